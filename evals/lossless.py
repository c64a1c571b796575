"""Does speculation change what the target says? Greedy outputs with and without it, compared.

Temperature 0 is not deterministic across batch shapes, so a first difference only counts where the
target had a clear preference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

NEAR_TIE_NATS = 0.15


@dataclass(frozen=True)
class Agreement:
    """`position` is that of the first difference, `gap` how far behind the other token was."""

    kind: Literal["equal", "near-tie", "diverged"]
    position: int | None = None
    gap: float | None = None


def compare(
    plain: Sequence[int], candidates: Sequence[Mapping[int, float]], other: Sequence[int]
) -> Agreement:
    """Judge `other` by what the plain run thought at the first token where they differ.

    `candidates` holds the plain run's top tokens at each position, id -> log-probability in nats
    (fp32), the chosen one among them. A difference is a near-tie where the token that the other
    run took is at most 0.15 nats behind the best one, which is stricter than asking whether any
    second token is. One output ending before the other is a difference too.
    """
    position = next(
        (i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b),
        min(len(plain), len(other)),
    )
    if position == len(plain) == len(other):
        return Agreement("equal")
    if position == len(plain) or position == len(other):
        return Agreement("diverged", position)
    top = candidates[position]
    taken = top.get(other[position])
    if taken is None:
        return Agreement("diverged", position)
    gap = max(top.values()) - taken
    return Agreement("near-tie" if gap <= NEAR_TIE_NATS else "diverged", position, gap)
