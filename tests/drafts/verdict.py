"""What the comparison of drafts must show, recomputed from the per-prompt rows of its JSON file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 4000
CODE, ALL = 1.9, 1.7  # acceptance lengths to reach with three drafted tokens
SPEED = 1.5  # our tokens per second over the peer's
MINUTES = 25  # of training
PROMPTS = 50  # whose greedy answers are compared, at least
P_VALUE, POWER = 0.001, 0.9  # of the test that sampled tokens are the target's
LOSSLESS = ("prompts", "divergences", "exempt", "sampling_p_value", "sampling_power")

Rows = Sequence[Mapping[str, Any]]


def length(rows: Rows) -> tuple[float, float, float]:
    """Return the acceptance length, 1 + accepted / drafts, and its 95% interval over prompts.

    Answers that loop are left out. Nothing drafted is a length of 1.
    """
    counts, accepted = _counts(rows)
    if not counts.sum():
        return 1.0, 1.0, 1.0
    picks = np.random.default_rng(0).integers(len(counts), size=(RESAMPLES, len(counts)))
    drawn = 1 + accepted[picks].sum(1) / counts[picks].sum(1)
    lo, hi = np.quantile(drawn, (0.025, 0.975))
    return float(1 + accepted.sum() / counts.sum()), float(lo), float(hi)


def difference(first: Rows, second: Rows) -> tuple[float, float, float]:
    """Return by how much the first one's acceptance length is larger, and its paired interval.

    Prompts that loop with either draft are left out of both.
    """
    kept = [not (a["looped"] or b["looped"]) for a, b in zip(first, second, strict=True)]
    pairs = [_counts([row for row, keep in zip(rows, kept, strict=True) if keep])
             for rows in (first, second)]  # fmt: skip
    size = len(pairs[0][0])
    picks = np.random.default_rng(0).integers(size, size=(RESAMPLES, size))
    drawn = [accepted[picks].sum(1) / counts[picks].sum(1) for counts, accepted in pairs]
    lo, hi = np.quantile(drawn[0] - drawn[1], (0.025, 0.975))
    whole = [accepted.sum() / counts.sum() for counts, accepted in pairs]
    return float(whole[0] - whole[1]), float(lo), float(hi)


def _counts(rows: Rows) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return drafts and accepted tokens of each answer that does not loop."""
    kept = [np.asarray(row["histogram"], float) for row in rows
            if not row["looped"] and sum(row["histogram"])]  # fmt: skip
    accepted = [float((np.arange(len(h)) * h).sum()) for h in kept]
    return np.array([h.sum() for h in kept]), np.array(accepted)


def shortfalls(results: Mapping[str, Any]) -> list[str]:
    """Return what falls short, in words; nothing where all holds."""
    long, ours, peer = (results["drafts"].get(name) for name in ("long", "ours", "peer"))
    said = []
    if long is None:
        said.append("no result of the long training")
    else:
        code = [row for row in long["prompts"] if row["domain"] == "code"]
        for name, rows, limit in (("code", code, CODE), ("all domains", long["prompts"], ALL)):
            found, lo, hi = length(rows)
            if found < limit:
                said.append(
                    f"acceptance on {name} is {found:.3f} [{lo:.3f}, {hi:.3f}], at least {limit}"
                )
        if long["seconds"] > 60 * MINUTES:
            said.append(f"training took {long['seconds'] / 60:.1f} minutes, at most {MINUTES}")
        said += _changes(long["smoke"])
    if ours is None or peer is None or "prompts" not in peer:
        return [*said, "no result of the peer beside ours"]
    gain, lo, hi = difference(ours["prompts"], peer["prompts"])
    if gain < 0:
        said.append(f"acceptance is {gain:.3f} [{lo:.3f}, {hi:.3f}] beside the peer's, no lower")
    ratio = ours["tokens_per_s"] / peer["tokens_per_s"]
    if ratio < SPEED:
        said.append(
            f"training makes {ratio:.2f} times the peer's tokens per second, at least {SPEED}"
        )
    return said


def _changes(smoke: Mapping[str, float]) -> list[str]:
    """Return how drafting changes answers, or why that was not seen well enough."""
    said = []
    if smoke["prompts"] < PROMPTS:
        said.append(f"{smoke['prompts']:g} greedy answers compared, at least {PROMPTS}")
    if smoke["divergences"]:
        said.append(f"{smoke['divergences']:g} greedy answers are not the target's")
    if smoke["sampling_p_value"] < P_VALUE:
        said.append(f"sampled tokens differ with p = {smoke['sampling_p_value']:.2g}")
    if smoke["sampling_power"] < POWER:
        said.append(f"the test of sampling has power {smoke['sampling_power']:.2f}, not {POWER}")
    return said
