"""When the speculator ships."""

from typing import Any

import pytest

from onboard.evals.ship import decide
from onboard.recipe import ShipsIf, Smoke

GOOD = {"acceptance_length_lo": 1.5, "speedup_1": 1.2, "speedup_4": 0.9}


def decided(measured: dict[str, float], native: bool = True, **asked: Any) -> dict[str, Any]:
    return decide(Smoke(ship=ShipsIf(**asked)), measured, native)


@pytest.mark.parametrize(
    ("change", "native", "asked", "reasons"),
    [
        ({}, True, {}, []),
        ({}, True, {"acceptance_length_lo": 1.4, "speedup": 1.2}, []),
        (
            {"acceptance_length_lo": 1.0},  # a head that is never right
            True,
            {},
            ["the lower 95% bound of its acceptance length is 1, not above 1"],
        ),
        (
            {},
            True,
            {"acceptance_length_lo": 1.5},  # clearing a limit is being above it
            ["the lower 95% bound of its acceptance length is 1.5, not above 1.5"],
        ),
        (
            {"speedup_1": 0.9},
            True,
            {},
            ["with it the engine makes 0.9 times the tokens per second at concurrency 1, "
             "less than 1"],
        ),
        (
            {},
            True,
            {"concurrency": 4},
            ["with it the engine makes 0.9 times the tokens per second at concurrency 4, "
             "less than 1"],
        ),
        ({"speedup_1": 0.5}, False, {}, []),  # an emulation's speed
        ({"speedup_1": 0.5}, True, {"speedup": None}, []),
        ({"acceptance_length_lo": 1.0}, True, {"acceptance_length_lo": None}, []),
    ],
)  # fmt: skip
def test_the_decision(
    change: dict[str, float], native: bool, asked: dict[str, Any], reasons: list[str]
) -> None:
    found = decided(GOOD | change, native, **asked)
    assert found["reasons"] == reasons
    assert found["ships"] == (not reasons)


def test_both_reasons_are_given() -> None:
    found = decided({"acceptance_length_lo": 1.0, "speedup_1": 0.8})
    assert len(found["reasons"]) == 2


def test_without_an_acceptance_length_nothing_ships() -> None:
    found = decided({"speedup_1": 2.0})
    assert found["reasons"] == ["every greedy answer loops, so that it has no acceptance length"]


def test_what_was_not_judged_says_so() -> None:
    _, speed = decided(GOOD, native=False)["criteria"]
    assert speed["met"] is None
    assert speed["measured"] == 1.2
    assert "emulated" in speed["says"]
