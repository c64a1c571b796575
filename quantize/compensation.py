"""Rounding in which later columns make up for the errors of earlier ones, and layers for layers.

With H = X̂ᵀX̂ of what enters a matrix, the squared error of its outputs is tr(E H Eᵀ). GPTQ (Frantar
et al. 2022, arXiv:2210.17323) rounds a column at a time and moves the columns not yet rounded to
cancel the error as far as H lets them. Before that, the weights are moved towards the outputs of
the unquantized model: where X was wanted and X̂ came, W + a W (X - X̂)ᵀX̂ H⁻¹ is the least-squares
answer for a = 1; how much of it holds on other tokens is measured on a part of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onboard.checkpoint import nvfp4
from onboard.quantize import rounding
from onboard.quantize.rounding import TARGETS

DAMPING = 0.01  # of H's mean diagonal, added to its diagonal
LAZY = 128  # columns after which errors are handed on to all the others


@dataclass(frozen=True)
class Inputs:
    """Sums over tokens of what enters a matrix, f32 [in, in]: X̂ᵀX̂ and (X - X̂)ᵀX̂."""

    hessian: Tensor
    cross: Tensor

    @classmethod
    def of(cls, seen: Tensor, wanted: Tensor) -> Inputs:
        """Sum up what came, X̂ [tokens, in] f32, and what came to the unquantized model, X."""
        return cls(seen.T @ seen, (wanted - seen).T @ seen)

    def __add__(self, other: Inputs) -> Inputs:
        return Inputs(self.hessian + other.hessian, self.cross + other.cross)


def corrected(weight: Tensor, fitted: Inputs, judges: Inputs) -> tuple[Tensor, float]:
    """Return the weight moved towards the unquantized outputs, and the share of the correction.

    The share is found on the `judges`, tokens that the correction was not fitted on; the correction
    itself is then taken from all.
    """
    share = held_share(weight, correction(weight, fitted), judges)
    return weight + share * correction(weight, fitted + judges), share


def correction(weight: Tensor, inputs: Inputs) -> Tensor:
    """Return W (X - X̂)ᵀX̂ (X̂ᵀX̂)⁻¹, [out, in], with damping."""
    factor = torch.linalg.cholesky(damped(inputs.hessian))
    return torch.cholesky_solve((weight @ inputs.cross).T, factor).T


def held_share(weight: Tensor, change: Tensor, judges: Inputs) -> float:
    """Return which multiple of `change`, in [0, 1], serves the judges' tokens best.

    The minimum over a of |W X - (W + a change) X̂|^2.
    """
    norm = float(((change @ judges.hessian) * change).sum())
    gain = float(((weight @ judges.cross) * change).sum())
    return min(1.0, max(0.0, gain / norm)) if norm > 0 else 0.0


def damped(hessian: Tensor) -> Tensor:
    """Return H with its diagonal raised, so that inputs that were never seen do no harm."""
    level = DAMPING * float(hessian.diagonal().mean()) or 1.0
    return hessian + level * torch.eye(len(hessian), device=hessian.device)


def gptq(weight: Tensor, hessian: Tensor, scale_2: Tensor) -> tuple[Tensor, Tensor]:
    """Round [out, in] f32; return the packed codes u8 [out, in/2] and E4M3 scales [out, in/16].

    A block's scale is found when its turn comes, on the weights as they then are.
    """
    rest, width = weight.clone(), weight.shape[1]
    matrix = damped(hessian)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(matrix))
    upper = torch.linalg.cholesky(inverse, upper=True)
    importance = matrix.diagonal()
    codes, scales = [], []
    for first in range(0, width, LAZY):
        last = min(first + LAZY, width)
        errors = torch.empty(len(rest), last - first, device=rest.device)
        for begin in range(first, last, nvfp4.BLOCK):
            end = begin + nvfp4.BLOCK
            block = rest[:, begin:end]
            scale = _scale(block, importance[begin:end], scale_2)
            step = scale.float() * scale_2
            for column in range(begin, end):
                value = nvfp4.round_to_e2m1(rest[:, column] / step)
                error = (rest[:, column] - value * step) / upper[column, column]
                rest[:, column + 1 : end] -= error[:, None] * upper[column, column + 1 : end]
                errors[:, column - first] = error
                codes.append(nvfp4.codes(value))
            rest[:, end:last] -= errors[:, begin - first : end - first] @ upper[begin:end, end:last]
            scales.append(scale)
        rest[:, last:] -= errors @ upper[first:last, last:]
    return nvfp4.pack(torch.stack(codes, 1)), torch.stack(scales, 1)


def _scale(block: Tensor, importance: Tensor, scale_2: Tensor) -> Tensor:
    """Return the E4M3 scale [out] of one block [out, 16] with the least weighted error."""
    amax = block.abs().amax(-1)
    best, least = torch.zeros_like(amax), torch.full_like(amax, torch.inf)
    for target in TARGETS:
        scale = nvfp4.block_scale(amax * (nvfp4.E2M1_MAX / target), scale_2).float()
        step = (scale * scale_2)[:, None]
        error = (nvfp4.round_to_e2m1(block / step) * step - block).square() @ importance
        best = torch.where(error < least, scale, best)
        least = torch.minimum(error, least)
    return best.to(torch.float8_e4m3fn)


def shared_scale(weight: Tensor) -> Tensor:
    """Return the `weight_scale_2` f32 [] of matrices that are fused, with room for the search."""
    return rounding.shared_scale(weight.abs().amax(), "sweep")
