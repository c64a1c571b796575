"""The verdict of `make bench-quality` from results that are made up."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.quality import verdict

SPREAD = (0.8, 0.9, 1.0, 1.1, 1.2)


def point(kl: float, **more: Any) -> dict[str, Any]:
    """A point whose documents differ as those of every other point do."""
    rows = {"kl": [kl * s for s in SPREAD], "accuracy": [0.5] * len(SPREAD)}
    return rows | {"seconds": 100.0, "bytes": 60, "nvfp4_share": 1.0, "group": "ours"} | more


def results() -> dict[str, Any]:
    weight_only = {
        "ours/rtn-w4a16": point(0.25),
        "ours/sequential-w4a16": point(0.05),
        "modelopt/local_hessian": point(0.1, group="weight-only peer"),
    }
    selected = {
        f"modelopt/autoquantize-{method}-{bits}": point(
            kl, bytes=13 * bits, select_seconds=90.0, nvfp4_share=0.1
        )
        for method in verdict.SELECTORS
        for bits, kl in ((5, 0.14), (6, 0.09), (8, 0.025))
    }
    ours = {
        f"ours/bytes-{bits}": point(kl, bytes=13 * bits, select_seconds=20.0, nvfp4_share=0.5)
        for bits, kl in ((5, 0.04), (6, 0.02), (8, 0.005))
    }
    served = {
        "modelopt/w4a4": point(0.45, group="W4A4 peer"),
        "ours/sequential-w4a4": point(0.2),
        "ours/qad-w4a4": point(0.15),
    }
    return {
        "models": {
            "smollm2": weight_only | selected | ours | served,
            "continuous": copy.deepcopy(weight_only),
        },
        "code_documents": [0, 1],
        "experts": [{"expert": "0", "tokens": 3, "ours": 0.01, "rtn": 0.02}],
    }


def test_all_that_was_asked_for_holds() -> None:
    assert verdict.shortfalls(results()) == []


@pytest.mark.parametrize(
    ("model", "name", "change", "said"),
    [
        ("continuous", "ours/sequential-w4a16", {"kl": [0.07] * 5}, "of RTN's, at most 0.25"),
        ("smollm2", "ours/sequential-w4a16", {"seconds": 301.0}, "took 301 s"),
        ("smollm2", "modelopt/local_hessian", {"kl": [0.07] * 5}, "1.6x, and above 1.3x surely"),
        ("smollm2", "ours/sequential-w4a4", {"kl": [0.3] * 5}, "at most 0.6"),
        ("smollm2", "ours/bytes-5", {"bytes": 66}, "takes 66 bytes"),
        ("smollm2", "ours/bytes-6", {"select_seconds": 31.0}, "at most a third"),
        ("smollm2", "ours/bytes-8", {"kl": [0.02] * 5}, "at most 0.4"),
        ("smollm2", "ours/bytes-6", {"nvfp4_share": 0.2}, "points more of the weights"),
        ("smollm2", "ours/bytes-6", {"bytes": 83}, "to be reached at 6.2"),
        ("smollm2", "ours/qad-w4a4", {"kl": [0.19] * 5}, "of the KL, at most 0.8"),
        ("smollm2", "ours/qad-w4a4", {"accuracy": [0.4] * 5}, "accuracy on code falls"),
    ],
)
def test_each_thing_that_falls_short_is_named(
    model: str, name: str, change: dict[str, Any], said: str
) -> None:
    found = results()
    found["models"][model][name] |= change
    assert any(said in line for line in verdict.shortfalls(found))


def test_a_result_that_is_missing_is_no_pass() -> None:
    found = results()
    del found["models"]["smollm2"]["ours/qad-w4a4"]
    found["models"]["continuous"]["ours/sequential-w4a16"] = {"failed": "out of time"}
    found["experts"] = []
    said = verdict.shortfalls(found)
    assert "no result of ours/qad-w4a4" in said
    assert "continuous: no result of ours/sequential-w4a16" in said
    assert "no expert was measured" in said


def test_ratios_are_drawn_document_by_document() -> None:
    """Where every document has the same ratio, the interval has no width."""
    assert verdict.ratio([2.0, 4.0, 8.0], [1.0, 2.0, 4.0]) == (2.0, 2.0, 2.0)
