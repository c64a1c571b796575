"""A transformers model without weights, which takes any part of a checkpoint.

transformers renames and fuses published tensors as it loads them. The skeleton knows where each
one goes, so a single layer can be loaded, used and dropped again.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging as transformers_logging

from onboard.checkpoint.headers import is_mtp
from onboard.errors import InputError
from onboard.hardware import device_kind
from onboard.modelconfig import read_config

Weights = Mapping[str, Tensor]


class Skeleton:
    """The model of `root` on the meta device; `names` are the source's tensors.

    `targets` maps each to the model's parameter or buffer it goes into. `text` is what takes token
    ids and gives logits: the model, or the language model inside it. Raises InputError where
    transformers has no class for the model, and where the class ignores a tensor.
    """

    def __init__(self, root: Path, names: Iterable[str], dtype: torch.dtype) -> None:
        transformers_logging.disable_progress_bar()
        logging.getLogger("transformers").setLevel(logging.ERROR)
        facts = read_config(root)
        if facts.architecture is None:
            raise InputError(f"{root}: transformers has no class for {facts.model_type}")
        config = transformers.AutoConfig.from_pretrained(root, local_files_only=True)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with torch.device("meta"):
            model = getattr(transformers, facts.architecture)._from_config(
                config, dtype=dtype, experts_implementation="eager"
            )
        self.root, self.dtype = root, dtype
        self.model: Any = model.eval().requires_grad_(False)
        self.mapping = get_model_conversion_mapping(model)
        self.targets = self._targets(names, facts.num_layers)
        self.text = _causal_model(model)
        self.layers: nn.ModuleList = decoder_of(self.text).layers
        self.prefix = next(n for n, m in model.named_modules() if m is self.layers)
        self._fill_buffers()

    @property
    def bytes(self) -> int:
        """What all the parameters take in memory."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters())

    def inside_layers(self) -> list[list[str]]:
        """Return, for each layer, the source tensors that it needs."""
        names: list[list[str]] = [[] for _ in self.layers]
        for name, target in self.targets.items():
            if found := re.match(rf"{re.escape(self.prefix)}\.(\d+)\.", target):
                names[int(found[1])].append(name)
        return names

    def outside_layers(self) -> list[str]:
        """Return the language model's other tensors: embeddings, last norm, head."""
        inside = {name for names in self.inside_layers() for name in names}
        decoder, head = decoder_of(self.text), self.text.get_output_embeddings()
        text = tuple(f"{n}." for n, m in self.model.named_modules() if m is decoder or m is head)
        return [n for n, t in self.targets.items() if n not in inside and t.startswith(text)]

    def load(self, weights: Weights) -> None:
        """Fill in the parameters that `weights` (source name -> tensor) make up."""
        plan = self.model._get_dtype_plan(self.dtype)
        settings = LoadStateDictConfig(
            dtype=self.dtype,
            dtype_plan=plan,
            device_map={"": device_kind()},
            weight_mapping=self.mapping,
        )
        info, _ = convert_and_load_state_dict_in_model(self.model, dict(weights), settings)
        wrong = [*info.mismatched_keys, *info.conversion_errors.items(), *info.error_msgs]
        if wrong:
            raise InputError(f"{self.root}: a tensor does not fit the model class: {wrong[0]}")

    def finish(self, module: nn.Module, prefix: str = "") -> None:
        """Tie what is tied and raise InputError where a weight under `module` is missing."""
        self.model.tie_weights()
        self.model.requires_grad_(False)
        missing = [name for name, p in module.named_parameters() if p.is_meta]
        if missing:
            raise InputError(f"{self.root}: no weights for {few(prefix + n for n in missing)}")

    def drop(self, module: nn.Module) -> None:
        """Free the parameters under `module`."""
        for owner in module.modules():
            for name, parameter in owner._parameters.items():
                if parameter is not None:
                    empty = torch.empty_like(parameter, device="meta")
                    owner._parameters[name] = nn.Parameter(empty, requires_grad=False)

    def _targets(self, names: Iterable[str], num_layers: int) -> dict[str, str]:
        renamings = [m for m in self.mapping if isinstance(m, WeightRenaming)]
        converters = [m for m in self.mapping if isinstance(m, WeightConverter)]
        state, prefix = self.model.state_dict(), self.model.base_model_prefix
        targets, ignored = {}, []
        for name in names:
            target, _ = rename_source_key(name, renamings, converters, prefix, state)
            if target not in state and name in state:
                target, _ = rename_source_key(name, [], [], prefix, state)
            if target in state:
                targets[name] = target
            elif not is_mtp(name, num_layers) and not self._is_ignored(target):
                ignored.append(name)
        if ignored:
            raise InputError(f"{self.root}: the model class ignores {few(ignored)}")
        return targets

    def _is_ignored(self, target: str) -> bool:
        """Whether the class itself says that checkpoints may hold what it does not use."""
        patterns = self.model._keys_to_ignore_on_load_unexpected or ()
        return any(re.search(pattern, target) for pattern in patterns)

    def _fill_buffers(self) -> None:
        """Compute what is no weight, such as rotary frequencies, on the real device."""
        for module in self.model.modules():
            empty = {n: b for n, b in module._buffers.items() if b is not None and b.is_meta}
            for name, buffer in empty.items():
                module._buffers[name] = torch.zeros_like(buffer, device=device_kind())
            if empty:
                self.model._init_weights(module)


def _causal_model(model: Any) -> Any:
    """Return the whole language model inside of a multimodal one, where it has one (Llama 4)."""
    inner = getattr(model, "language_model", None)
    has_head = isinstance(inner, nn.Module) and hasattr(inner, "lm_head")
    return inner if has_head else model


def decoder_of(model: Any) -> Any:
    """Return the part of a causal model between token ids and the head: it holds the layers."""
    decoder = model.get_decoder()
    return decoder if hasattr(decoder, "layers") else decoder.model


def few(names: Iterable[str]) -> str:
    """Return the first three names, and how many more there are."""
    every = sorted(names)
    return ", ".join(every[:3]) + (f" and {len(every) - 3} more" if len(every) > 3 else "")
