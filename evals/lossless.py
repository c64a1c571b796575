"""Does speculation change what the target says? Greedy outputs with and without it, compared.

Temperature 0 is not deterministic across batch shapes, so a first difference only counts where the
target had a clear preference. How clear it must be is measured on the engine itself: where inputs
are rounded to 4 bits, the last bit of a sum can move one by a whole step, and what the plain engine
thinks of a token then changes by 1 or 2 nats from one batch shape to another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

NEAR_TIE_NATS = 0.15

Candidates = Mapping[int, float]  # token id -> log-probability in nats (fp32)


@dataclass(frozen=True)
class Agreement:
    """`position` is that of the first difference, `gap` how far behind the other token was."""

    kind: Literal["equal", "near-tie", "diverged"]
    position: int | None = None
    gap: float | None = None


@dataclass(frozen=True)
class Noise:
    """By how much an engine without a speculator contradicts itself in another batch shape.

    `nats` is the most that a chosen token's lead over the runner-up changed, `changed` the number
    of answers in which another token would have been chosen somewhere.
    """

    nats: float
    changed: int

    @property
    def near_tie(self) -> float:
        """Return how far behind a token may be, in nats, to count as a tie with the best."""
        return max(NEAR_TIE_NATS, self.nats)


def noise(
    answers: Sequence[Sequence[int]],
    first: Sequence[Sequence[Candidates]],
    again: Sequence[Sequence[Candidates]],
) -> Noise:
    """Compare two readings of the same answers, the first that in which they were chosen.

    A reading holds per answer and position the top tokens; the second may lack last positions.
    A token that it lacks counts as likely as the least likely one it holds.
    """
    nats, changed = 0.0, 0
    for ids, *readings in zip(answers, first, again, strict=True):
        differs = False
        for token, before, after in zip(ids, *readings, strict=False):
            rival = max((t for t in before if t != token), key=before.__getitem__, default=token)
            nats = max(nats, abs(_lead(before, token, rival) - _lead(after, token, rival)))
            differs |= token != max(after, key=after.__getitem__)
        changed += differs
    return Noise(nats, changed)


def _lead(top: Candidates, token: int, rival: int) -> float:
    least = min(top.values())
    return top.get(token, least) - top.get(rival, least)


def compare(
    plain: Sequence[int],
    candidates: Sequence[Candidates],
    other: Sequence[int],
    near_tie: float = NEAR_TIE_NATS,
) -> Agreement:
    """Judge `other` by what the plain run thought at the first token where they differ.

    `candidates` holds the plain run's top tokens at each position, the chosen one among them. A
    difference is a near-tie where the token that the other run took is at most `near_tie` nats
    behind the best one, which is stricter than asking whether any second token is. One output
    ending before the other is a difference too.
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
    return Agreement("near-tie" if gap <= near_tie else "diverged", position, gap)
