"""How a weight matrix becomes NVFP4: which block scale each 16 weights get.

Round to nearest maps the largest of 16 weights to 6. The sweep tries other targets for it and
keeps the one with the least squared error, each input weighted by its second moment E[x_j^2]: the
expected squared error of the output, under the assumption that inputs are uncorrelated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onboard.checkpoint import nvfp4

TARGETS = (6.0, 4.0, 4.5, 5.0, 5.5, 7.0, 8.0)  # what a block's amax is mapped to; 6 wins ties
SWEEP_SCALE_MAX = 256.0  # leaves room for amax -> 4: 256 * 6/4 = 384 <= 448


@dataclass(frozen=True)
class Packed:
    """One matrix as stored: u8 [out, in/2], E4M3 [out, in/16], f32 []."""

    weight: Tensor
    weight_scale: Tensor
    weight_scale_2: Tensor


def shared_scale(weights: Sequence[Tensor], rounding: str) -> Tensor:
    """Return the one `weight_scale_2` f32 [] of matrices that an engine fuses."""
    amax = torch.stack([weight.abs().amax().float() for weight in weights]).amax()
    if amax == 0:
        amax = torch.ones_like(amax)  # all-zero weights: any positive scale stores them exactly
    return nvfp4.tensor_scale(amax, SWEEP_SCALE_MAX if rounding == "sweep" else nvfp4.E4M3_MAX)


def round_weight(weight: Tensor, scale_2: Tensor, rounding: str, second_moment: Tensor) -> Packed:
    """Round [out, in] with "rtn" or "sweep"; `second_moment` is f32 [in], E[x_j^2]."""
    amax = nvfp4.block_amax(weight)
    if rounding == "rtn":
        scale = nvfp4.block_scale(amax, scale_2)
    else:
        scale = sweep(weight, amax, scale_2, second_moment)
    return Packed(nvfp4.quantize(weight, scale, scale_2), scale, scale_2)


def sweep(weight: Tensor, amax: Tensor, scale_2: Tensor, second_moment: Tensor) -> Tensor:
    """Return the E4M3 block scales [out, in/16] with the least weighted squared error."""
    blocks = nvfp4.blocks(weight.float())
    importance = nvfp4.blocks(second_moment)
    best_scale = torch.empty_like(amax, dtype=torch.float8_e4m3fn)
    best_error = torch.full_like(amax, torch.inf)
    for target in TARGETS:
        scale = nvfp4.block_scale(amax * (nvfp4.E2M1_MAX / target), scale_2)
        step = (scale.float() * scale_2).unsqueeze(-1)
        rounded = nvfp4.round_to_e2m1(blocks / step).mul_(step)
        error = rounded.sub_(blocks).square_().mul_(importance).sum(-1)
        better = error < best_error
        best_scale = torch.where(better, scale.float(), best_scale.float()).to(scale.dtype)
        best_error = torch.where(better, error, best_error)
    return best_scale


def relative_error(weight: Tensor, packed: Packed) -> float:
    """Return |W - Q(W)| / |W| in the Frobenius norm (0 for an all-zero matrix)."""
    stored = nvfp4.dequantize(packed.weight, packed.weight_scale, packed.weight_scale_2)
    norm = weight.float().norm()
    return float((stored - weight.float()).norm() / norm) if norm > 0 else 0.0
