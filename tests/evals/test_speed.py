"""Paces and speed-ups by hand."""

import pytest

from onboard.evals import speed

PROMPTS = [{"id": i} for i in range(20)]


def test_the_prompts_of_a_concurrency() -> None:
    assert speed.chosen(PROMPTS, 1) == PROMPTS[:6]
    assert speed.chosen(PROMPTS, 4) == PROMPTS[:16]
    assert speed.chosen(PROMPTS, 8) == [*PROMPTS, *PROMPTS[:12]]  # four for each of the eight


def test_pace() -> None:
    answers = [{"ids": [1] * 10, "seconds": 2.0}, {"ids": [1] * 30, "seconds": 4.0}]
    assert speed.pace(answers, 4.0) == {
        "answers": 2,
        "tokens": 40,
        "tokens_per_s": 10.0,
        "seconds_per_token": 0.15,
    }


def test_rows_and_metrics() -> None:
    def pace(concurrency: int, tokens_per_s: float) -> dict[str, float]:
        waited = concurrency / tokens_per_s
        return {
            "concurrency": concurrency, "answers": 6, "tokens": 60, "tokens_per_s": tokens_per_s,
            "seconds_per_token": waited,
        }  # fmt: skip

    plain, fast = [pace(1, 10), pace(4, 32)], [pace(1, 15), pace(4, 24)]
    rows = speed.compare(plain, fast, {1: 1.8, 4: None}.__getitem__)
    assert [row["speedup"] for row in rows] == pytest.approx([1.5, 0.75])
    assert rows[0]["plain"] == {"tokens_per_s": 10, "seconds_per_token": 0.1}
    assert speed.metrics(rows) == {
        "speedup_1": 1.5, "speedup_expected_1": 1.8, "tokens_per_s_1": 10,
        "tokens_per_s_speculative_1": 15, "seconds_per_token_1": 0.1,
        "seconds_per_token_speculative_1": pytest.approx(1 / 15),
        "speedup_4": 0.75, "tokens_per_s_4": 32, "tokens_per_s_speculative_4": 24,
        "seconds_per_token_4": 0.125, "seconds_per_token_speculative_4": pytest.approx(1 / 6),
    }  # fmt: skip
