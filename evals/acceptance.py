"""Acceptance length of a speculator in a real engine: 1 + accepted tokens / drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000
INTERVAL = (2.5, 97.5)  # percent


@dataclass(frozen=True)
class Drafts:
    """What became of one prompt's drafts: `histogram[j]` of them had exactly j tokens accepted."""

    histogram: tuple[int, ...]

    @property
    def count(self) -> int:
        return sum(self.histogram)

    @property
    def accepted(self) -> int:
        return sum(j * n for j, n in enumerate(self.histogram))

    def accepted_at(self, position: int) -> int:
        """Return how many drafts had their token at `position` (from 0) accepted."""
        return sum(self.histogram[position + 1 :])


def length(prompts: Sequence[Drafts]) -> float:
    """Return tokens per step of the target: from 1 (nothing accepted) to draft length + 1."""
    return 1 + sum(p.accepted for p in prompts) / sum(p.count for p in prompts)


def interval(prompts: Sequence[Drafts], seed: int = 0) -> tuple[float, float]:
    """Return the 95% bootstrap interval of `length`, prompts resampled with replacement."""
    accepted = np.array([p.accepted for p in prompts])
    count = np.array([p.count for p in prompts])
    picks = np.random.default_rng(seed).integers(len(prompts), size=(RESAMPLES, len(prompts)))
    lengths = 1 + accepted[picks].sum(1) / count[picks].sum(1)
    lo, hi = np.percentile(lengths, INTERVAL)
    return float(lo), float(hi)


def rates(prompts: Sequence[Drafts]) -> list[float]:
    """Return per draft position the share of drafts accepted up to and including it."""
    positions = len(prompts[0].histogram) - 1 if prompts else 0
    drafts = sum(p.count for p in prompts)
    return [sum(p.accepted_at(k) for p in prompts) / drafts for k in range(positions)]
