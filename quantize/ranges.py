"""The range of NVFP4 inputs, searched: a factor on the largest magnitude that calibration saw.

A block's scale is stored in E4M3, relative to the range. So the range says which blocks fall below
the smallest scale, which saturate, and how well the scales of all others are met. The search
quantizes a bounded sample of tokens with a few ranges, and moves one only where that is safe.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onboard.checkpoint import nvfp4
from onboard.checkpoint.matrices import Group, Matrix, range_groups

# Tried beside 1 on the largest magnitude. Those above 1 stay below 2: a power of two rounds no scale
# differently, but brings more of them below E4M3's smallest number.
FACTORS = (1.25, 1.5, 1.75, 0.85, 0.7)
ROWS = 512  # tokens sampled per range group
LARGEST = 16  # tokens kept beside them: those with the largest magnitudes
LEAST_GAIN = 0.01  # share of the error that a factor must save
WORST_GROWTH = 1.1  # times which the worst token's error may grow
ROUNDING_ERROR = 0.01  # what a token whose values are normally distributed loses, in energy


@dataclass(frozen=True)
class Errors:
    """Relative squared errors |x - Q(x)|^2 / |x|^2 of tokens with one range, f32 [tokens].

    Every token counts alike: a massive one does not decide the mean by its size.
    """

    sampled: Tensor
    largest: Tensor  # of the tokens with the largest magnitudes

    @classmethod
    def of(cls, rows: Tensor, largest: Tensor, limit: float) -> Errors:
        """Quantize sampled and largest tokens, [tokens, in], with the range `limit`."""
        return cls(relative_errors(rows, limit), relative_errors(largest, limit))

    @property
    def mean(self) -> float:
        return float(self.sampled.mean())

    def is_safe(self, plain: Errors) -> bool:
        """Tell whether no token is much worse off than in `plain`, with the largest magnitude.

        There, a token that one magnitude dominates has next to no error: it may come to err as
        other tokens do, but not more, which would be saturation.
        """
        allowed = (WORST_GROWTH * plain.largest).clamp(min=ROUNDING_ERROR)
        worst_holds = self.sampled.max() <= WORST_GROWTH * plain.sampled.max()
        return bool(worst_holds and (self.largest <= allowed).all())


def relative_errors(x: Tensor, limit: float) -> Tensor:
    """Return |x - Q(x)|^2 / |x|^2 f32 [tokens] of [tokens, in] in NVFP4; 0 for a token of zeros."""
    x = x.float()
    scale = nvfp4.tensor_scale(torch.tensor(limit, device=x.device))
    error = (x - nvfp4.quantize_dequantize(x, scale)).square().sum(-1)
    energy = x.square().sum(-1)
    return torch.where(energy > 0, error / energy, 0.0)


def best_factor(rows: Tensor, largest: Tensor, amax: float) -> float:
    """Return the factor on `amax` with the least mean error of `rows` among those that are safe.

    `rows` and `largest` are [tokens, in]. It is 1 where no other saves `LEAST_GAIN`.
    """
    plain = Errors.of(rows, largest, amax)
    best, least = 1.0, (1 - LEAST_GAIN) * plain.mean
    for factor in FACTORS:
        errors = Errors.of(rows, largest, factor * amax)
        if errors.mean < least and errors.is_safe(plain):
            best, least = factor, errors.mean
    return best


class Sample:
    """Tokens that entered the matrices of a range group, and in the end their factor.

    `ROWS` tokens are drawn without replacement, each as likely as any other, whichever batch or
    expert it came with: those with the smallest of random numbers that every token gets. The
    `LARGEST` tokens with the largest magnitudes are kept beside them.
    """

    def __init__(self) -> None:
        self.factor: float | None = None
        self.amax = 0.0
        self._random = torch.Generator().manual_seed(0)
        self._drawn = torch.empty(0)  # the random numbers of the tokens held
        self._rows: Tensor | None = None  # [ROWS, in], filled up to the numbers of tokens drawn
        self._largest: Tensor | None = None  # [up to LARGEST, in]

    @torch.inference_mode()
    def add(self, rows: Tensor) -> None:
        """Add [tokens, in]. Tokens that come when the factor is settled make it 1."""
        if self.factor is not None:
            self.factor = 1.0
        elif len(rows):
            self._draw(rows)
            self._keep_largest(rows)

    def _draw(self, rows: Tensor) -> None:
        if self._rows is None:
            self._rows = rows.new_empty(ROWS, rows.shape[-1])
        held = len(self._drawn)
        drawn = torch.cat((self._drawn, torch.rand(len(rows), generator=self._random)))
        stays = torch.zeros(len(drawn), dtype=torch.bool)
        stays[drawn.topk(min(ROWS, len(drawn)), largest=False).indices] = True
        new = stays[held:].nonzero()[:, 0]
        left = (~stays[:held]).nonzero()[:, 0]
        slots = torch.cat((left, torch.arange(held, held + len(new) - len(left))))
        self._rows[slots] = rows[new]
        self._drawn = torch.cat((self._drawn, torch.empty(len(new) - len(left))))
        self._drawn[slots] = drawn[held:][new]

    def _keep_largest(self, rows: Tensor) -> None:
        sizes = torch.linalg.vector_norm(rows, torch.inf, dim=-1)
        found = rows[sizes.topk(min(LARGEST, len(rows))).indices]
        if self._largest is not None:
            found = torch.cat((self._largest, found))
        sizes = torch.linalg.vector_norm(found, torch.inf, dim=-1)
        self._largest = found[sizes.topk(min(LARGEST, len(found))).indices]

    @torch.inference_mode()
    def settle(self) -> None:
        """Choose the factor of what has been seen, if anything has, and let go of the tokens."""
        if self.factor is not None or self._rows is None or self._largest is None:
            return
        self.amax = float(self._largest.abs().max())
        rows = self._rows[: len(self._drawn)]
        self.factor = best_factor(rows, self._largest, self.amax) if self.amax > 0 else 1.0
        self._rows = self._largest = None


class RangeSearch:
    """Finds the factor of every range group: siblings have one, and a layer's experts alike.

    Siblings read the same input, of which one copy is looked at. Memory: the samples of the
    groups that have seen tokens since the last `settle`.
    """

    def __init__(self, groups: Iterable[Group]) -> None:
        groups = list(groups)
        first = {group[0].module for group in groups}
        self.found = [(members, Sample()) for members in range_groups(groups)]
        self._samples = {
            matrix.module: sample
            for members, sample in self.found
            for matrix in members
            if matrix.module in first
        }

    def collect(self, entered: Sequence[Matrix], x: Tensor) -> None:
        """Add activations [..., in] that entered these matrices, together."""
        for matrix in entered:
            if matrix.module in self._samples:
                self._samples[matrix.module].add(x.flatten(0, -2))
                return

    def settle(self) -> None:
        """Choose the factors of all groups that saw tokens: none of them will see more."""
        for _, sample in self.found:
            sample.settle()

    def factors(self, amax: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the factor of each module, to be applied to its `amax` f32 [].

        It is 1 where the group saw nothing, or where its amax is not that of the sample.
        """
        self.settle()
        return {
            matrix.module: sample.factor or 1.0 if amax[matrix.module] == sample.amax else 1.0
            for members, sample in self.found
            for matrix in members
        }
