"""Both stages on twins, end to end, and again after being cut short."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from onboard.checkpoint import models
from onboard.errors import InputError
from onboard.recipe import Features, Speculate
from onboard.speculators import export, features, stage
from onboard.speculators.shards import places

from .conftest import TWINS

FEATURES = Features(target="source", max_new_tokens=12, batch_size=4)
SPECULATE = Speculate(draft_vocab_size=64, epochs=2, batch_size=4, warmup_steps=1)


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("twin", TWINS)
def test_prompts_become_a_draft(
    ask: Callable[..., Any], twin: str, request: pytest.FixtureRequest
) -> None:
    bench = ask(request.getfixturevalue(twin))
    made = bench.run("features", features.run, FEATURES)
    documents, metrics, samples = places(made.path), made.metrics, made.lines("samples.jsonl")
    assert len(samples) == 10
    assert {s["id"] for s in samples} >= {d.id for d in documents}
    assert metrics["looped_answers"] == sum(s["looped"] is not None for s in samples)
    assert metrics["feature_tokens"] == sum(len(d) for d in documents)
    assert metrics["batch_invariance_error"] < 0.01
    assert metrics["stored_state_error"] < 0.2
    assert metrics["zero_features"] == 0
    for document in documents:
        sample = next(s for s in samples if s["id"] == document.id)
        ids, mask = document.read_tokens()
        kept = sample["answer_ids"][:-1]
        if sample["looped"]:
            kept = kept[: features.before_loop(sample["answer_ids"])]
        assert ids.tolist() == [*sample["prompt_ids"], *kept]
        assert ids[mask].tolist() == kept

    draft = bench.run("speculate", stage.run, SPECULATE)
    assert draft.metrics["offline_acceptance_length"] >= 1
    assert draft.metrics["training_tokens"] > 0
    assert len(draft.lines("training.jsonl")) == 2 * -(-(len(documents) - 1) // 4)
    for engine in ("vllm", "sglang"):
        found = export.read(draft.path / engine, engine)
        assert found.aux_layers == (0, 1, 2)
        assert found.config.hidden_size == 64
    reference = request.getfixturevalue(twin)
    embedding = _tensor(reference, "model.embed_tokens.weight")
    found = export.read(draft.path / "vllm", "vllm")
    assert torch.equal(found.tensors["embed_tokens.weight"], embedding)
    tied = json.loads((reference / "config.json").read_text())["tie_word_embeddings"]
    output = embedding if tied else _tensor(reference, "lm_head.weight")
    assert torch.equal(found.tensors["lm_head.weight"], output[found.vocabulary.kept])


def _tensor(folder: Path, name: str) -> torch.Tensor:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as f:
        tensor: torch.Tensor = f.get_tensor(name)
        return tensor


def test_features_cut_short_end_in_the_same_bytes(
    ask: Callable[..., Any], llama_twin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = ask(llama_twin)
    whole = files(bench.run("features", features.run, FEATURES).path)
    again = bench.job("again", FEATURES)
    real, calls = features.answer, []

    def dies_on_the_second(*args: Any) -> Any:
        calls.append(len(args[1]))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(features, "answer", dies_on_the_second)
    with pytest.raises(KeyboardInterrupt):
        features.run(again)
    assert list(again.out.iterdir()) == []
    features.run(again)
    # The first batch was not asked again; the last three are the batch invariance check.
    assert calls == [4, 4, 4, 2, 3]
    assert files(again.out) == whole


def test_speculate_is_deterministic(ask: Callable[..., Any], llama_twin: Path) -> None:
    bench = ask(llama_twin)
    bench.run("features", features.run, FEATURES)
    first = files(bench.run("speculate", stage.run, SPECULATE).path)
    assert files(bench.run("speculate2", stage.run, SPECULATE).path) == first


def test_of_a_sweep_the_best_draft_is_written(ask: Callable[..., Any], llama_twin: Path) -> None:
    bench = ask(llama_twin)
    bench.run("features", features.run, FEATURES)
    sweep = {"window": (None, 8), "layers": (1, 2)}
    made = bench.run("speculate", stage.run, SPECULATE.model_copy(update={"sweep": sweep}))
    table = made.json("sweep.json")
    assert [(row["draft"]["window"], row["draft"]["layers"]) for row in table] == [
        (None, 1), (None, 2), (8, 1), (8, 2),
    ]  # fmt: skip
    (chosen,) = [row for row in table if row["chosen"]]
    lengths = [row["offline_acceptance_length"] for row in table]
    assert chosen["offline_acceptance_length"] == max(lengths)
    assert made.metrics["offline_acceptance_length"] == max(lengths)
    written = export.read(made.path / "vllm", "vllm").config
    assert written.num_hidden_layers == chosen["draft"]["layers"]
    assert written.sliding_window == chosen["draft"]["window"]


@pytest.mark.parametrize("sweep", [{"windows": (8,)}, {"window": ()}, {"layers": (0,)}])
def test_a_sweep_of_what_no_draft_has_is_refused(sweep: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(sweep))):
        Speculate(sweep=sweep)


def test_a_target_that_only_loops_is_an_error(ask: Callable[..., Any], llama_twin: Path) -> None:
    """Its logits depend on nothing, so it repeats one token for ever."""
    from safetensors.torch import load_file, save_file

    bench = ask(llama_twin)
    file = bench.folder / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = torch.zeros_like(tensors["model.norm.weight"])
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(InputError, match="no token to train on: 10 of 10 answers loop"):
        bench.run("features", features.run, FEATURES)


def test_only_what_precedes_a_loop_is_kept() -> None:
    assert features.before_loop([5, 6, 7, 7, 7, 7, 7, 7, 7, 7]) == 2
    assert features.before_loop([9, 8, *[1, 2, 3] * 12, 4]) == 5
    assert features.before_loop(list(range(40))) == 0


def test_stages_read_what_the_pipeline_says_they_need() -> None:
    from onboard.stages import STAGES

    needs = {s.name: set(s.inputs) for s in STAGES}
    assert needs["features"] >= {"source", "quantize", "data"}
    assert needs["speculate"] >= {"quantize", "features"}


def test_a_target_beyond_memory_is_said_before_any_answer(
    ask: Callable[..., Any], llama_twin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = ask(llama_twin)
    monkeypatch.setattr(models, "device_memory", lambda: 0)
    with pytest.raises(InputError, match="does not fit in this machine's memory") as caught:
        bench.run("features", features.run, FEATURES)
    assert "features.answers" in str(caught.value.hint)
