"""Acceptance length from histograms of accepted tokens, against a count by hand."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onboard.evals import acceptance
from onboard.evals.acceptance import Drafts, interval, length, rate_intervals, rates

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
    assert rate_intervals([]) == []


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
    for lowest, highest in rate_intervals(prompts):
        assert 0 <= lowest <= highest <= 1


def test_equal_prompts_leave_no_doubt() -> None:
    assert interval([FIRST] * 5) == pytest.approx((1.8, 1.8))
    assert rate_intervals([FIRST] * 5) == [
        pytest.approx((0.5, 0.5)),
        pytest.approx((0.2, 0.2)),
        pytest.approx((0.1, 0.1)),
    ]


def test_two_prompts_give_the_interval_between_them() -> None:
    """A quarter of the resamples holds one prompt alone, twice: both are within 95%."""
    assert interval([FIRST, Drafts((0, 0, 0, 10))]) == pytest.approx((1.8, 4.0))
    assert rate_intervals([FIRST, Drafts((0, 0, 0, 10))])[2] == pytest.approx((0.1, 1.0))


def sample(domain: str, greedy: Drafts, sampled: Drafts, looped: str = "") -> dict[str, Any]:
    return {
        "id": domain,
        "domain": domain,
        "drafts": list(greedy.histogram),
        "drafts_sampled": list(sampled.histogram),
        "looped": "greedy" in looped,
        "looped_sampled": "sampled" in looped,
    }


SAMPLES = [
    sample("code", FIRST, SECOND),
    sample("chat", SECOND, FIRST),
    sample("loop", Drafts((0, 0, 0, 99)), FIRST, "greedy"),
    sample("word", Drafts((0, 0, 0, 0)), FIRST, "sampled"),  # one token: nothing was drafted
]


def test_loops_are_left_out_of_their_own_kind_and_counted() -> None:
    found = acceptance.metrics(SAMPLES)
    assert found["acceptance_length"] == pytest.approx(1 + 14 / 12)
    assert found["acceptance_length_sampled"] == pytest.approx(1 + (8 + 6 + 8) / 22)
    assert found["looped_excluded"] == found["looped_excluded_sampled"] == 1
    assert found["acceptance_rate_0"] == pytest.approx(7 / 12)
    for suffix in ("", "_sampled"):
        name = f"acceptance_length{suffix}"
        assert found[f"{name}_lo"] <= found[name] <= found[f"{name}_hi"]


def test_the_tables_of_both_kinds() -> None:
    found = acceptance.tables(SAMPLES)
    assert found["greedy"]["prompts"] == 2
    assert found["greedy"]["looped"] == ["loop"]
    assert [row["domain"] for row in found["greedy"]["domains"]] == ["chat", "code"]
    assert found["greedy"]["domains"][1] == {
        "domain": "code",
        "prompts": 1,
        "acceptance_length": pytest.approx(1.8),
        "acceptance_length_lo": pytest.approx(1.8),
        "acceptance_length_hi": pytest.approx(1.8),
    }
    assert [row["rate"] for row in found["greedy"]["positions"]] == pytest.approx(
        [7 / 12, 4 / 12, 3 / 12]
    )
    assert found["sampled"]["looped"] == ["word"]
    assert [row["domain"] for row in found["sampled"]["domains"]] == ["chat", "code", "loop"]


def test_where_everything_loops_there_is_nothing_to_tell() -> None:
    loops = [sample("loop", FIRST, FIRST, "greedy and sampled")]
    assert acceptance.metrics(loops) == {"looped_excluded": 1, "looped_excluded_sampled": 1}
    assert acceptance.tables(loops)["greedy"] == {
        "prompts": 0, "domains": [], "positions": [], "looped": ["loop"],
    }  # fmt: skip


def drafted(*histogram: int, looped: bool = False) -> dict[str, Any]:
    return {"drafts": list(histogram), "looped": looped}


def test_two_drafters_on_the_same_prompts_by_hand() -> None:
    """Lengths of 1 + 8/10 and 1 + 2/4; what loops with either, or drafted nothing, is left out."""
    first = [drafted(5, 3, 1, 1), drafted(0, 0, 0, 9), drafted(0, 9), drafted(9, 0)]
    second = [drafted(2, 2, 0, 0), drafted(9, 0, 0, 0, looped=True), drafted(0, 0), drafted(0, 0)]
    found = acceptance.difference(first, second)
    assert found is not None
    assert found["prompts"] == 1
    assert [found[k] for k in ("value", "lo", "hi")] == pytest.approx([0.3] * 3)
    assert acceptance.difference(first[1:], second[1:]) is None


def test_pairs_are_drawn_together() -> None:
    """Easy and hard prompts differ much more than the two drafters do on each."""
    first = [drafted(0, 0, 0, 8), drafted(8, 1, 0, 0)] * 20
    second = [drafted(0, 0, 1, 7), drafted(9, 0, 0, 0)] * 20
    found = acceptance.difference(first, second)
    assert found is not None
    assert 0 < found["lo"] < found["value"] < found["hi"] < 0.2
