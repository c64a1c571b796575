"""The NVFP4 storage format: E2M1 values, an E4M3 scale per 16 inputs, an fp32 scale per tensor.

    W = E2M1[nibble] * (weight_scale * weight_scale_2)

Two values a byte, the low nibble for the even column (FP4 layout of NVIDIA ModelOpt's
`NVFP4QTensor`, with which packing is bit-identical).
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 16  # inputs that share a block scale
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_MIN = 2.0**-9  # smallest positive E4M3 number
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def tensor_scale(amax: Tensor, block_scale_max: float = E4M3_MAX) -> Tensor:
    """Return `weight_scale_2` or `input_scale` [] f32 of values up to `amax`.

    `block_scale_max` is the E4M3 block scale that stands for a block reaching `amax`; a search
    over block scales asks for less than 448, to have headroom above it.
    """
    return amax.float() / (E2M1_MAX * block_scale_max)


def blocks(x: Tensor) -> Tensor:
    """View [..., in] as [..., in/16, 16]."""
    return x.reshape(*x.shape[:-1], -1, BLOCK)


def block_amax(weight: Tensor) -> Tensor:
    """Return the largest magnitude per block: [..., in] -> [..., in/16] f32.

    As a pooling, which is three times as fast on a CPU as a maximum over a short last dimension.
    """
    rows = weight.abs().float().reshape(1, -1, weight.shape[-1])
    return torch.max_pool1d(rows, BLOCK).reshape(*weight.shape[:-1], -1)


def block_scale(amax: Tensor, scale_2: Tensor) -> Tensor:
    """Return the E4M3 scale that maps each block's `amax` to 6; an all-zero block gets 1.0."""
    scale = amax / (E2M1_MAX * scale_2)
    return to_e4m3(torch.where(scale == 0, 1.0, scale))


def to_e4m3(scale: Tensor) -> Tensor:
    """Round positive scales to E4M3, clamped to [2^-9, 448] so that none becomes 0 or NaN."""
    return scale.clamp(E4M3_MIN, E4M3_MAX).to(torch.float8_e4m3fn)


def round_to_e2m1(x: Tensor) -> Tensor:
    """Round to the nearest E2M1 value, ties to the even code, magnitudes above 6 to 6.

    |x| times 2^22 is taken away and added again: just below it f32 is as coarse as E2M1 at |x|.
    Up to 1.25 E2M1 is as coarse as there.
    """
    a = x.float().abs().clamp_(max=E2M1_MAX)
    coarse = a.clamp(min=1.25)
    return a.sub_(coarse, alpha=2.0**22).add_(coarse, alpha=2.0**22).copysign_(x)


def codes(values: Tensor) -> Tensor:
    """Return the codes u8 of E2M1 values f32, each exactly on the grid.

    From 1 on, a code is the exponent and the one mantissa bit of the number. Below 1 it is twice
    the value, read off f32 at 2^22, whose spacing is 0.5; these codes end where the others begin.
    """
    magnitude = values.abs()
    from_one = (magnitude.view(torch.int32) >> 22).sub_(252).clamp_(min=2)
    below_one = (magnitude + 2.0**22).view(torch.int32).sub_(0x4A800000)
    code = torch.minimum(below_one, from_one)
    return code.bitwise_or_((values.view(torch.int32) >> 28) & 8).to(torch.uint8)


def pack(code: Tensor) -> Tensor:
    """Pack codes u8 [..., in] two a byte, u8 [..., in/2]; reads pairs as little-endian words."""
    pairs = code.contiguous().view(torch.int16)
    return (pairs | (pairs >> 4)).to(torch.uint8)


def quantize(weight: Tensor, weight_scale: Tensor, scale_2: Tensor) -> Tensor:
    """Pack [..., in] into nibbles, u8 [..., in/2].

    `weight_scale` is E4M3 [..., in/16], `scale_2` f32 []. A weight of -0.0 is stored as +0; a
    small negative one keeps its sign, as in ModelOpt.
    """
    step = (weight_scale.float() * scale_2).unsqueeze(-1)
    positive_zero = weight.float() + 0.0
    return pack(codes(round_to_e2m1(blocks(positive_zero) / step)).flatten(-2))


def unpack(packed: Tensor) -> Tensor:
    """Return the E2M1 values of u8 [..., in/2] as f32 [..., in]."""
    table = torch.tensor([*E2M1, *(-v for v in E2M1)], device=packed.device)
    codes = torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2)
    values: Tensor = table[codes.int()]
    return values


def dequantize(packed: Tensor, weight_scale: Tensor, scale_2: Tensor) -> Tensor:
    """Return the weights that an engine computes with, f32 [..., in]."""
    scale = (weight_scale.float() * scale_2).unsqueeze(-1)
    return (blocks(unpack(packed)) * scale).flatten(-2)


def quantize_dequantize(x: Tensor, input_scale: Tensor) -> Tensor:
    """Return activations as a W4A4 kernel sees them: block scales taken from `x` itself.

    `x` is [..., in] of any float dtype (kept), `input_scale` f32 []. The arithmetic is that of
    vLLM's `ref_nvfp4_quant_dequant`: a block scale that rounds to zero makes its block zero, and
    one above 448 saturates.
    """
    values = blocks(x.float())
    global_scale = 1.0 / input_scale
    amax = values.abs().amax(-1, keepdim=True)
    scale = (global_scale * (amax * (1 / E2M1_MAX))).clamp(max=E4M3_MAX)
    scale = scale.to(torch.float8_e4m3fn).float()
    inverse = torch.where(scale == 0, 0.0, 1.0 / (scale * input_scale))
    rounded = round_to_e2m1(values * inverse)
    return (rounded * (scale / global_scale)).flatten(-2).to(x.dtype)
