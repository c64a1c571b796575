from __future__ import annotations

from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onboard.evals.bootstrap import document_bootstrap, mcnemar, paired_bootstrap


def test_equal_documents_leave_no_doubt() -> None:
    lo, hi = document_bootstrap([6.0, 3.0, 9.0], [2, 1, 3], 200, 0)
    assert (lo, hi) == pytest.approx((3.0, 3.0))


def test_two_documents_by_hand() -> None:
    # Of the four draws one has only the first document, one only the second: both ends are reached.
    assert document_bootstrap([0.0, 10.0], [1, 1], 2000, 0) == (0.0, 10.0)


def test_the_mean_is_weighted_by_tokens() -> None:
    lo, hi = document_bootstrap([0.0] * 50 + [1000.0] * 50, [1] * 50 + [100] * 50, 2000, 0)
    assert 9.8 < lo < hi < 10  # 50,000 / 5,050 = 9.9, though the mean of means is 5


def test_seeded() -> None:
    values, ones = np.arange(20.0), np.ones(20)
    assert document_bootstrap(values, ones, 500, 1) == document_bootstrap(values, ones, 500, 1)
    assert document_bootstrap(values, ones, 500, 1) != document_bootstrap(values, ones, 500, 2)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    random = np.random.default_rng(0)
    covered = 0
    for trial in range(200):
        level = random.normal(2.0, 1.0, 30)  # documents differ, tokens within one are alike
        counts = random.integers(5, 20, 30)
        lo, hi = document_bootstrap(level * counts, counts, 400, trial)
        covered += lo <= 2.0 <= hi
    assert 0.88 < covered / 200 < 0.99


def test_paired_interval_is_narrow_where_items_move_together() -> None:
    random = np.random.default_rng(0)
    hard = random.normal(0, 10, 100)
    lo, hi = paired_bootstrap(hard + 1, hard, 500, 0)
    assert (lo, hi) == pytest.approx((1.0, 1.0))


@pytest.mark.parametrize(
    ("only_first", "only_second", "p"),
    [(0, 0, 1.0), (1, 0, 1.0), (5, 0, 2 / 32), (8, 2, 2 * (1 + 10 + 45) / 1024), (3, 3, 1.0)],
)
def test_mcnemar_by_hand(only_first: int, only_second: int, p: float) -> None:
    assert mcnemar(only_first, only_second) == pytest.approx(p)


@given(st.integers(0, 40), st.integers(0, 40))
def test_mcnemar_is_symmetric_and_a_sum_of_tails(b: int, c: int) -> None:
    n = b + c
    tails = sum(comb(n, i) for i in range(n + 1) if abs(2 * i - n) >= abs(b - c)) / 2**n
    assert mcnemar(b, c) == mcnemar(c, b) == pytest.approx(tails)
