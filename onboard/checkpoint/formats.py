"""Which stored tensors make up one weight, in every format of source that onboard reads.

A quantized source stores a weight as codes and scales, under names that its format gives them:

    bf16, fp16, fp32          X.weight
    block FP8                 X.weight, X.weight_scale_inv (DeepSeek V4: X.scale)
    FP8 by tensor or channel  X.weight, X.weight_scale, static ones X.input_scale
    INT4, compressed-tensors  X.weight_packed, X.weight_scale, X.weight_shape
    MXFP4, gpt-oss            X_blocks, X_scales (X as transformers has it: [expert, in, out])
    MXFP4, Kimi K3            X.weight_packed, X.weight_scale
    MXFP4, DeepSeek V4        X.weight, X.scale
    NVFP4, ModelOpt           X.weight, X.weight_scale, X.weight_scale_2, X.input_scale
    NVFP4, compressed-tensors X.weight_packed, X.weight_scale, and the reciprocals of the last two:
                              X.weight_global_scale, X.input_global_scale

What follows is decided from the headers alone, and needs no torch. Read from DeepSeek's inference
code, compressed-tensors 0.17, transformers 5.24 and vLLM 0.32.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from onboard.checkpoint.headers import Header
from onboard.errors import InputError

Scheme = Literal["plain", "fp8_block", "fp8_tensor", "fp8_channel", "int4_group", "mxfp4", "nvfp4"]
Parts = Mapping[str, Header]

METHODS = ("compressed-tensors", "fbgemm_fp8", "fp8", "modelopt", "mxfp4")
BLOCK_SIZE = (128, 128)  # of block FP8 where the config does not say
MXFP4_BLOCK = 32
NVFP4_BLOCK = 16

_CODES = ("F8_E4M3", "I8", "U8", "I32")  # dtypes that mean nothing without a scale
_FLOATS = ("F32", "BF16", "F16")
_EXPONENTS = ("F8_E8M0", "U8")
_ENDS = r"scale_inv|scale|scale_2|scales|global_scale|shape|zero_point|g_idx"
_BESIDE_A_WEIGHT = re.compile(rf"(?:(.+(?:\.weight|_proj))_(?:{_ENDS})|(.+)_scale_inv)$")


@dataclass(frozen=True)
class Weight:
    """One weight as a model sees it, whatever tensors store it.

    `parts` are those tensors: "weight" holds the values or codes, "scale" the scales, others are
    named as their endings. A scale stands for `block` = (outputs, inputs) neighbours; blocks at
    the edge may be smaller. Codes are stored outputs first; `transposed` says that `shape` is
    [expert, in, out] nevertheless.
    """

    name: str
    shape: tuple[int, ...]
    scheme: Scheme
    parts: Parts
    block: tuple[int, int] = (1, 1)
    transposed: bool = False

    @property
    def dtype(self) -> str:
        """The stored values' or codes' dtype, in the safetensors format's word."""
        return self.parts["weight"].dtype

    @property
    def shard(self) -> str:
        """The file with the values or codes; scales may be in another."""
        return self.parts["weight"].shard

    @property
    def parameters(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size in the source, scales included."""
        return sum(part.bytes for part in self.parts.values())

    @property
    def matrices(self) -> int:
        """Matrices in it: the experts of [E, ., .], else 1."""
        return math.prod(self.shape[:-2])

    @property
    def rows(self) -> int:
        """Rows of one stored matrix, outputs where the source is quantized; 1 for a vector."""
        return 1 if len(self.shape) < 2 else self.shape[-1 if self.transposed else -2]

    @property
    def columns(self) -> int:
        """Columns of one stored matrix, inputs where the source is quantized."""
        return math.prod(self.shape[-1:]) if not self.transposed else self.shape[-2]


def quantization(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the `quantization_config` of a config.json or of its text_config; empty without."""
    text = config.get("text_config")
    nested = text.get("quantization_config") if isinstance(text, Mapping) else None
    table: Mapping[str, Any] = config.get("quantization_config") or nested or {}
    return table


def method(config: Mapping[str, Any]) -> str | None:
    """Return the declared `quant_method`, None for a config that declares no quantization.

    ModelOpt's own files give only a `quant_algo`.
    """
    table = quantization(config)
    implied = "modelopt" if "quant_algo" in table else "none"
    return str(table.get("quant_method") or implied) if table else None


def check_method(config: Mapping[str, Any]) -> None:
    """Raise InputError on a quantization that onboard does not read."""
    found = method(config)
    if found not in (None, *METHODS):
        raise InputError(
            f"config.json: quant_method {found!r} is none of the formats that onboard reads: "
            f"{', '.join(METHODS)}",
            "start from the checkpoint that this one was quantized from",
        )


def weight_arguments(table: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what a compressed-tensors config says of weights, a table per group of modules."""
    groups = (table.get("config_groups") or {}).values()
    return [group["weights"] for group in groups if group.get("weights")]


def block_size(table: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the (outputs, inputs) per scale that block FP8 declares."""
    sizes = [table.get("weight_block_size")]
    sizes += [arguments.get("block_structure") for arguments in weight_arguments(table)]
    size = next((size for size in sizes if size), None)
    return None if size is None else (int(size[0]), int(size[1]))


def weights(headers: Mapping[str, Header], config: Mapping[str, Any]) -> dict[str, Weight]:
    """Return every weight by its name, in the order of the stored values or codes.

    Every stored tensor is a part of exactly one weight. Raises InputError on a scale without its
    weight, codes without their scale, and shapes or dtypes that do not belong together.
    """
    table = quantization(config)
    coded = {name: parts for name, h in headers.items() if (parts := _parts(h, headers))}
    beside = {part.name for parts in coded.values() for part in parts.values()}
    found: dict[str, Weight] = {}
    for name, header in headers.items():
        if name in coded:
            weight = _coded(coded[name], table)
        elif name in beside:
            continue
        else:
            _refuse_alone(header, headers)
            weight = Weight(name, header.shape, "plain", {"weight": header})
        if weight.name in found:
            other = found[weight.name].parts["weight"].name
            raise InputError(f"{header.shard}: {name} and {other} both hold {weight.name}")
        found[weight.name] = weight
    return found


def _logical(name: str) -> str:
    return name.removesuffix("_packed").removesuffix("_blocks")


def _parts(codes: Header, headers: Mapping[str, Header]) -> Parts | None:
    """Return the tensors that belong to `codes`; None where it holds no codes of a weight."""
    if codes.dtype not in _CODES:
        return None
    name = _logical(codes.name)
    module = name.removesuffix(".weight")
    endings = {
        "scale": (f"{name}_scale_inv", f"{name}_scale", f"{name}_scales", f"{module}.scale"),
        "scale_2": (f"{name}_scale_2",),
        "global_scale": (f"{name}_global_scale",),
        "shape": (f"{name}_shape",),
        "zero_point": (f"{name}_zero_point",),
        "g_idx": (f"{name}_g_idx",),
        "input_scale": (f"{module}.input_scale", f"{module}.activation_scale"),
        "input_global_scale": (f"{module}.input_global_scale",),
    }
    parts = {"weight": codes}
    for part, names in endings.items():
        if held := [headers[n] for n in names if n in headers]:
            parts[part] = held[0]
    if "scale" in parts:
        return parts
    if codes.name in (f"{module}.weight", f"{name}_packed", f"{name}_blocks"):
        scales = f"{name}_scales" if codes.name.endswith("_blocks") else f"{name}_scale"
        raise InputError(
            f"{codes.shard}: tensor {codes.name} is {codes.dtype}: expected its scales beside it "
            f"({scales} or its format's name for it), found none",
            "download the checkpoint again, or take another of this model",
        )
    return None


def _refuse_alone(header: Header, headers: Mapping[str, Header]) -> None:
    """Raise InputError on a part of a quantized weight that belongs to none."""
    match = _BESIDE_A_WEIGHT.match(header.name)
    if not match and header.dtype != "F8_E8M0":
        return
    weight = (match[1] or match[2]) if match else f"{header.name.rpartition('.')[0]}.weight"
    stored = headers.get(weight)
    raise InputError(
        f"{header.shard}: tensor {header.name} {header.dtype} {list(header.shape)} scales no "
        f"weight: expected {weight} as {', '.join(_CODES)}, "
        f"found {f'it as {stored.dtype}' if stored else 'none'}"
    )


def _coded(parts: Parts, table: Mapping[str, Any]) -> Weight:
    codes = parts["weight"]
    if codes.name.endswith("_blocks"):
        return _gpt_oss(parts)
    if len(codes.shape) not in (2, 3):
        raise _wrong(codes, "a matrix, or one per expert")
    if codes.dtype == "F8_E4M3":
        return _fp8(parts, table)
    if codes.dtype == "I32":
        return _int4(parts, table)
    return _nvfp4(parts) if {"scale_2", "global_scale"} & parts.keys() else _mxfp4(parts)


def _fp8(parts: Parts, table: Mapping[str, Any]) -> Weight:
    codes, scale = parts["weight"], parts["scale"]
    *experts, outputs, inputs = codes.shape
    _check_dtype(parts, (*_FLOATS, *_EXPONENTS))
    is_inverse = not scale.name.endswith("_scale")  # DeepSeek's names for the scales of blocks
    declared = block_size(table)
    block = declared or (BLOCK_SIZE if is_inverse else None)
    readings: list[tuple[Scheme, tuple[int, int], tuple[tuple[int, ...], ...]]] = []
    if block:
        grid = (*experts, -(-outputs // block[0]), -(-inputs // block[1]))
        readings.append(("fp8_block", block, (grid,)))
    if not (declared and is_inverse):
        one = tuple(experts)
        readings.append(("fp8_tensor", (outputs, inputs), (one, (*one, 1), (*one, 1, 1))))
        rows = (*experts, outputs)
        readings.append(("fp8_channel", (1, inputs), (rows, (*rows, 1))))
    for scheme, size, shapes in readings:
        if scale.shape in shapes:
            return Weight(codes.name, codes.shape, scheme, parts, size)
    expected = (f"{list(shapes[-1])} ({scheme})" for scheme, _, shapes in readings)
    raise _wrong(scale, " or ".join(expected), codes)


def _int4(parts: Parts, table: Mapping[str, Any]) -> Weight:
    codes, scale = parts["weight"], parts["scale"]
    if unread := {"zero_point", "g_idx"} & parts.keys():
        header = parts[unread.pop()]
        raise InputError(
            f"{header.shard}: tensor {header.name}: onboard reads symmetric INT4 in its own order"
        )
    integers = [a for a in weight_arguments(table) if a.get("type", "int") == "int"]
    if bits := {a.get("num_bits") for a in integers} - {4}:
        raise InputError(f"config.json: integer weights of {bits.pop()} bits; onboard reads 4")
    _check_dtype(parts, _FLOATS)
    *experts, outputs, words = codes.shape
    sizes = {a["group_size"] for a in integers if (a.get("group_size") or 0) > 0}
    groups = scale.shape[-1] if scale.shape else 0
    inputs = groups * sizes.pop() if len(sizes) == 1 else words * 8
    fits = groups and inputs % groups == 0 and -(-inputs // 8) == words
    if not fits or scale.shape != (*experts, outputs, groups):
        raise _wrong(scale, f"a scale per group of {[*experts, outputs, words * 8]}", codes)
    shape = (*experts, outputs, inputs)
    return Weight(_logical(codes.name), shape, "int4_group", parts, (1, inputs // groups))


def _mxfp4(parts: Parts) -> Weight:
    codes, scale = parts["weight"], parts["scale"]
    _check_dtype(parts, _EXPONENTS)
    *rows, half = codes.shape
    if scale.shape != (*rows, 2 * half // MXFP4_BLOCK) or 2 * half % MXFP4_BLOCK:
        raise _wrong(scale, f"a scale per {MXFP4_BLOCK} of {[*rows, 2 * half]}", codes)
    shape = (*rows, 2 * half)
    return Weight(_logical(codes.name), shape, "mxfp4", parts, (1, MXFP4_BLOCK))


def _gpt_oss(parts: Parts) -> Weight:
    codes, scale = parts["weight"], parts["scale"]
    _check_dtype(parts, _EXPONENTS)
    if len(codes.shape) != 4 or codes.shape[-1] != MXFP4_BLOCK // 2:
        raise _wrong(codes, "[experts, rows, blocks, 16]")
    experts, outputs, blocks, _ = codes.shape
    if scale.shape != (experts, outputs, blocks):
        raise _wrong(scale, f"{[experts, outputs, blocks]}", codes)
    shape = (experts, blocks * MXFP4_BLOCK, outputs)
    return Weight(_logical(codes.name), shape, "mxfp4", parts, (1, MXFP4_BLOCK), True)


def _nvfp4(parts: Parts) -> Weight:
    codes, scale = parts["weight"], parts["scale"]
    _check_dtype(parts, ("F8_E4M3",))
    *rows, half = codes.shape
    if scale.shape != (*rows, 2 * half // NVFP4_BLOCK):
        raise _wrong(scale, f"a scale per {NVFP4_BLOCK} of {[*rows, 2 * half]}", codes)
    return Weight(_logical(codes.name), (*rows, 2 * half), "nvfp4", parts, (1, NVFP4_BLOCK))


def _check_dtype(parts: Parts, allowed: Collection[str]) -> None:
    if parts["scale"].dtype not in allowed:
        raise _wrong(parts["scale"], " or ".join(allowed), parts["weight"])


def _wrong(header: Header, expected: str, codes: Header | None = None) -> InputError:
    of = f", scales of {codes.name} {codes.dtype} {list(codes.shape)}" if codes else ""
    return InputError(
        f"{header.shard}: tensor {header.name}{of}: expected {expected}, "
        f"found {header.dtype} {list(header.shape)}"
    )
