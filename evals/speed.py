"""How fast an engine answers without and with the speculator, at several concurrencies.

Measured and expected speed-ups stand side by side: what drafting should give by the bytes that
decoding reads, and what it gave.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]

LEAST = 6  # answers, however few come at once
ROUNDS = 4  # answers per request that is always under way


def chosen(prompts: Sequence[Row], concurrency: int) -> list[Row]:
    """Return the prompts to time a concurrency with, the same ones again where they run out."""
    count = max(LEAST, ROUNDS * concurrency)
    return list(itertools.islice(itertools.cycle(prompts), count))


def pace(answers: Sequence[Mapping[str, Any]], seconds: float) -> dict[str, float]:
    """Return the speed of answers that took `seconds` together.

    `tokens_per_s` is the engine's throughput, `seconds_per_token` what one reader waits for a
    token on average, the prompt's processing included.
    """
    tokens = sum(len(answer["ids"]) for answer in answers)
    waited = sum(answer["seconds"] for answer in answers)
    return {
        "answers": len(answers),
        "tokens": tokens,
        "tokens_per_s": tokens / seconds,
        "seconds_per_token": waited / tokens,
    }


def compare(
    plain: Sequence[Mapping[str, Any]],
    speculative: Sequence[Mapping[str, Any]],
    expected: Callable[[int], float | None],
) -> list[Row]:
    """Return a row per concurrency: both paces, the measured speed-up and the expected one.

    `plain` and `speculative` are paces with their `concurrency`; `expected` gives the speed-up
    that theory promises at a concurrency, or None.
    """
    return [
        {
            "concurrency": without["concurrency"],
            "answers": without["answers"],
            "plain": _figures(without),
            "speculative": _figures(with_),
            "speedup": with_["tokens_per_s"] / without["tokens_per_s"],
            "expected": expected(without["concurrency"]),
        }
        for without, with_ in zip(plain, speculative, strict=True)
    ]


def _figures(pace: Mapping[str, Any]) -> dict[str, float]:
    return {name: pace[name] for name in ("tokens_per_s", "seconds_per_token")}


def metrics(rows: Sequence[Row]) -> dict[str, float]:
    """Return the flat numbers, each name ending with the concurrency: `speedup_4`."""
    flat: dict[str, float] = {}
    for row in rows:
        width = row["concurrency"]
        flat[f"speedup_{width}"] = row["speedup"]
        if row["expected"] is not None:
            flat[f"speedup_expected_{width}"] = row["expected"]
        for name in ("tokens_per_s", "seconds_per_token"):
            flat[f"{name}_{width}"] = row["plain"][name]
            flat[f"{name}_speculative_{width}"] = row["speculative"][name]
    return flat
