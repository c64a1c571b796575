from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onboard.errors import InputError
from onboard.speculators.vocabulary import Vocabulary, count, coverage


def test_most_frequent_by_hand() -> None:
    counts = torch.tensor([0, 5, 0, 7, 5, 1])
    vocabulary = Vocabulary.most_frequent(counts, 3)
    assert vocabulary.kept.tolist() == [1, 3, 4]
    assert vocabulary.d2t.tolist() == [1, 2, 2]
    assert vocabulary.t2d.tolist() == [False, True, False, True, True, False]
    assert coverage(vocabulary, counts) == pytest.approx(17 / 18)


def test_a_tie_goes_to_the_lower_id() -> None:
    assert Vocabulary.most_frequent(torch.tensor([1, 2, 1, 1]), 2).kept.tolist() == [0, 1]


def test_only_answers_are_counted() -> None:
    ids, mask = torch.tensor([3, 3, 1, 0]), torch.tensor([False, True, True, True])
    assert count([(ids, mask), (ids, mask)], 5).tolist() == [2, 2, 0, 2, 0]


@given(st.lists(st.integers(0, 50), min_size=2, max_size=40), st.data())
def test_tables_round_trip(counts: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(counts)))
    vocabulary = Vocabulary.most_frequent(torch.tensor(counts), size)
    again = Vocabulary.from_tables(vocabulary.d2t, vocabulary.t2d)
    assert torch.equal(again.kept, vocabulary.kept)
    assert torch.equal(vocabulary.to_target(torch.arange(size)), vocabulary.kept)


def test_tables_that_disagree_are_refused() -> None:
    vocabulary = Vocabulary(torch.tensor([1, 4]), 6)
    with pytest.raises(InputError, match="d2t and t2d"):
        Vocabulary.from_tables(vocabulary.d2t + 1, vocabulary.t2d)
