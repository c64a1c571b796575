"""When the speculator ships."""

from typing import Any

import pytest

from onboard.evals.ship import decide, decide_mtp, prefer
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


@pytest.mark.parametrize(
    ("change", "ships"),
    [({}, True), ({"divergences": 1}, False), ({"acceptance_length_lo": 1.0}, False)],
)
def test_mtp_layers_must_agree_with_the_target_too(change: dict[str, float], ships: bool) -> None:
    found = decide_mtp(Smoke(), GOOD | {"divergences": 0} | change, True, None)
    assert found["ships"] is ships
    assert len(found["reasons"]) == (not ships)


@pytest.mark.parametrize(
    ("head", "mtp", "native", "use"),
    [
        (True, True, False, "mtp"),  # the longer acceptance
        (True, True, True, "speculative"),  # the faster
        (False, True, True, "mtp"),
        (True, False, False, "speculative"),
        (False, False, True, "plain"),
        (True, None, True, "speculative"),
        (False, None, True, "plain"),
    ],
)
def test_what_drafts_by_default(head: bool, mtp: bool | None, native: bool, use: str) -> None:
    decision: dict[str, Any] = {"ships": head}
    if mtp is not None:
        decision["mtp"] = {"ships": mtp}
    measured = {"speedup_1": 1.5, "acceptance_length": 1.5}
    measured |= {"mtp_speedup_1": 1.4, "mtp_acceptance_length": 2.0}
    assert prefer(Smoke(), decision, measured, native)["use"] == use
