"""When do two greedy outputs agree?"""

import pytest

from onboard.evals.lossless import Agreement, compare

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
