"""Every shipped recipe rehearses on its real config; what cannot run here says why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onboard import recipe, rehearsal, twins
from onboard.engines.environment import find
from onboard.errors import EnvironmentFault
from onboard.lookup import find as look_up
from onboard.store import Store

QUICK = ("kimi-k3", "gpt-oss-120b")  # without a forward pass; with one, but without an engine
SLOW = sorted(set(recipe.names()) - set(QUICK))


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")


@pytest.fixture
def rehearse(tmp_path: Path, offline: None) -> Callable[[str], dict[str, Any]]:
    try:
        find()
    except EnvironmentFault as e:
        pytest.skip(e.message)

    def run(model: str) -> dict[str, Any]:
        document, code = rehearsal.rehearse(model, (), Store(tmp_path / "store"))
        assert code == 0, document
        return document

    return run


@pytest.mark.parametrize(
    "model", [*QUICK, *(pytest.param(m, marks=pytest.mark.slow) for m in SLOW)]
)
def test_a_recipe_rehearses(rehearse: Callable[[str], dict[str, Any]], model: str) -> None:
    document = rehearse(model)
    by_stage = {row["stage"]: row for row in document["stages"]}
    assert by_stage["quantize"]["status"] == "ran"
    for row in document["stages"]:
        assert row["status"] in ("ran", "not run here")
        assert bool(row["reason"]) == (row["status"] == "not run here")
    assert document["model"] in rehearsal.text(document)


def test_a_model_without_a_class_says_what_is_not_run(offline: None) -> None:
    rules = look_up("kimi-k3")
    facts = rehearsal.parse_config(rules.config, Path(rules.path))
    reasons = rehearsal.not_run_here(facts.rules, facts.model_type)
    assert set(reasons) == {"fidelity", "features", "speculate", "smoke"}
    assert "no transformers class" in reasons["fidelity"]


def test_a_twin_keeps_the_recipe_s_plan(offline: None, tmp_path: Path) -> None:
    found = look_up("glm-5.2")
    small = rehearsal.twin_recipe(found.recipe, tmp_path)
    assert small.adapt == found.recipe.adapt
    assert small.fidelity.gates.kl_mean is None
    assert small.smoke.tool_call_parser is None, "the twin's tokenizer is not the model's"


def test_special_tokens_stay_inside_a_smaller_vocabulary() -> None:
    config = {
        "model_type": "llama",
        "vocab_size": 1000,
        "eos_token_id": [999, 5],
        "pad_token_id": 7,
    }
    small = twins.with_vocabulary(config, 100)
    assert small == {**config, "vocab_size": 100, "eos_token_id": [99, 5]}
