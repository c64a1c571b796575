"""Read a weight's values out of the codes and scales that store it, a few rows at a time.

    W[o, i] = value(code[o, i]) * scale[o // block outputs, i // block inputs]

in fp32. The product is exact for INT4 and MXFP4, and for FP8 with power-of-two scales; with other
scales it is the fp32 product that engines compute.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from onboard.checkpoint import nvfp4
from onboard.checkpoint.formats import Weight
from onboard.checkpoint.headers import Header
from onboard.checkpoint.writer import check_finite
from onboard.errors import InputError


class Read(Protocol):
    """Returns rows [first, first + count) of a stored tensor seen as [rows, any width]."""

    def __call__(self, header: Header, rows: int, first: int, count: int) -> Tensor: ...


def decode(weight: Weight, read: Read, matrix: int, first: int, count: int) -> Tensor:
    """Return stored rows [first, first + count) of one matrix, f32 [count, columns].

    `matrix` counts the experts of a fused weight, and is 0 for others. Raises InputError naming
    tensor and shard where codes or scales hold NaN or Inf.
    """
    codes, scale = weight.parts["weight"], weight.parts["scale"]
    every = weight.matrices * weight.rows
    values = _values(weight, read(codes, every, matrix * weight.rows + first, count))
    tall, wide = weight.block
    grid = -(-weight.rows // tall)
    top, bottom = first // tall, -(-(first + count) // tall)
    scales = as_float(read(scale, weight.matrices * grid, matrix * grid + top, bottom - top))
    if weight.scheme == "nvfp4":
        scales = scales * _tensor_scale(weight, read)
    if tall > 1:
        scales = scales.repeat_interleave(tall, 0)[first - top * tall :][:count]
    whole = weight.columns // wide * wide
    torch.unflatten(values[:, :whole], 1, (-1, wide)).mul_(scales[:, : whole // wide, None])
    values[:, whole:].mul_(scales[:, whole // wide :])  # the narrower block at the edge
    if not torch.isfinite(values).all():
        check_finite(scale, scales)
        check_finite(codes, values)
    return values


def _tensor_scale(weight: Weight, read: Read) -> Tensor:
    """Return NVFP4's scale per tensor, f32 [1, 1], of either layout."""
    if "scale_2" in weight.parts:
        return read(weight.parts["scale_2"], 1, 0, 1)
    return read(weight.parts["global_scale"], 1, 0, 1).reciprocal()


def as_float(scales: Tensor) -> Tensor:
    """Return stored scales as f32; bytes are the exponents of powers of two (e8m0)."""
    if scales.dtype is torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    return scales.float()


def check_shape(weight: Weight, read: Read) -> None:
    """Raise InputError where a stored `weight_shape` (data, not a header) says another shape."""
    header = weight.parts.get("shape")
    if header is None:
        return
    said = tuple(read(header, 1, 0, 1).flatten().tolist())
    if said != weight.shape:
        raise InputError(
            f"{header.shard}: tensor {header.name} says {list(said)}, "
            f"{weight.parts['weight'].name} and its scales hold {list(weight.shape)}"
        )


def _values(weight: Weight, codes: Tensor) -> Tensor:
    if weight.scheme.startswith("fp8"):
        return codes.float()
    nibbles = codes.view(torch.uint8)
    if weight.scheme == "int4_group":  # stored plus 8; the last word may be padded
        low_first = torch.stack((nibbles & 0xF, nibbles >> 4), -1).flatten(-2)
        return low_first[:, : weight.columns].float().sub_(8)
    return nvfp4.unpack(nibbles)
