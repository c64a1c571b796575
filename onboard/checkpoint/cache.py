"""Keys and values on their way into a cache: seen as they are, or as an FP8 cache gives them back.

An FP8 cache holds E4M3 numbers with one scale for all keys of a layer and one for all its values.
A checkpoint names the scales after what makes the two: `<…k_proj>.k_scale`, `<…v_proj>.v_scale`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from onboard.checkpoint.formats import quantization
from onboard.checkpoint.headers import contained
from onboard.checkpoint.nvfp4 import E4M3_MAX
from onboard.checkpoint.reader import Reader
from onboard.checkpoint.skeleton import Skeleton, decoder_of
from onboard.hardware import device_kind

See = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
SCALES = (".k_scale", ".v_scale")


class Passing(DynamicCache):  # type: ignore[misc]
    """A transformers cache for one forward pass over whole documents; it keeps nothing.

    `see(layer, keys, values)` returns what attention reads. Latent attention (MLA) brings its
    latent as keys and its rotary part as values. Numbers of layers are those of the cache, of
    which a layer of the model can have two (LongCat).
    """

    def __init__(self, config: Any, see: See) -> None:
        super().__init__(config=config)
        self.see = see

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        return self.see(layer_idx, key, value)

    def update_conv_state(self, states: Tensor, *_: Any, **__: Any) -> Tensor:
        return states

    def update_recurrent_state(self, states: Tensor, *_: Any, **__: Any) -> Tensor:
        return states

    def update_indexer(self, states: Tensor, *_: Any, **__: Any) -> Tensor:
        return states


def projections(skeleton: Skeleton) -> dict[int, dict[str, str]]:
    """Return the modules, by their source names, that make a cached layer's "k" and "v"."""
    found: dict[int, dict[str, str]] = defaultdict(dict)
    for name, target in skeleton.targets.items():
        for part in "kv":
            if name.endswith(f".{part}_proj.weight") and target.startswith(f"{skeleton.prefix}."):
                attention = skeleton.model.get_submodule(target.rsplit(".", 2)[0])
                if (number := getattr(attention, "layer_idx", None)) is not None:
                    found[number][part] = name.removesuffix(".weight")
    return dict(found)


def through_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """Return keys or values as an FP8 cache gives them back: E4M3(x / scale) * scale.

    `scale` is f32 []; what lies beyond 448 scales saturates. Shape and dtype are x's.
    """
    codes = (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return (codes.float() * scale).to(x.dtype)


@dataclass(frozen=True)
class Fp8Cache:
    """The scales of keys and of values, f32 [], by layer of the cache; 1 for one not listed."""

    scales: Mapping[int, tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, named: Mapping[str, Tensor], skeleton: Skeleton) -> Fp8Cache:
        """Take scales by the name that a checkpoint has; one of a layer's two stands for both."""
        scales = {}
        for number, modules in projections(skeleton).items():
            names = {part: f"{module}.{part}_scale" for part, module in modules.items()}
            known = {part: named[name] for part, name in names.items() if name in named}
            if known:
                first = next(iter(known.values()))
                k, v = (known.get(part, first).float().to(device_kind()) for part in "kv")
                scales[number] = (k, v)
        return cls(scales)

    def fresh(self, config: Any) -> Passing:
        """Return the cache of one forward pass of a model with this config."""
        return Passing(config, self._round)

    @contextmanager
    def serving(self, model: Any) -> Iterator[None]:
        """Give every forward pass of `model` such a cache, for a while."""

        def bring(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            return args, {**kwargs, "use_cache": True, "cache": self.fresh(model.config)}

        hook = decoder_of(model).register_forward_pre_hook(bring, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    def _round(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        one = torch.ones((), device=keys.device)
        k_scale, v_scale = self.scales.get(layer, (one, one))
        return through_fp8(keys, k_scale), through_fp8(values, v_scale)


def fp8_cache(checkpoint: Reader, skeleton: Skeleton) -> Fp8Cache | None:
    """Return the cache that engines use with a written checkpoint; None where that is not FP8.

    A layer without scales, such as one that caches a latent, gets scale 1.
    """
    if not has_fp8_cache(checkpoint):
        return None
    names = [name for name in checkpoint.headers if name.endswith(SCALES)]
    return Fp8Cache.of({name: checkpoint.tensor(name) for name in names}, skeleton)


def has_fp8_cache(checkpoint: Reader) -> bool:
    """Tell whether the checkpoint declares an FP8 cache, or holds scales for one."""
    if any(name.endswith(SCALES) for name in checkpoint.headers):
        return True
    config, sidecar = (_json(checkpoint, n) for n in ("config.json", "hf_quant_config.json"))
    scheme = quantization(config).get("kv_cache_scheme") or {}
    is_float8 = scheme.get("type") == "float" and scheme.get("num_bits") == 8
    algorithm = (sidecar.get("quantization") or {}).get("kv_cache_quant_algo")
    return is_float8 or algorithm == "FP8"


def _json(checkpoint: Reader, name: str) -> dict[str, Any]:
    if not (checkpoint.root / name).exists():
        return {}
    read: dict[str, Any] = json.loads(contained(checkpoint.root, name).read_text())
    return read
