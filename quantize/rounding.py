"""How a weight matrix becomes NVFP4: which block scale each 16 weights get.

Round to nearest maps the largest of 16 weights to 6. The sweep tries other targets for it and
keeps the one with the least squared error, each input weighted by its second moment E[x_j^2]: the
expected squared error of the output, under the assumption that inputs are uncorrelated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onboard.checkpoint import nvfp4
from onboard.checkpoint.reciprocal import invertible

# What a block's amax is mapped to; 6 wins ties. Above 6 the largest weights are clipped.
TARGETS = (6.0, 4.0, 4.5, 5.0, 5.5, 6.5, 7.0, 7.5, 8.0, 9.0, 10.0, 11.0, 12.0)
SWEEP_SCALE_MAX = 256.0  # leaves room for amax -> 4: 256 * 6/4 = 384 <= 448


CHUNK = 2**17  # weights that a CPU rounds at a time: about what its cache holds


@dataclass(frozen=True)
class Packed:
    """Rows of a matrix as stored, u8 [out, in/2] and E4M3 [out, in/16], and their squared sums.

    `error` is |W - Q(W)|^2, `norm` is |W|^2.
    """

    weight: Tensor
    weight_scale: Tensor
    error: float
    norm: float


def shared_scale(amax: Tensor, rounding: str) -> Tensor:
    """Return the one `weight_scale_2` f32 [] of matrices with weights up to `amax` f32 []."""
    if amax == 0:
        amax = torch.ones_like(amax)  # all-zero weights: any positive scale stores them exactly
    top = nvfp4.E4M3_MAX if rounding == "rtn" else SWEEP_SCALE_MAX
    return invertible(nvfp4.tensor_scale(amax, top))


def round_rows(weight: Tensor, scale_2: Tensor, rounding: str, second_moment: Tensor) -> Packed:
    """Round [out, in] with "rtn" or "sweep"; `second_moment` is f32 [in], E[x_j^2]."""
    rows = len(weight) if weight.is_cuda else max(1, CHUNK // weight.shape[-1])
    chunks = torch.split(weight, rows)
    parts = [_round(part, scale_2, rounding, second_moment) for part in chunks]
    return Packed(
        torch.cat([part.weight for part in parts]),
        torch.cat([part.weight_scale for part in parts]),
        sum(part.error for part in parts),
        sum(part.norm for part in parts),
    )


def _round(weight: Tensor, scale_2: Tensor, rounding: str, second_moment: Tensor) -> Packed:
    exact = weight.float() + 0.0  # -0.0 becomes +0, as in ModelOpt
    values, amax = nvfp4.blocks(exact), nvfp4.block_amax(exact)
    if rounding == "rtn":
        scale = nvfp4.block_scale(amax, scale_2)
    else:
        scale = sweep(values, amax, scale_2, second_moment)
    step = (scale.float() * scale_2).unsqueeze(-1)
    rounded = nvfp4.round_to_e2m1(values / step)
    packed = nvfp4.pack(nvfp4.codes(rounded).flatten(-2))
    error = rounded.mul_(step).sub_(values)
    return Packed(packed, scale, _squared(error), _squared(values))


def sweep(blocks: Tensor, amax: Tensor, scale_2: Tensor, second_moment: Tensor) -> Tensor:
    """Return the E4M3 block scales [out, in/16] with the least weighted squared error.

    `blocks` f32 [out, in/16, 16], `amax` their maxima.
    """
    importance = nvfp4.blocks(second_moment)
    best_scale = torch.empty_like(amax)
    best_error = torch.full_like(amax, torch.inf)
    for target in TARGETS:
        scale = nvfp4.block_scale(amax * (nvfp4.E2M1_MAX / target), scale_2).float()
        step = (scale * scale_2).unsqueeze(-1)
        rounded = nvfp4.round_to_e2m1(blocks / step).mul_(step)
        error = rounded.sub_(blocks).square_().mul_(importance).sum(-1)
        better = error < best_error
        best_scale = torch.where(better, scale, best_scale)
        best_error = torch.where(better, error, best_error)
    return best_scale.to(torch.float8_e4m3fn)


def _squared(x: Tensor) -> float:
    flat = x.flatten()
    return float(flat.dot(flat))
