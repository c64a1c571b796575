"""The FP8 storage format: E4M3 values with one fp32 scale per tensor.

    W = E4M3[out, in] * weight_scale

Weights are rounded as NVIDIA ModelOpt rounds them (`FP8QTensor`), activations as vLLM's static
per-tensor quantization (`QuantFP8`) does: the one divides by the scale, the other multiplies by
its reciprocal.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0


def tensor_scale(amax: Tensor) -> Tensor:
    """Return `weight_scale` or `input_scale` f32 [] of values up to `amax`: amax over 448.

    Of many maxima, a scale each. All-zero values get the scale of amax = 1, which stores them
    exactly.
    """
    amax = amax.float()
    return torch.where(amax == 0, torch.ones_like(amax), amax) / E4M3_MAX


def quantize(weight: Tensor, scale: Tensor) -> Tensor:
    """Round [..., in] to the nearest E4M3 multiples of `scale` f32 [], saturating at 448."""
    return to_e4m3(weight.float() / scale)


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """Return the weights that an engine computes with, f32 [..., in]."""
    return codes.float() * scale


def quantize_dequantize(x: Tensor, input_scale: Tensor) -> Tensor:
    """Return activations [..., in], of any float dtype (kept), as a W8A8 kernel sees them.

    `input_scale` is f32 [].
    """
    codes = to_e4m3(x.float() * input_scale.reciprocal())
    return dequantize(codes, input_scale).to(x.dtype)


def to_e4m3(x: Tensor) -> Tensor:
    """Round to the nearest E4M3 number, saturating at 448."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
