"""A checkpoint as a transformers model: the source, or the bytes that ship.

Experts are split into one linear per expert and projection, under the names that published
checkpoints use, so that calibration, fidelity and features see every quantized matrix as an
ordinary `nn.Linear`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from onboard.checkpoint import nvfp4
from onboard.checkpoint.headers import is_mtp
from onboard.checkpoint.reader import Reader
from onboard.errors import InputError
from onboard.hardware import device_kind
from onboard.modelconfig import read_config


def load_reference(root: Path, dtype: torch.dtype) -> Any:
    """Return the source model in eval mode on this machine's device."""
    return _load(root, Reader.open(root), dtype)


def load_candidate(checkpoint: Path, dtype: torch.dtype, activations: bool = True) -> Any:
    """Return the written checkpoint as an engine computes it.

    Weights are dequantized from the file. With `activations`, the input of every linear that
    has an `input_scale` is quantized and dequantized as a W4A4 kernel does;
    `set_activation_quantization` switches that off and on.
    """
    reader = Reader.open(checkpoint)
    model = _load(checkpoint, reader, dtype)
    modules: dict[str, Any] = dict(model.named_modules())
    quantize_input = InputQuantizer()
    for name, scale in reader.input_scales().items():
        if name in modules:
            modules[name].register_buffer("input_scale", scale.to(model.device), persistent=False)
            modules[name].input_scale_value = scale.item()
            modules[name].register_forward_pre_hook(quantize_input)
    set_activation_quantization(model, activations)
    return model


def set_activation_quantization(model: nn.Module, enabled: bool) -> None:
    """Switch the fake quantization of a candidate's activations."""
    quantized: list[Any] = [m for m in model.modules() if hasattr(m, "input_scale")]
    for module in quantized:
        module.quantizes_input = enabled


class InputQuantizer:
    """Quantizes what enters a linear; q/k/v and gate/up read one tensor, which is done once."""

    def __init__(self) -> None:
        self.last: tuple[Tensor, float, Tensor] | None = None  # input, scale, result

    def __call__(self, module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if not module.quantizes_input:
            self.last = None
            return None
        x, scale = args[0], module.input_scale_value
        if self.last is None or self.last[0] is not x or self.last[1] != scale:
            self.last = (x, scale, nvfp4.quantize_dequantize(x, module.input_scale))
        return (self.last[2], *args[1:])


def _load(root: Path, reader: Reader, dtype: torch.dtype) -> Any:
    transformers_logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    config = AutoConfig.from_pretrained(root, local_files_only=True)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model, info = _from_state(root, config, dict(reader.dequantized()), dtype)
    layers = config.get_text_config().num_hidden_layers
    ignored = [name for name in info["unexpected_keys"] if not is_mtp(name, layers)]
    _check_complete(root, info["missing_keys"], ignored)
    split_experts(model)
    return model.eval().requires_grad_(False).to(device_kind())


def _from_state(
    root: Path, config: Any, state: dict[str, Tensor], dtype: torch.dtype
) -> tuple[Any, Any]:
    cls = getattr(transformers, read_config(root).architecture)
    return cls.from_pretrained(  # type: ignore[no-any-return]
        None, config=config, state_dict=state, dtype=dtype, output_loading_info=True
    )


def _check_complete(root: Path, missing: Iterable[str], ignored: Iterable[str]) -> None:
    """Raise InputError where the model lacks a weight, or the file has one the model ignores."""
    if missing := sorted(missing):
        raise InputError(f"{root}: no weights for {_few(missing)}")
    if ignored := sorted(ignored):
        raise InputError(f"{root}: the model class ignores {_few(ignored)}")


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


class SplitExperts(nn.ModuleList):
    """The experts of one layer, each with its own `gate_proj`, `up_proj` and `down_proj`.

    Weights are views of the fused [E, 2I, H] and [E, H, I] tensors: no copy is made.
    """

    def __init__(self, fused: Any) -> None:
        super().__init__(
            _expert(gate_up, down)
            for gate_up, down in zip(fused.gate_up_proj, fused.down_proj, strict=True)
        )
        self.act_fn = fused.act_fn

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the routed sum: [T, H], [T, k] expert ids, [T, k] weights -> [T, H]."""
        out = torch.zeros_like(hidden)
        for number in sorted(set(top_k_index.flatten().tolist())):
            if number >= len(self):
                continue
            token, choice = torch.where(top_k_index == number)
            expert: Any = self[number]
            x = hidden[token]
            y = expert.down_proj(self.act_fn(expert.gate_proj(x)) * expert.up_proj(x))
            out.index_add_(0, token, (y * top_k_weights[token, choice, None]).to(out.dtype))
        return out


def _expert(gate_up: Tensor, down: Tensor) -> nn.ModuleDict:
    gate, up = gate_up.chunk(2, dim=0)
    return nn.ModuleDict(
        {"gate_proj": _linear(gate), "up_proj": _linear(up), "down_proj": _linear(down)}
    )


def _linear(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    return linear


def split_experts(model: nn.Module) -> None:
    """Replace every module of fused expert tensors by one linear per expert and projection."""
    for name, module in list(model.named_modules()):
        gate_up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
        if isinstance(gate_up, Tensor) and isinstance(down, Tensor) and gate_up.ndim == 3:
            model.set_submodule(name, SplitExperts(module))


def compute_dtype() -> torch.dtype:
    """Return the dtype to run models in: bf16 on an accelerator, fp32 on a CPU."""
    return torch.float32 if device_kind() == "cpu" else torch.bfloat16
