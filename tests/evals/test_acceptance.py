"""Acceptance length from histograms of accepted tokens, against a count by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onboard.evals.acceptance import Drafts, interval, length, rates

# 10 drafts of three tokens: 5 rejected at once, 3 with one token accepted, 1 with two, 1 with all.
FIRST = Drafts((5, 3, 1, 1))
SECOND = Drafts((0, 0, 0, 2))


def test_by_hand() -> None:
    assert (FIRST.count, FIRST.accepted) == (10, 3 + 2 + 3)
    assert [FIRST.accepted_at(k) for k in range(3)] == [5, 2, 1]
    assert length([FIRST]) == pytest.approx(1.8)
    assert length([FIRST, SECOND]) == pytest.approx(1 + 14 / 12)
    assert rates([FIRST, SECOND]) == pytest.approx([7 / 12, 4 / 12, 3 / 12])
    assert rates([]) == []


@given(
    st.lists(
        st.tuples(*[st.integers(0, 50)] * 4).filter(lambda h: sum(h) > 0).map(Drafts), min_size=1
    )
)
def test_what_holds_for_all(prompts: list[Drafts]) -> None:
    lo, hi = interval(prompts)
    assert 1 <= lo <= hi <= 4
    assert length(prompts) == pytest.approx(1 + sum(rates(prompts)))
    assert rates(prompts) == sorted(rates(prompts), reverse=True)
    assert interval(prompts) == (lo, hi)


def test_equal_prompts_leave_no_doubt() -> None:
    assert interval([FIRST] * 5) == pytest.approx((1.8, 1.8))
