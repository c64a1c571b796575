"""The MXFP4 format: E2M1 values, a power of two per 32 inputs. To NVFP4 it goes without loss.

    W = E2M1[nibble] * 2^(exponent - 127)

Specification: OCP Microscaling Formats (MX) v1.0, 5.3 and 6.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onboard.checkpoint import nvfp4
from onboard.checkpoint.formats import MXFP4_BLOCK

BIAS = 127
HIGHEST, LOWEST = 8, -9  # powers of two that E4M3 holds: 256 down to its smallest number


@dataclass(frozen=True)
class Converted:
    """NVFP4 of matrices that share `weight_scale_2`, f32 [].

    `weights` are u8 [out, in/2] and `weight_scales` E4M3 [out, in/16], in the order given.
    `rounded_blocks` of 32 were too small beside the largest for an E4M3 scale, and were rounded.
    """

    weights: tuple[Tensor, ...]
    weight_scales: tuple[Tensor, ...]
    weight_scale_2: Tensor
    rounded_blocks: int


def to_nvfp4(siblings: Sequence[tuple[Tensor, Tensor]]) -> Converted:
    """Return one or several fused MXFP4 matrices as NVFP4 of equal values.

    Each is (codes u8 [out, in/2], exponents u8 [out, in/32]) with finite scales. Nibbles stay; the
    shared `weight_scale_2` is the power of two that maps the largest exponent to 256, and each
    scale is repeated for the two halves of its block. Blocks whose scale is then below 2^-9 are
    rounded to nearest, as any weight would be.
    """
    alive = [_alive(codes) for codes, _ in siblings]
    tops = [e[a].max() for (_, e), a in zip(siblings, alive, strict=True) if a.any()]
    top = int(torch.stack(tops).max()) if tops else BIAS
    scale_2 = torch.ldexp(torch.tensor(1.0), torch.tensor(top - BIAS - HIGHEST))
    scale_2 = scale_2.to(siblings[0][0].device)
    converted = [
        _convert(codes, exponents, blocks, top, scale_2)
        for (codes, exponents), blocks in zip(siblings, alive, strict=True)
    ]
    weights, scales, rounded = zip(*converted, strict=True)
    return Converted(weights, scales, scale_2, sum(rounded))


def dequantize(codes: Tensor, exponents: Tensor) -> Tensor:
    """Return the values of u8 [..., in/2] with exponents u8 [..., in/32], f32 [..., in]."""
    scale = exponents.view(torch.float8_e8m0fnu).float().unsqueeze(-1)
    return (torch.unflatten(nvfp4.unpack(codes), -1, (-1, MXFP4_BLOCK)) * scale).flatten(-2)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes u8 [..., in/2] and exponents u8 [..., in/32] of [..., in].

    As the specification has it: the scale is the largest power of two in the block over that in
    E2M1 (4), values round to nearest and saturate.
    """
    blocks = torch.unflatten(weight.float(), -1, (-1, MXFP4_BLOCK))
    power = torch.frexp(blocks.abs().amax(-1)).exponent - 1 - 2
    exponents = (power + BIAS).clamp(0, 2 * BIAS).to(torch.uint8)
    scale = exponents.view(torch.float8_e8m0fnu).float().unsqueeze(-1)
    return nvfp4.pack(nvfp4.codes(nvfp4.round_to_e2m1(blocks / scale)).flatten(-2)), exponents


def _alive(codes: Tensor) -> Tensor:
    """Return which blocks hold a value other than zero: u8 [out, in/2] -> bool [out, in/32]."""
    return torch.unflatten((codes & 0x77) != 0, -1, (-1, MXFP4_BLOCK // 2)).any(-1)


def _convert(
    codes: Tensor, exponents: Tensor, alive: Tensor, top: int, scale_2: Tensor
) -> tuple[Tensor, Tensor, int]:
    power = torch.where(alive, exponents.int() - top + HIGHEST, 0)  # zeros take any scale
    small = power < LOWEST
    scale = torch.ldexp(torch.ones_like(power, dtype=torch.float32), power.clamp(LOWEST, HIGHEST))
    halves = nvfp4.to_e4m3(scale).repeat_interleave(2, -1)
    values = dequantize(codes, exponents)
    packed = codes.clone()
    if small.any():
        picked = torch.unflatten(values, -1, (-1, MXFP4_BLOCK))[small]
        rounded = nvfp4.block_scale(nvfp4.block_amax(picked), scale_2)
        torch.unflatten(halves.view(torch.uint8), -1, (-1, 2))[small] = rounded.view(torch.uint8)
        nibbles = nvfp4.quantize(picked, rounded, scale_2)
        torch.unflatten(packed, -1, (-1, MXFP4_BLOCK // 2))[small] = nibbles
    differs = nvfp4.dequantize(packed, halves, scale_2) != values
    unequal = torch.unflatten(differs, -1, (-1, MXFP4_BLOCK)).any(-1)
    assert not (unequal & ~small).any(), "MXFP4 became NVFP4 of other values"
    return packed, halves, int(small.sum())
