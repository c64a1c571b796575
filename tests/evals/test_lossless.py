"""When do two greedy outputs agree?"""

import pytest

from onboard.evals.lossless import Agreement, Noise, compare, noise

# Log-probabilities at each position; the plain run said 7, 8, 9.
CANDIDATES = [{7: -0.1, 1: -3.0}, {8: -0.70, 2: -0.80, 3: -2.0}, {9: -0.70, 4: -0.86}]


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ([7, 8, 9], Agreement("equal")),
        ([7, 2, 5], Agreement("near-tie", 1, pytest.approx(0.10))),
        ([7, 8, 4], Agreement("diverged", 2, pytest.approx(0.16))),  # just beyond 0.15 nats
        ([7, 3, 9], Agreement("diverged", 1, pytest.approx(1.3))),  # a tie, but not with this one
        ([7, 6, 9], Agreement("diverged", 1)),  # a token out of nowhere
        ([1, 2, 4], Agreement("diverged", 0, pytest.approx(2.9))),  # the first difference decides
        ([7, 8], Agreement("diverged", 2)),
        ([7, 8, 9, 9], Agreement("diverged", 3)),
        ([], Agreement("diverged", 0)),
    ],
)
def test_the_first_difference_decides(other: list[int], expected: Agreement) -> None:
    assert compare([7, 8, 9], CANDIDATES, other) == expected


def test_nothing_said_by_both_is_equal() -> None:
    assert compare([], [], []) == Agreement("equal")


def test_a_tie_is_as_wide_as_the_engines_own_noise() -> None:
    farther = [7, 3, 9]  # 1.3 nats behind
    assert compare([7, 8, 9], CANDIDATES, farther, near_tie=1.31).kind == "near-tie"
    assert compare([7, 8, 9], CANDIDATES, farther, near_tie=1.29).kind == "diverged"
    assert compare([7, 8, 9], CANDIDATES, [7, 6, 9], near_tie=9.0).kind == "diverged"
    assert Noise(0.01, 0).near_tie == 0.15
    assert Noise(1.2, 0).near_tie == 1.2


@pytest.mark.parametrize(
    ("again", "expected"),
    [
        (CANDIDATES[:2], Noise(0.0, 0)),  # the last position was not read again
        ([CANDIDATES[0], {8: -0.9, 2: -0.8}], Noise(0.2, 1)),  # ahead by 0.1, now behind by 0.1
        ([{7: -0.1, 1: -2.5}, {8: -0.6, 2: -0.9}], Noise(0.5, 0)),
        ([{7: -0.1, 5: -1.0}, CANDIDATES[1]], Noise(2.0, 0)),  # the rival fell below -1.0
        ([], Noise(0.0, 0)),
    ],
)
def test_noise_is_what_the_lead_over_the_runner_up_moves(
    again: list[dict[int, float]], expected: Noise
) -> None:
    found = noise([[7, 8, 9]], [CANDIDATES], [again])
    assert found == Noise(pytest.approx(expected.nats), expected.changed)
    twice = noise([[7, 8, 9]] * 2, [CANDIDATES] * 2, [again, CANDIDATES])
    assert twice == found
