"""Climb from method to method until the selection documents are satisfied."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from onboard.quantize.making import METHODS, Formats, Made, Maker
from onboard.quantize.selection import Measured


@dataclass(frozen=True)
class Rung:
    """A method's checkpoint, its KL on the selection documents, and what both took."""

    method: str
    made: Made
    measured: Measured
    seconds: float


@dataclass(frozen=True)
class Ladder:
    """The rungs that were climbed, in order."""

    rungs: Sequence[Rung]
    target_kl: float | None

    @property
    def best(self) -> Rung:
        """The rung of least KL; of equal ones the first, which is the simpler method."""
        return min(self.rungs, key=lambda rung: rung.measured.kl)

    def describe(self) -> dict[str, Any]:
        """Return `ladder.json`."""
        return {
            "target_kl": self.target_kl,
            "documents": len(self.best.measured.sums),
            "rungs": [
                {
                    "method": rung.method,
                    "kl": rung.measured.kl,
                    "kl_lo": rung.measured.interval[0],
                    "kl_hi": rung.measured.interval[1],
                    "seconds": round(rung.seconds, 1),
                    "bytes": rung.made.bytes,
                    "chosen": rung is self.best,
                }
                for rung in self.rungs
            ],
        }


def climb(maker: Maker, formats: Formats) -> Ladder:
    """Try the methods in order, up to the one that reaches `target_kl`.

    No method is begun after the recipe's `minutes`, and distillation only where the recipe gives it
    documents. A method that was finished by a run that was killed takes no time again. There are
    two checkpoints on the disk at most: the best so far, and the one that is tried.
    """
    params, begun = maker.params, time.monotonic()
    methods = [m for m in METHODS if m != "qad" or maker.ids("distillation")]
    rungs: list[Rung] = []
    for method in methods:
        before = time.monotonic()
        if rungs and params.minutes is not None and before - begun > 60 * params.minutes:
            break
        measured = maker.measure(method, formats)
        made = maker.made(method, formats)
        rungs.append(Rung(method, made, measured, time.monotonic() - before))
        best = Ladder(rungs, params.target_kl).best
        for rung in rungs:
            if rung is not best:
                rung.made.drop()
        if params.target_kl is not None and measured.kl <= params.target_kl:
            break
    return Ladder(rungs, params.target_kl)
