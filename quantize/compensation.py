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

from collections.abc import Callable, Sequence
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
    """Sums over tokens of what enters a matrix, f32 [in, in]: X̂ᵀX̂ and (X - X̂)ᵀX̂.

    `cross` is None where nothing but X̂ was ever wanted.
    """

    hessian: Tensor
    cross: Tensor | None

    @classmethod
    def of(cls, seen: Tensor, wanted: Tensor | None) -> Inputs:
        """Sum up what came, X̂ [tokens, in] f32, and what came to the unquantized model, X."""
        return cls(seen.T @ seen, None if wanted is None else (wanted - seen).T @ seen)

    def __add__(self, other: Inputs) -> Inputs:
        hessian = self.hessian + other.hessian
        if self.cross is None or other.cross is None:
            return Inputs(hessian, None)
        return Inputs(hessian, self.cross + other.cross)


def corrected(
    weights: Sequence[Tensor], fitted: Inputs, judges: Inputs
) -> list[tuple[Tensor, float]]:
    """Return matrices [out, in] that read one input, moved towards the unquantized outputs.

    With each comes the share of the correction that was taken. Ridge and share are found on the
    `judges`, tokens that the correction was not fitted on; the correction itself is then taken
    from all.
    """
    if fitted.cross is None:
        return [(weight, 0.0) for weight in weights]
    tried = {ridge: correction(weights, fitted, ridge) for ridge in RIDGES}
    every, taken, found = fitted + judges, dict[float, list[Tensor]](), []
    for at, weight in enumerate(weights):
        trials = ((held_share(weight, tried[ridge][at], judges), ridge) for ridge in RIDGES)
        (_, share), ridge = max(trials)
        if ridge not in taken:
            taken[ridge] = correction(weights, every, ridge)
        found.append((weight + share * taken[ridge][at], share))
    return found


def correction(weights: Sequence[Tensor], inputs: Inputs, ridge: float) -> list[Tensor]:
    """Return W (X - X̂)ᵀX̂ (X̂ᵀX̂)⁻¹ of each W [out, in], with damping."""
    assert inputs.cross is not None
    factor = torch.linalg.cholesky(damped(inputs.hessian, ridge))
    pulls = (torch.cat(list(weights)) @ inputs.cross).T
    return list(torch.split(torch.cholesky_solve(pulls, factor).T, [len(w) for w in weights]))


def held_share(weight: Tensor, change: Tensor, judges: Inputs) -> tuple[float, float]:
    """Return the gain of a `change` on the judges' tokens, and which multiple in [0, 1] has it.

    The minimum over a of |W X - (W + a change) X̂|^2; the gain is how much lower it is than at 0.
    """
    assert judges.cross is not None
    norm = float(((change @ judges.hessian) * change).sum())
    slope = float(((weight @ judges.cross) * change).sum())
    share = min(1.0, max(0.0, slope / norm)) if norm > 0 else 0.0
    return share * (2 * slope - share * norm), share


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

    `hessian` [B, in, in] is positive definite. With H = R Rᵀ, R upper triangular, the error is that
    of (W - Q) R, whose column k no later column of Q enters: each makes up for those before it.
    That is GPTQ, which takes the factor of H⁻¹ instead. A block's step is searched on what its
    columns should be when its turn comes, each weighted by its R_kk².
    """
    wanted = weight.mT.contiguous()
    values, steps = wanted.clone(), list[Tensor]()
    factor = torch.linalg.cholesky(hessian.flip(-2, -1)).flip(-2, -1)
    pivots = factor.diagonal(dim1=-2, dim2=-1)
    pulls = (factor / pivots[:, None]).mT.contiguous()

    def searched(block: slice, pulled: Tensor) -> Tensor:
        made_up = torch.linalg.solve_triangular(
            pulls[:, block, block], pulled, upper=False, unitriangular=True
        )
        steps.append(grid.step(values[:, block] + made_up, pivots[:, block] ** 2))
        return steps[-1]

    sweep(values, torch.zeros_like(values), pulls, grid, searched)
    pulls = hessian / hessian.diagonal(dim1=-2, dim2=-1)[..., None]
    for _ in range(polishes):
        pulled = pulls @ (wanted - values)
        sweep(values, pulled, pulls, grid, lambda block, _: steps[block.start // BLOCK])
    return values.mT, steps


def sweep(
    values: Tensor,
    pulled: Tensor,
    pulls: Tensor,
    grid: Grid,
    step_of: Callable[[slice, Tensor], Tensor],
) -> None:
    """Round every column in place to where the error is least with all others as they are.

    Columns are rows here: `values` is [B, in, out], and so is `pulled` = `pulls` (W - values), how
    far each is to move, which is used up. `pulls` is [B, in, in] with ones on its diagonal.
    `step_of` gives the step [B, out] of a block.
    """
    width = values.shape[1]
    for first in range(0, width, LAZY):
        last = min(first + LAZY, width)
        moves = torch.empty_like(values[:, first:last])
        for begin in range(first, last, BLOCK):
            block, end = slice(begin, begin + BLOCK), begin + BLOCK
            now, step = values[:, block], step_of(block, pulled[:, block])[:, None]
            best = (now + pulled[:, block]) / step
            rounded = _round_block(best, now / step, pulls[:, block, block], grid).mul_(step)
            moved = moves[:, begin - first : end - first].copy_(now).sub_(rounded)
            values[:, block] = rounded
            pulled[:, end:last].baddbmm_(pulls[:, end:last, block], moved)
        pulled[:, last:].baddbmm_(pulls[:, last:, first:last], moves)


def _round_block(best: Tensor, now: Tensor, pulls: Tensor, grid: Grid) -> Tensor:
    """Round 16 columns one by one, [B, 16, out] in multiples of their step."""
    rounded, moves = list[Tensor](), torch.empty_like(best)
    for at in range(BLOCK):
        here = slice(at, at + 1)
        wish = torch.baddbmm(best[:, here], pulls[:, here, :at], moves[:, :at])
        rounded.append(grid.nearest(wish))
        torch.sub(now[:, here], rounded[-1], out=moves[:, here])
    return torch.cat(rounded, 1)
