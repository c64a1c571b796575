"""Golden numbers of the verdict on drafts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.drafts.study import SEEDS, longer
from tests.drafts.verdict import difference, length, shortfalls


def row(*histogram: int, domain: str = "code", looped: bool = False) -> dict[str, Any]:
    return {"id": "p", "domain": domain, "looped": looped, "histogram": list(histogram)}


def test_length_by_hand() -> None:
    """Ten drafts accepted 0*4 + 1*3 + 2*2 + 3*1 = 10 tokens: a length of 2."""
    found, lo, hi = length([row(4, 3, 2, 1)] * 5)
    assert (found, lo, hi) == (2, 2, 2)
    assert length([row(4, 3, 2, 1), row(0, 0, 0, 99, looped=True)])[0] == 2
    assert length([row(0, 0, 0, 0)]) == (1, 1, 1)


def test_difference_leaves_out_what_loops_with_either() -> None:
    first = [row(0, 1, 0, 0), row(0, 0, 0, 1), row(0, 1, 0, 0)]
    second = [row(1, 0, 0, 0), row(1, 0, 0, 0, looped=True), row(1, 0, 0, 0)]
    assert difference(first, second) == (1, 1, 1)


LOSSLESS = {"prompts": 60, "divergences": 0, "sampling_p_value": 0.4, "sampling_power": 0.99}


def results(**changes: Any) -> dict[str, Any]:
    good = [row(1, 1, 1, 1), row(1, 1, 1, 1, domain="math")]  # 2.5
    drafts = {
        "long": {"prompts": good, "seconds": 1000.0, "smoke": LOSSLESS},
        "ours": {"prompts": good, "tokens_per_s": 160.0},
        "peer": {"prompts": good, "tokens_per_s": 100.0},
    }
    return {"drafts": {**drafts, **changes}}


def long(**changes: Any) -> dict[str, Any]:
    """Return results whose long training has one thing otherwise."""
    row_ = results()["drafts"]["long"]
    smoke = row_["smoke"] | {k: v for k, v in changes.items() if k in LOSSLESS and k != "prompts"}
    if isinstance(changes.get("prompts"), int):
        smoke["prompts"] = changes.pop("prompts")
    return {"long": row_ | changes | {"smoke": smoke}}


def test_all_holds() -> None:
    assert shortfalls(results()) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (long(prompts=[row(1, 1, 0, 0)]), "on code is 1.500"),
        (long(seconds=1600.0), "took 26.7 minutes"),
        (long(prompts=40), "40 greedy answers compared"),
        (long(divergences=2), "2 greedy answers are not"),
        (long(sampling_p_value=1e-4), "sampled tokens differ with p = 0.0001"),
        (long(sampling_power=0.5), "power 0.50, not 0.9"),
        ({"peer": {"failed": "no"}}, "no result of the peer"),
        ({"peer": {"prompts": [row(0, 0, 0, 1)] * 2, "tokens_per_s": 1.0}}, "acceptance is -1.500"),
        ({"ours": {"prompts": [row(1, 1, 1, 1)] * 2, "tokens_per_s": 140.0}}, "1.40 times"),
    ],
)
def test_what_falls_short_is_said(changes: dict[str, Any], said: str) -> None:
    assert any(said in one for one in shortfalls(results(**changes)))


def test_feature_sources_by_hand() -> None:
    """Lengths of 2 and 1.5 with every seed; the prompt that loops with one draft is in none."""
    source = [row(0, 4, 0, 0), row(0, 4, 0, 0), row(9, 0, 0, 0)]
    quantize = [row(2, 2, 0, 0), row(2, 2, 0, 0), row(0, 0, 0, 9, looped=True)]
    drafts = {f"source-{seed}": {"prompts": source} for seed in SEEDS}
    drafts |= {f"quantize-{seed}": {"prompts": quantize} for seed in SEEDS}
    assert longer(drafts) == pytest.approx((0.5, 0.5, 0.5))
