"""Allocation against numbers worked out by hand, and against every choice there is."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onboard.errors import InputError
from onboard.quantize.allocation import (
    FORMATS,
    MEASUREMENTS,
    Limit,
    Point,
    Problem,
    Unit,
    choose,
    describe,
    front,
    refine,
)

# A: 908, 1608 or 3200 bytes; B: 1808, 3208 or 6400.
#   A to FP8   saves .060 for  700 bytes: 8.6e-5 a byte      A on to bf16  .010 for 1592: 6.3e-6
#   B to FP8   saves .005 for 1400 bytes: 3.6e-6 a byte      B to bf16     .050 for 4592: 1.1e-5
# so B's FP8 lies above the line from its NVFP4 to its bf16.
A = Unit("a", ("a.q", "a.k"), 1600, "attention")
B = Unit("b", ("b",), 3200, "mlp")
WORKED = Problem(
    (Unit("a", ("a",), 1600, "attention"), B), {"nvfp4": [0.07, 0.05], "fp8": [0.01, 0.045]}
)


def test_the_front_of_two_units_worked_out_by_hand() -> None:
    found = front(WORKED)
    assert [point.formats for point in found] == [
        ("nvfp4", "nvfp4"),
        ("fp8", "nvfp4"),
        ("fp8", "bf16"),
        ("bf16", "bf16"),
    ]
    assert [point.bytes for point in found] == [2716, 3416, 8008, 9600]
    assert [point.kl for point in found] == pytest.approx([0.12, 0.06, 0.01, 0.0])
    assert [point.bits for point in found] == pytest.approx([4.5, 17 / 3, 40 / 3, 16])


def test_what_is_left_of_a_budget_goes_to_the_unit_that_still_fits() -> None:
    """9 bits are 5400 bytes; A in FP8 takes 3400; of the rest, A in bf16 saves most."""
    point = choose(WORKED, Limit("bits", 9)).point
    assert point.formats == ("bf16", "nvfp4")
    assert point.kl == pytest.approx(0.05)


def test_speed_counts_the_bytes_that_a_token_reads() -> None:
    """B is read to a tenth: its bf16 is then the cheapest step of all, by bytes it is not."""
    experts = Unit("b", ("b",), 3200, "expert", active=0.1)
    problem = Problem((WORKED.units[0], experts), {"nvfp4": [0.07, 0.05], "fp8": [0.01, 0.045]})
    first = front(problem, Limit("speed", 2))[1]
    assert first.formats == ("nvfp4", "bf16")
    assert first.bytes_per_token == pytest.approx((1600 * 4.5 + 320 * 16) / 8)
    assert front(problem)[1].formats == ("fp8", "nvfp4")


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Up to four units; FP8 costs less KL than NVFP4, but for a few."""
    number = draw(st.integers(1, 4))
    units = tuple(
        Unit(
            f"u{n}",
            tuple(f"u{n}.{m}" for m in range(draw(st.integers(1, 3)))),
            16 * draw(st.integers(4, 400)),  # scales weigh less than what they save
            "mlp",
            draw(st.sampled_from([1.0, 0.125])),
        )
        for n in range(number)
    )
    kl = [draw(st.floats(0, 1)) for _ in units]
    wide = [value * draw(st.floats(0, 1.1)) for value in kl]
    allowed = {u.name: draw(st.sampled_from([FORMATS, ("nvfp4", "bf16"), ("fp8",)])) for u in units}
    return Problem(units, {"nvfp4": kl, "fp8": wide}, allowed=allowed)


def every_point(problem: Problem) -> list[Point]:
    ways = itertools.product(*(problem.may_be(n) for n in range(len(problem.units))))
    return [problem.point(formats) for formats in ways]


@given(problems())
def test_no_choice_beats_a_point_of_the_front_at_its_bytes(problem: Problem) -> None:
    found = front(problem)
    for point in found:
        beaten = [p for p in every_point(problem) if p.bytes <= point.bytes]
        assert point.kl <= min(p.kl for p in beaten) + 1e-12
    assert [p.bytes for p in found] == sorted({p.bytes for p in found})
    assert [p.kl for p in found] == sorted({p.kl for p in found}, reverse=True)


@given(problems(), st.floats(4.5, 16))
def test_a_budget_is_kept_and_well_spent(problem: Problem, bits: float) -> None:
    every, limit = every_point(problem), Limit("bits", bits)
    fitting = [point for point in every if point.bits <= bits * (1 + 1e-12)]
    if not fitting:
        with pytest.raises(InputError, match="smallest formats"):
            choose(problem, limit)
        return
    found = choose(problem, limit)
    assert found.point.bits <= bits * (1 + 1e-12)
    assert all(f in problem.may_be(n) for n, f in enumerate(found.point.formats))
    least = min(point.kl for point in fitting)
    below = [p for p in found.front if p.bits <= bits * (1 + 1e-12)]
    above = [p for p in found.front if p.bits > bits * (1 + 1e-12)]
    jump = below[-1].kl - above[0].kl if above else 0.0
    assert least - 1e-12 <= found.point.kl <= least + jump + 1e-12


@given(problems(), st.sampled_from(["bytes", "speed"]), st.floats(0, 1))
def test_bytes_and_speed_are_kept(problem: Problem, name: str, share: float) -> None:
    every = every_point(problem)
    wide = problem.point(["bf16"] * len(problem.units))
    if name == "bytes":
        sizes = [point.bytes for point in every]
        value: float = int(min(sizes) + share * (max(sizes) - min(sizes)))
        assert choose(problem, Limit(name, value)).point.bytes <= value
    else:
        speeds = [wide.bytes_per_token / point.bytes_per_token for point in every]
        value = min(speeds) + share * (max(speeds) - min(speeds))
        point = choose(problem, Limit(name, value)).point
        assert wide.bytes_per_token / point.bytes_per_token >= value * (1 - 1e-9)


@given(problems(), st.floats(1e-3, 1), st.floats(0.3, 3))
def test_a_kl_limit_is_met_by_what_was_measured(
    problem: Problem, limit: float, truth: float
) -> None:
    """Measured KL is not what was predicted, and may not even fall along the front."""
    calls: list[tuple[str, ...]] = []

    def measure(formats: Mapping[str, str]) -> float:
        own = tuple(formats[unit.modules[0]] for unit in problem.units)
        calls.append(own)
        return problem.point(own).kl * truth * (1 + 0.2 * (len(calls) % 2))

    found = choose(problem, Limit("kl_max", limit), measure)
    assert len(calls) <= MEASUREMENTS
    largest = found.point == found.front[-1]
    assert largest or found.measured[found.point.formats] <= limit
    smaller = [p for p in found.front if p.bytes < found.point.bytes]
    if smaller and len(calls) < MEASUREMENTS:
        assert found.measured[smaller[-1].formats] > limit


def test_without_measuring_the_prediction_decides() -> None:
    assert choose(WORKED, Limit("kl_max", 0.0601)).point.formats == ("fp8", "nvfp4")
    assert choose(WORKED, Limit("kl_max", 0.059)).point.formats == ("fp8", "bf16")
    assert choose(WORKED, Limit("kl_max", 0.5)).point.formats == ("nvfp4", "nvfp4")


def test_fused_modules_are_alike() -> None:
    problem = Problem((A, B), WORKED.kl)
    assert problem.modules(("fp8", "nvfp4")) == {"a.q": "fp8", "a.k": "fp8", "b": "nvfp4"}
    assert problem.point(("fp8", "nvfp4")).bytes == 1600 + 2 * 8 + 1808


PAIRED = Problem(
    tuple(Unit(f"u{n}", (f"u{n}",), 1600, "mlp") for n in range(3)),
    {"nvfp4": [0.1, 0.1, 0.08], "fp8": [0.01, 0.01, 0.01]},
    np.array([[0, -0.08, 0], [-0.08, 0, 0], [0, 0, 0]], float),
)


def test_errors_that_cancel_stay_together() -> None:
    """u0 and u1 cost .12 together: moving one saves .01 of it, u2's .07 go first."""
    assert front(PAIRED)[1].formats == ("nvfp4", "nvfp4", "fp8")
    alone = Problem(PAIRED.units, PAIRED.kl)
    assert front(alone)[1].formats == ("fp8", "nvfp4", "nvfp4")


@given(st.integers(0, 2**32 - 1))
def test_a_change_is_the_difference_of_two_points(seed: int) -> None:
    random = np.random.default_rng(seed)
    raw = random.normal(size=(4, 4))
    pairs = (raw + raw.T) * (1 - np.eye(4))
    kl = {"nvfp4": random.random(4).tolist(), "fp8": random.random(4).tolist()}
    units = tuple(Unit(f"u{n}", (f"u{n}",), 16, "mlp") for n in range(4))
    problem = Problem(units, kl, pairs)
    formats = random.choice(FORMATS, 4).tolist()
    changes = problem.changes(formats)
    assert len(changes) == 4 * 2
    for (unit, to), change in changes.items():
        after = [to if n == unit else f for n, f in enumerate(formats)]
        expected = problem.point(after).kl - problem.point(formats).kl
        assert change == pytest.approx(expected, abs=1e-12)


def test_a_swap_stays_only_where_the_measured_kl_falls() -> None:
    """The truth is that u1, thought cheap, costs most; the second try finds out."""
    units = tuple(Unit(f"u{n}", (f"u{n}",), 1600, "mlp") for n in range(4))
    problem = Problem(units, {"nvfp4": [0.4, 0.1, 0.12, 0.3], "fp8": [0.0, 0.0, 0.0, 0.0]})
    truth = {"u0": 0.4, "u1": 0.9, "u2": 0.05, "u3": 0.3}

    def measure(formats: Mapping[str, str]) -> float:
        return sum(truth[module] for module, format in formats.items() if format == "nvfp4")

    limit = Limit("bits", (4.5 * 2 + 8 * 2) / 4)
    start = choose(problem, limit)
    assert start.point.formats == ("fp8", "nvfp4", "nvfp4", "fp8")
    found, swaps = refine(start, limit, measure, swaps=4)
    assert [(s.up, s.down, s.accepted) for s in swaps] == [("u2", "u3", False), ("u1", "u0", True)]
    assert found.point.formats == ("nvfp4", "fp8", "nvfp4", "fp8")
    assert found.measured[found.point.formats] == pytest.approx(0.45)
    assert found.point.bytes <= start.point.bytes
    assert refine(start, limit, measure, swaps=4) == (found, swaps)
    assert refine(start, limit, measure, swaps=0) == (start, ())


def test_what_the_artifact_says() -> None:
    limit = Limit("bits", 9)
    choice = choose(WORKED, limit)
    choice, swaps = refine(choice, limit, lambda formats: 0.5, swaps=1)
    said = json.loads(json.dumps(describe(choice, limit, swaps, {"used": False})))
    assert said["limit"] == {"name": "bits", "value": 9}
    assert [group["format"] for group in said["groups"]] == ["bf16", "nvfp4"]
    assert said["groups"][0]["kl"] == {"nvfp4": 0.07, "fp8": 0.01}
    assert [p["chosen"] for p in said["front"]] == [False, False, True, False, False]
    assert said["front"][2]["kl_measured"] == 0.5
    assert said["front"][0]["kl_measured"] is None
    assert not any(swap["accepted"] for swap in said["swaps"])
