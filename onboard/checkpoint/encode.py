"""Store bf16 weights in the format that a config declares: how a twin gets its source's format.

Which weights are stored so follows the published rules: linear layers, but for those that the
config's list of exceptions names. Rounding is to nearest; nothing here is for a model that ships.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from onboard.checkpoint import formats, mxfp4

State = dict[str, Tensor]
Encode = Callable[[str, Tensor], State]

E4M3_MAX = 448.0
# Modules that published quantized checkpoints leave alone though few of them list these.
NEVER = ("embed", "embed_tokens", "gate", "head", "lm_head", "eh_proj", "router", "weights_proj")
NEVER_INSIDE = (".compressor.",)  # of DeepSeek V4's sparse attention


def encode(state: Mapping[str, Tensor], config: Mapping[str, Any]) -> State:
    """Return the tensors of `state` (name -> bf16) as a checkpoint with this config stores them.

    Names and shapes are those of `onboard.checkpoint.formats`, which reads the result. Raises
    InputError where the config's method is none of those.
    """
    formats.check_method(config)
    if formats.method(config) is None:
        return dict(state)
    stored: State = {}
    for name, tensor in state.items():
        if is_encoded(name, tensor.shape, config):
            stored |= _encoder(name, config)(name, tensor.float())
        else:
            stored[name] = tensor
    return stored


def is_encoded(name: str, shape: Sequence[int], config: Mapping[str, Any]) -> bool:
    """Whether a published checkpoint with this config stores a tensor as codes and scales."""
    table, module = formats.quantization(config), name.removesuffix(".weight")
    is_fused = module.endswith("_proj") and len(shape) == 3
    is_matrix = name.endswith(".weight") and len(shape) == 2 and shape[0] > 1  # no gate of one row
    is_linear = is_fused or (is_matrix and formats.method(config) != "mxfp4")
    of_text = "quantization_config" in config or "language_model." in name
    exempt = module.rpartition(".")[2] in NEVER or any(part in name for part in NEVER_INSIDE)
    lists = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules")
    patterns = [pattern for key in lists for pattern in table.get(key) or ()]
    return is_linear and of_text and not exempt and not is_ignored(module, patterns)


def is_ignored(module: str, patterns: Iterable[str]) -> bool:
    """Whether a published list of exceptions names a module, or one that it is in.

    An entry is a regular expression after "re:", a glob, or the full path or its end.
    """
    return any(_matches(module, pattern) for pattern in patterns)


def _matches(module: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    globs = (pattern, f"{pattern}.*", f"*.{pattern}")
    return any(fnmatch.fnmatchcase(module, glob) for glob in globs)


def _encoder(name: str, config: Mapping[str, Any]) -> Encode:
    table, method = formats.quantization(config), formats.method(config)
    if method == "mxfp4":
        return _gpt_oss
    if config.get("model_type") == "deepseek_v4":
        is_fp4 = config.get("expert_dtype", "fp4") == "fp4"
        if is_fp4 and ".ffn.experts." in name:
            return _deepseek_mxfp4
        return _fp8(formats.block_size(table), ".scale", powers=is_fp4)
    if method == "fp8":
        ending = "_scale_inv" if formats.block_size(table) else "_scale"
        static = table.get("activation_scheme") == "static"
        powers = table.get("scale_fmt") == "ue8m0"
        return _fp8(formats.block_size(table), ending, powers=powers, static=static)
    if method == "fbgemm_fp8":
        return _fp8((1, 0), "_scale")
    if method == "modelopt":
        by_channel = table.get("quant_algo") == "FP8_PER_CHANNEL_PER_TOKEN"
        return _fp8((1, 0) if by_channel else None, "_scale", static=not by_channel)
    return _compressed(table)


def _compressed(table: Mapping[str, Any]) -> Encode:
    arguments = formats.weight_arguments(table)[0]
    if arguments.get("type") == "int":
        return _int4(int(arguments["group_size"]))
    if arguments["num_bits"] == 4:
        return _packed_mxfp4
    by_channel = arguments.get("strategy") == "channel"
    return _fp8((1, 0) if by_channel else formats.block_size(table), "_scale")


def _fp8(
    block: tuple[int, int] | None, ending: str, *, powers: bool = False, static: bool = False
) -> Encode:
    """Return an encoder with a scale per block; a block of 0 is as large as the matrix."""

    def encoder(name: str, weight: Tensor) -> State:
        rows, columns = weight.shape[-2:]
        tall, wide = block or (0, 0)
        codes, scale = quantize_fp8(weight, (tall or rows, wide or columns), powers)
        if block is None:
            scale = scale.reshape(weight.shape[:-2])
        if ending == ".scale":  # DeepSeek V4 stores powers of two as such, V3.2 in fp32
            scale = scale.to(torch.float8_e8m0fnu) if powers else scale
            return {name: codes, f"{name.removesuffix('.weight')}.scale": scale}
        stored = {name: codes, f"{name}{ending}": scale}
        if static:
            stored[f"{name.removesuffix('.weight')}.input_scale"] = torch.tensor(1.0)
        return stored

    return encoder


def quantize_fp8(
    weight: Tensor, block: tuple[int, int], powers: bool = False
) -> tuple[Tensor, Tensor]:
    """Return E4M3 codes [..., out, in] and f32 scales per block, [..., ceil(out/b), ceil(in/b)].

    A scale maps the block's largest magnitude to 448, or is the next power of two.
    """
    tall, wide = block
    rows, columns = weight.shape[-2:]
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % wide, 0, -rows % tall))
    tiles = torch.unflatten(torch.unflatten(padded, -1, (-1, wide)), -3, (-1, tall))
    amax = tiles.abs().amax((-3, -1))
    scale = torch.where(amax > 0, amax / E4M3_MAX, 1.0)  # [..., m, n] of [..., m, tall, n, wide]
    if powers:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    scaled = tiles / scale.unsqueeze(-1).unsqueeze(-3)
    codes = scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    whole = codes.flatten(-2).flatten(-3, -2)
    return whole[..., :rows, :columns].contiguous(), scale


def _int4(group: int) -> Encode:
    def encoder(name: str, weight: Tensor) -> State:
        packed, scale = quantize_int4(weight, group)
        shape = torch.tensor(weight.shape, dtype=torch.int32)
        return {f"{name}_packed": packed, f"{name}_scale": scale, f"{name}_shape": shape}

    return encoder


def quantize_int4(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return i32 [..., in/8], the first input in the lowest bits, and bf16 scales [..., in/group].

    Values are -8 to 7, stored plus 8; a scale maps the group's largest magnitude to 7.5.
    """
    groups = torch.unflatten(weight.float(), -1, (-1, group))
    scale = (groups.abs().amax(-1) / 7.5).to(torch.bfloat16)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    values = (groups / scale.float().unsqueeze(-1)).round().clamp(-8, 7).add(8).flatten(-2)
    nibbles = values.to(torch.uint8)
    return (nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)).view(torch.int32), scale


def _gpt_oss(name: str, weight: Tensor) -> State:
    codes, exponents = mxfp4.quantize(weight.transpose(-1, -2).contiguous())
    blocks = torch.unflatten(codes, -1, (-1, formats.MXFP4_BLOCK // 2))
    return {f"{name}_blocks": blocks, f"{name}_scales": exponents}


def _deepseek_mxfp4(name: str, weight: Tensor) -> State:
    codes, exponents = mxfp4.quantize(weight)
    scale = f"{name.removesuffix('.weight')}.scale"
    return {name: codes.view(torch.int8), scale: exponents.view(torch.float8_e8m0fnu)}


def _packed_mxfp4(name: str, weight: Tensor) -> State:
    codes, exponents = mxfp4.quantize(weight)
    return {f"{name}_packed": codes, f"{name}_scale": exponents}
