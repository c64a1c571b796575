"""Acceptance of a speculator's drafts in a real engine: 1 + accepted tokens / drafts.

Drafts of looped answers do not count: a model that repeats itself accepts everything. Intervals
hold 95% and resample documents, since the drafts of one answer are not independent.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onboard.evals.bootstrap import document_bootstrap, paired_ratio_bootstrap

RESAMPLES = 2000
SUFFIX = {"greedy": "", "sampled": "_sampled"}  # of a sample's fields and of the metrics

Row = Mapping[str, Any]


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
    accepted, count = [p.accepted for p in prompts], [p.count for p in prompts]
    lo, hi = document_bootstrap(accepted, count, RESAMPLES, seed)
    return 1 + lo, 1 + hi


def rates(prompts: Sequence[Drafts]) -> list[float]:
    """Return per draft position the share of drafts accepted up to and including it."""
    drafts = sum(p.count for p in prompts)
    return [sum(p.accepted_at(k) for p in prompts) / drafts for k in range(_positions(prompts))]


def rate_intervals(prompts: Sequence[Drafts], seed: int = 0) -> list[tuple[float, float]]:
    """Return the 95% bootstrap interval of each of `rates`."""
    count = [p.count for p in prompts]
    return [
        document_bootstrap([p.accepted_at(k) for p in prompts], count, RESAMPLES, seed)
        for k in range(_positions(prompts))
    ]


def _positions(prompts: Sequence[Drafts]) -> int:
    return len(prompts[0].histogram) - 1 if prompts else 0


def healthy(samples: Sequence[Row], kind: str) -> list[Drafts]:
    """Return the drafts of the answers that do not loop (an answer of one token has none).

    `samples` hold `looped` and `drafts`, a histogram, for "greedy" answers, and the same with
    `_sampled` for "sampled" ones.
    """
    looped, drafts = f"looped{SUFFIX[kind]}", f"drafts{SUFFIX[kind]}"
    return [Drafts(tuple(row[drafts])) for row in samples if not row[looped] and sum(row[drafts])]


def metrics(samples: Sequence[Row]) -> dict[str, float]:
    """Return the flat numbers of both kinds; no acceptance length where every answer loops."""
    found: dict[str, float] = {}
    for kind, suffix in SUFFIX.items():
        prompts = healthy(samples, kind)
        looped = sum(bool(row[f"looped{suffix}"]) for row in samples)
        found |= {f"looped_excluded{suffix}": looped, **_lengths(prompts, suffix)}
    greedy = rates(healthy(samples, "greedy"))
    return found | {f"acceptance_rate_{k}": rate for k, rate in enumerate(greedy)}


def difference(first: Sequence[Row], second: Sequence[Row]) -> dict[str, float] | None:
    """Return how much longer the `first` drafter's greedy acceptance is, `value`, `lo` and `hi`.

    Both are samples of the same prompts in the same order, of which those are compared that loop
    with neither (`prompts` says how many); None where there are none. The interval holds 95% and
    resamples prompts, each with both of its answers.
    """
    pairs = [
        (Drafts(tuple(a["drafts"])), Drafts(tuple(b["drafts"])))
        for a, b in zip(first, second, strict=True)
        if not (a["looped"] or b["looped"]) and sum(a["drafts"]) and sum(b["drafts"])
    ]
    if not pairs:
        return None
    sides = list(zip(*pairs, strict=True))
    first_ratio, second_ratio = (
        ([p.accepted for p in side], [p.count for p in side]) for side in sides
    )
    lo, hi = paired_ratio_bootstrap(first_ratio, second_ratio, RESAMPLES, seed=0)
    value = length(sides[0]) - length(sides[1])
    return {"value": value, "lo": lo, "hi": hi, "prompts": len(pairs)}


def tables(samples: Sequence[Row]) -> dict[str, Any]:
    """Return the content of `acceptance.json`, by kind: domains, draft positions, looped ids."""
    return {kind: _table(samples, kind) for kind in SUFFIX}


def _table(samples: Sequence[Row], kind: str) -> dict[str, Any]:
    prompts = healthy(samples, kind)
    positions = zip(rates(prompts), rate_intervals(prompts), strict=True)
    return {
        "prompts": len(prompts),
        "domains": _by_domain(samples, kind),
        "positions": [{"rate": rate, "lo": lo, "hi": hi} for rate, (lo, hi) in positions],
        "looped": [row["id"] for row in samples if row[f"looped{SUFFIX[kind]}"]],
    }


def _by_domain(samples: Sequence[Row], kind: str) -> list[dict[str, Any]]:
    rows = []
    ordered = sorted(samples, key=_domain)
    for domain, group in itertools.groupby(ordered, key=_domain):
        if prompts := healthy(list(group), kind):
            rows.append({"domain": domain, "prompts": len(prompts), **_lengths(prompts)})
    return rows


def _domain(sample: Row) -> str:
    return str(sample["domain"])


def _lengths(prompts: Sequence[Drafts], suffix: str = "") -> dict[str, float]:
    if not prompts:
        return {}
    lo, hi = interval(prompts)
    name = f"acceptance_length{suffix}"
    return {name: length(prompts), f"{name}_lo": lo, f"{name}_hi": hi}
