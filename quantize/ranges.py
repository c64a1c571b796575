"""The range of NVFP4 inputs, searched: a factor on the largest magnitude that calibration saw.

A block's scale is stored in E4M3, relative to the range. So the range says which blocks fall below
the smallest scale, which saturate, and how well the scales of all others are met. The search
quantizes a bounded sample of tokens with a few ranges, and moves one where that saves error and no
sampled token gets much worse. What this does to a model's KL is not in its view.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onboard.checkpoint import nvfp4
from onboard.checkpoint.matrices import Group, Matrix, range_groups

# Tried beside 1 on the largest magnitude. None is 2 or more: a power of two rounds no scale
# differently, but brings more of them below E4M3's smallest number.
FACTORS = (1.25, 1.5, 1.75, 0.85)
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
        worst, largest = (
            (WORST_GROWTH * errors).clamp(min=ROUNDING_ERROR)
            for errors in (plain.sampled.max(), plain.largest)
        )
        return bool((self.sampled <= worst).all() and (self.largest <= largest).all())


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
        self._numbers = torch.empty(0)  # those of the tokens held
        self._held = torch.empty(0)  # [ROWS, in], filled as far as there are numbers
        self.largest = torch.empty(0)  # [at most LARGEST, in]

    @property
    def rows(self) -> Tensor:
        """The tokens drawn so far, [at most ROWS, in]."""
        return self._held[: len(self._numbers)]

    @torch.inference_mode()
    def add(self, rows: Tensor) -> None:
        """Add [tokens, in]. Tokens that come when the factor is settled make it 1."""
        if self.factor is not None:
            self.factor = 1.0
        elif len(rows):
            if not len(self._held):
                self._held = rows.new_empty(ROWS, rows.shape[-1])
                self.largest = rows[:0]
            self._draw(rows)
            self.largest = _largest(torch.cat((self.largest, _largest(rows))))

    def _draw(self, rows: Tensor) -> None:
        held = len(self._numbers)
        numbers = torch.cat((self._numbers, torch.rand(len(rows), generator=self._random)))
        stays = torch.zeros(len(numbers), dtype=torch.bool)
        stays[numbers.topk(min(ROWS, len(numbers)), largest=False).indices] = True
        new = stays[held:].nonzero()[:, 0]
        freed = (~stays[:held]).nonzero()[:, 0]
        added = len(new) - len(freed)
        slots = torch.cat((freed, torch.arange(held, held + added)))
        self._held[slots] = rows[new]
        self._numbers = numbers[: held + added]
        self._numbers[slots] = numbers[held:][new]

    @torch.inference_mode()
    def settle(self) -> None:
        """Choose the factor of what has been seen, if anything has, and let go of the tokens."""
        if self.factor is not None or not len(self._numbers):
            return
        self.amax = float(self.largest.abs().max())
        self.factor = best_factor(self.rows, self.largest, self.amax) if self.amax else 1.0
        self._held = self.largest = self._numbers = torch.empty(0)


def _largest(rows: Tensor) -> Tensor:
    """Return the tokens with the largest magnitudes, [at most LARGEST, in]."""
    sizes = rows.abs().amax(-1)
    return rows[sizes.topk(min(LARGEST, len(rows))).indices]


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
