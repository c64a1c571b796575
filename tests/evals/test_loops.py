"""Golden cases of the loop rules, from the limits written in FACTS 6."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onboard.evals.loops import compression, cycle, find_loop

WORDS = {1: " the", 2: "0", 3: "\n", 4: "..."}


def verdict(ids: list[int], text: str = "") -> str | None:
    return find_loop(ids, text, lambda token: WORDS.get(token, f" w{token}"))


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ([10, 1, 1, 1, 1, 11], "word ' the' 4 times in a row"),
        ([10, 1, 1, 1, 11], None),
        ([10, *[2] * 7, 11], None),  # a number with many zeros
        ([10, *[2] * 8, 11], "token 2 8 times in a row"),
        ([10, *[3] * 5, *[4] * 6], None),
        ([5, 6, 7, 8] * 8, "a cycle of 4 tokens"),
        ([5, 6, 7, 8] * 7, None),  # 28 tokens: not enough of them
        ([99, 98, *list(range(20, 36)) * 4, 97], "a cycle of 16 tokens"),
        (list(range(20, 36)) * 3, None),  # three repeats
        (list(range(100, 164)) * 4, "a cycle of 64 tokens"),
        (list(range(100, 165)) * 4, None),  # longer than the longest cycle
        (list(range(300)), None),
        ([], None),
    ],
)
def test_token_rules(ids: list[int], reason: str | None) -> None:
    assert verdict(ids) == reason


def test_text_that_only_differs_in_tokens_is_caught_by_compression() -> None:
    text = "I am happy to help you. " * 40
    assert compression(text) > 8
    assert verdict(list(range(len(text))), text).startswith("text compresses")  # type: ignore[union-attr]
    assert verdict([1, 10, 1], "The capital of France is Paris, a city on the Seine.") is None


@given(st.integers(1, 20), st.lists(st.integers(1000, 2000), max_size=10), st.data())
def test_a_cycle_is_found_wherever_it_starts(
    period: int, prefix: list[int], data: st.DataObject
) -> None:
    unit = data.draw(st.lists(st.integers(0, 500), min_size=period, max_size=period, unique=True))
    repeats = max(4, -(-32 // period))
    assert cycle([*prefix, *unit * repeats]) == period
