"""Which format each unit gets: the least KL for what a budget allows.

The KL of rounding several units is, to second order, the sum of what each costs alone plus terms of
pairs. Starting with every unit in its smallest format, the greedy front always takes the step that
saves the most KL per byte; without pair terms these are the vertices of the lower convex hull, and
no choice of formats beats a point of it at the same bytes (Everett 1963, Lagrange multipliers).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onboard.errors import InputError

BITS = {"nvfp4": 4.5, "fp8": 8.0, "bf16": 16.0}  # a weight, with its share of a block scale
SCALE_BYTES = {"nvfp4": 8, "fp8": 8, "bf16": 0}  # of a matrix: an fp32 scale, and its inputs'
FORMATS = tuple(BITS)  # from small to large
MEASUREMENTS = 8  # of the joint KL at most, on the way to a `kl_max`

Measure = Callable[[Mapping[str, str]], float]  # formats by module -> joint KL in nats a token
Pairs = NDArray[np.float64]
Move = tuple[int, str]  # a unit, and the format that it is to get


@dataclass(frozen=True)
class Unit:
    """What an engine gives one format: fused siblings, or all experts of a layer.

    `active` is the share of its weights that one token reads.
    """

    name: str
    modules: tuple[str, ...]
    parameters: int
    role: str
    active: float = 1.0

    def bits(self, format: str) -> float:
        """Return the bits of its weights and block scales."""
        return self.parameters * BITS[format]

    def bytes(self, format: str) -> int:
        """Return what it takes on disk, fp32 scales included (W4A16 has none of inputs)."""
        return math.ceil(self.bits(format) / 8) + len(self.modules) * SCALE_BYTES[format]


@dataclass(frozen=True)
class Problem:
    """The units, what each costs alone in nats a token by format, and what pairs add.

    `kl` has an entry for every format but bf16, which costs nothing. `pairs` f64 [U, U] is
    symmetric with a zero diagonal: what two units in NVFP4 cost beyond their sum. `allowed` names
    the formats that a unit may have, by its name; units that it does not name may have any.
    """

    units: tuple[Unit, ...]
    kl: Mapping[str, Sequence[float]]
    pairs: Pairs | None = None
    allowed: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def alone(self, unit: int, format: str) -> float:
        return 0.0 if format == "bf16" else max(0.0, float(self.kl[format][unit]))

    def may_be(self, unit: int) -> list[str]:
        """Return the formats that a unit may have, small ones first."""
        allowed = self.allowed.get(self.units[unit].name, FORMATS)
        return [format for format in FORMATS if format in allowed]

    def point(self, formats: Sequence[str]) -> Point:
        """Return what a choice of formats costs."""
        held = list(zip(self.units, formats, strict=True))
        bits = sum(unit.bits(format) for unit, format in held)
        kl = sum(self.alone(n, format) for n, format in enumerate(formats))
        if self.pairs is not None:
            low = np.array([format == "nvfp4" for format in formats])
            kl += float(self.pairs[np.ix_(low, low)].sum()) / 2
        return Point(
            tuple(formats),
            sum(unit.bytes(format) for unit, format in held),
            bits / sum(unit.parameters for unit in self.units),
            sum(unit.bits(format) * unit.active for unit, format in held) / 8,
            kl,
        )

    def changes(self, formats: Sequence[str]) -> dict[Move, float]:
        """Return how the predicted KL changes with every move of one unit to another format."""
        low = np.array([format == "nvfp4" for format in formats], float)
        pull = np.zeros_like(low) if self.pairs is None else self.pairs @ low
        return {
            (n, to): self.alone(n, to)
            - self.alone(n, now)
            + float(pull[n]) * ((to == "nvfp4") - (now == "nvfp4"))
            for n, now in enumerate(formats)
            for to in self.may_be(n)
            if to != now
        }

    def modules(self, formats: Sequence[str]) -> dict[str, str]:
        """Return the format of every module."""
        held = zip(self.units, formats, strict=True)
        return {module: format for unit, format in held for module in unit.modules}


@dataclass(frozen=True)
class Point:
    """A format for every unit, in the units' order, and what that costs.

    `bits` are of a weight, with block scales; `bytes_per_token` of the weights that a token reads,
    with block scales; `kl` is predicted, in nats a token.
    """

    formats: tuple[str, ...]
    bytes: int
    bits: float
    bytes_per_token: float
    kl: float


@dataclass(frozen=True)
class Limit:
    """What a budget bounds: "bits", "bytes", "speed" or "kl_max", and its value."""

    name: str
    value: float

    def size(self, unit: Unit, format: str) -> float:
        """Return what counts against the limit: bytes on disk, or those that a token reads."""
        if self.name == "speed":
            return unit.bits(format) * unit.active / 8
        return unit.bits(format) / 8 if self.name == "bits" else unit.bytes(format)

    def spend(self, units: Sequence[Unit]) -> float:
        """Return the most that all units may take together, as `size` counts."""
        if self.name == "kl_max":
            return math.inf
        if self.name == "speed":
            return sum(self.size(unit, "bf16") for unit in units) / self.value
        return self.value * (sum(u.parameters for u in units) / 8 if self.name == "bits" else 1)


NO_LIMIT = Limit("kl_max", math.inf)


@dataclass(frozen=True)
class Swap:
    """A try: one unit up, another down, and the joint KL measured before and after."""

    up: str
    down: str
    kl_before: float
    kl_after: float
    accepted: bool


def front(problem: Problem, limit: Limit = NO_LIMIT) -> list[Point]:
    """Return the greedy front from the smallest formats to the largest.

    Bytes (those a token reads, for a `speed`) rise and predicted KL falls from point to point.
    """
    formats = [problem.may_be(n)[0] for n in range(len(problem.units))]
    points = [problem.point(formats)]
    while steps := list(_steps(problem, formats, limit)):
        best = max(steps, key=lambda step: step.gain / step.size)
        formats[best.unit] = best.to
        points.append(problem.point(formats))
    least = itertools.accumulate((point.kl for point in points), min)
    before = [math.inf, *least]
    return [p for p, kl in zip(points, before, strict=False) if p.kl < kl]


@dataclass(frozen=True)
class _Step:
    unit: int
    to: str
    gain: float  # KL saved
    size: float  # what it takes more


def _steps(problem: Problem, formats: Sequence[str], limit: Limit) -> Iterator[_Step]:
    """Yield every unit's moves to larger formats, in the units' order."""
    for (n, to), change in problem.changes(formats).items():
        if (size := _growth(problem, formats, limit, (n, to))) > 0:
            yield _Step(n, to, -change, size)


def _growth(problem: Problem, formats: Sequence[str], limit: Limit, move: Move) -> float:
    """Return what a move takes more, as the limit counts."""
    unit, to = problem.units[move[0]], move[1]
    return limit.size(unit, to) - limit.size(unit, formats[move[0]])


def choose(problem: Problem, limit: Limit, measure: Measure | None = None) -> Choice:
    """Return the best point within a limit, and the front it was found on.

    Under `kl_max` that is the smallest point whose KL is below, measured where `measure` is given.
    Raises InputError where even the smallest formats are too large.
    """
    points = front(problem, limit)
    if limit.name == "kl_max":
        return _below(problem, points, limit.value, measure)
    room = limit.spend(problem.units)

    def size(formats: Sequence[str]) -> float:
        return sum(limit.size(*held) for held in zip(problem.units, formats, strict=True))

    fitting = [point for point in points if _fits(size(point.formats), room)]
    if not fitting:
        least = points[0]
        raise InputError(
            f"quantize.budget.{limit.name}={limit.value:g}: the smallest formats that roles allow "
            f"take {least.bits:.2f} bits a weight, {least.bytes} bytes",
            "allow more, or quantize more roles (adapt.quantize)",
        )
    formats = list(fitting[-1].formats)
    while steps := [
        step
        for step in _steps(problem, formats, limit)
        if step.gain > 0 and _fits(size(formats) + step.size, room)
    ]:
        best = max(steps, key=lambda step: step.gain)
        formats[best.unit] = best.to
    return Choice(problem, points, problem.point(formats), {})


def _fits(size: float, room: float) -> bool:
    return size <= room * (1 + 1e-12)


@dataclass(frozen=True)
class Choice:
    """A point, the front it was chosen on, and the joint KLs that were measured, by formats."""

    problem: Problem
    front: list[Point]
    point: Point
    measured: Mapping[tuple[str, ...], float]

    @property
    def modules(self) -> dict[str, str]:
        return self.problem.modules(self.point.formats)


def _below(
    problem: Problem, points: Sequence[Point], limit: float, measure: Measure | None
) -> Choice:
    """Bisect along the front, first where the prediction, scaled by what was measured, says."""
    measured: dict[tuple[str, ...], float] = {}
    low, high, ratio = -1, len(points) - 1, 1.0  # too high a KL, low enough
    while high - low > 1 and len(measured) < MEASUREMENTS:
        fits = (n for n, point in enumerate(points) if point.kl * ratio <= limit)
        guess = min(max(next(fits, high - 1), low + 1), high - 1)
        if len(measured) > MEASUREMENTS // 2:
            guess = (low + high) // 2
        point = points[guess]
        kl = point.kl if measure is None else measure(problem.modules(point.formats))
        measured[point.formats] = kl
        ratio = kl / point.kl if point.kl > 0 else ratio
        low, high = (low, guess) if kl <= limit else (guess, high)
    known = measured if measure is not None else {}
    return Choice(problem, list(points), points[high], known)


def refine(
    choice: Choice, limit: Limit, measure: Measure, swaps: int
) -> tuple[Choice, tuple[Swap, ...]]:
    """Try up to `swaps` exchanges, one unit up and another down at no more size.

    They are tried in the order of the change that is predicted, and stay where the measured joint
    KL falls. A unit takes part in one try.
    """
    problem, formats = choice.problem, choice.point.formats
    measured = dict(choice.measured)
    if swaps and formats not in measured:
        measured[formats] = measure(problem.modules(formats))
    tried: list[Swap] = []
    used: set[int] = set()
    while len(tried) < swaps and (found := _best_swap(problem, formats, limit, used)):
        (up, _), (down, _) = found
        after = _moved(formats, found)
        measured[after] = measure(problem.modules(after))
        accepted = measured[after] < measured[formats]
        names = problem.units[up].name, problem.units[down].name
        tried.append(Swap(*names, measured[formats], measured[after], accepted))
        used |= {up, down}
        formats = after if accepted else formats
    point = problem.point(formats)
    return Choice(problem, choice.front, point, measured), tuple(tried)


def _best_swap(
    problem: Problem, formats: tuple[str, ...], limit: Limit, used: set[int]
) -> tuple[Move, Move] | None:
    """Return the moves up and down with the least predicted KL that take no more size."""
    best, least = None, math.inf
    changes = {m: change for m, change in problem.changes(formats).items() if m[0] not in used}
    more = {move: _growth(problem, formats, limit, move) for move in changes}
    downs = [move for move in changes if more[move] < 0]
    for up in (move for move in changes if more[move] > 0):
        for down in downs:
            if down[0] == up[0] or more[up] + more[down] > 0:
                continue
            change = changes[up] + changes[down] + _together(problem, formats, up, down)
            if change < least:
                best, least = (up, down), change
    return best


def _together(problem: Problem, formats: Sequence[str], up: Move, down: Move) -> float:
    """Return what two moves change beyond their sum, by the pair's term."""
    if problem.pairs is None:
        return 0.0
    signs = [(to == "nvfp4") - (formats[n] == "nvfp4") for n, to in (up, down)]
    return float(problem.pairs[up[0], down[0]]) * signs[0] * signs[1]


def _moved(formats: Sequence[str], moves: Sequence[Move]) -> tuple[str, ...]:
    moved = dict(moves)
    return tuple(moved.get(n, format) for n, format in enumerate(formats))


def describe(
    choice: Choice,
    limit: Limit | None,
    swaps: Sequence[Swap] = (),
    interactions: Mapping[str, Any] | None = None,
    intervals: Mapping[tuple[str, ...], tuple[float, float]] | None = None,
) -> dict[str, Any]:
    """Return `allocation.json`. `intervals` are those of measured KLs, by formats."""
    problem, chosen = choice.problem, choice.point
    shown = sorted({p.formats: p for p in (*choice.front, chosen)}.values(), key=lambda p: p.bytes)
    none = (None, None)
    return {
        "limit": None if limit is None else {"name": limit.name, "value": limit.value},
        "groups": [
            {
                "name": unit.name,
                "modules": list(unit.modules),
                "parameters": unit.parameters,
                "role": unit.role,
                "active": unit.active,
                "format": chosen.formats[n],
                "kl": {format: problem.alone(n, format) for format in problem.kl},
            }
            for n, unit in enumerate(problem.units)
        ],
        "front": [
            {
                "bits": point.bits,
                "bytes": point.bytes,
                "bytes_per_token": point.bytes_per_token,
                "kl_predicted": point.kl,
                "kl_measured": choice.measured.get(point.formats),
                "kl_lo": (intervals or {}).get(point.formats, none)[0],
                "kl_hi": (intervals or {}).get(point.formats, none)[1],
                "chosen": point.formats == chosen.formats,
            }
            for point in shown
        ],
        "interactions": dict(interactions or {}),
        "swaps": [asdict(swap) for swap in swaps],
    }
