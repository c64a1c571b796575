"""Rounding in which later columns make up for the errors of earlier ones, and layers for layers.

With H = X̂ᵀX̂ of what enters a matrix, the squared error of its outputs is tr(E H Eᵀ). GPTQ (Frantar
et al. 2022, arXiv:2210.17323) rounds a column at a time and moves the columns not yet rounded to
cancel the error as far as H lets them; afterwards every column is rounded again where that lowers
the error, with all the others as they are (coordinate descent, as in QuantEase, arXiv:2309.01885).
Before that, the weights are moved towards the outputs of the unquantized model: where X was wanted
and X̂ came, W + a W (X - X̂)ᵀX̂ H⁻¹ is the least-squares answer for a = 1. How much of it holds on
other tokens, and how far H is to be trusted (its damping), is measured on a part of the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onboard.checkpoint.nvfp4 import BLOCK
from onboard.quantize.grids import Grid

DAMPINGS = (0.003, 0.01, 0.03, 0.1, 1.0)  # of H's mean diagonal, added to its diagonal
RIDGES = (0.01, 0.1, 1.0)  # the same for the correction
SAMPLE_ROWS = 64  # of a matrix, on which dampings are compared
LAZY = 128  # columns after which errors are handed on to all the others
POLISHES = 2  # rounds of coordinate descent


@dataclass(frozen=True)
class Inputs:
    """Sums over tokens of what enters a matrix, f32 [..., in, in]: X̂ᵀX̂ and (X - X̂)ᵀX̂."""

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

    Ridge and share are found on the `judges`, tokens that the correction was not fitted on; the
    correction itself is then taken from all.
    """
    _, ridge, share = max(_trials(weight, fitted, judges))
    return weight + share * correction(weight, fitted + judges, ridge), share


def _trials(weight: Tensor, fitted: Inputs, judges: Inputs) -> Iterator[tuple[float, float, float]]:
    """Yield by how much a correction lowers the judges' squared error, its ridge and its share."""
    for ridge in RIDGES:
        change = correction(weight, fitted, ridge)
        share, gain = held_share(weight, change, judges)
        yield gain, ridge, share


def correction(weight: Tensor, inputs: Inputs, ridge: float) -> Tensor:
    """Return W (X - X̂)ᵀX̂ (X̂ᵀX̂)⁻¹, [out, in], with damping."""
    factor = torch.linalg.cholesky(damped(inputs.hessian, ridge))
    return torch.cholesky_solve((weight @ inputs.cross).T, factor).T


def held_share(weight: Tensor, change: Tensor, judges: Inputs) -> tuple[float, float]:
    """Return which multiple of `change`, in [0, 1], serves the judges' tokens best, and its gain.

    The minimum over a of |W X - (W + a change) X̂|^2; the gain is how much lower it is than at 0.
    """
    norm = float(((change @ judges.hessian) * change).sum())
    slope = float(((weight @ judges.cross) * change).sum())
    share = min(1.0, max(0.0, slope / norm)) if norm > 0 else 0.0
    return share, share * (2 * slope - share * norm)


def rounded(weight: Tensor, fitted: Tensor, judges: Tensor, grid: Grid) -> Rounded:
    """Round matrices [B, out, in] f32, each with its own H.

    `fitted` and `judges` are X̂ᵀX̂ f32 [B, in, in] of two parts of the tokens. Each matrix gets the
    damping with the least error on the judges, tried on a sample of rows that was rounded for the
    other tokens; then all is rounded for all tokens.
    """
    height, times = weight.shape[1], len(DAMPINGS)
    rows = torch.linspace(0, height - 1, min(SAMPLE_ROWS, height)).long().to(weight.device)
    sample = weight[:, rows].repeat(times, 1, 1)
    trials = torch.cat([damped(fitted, damping) for damping in DAMPINGS])
    tried, _ = compensate(sample, trials, grid.repeat(times), polishes=0)
    errors = output_error(tried - sample, judges.repeat(times, 1, 1)).reshape(times, -1)
    chosen = torch.tensor(DAMPINGS, device=weight.device)[errors.argmin(0)]
    return Rounded(*compensate(weight, damped(fitted + judges, chosen), grid), chosen)


@dataclass(frozen=True)
class Rounded:
    """Values on the grid f32 [B, out, in], a step per block [B, out], dampings [B]."""

    values: Tensor
    steps: list[Tensor]
    dampings: Tensor


def output_error(error: Tensor, hessian: Tensor) -> Tensor:
    """Return tr(E H Eᵀ) [B], the squared error of outputs, of E [B, out, in] and H [B, in, in]."""
    return ((error @ hessian) * error).sum((-2, -1))


def damped(hessian: Tensor, share: float | Tensor) -> Tensor:
    """Return H [..., in, in] with its diagonal raised by a share of its mean.

    Inputs that were never seen then do no harm; an H that is zero becomes the identity.
    """
    diagonal = hessian.diagonal(dim1=-2, dim2=-1)
    mean = diagonal.mean(-1)
    level = torch.where(mean > 0, mean * share, 1.0)
    return hessian + torch.diag_embed(level[..., None].expand_as(diagonal))


def compensate(
    weight: Tensor, hessian: Tensor, grid: Grid, polishes: int = POLISHES
) -> tuple[Tensor, list[Tensor]]:
    """Round [B, out, in] f32 column by column, then polish; return the values and steps.

    `hessian` [B, in, in] is positive definite. The grid finds a block's step when its turn comes,
    on the weights as they then are, each column weighted by what the columns behind it cannot make
    up for: 1/U², with U the Cholesky factor of H⁻¹.
    """
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    upper = torch.linalg.cholesky(inverse, upper=True)
    pivots = upper.diagonal(dim1=-2, dim2=-1)[:, None]
    rest, width = weight.clone(), weight.shape[-1]
    values, steps = torch.empty_like(weight), []
    for first in range(0, width, LAZY):
        last = min(first + LAZY, width)
        errors = torch.empty_like(rest[..., first:last])
        for begin in range(first, last, BLOCK):
            end = begin + BLOCK
            step = grid.step(rest[..., begin:end], pivots[..., begin:end] ** -2)
            for column in range(begin, end):
                now = rest[..., column]
                values[..., column] = grid.nearest(now, step)
                error = (now - values[..., column]) / pivots[..., column]
                errors[..., column - first] = error
                rest[..., column + 1 : end] -= (
                    error[..., None] * upper[:, column, None, column + 1 : end]
                )
            done = errors[..., begin - first : end - first]
            rest[..., end:last] -= done @ upper[:, begin:end, end:last]
            steps.append(step)
        rest[..., last:] -= errors @ upper[:, first:last, last:]
    for _ in range(polishes):
        polish(values, weight, hessian, grid, steps)
    return values, steps


def polish(
    values: Tensor, weight: Tensor, hessian: Tensor, grid: Grid, steps: Sequence[Tensor]
) -> None:
    """Round every column of [B, out, in] again, in place, to where the outputs' error is least.

    With G = (Q - W) H, the best value of column j, all others as they are, is q_j - G_j / H_jj.
    """
    curvature = hessian.diagonal(dim1=-2, dim2=-1)[:, None]
    slope = (values - weight) @ hessian
    for first in range(0, weight.shape[-1], LAZY):
        last = min(first + LAZY, weight.shape[-1])
        moves = torch.empty_like(values[..., first:last])
        for column in range(first, last):
            now = values[..., column].clone()
            best = now - slope[..., column] / curvature[..., column]
            values[..., column] = grid.nearest(best, steps[column // BLOCK])
            move = moves[..., column - first] = values[..., column] - now
            slope[..., column:last] += move[..., None] * hessian[:, column, None, column:last]
        slope[..., last:] += moves @ hessian[:, first:last, last:]
