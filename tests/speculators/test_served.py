"""Answers from a server: the same shards as from this process, or one error that says why not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onboard.checkpoint import models
from onboard.engines.client import Client
from onboard.errors import EnvironmentFault, InputError
from onboard.recipe import Features
from onboard.speculators import disk, features, served
from onboard.speculators.shards import places

from .test_stages import files
from .twin_server import Twin, serve

HERE = Features(target="source", max_new_tokens=12, batch_size=4)


def there(twin: Twin, **changes: Any) -> Features:
    given = {"answers": twin.url, "prefill_tokens": 60, **changes}
    return HERE.model_copy(update=given)


@pytest.fixture
def twin(llama_twin: Path) -> Iterator[Twin]:
    with serve(llama_twin) as running:
        yield running


def test_a_server_gives_what_this_process_gives(
    ask: Callable[..., Any], llama_twin: Path, twin: Twin
) -> None:
    bench = ask(llama_twin)
    own = bench.run("features", features.run, HERE)
    made = bench.run("served", features.run, there(twin, answers=f"{twin.url}/v1/"))
    assert made.lines("samples.jsonl") == own.lines("samples.jsonl")
    assert made.metrics["answers_reproduced"] == 1
    assert made.metrics["batch_invariance_error"] == 0
    assert made.metrics["stored_state_error"] < 0.01
    same = ("feature_tokens", "trained_tokens", "trained_token_share", "looped_answers")
    assert {name: made.metrics[name] for name in same} == {n: own.metrics[n] for n in same}
    for one, other in zip(places(made.path), places(own.path), strict=True):
        assert one.id == other.id
        mine, theirs = one.read(), other.read()
        assert torch.equal(mine.ids, theirs.ids)
        assert torch.equal(mine.mask, theirs.mask)
        assert torch.allclose(mine.last.float(), theirs.last.float(), rtol=0.05, atol=0.05)
    assert len(made.json("index.json")["shards"]) > 2
    request = twin.requests[0]
    assert (request["temperature"], request["repetition_penalty"]) == (0, 1)
    assert request["return_token_ids"] is True
    assert not any("may be the target" in text for text in bench.warnings)


def test_a_target_beyond_memory_is_read_by_the_layer(
    ask: Callable[..., Any], llama_twin: Path, twin: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = ask(llama_twin)
    whole = files(bench.run("features", features.run, there(twin)).path)
    monkeypatch.setattr(models, "device_memory", lambda: 0)
    assert files(bench.run("streamed", features.run, there(twin)).path) == whole


def test_answers_that_came_are_not_asked_for_again(
    ask: Callable[..., Any], llama_twin: Path, twin: Twin
) -> None:
    bench = ask(llama_twin)
    whole = files(bench.run("features", features.run, there(twin)).path)
    twin.requests.clear()
    twin.refuse_after = 5  # in the second batch of four
    again = bench.job("again", there(twin))
    with pytest.raises(EnvironmentFault, match=r"answered 500: .*out of memory") as caught:
        features.run(again)
    assert "answers that came are kept" in str(caught.value.hint)
    assert list(again.out.iterdir()) == []
    twin.requests.clear()
    twin.refuse_after = None
    features.run(again)
    assert len(twin.requests) == 6  # the second and the third batch
    assert files(again.out) == whole


def test_another_models_answers_are_refused(
    ask: Callable[..., Any], llama_twin: Path, make_llama: Callable[..., Path], tmp_path: Path
) -> None:
    other = make_llama(tmp_path / "other", num_hidden_layers=3)
    with serve(other, names=["other"]) as twin:
        bench = ask(llama_twin)
        with pytest.raises(InputError, match=r"gives \d+ of the \d+ tokens that other at http"):
            bench.run("features", features.run, there(twin))
    assert any("serves other, which may be the target" in text for text in bench.warnings)


@pytest.mark.parametrize(
    ("behaviour", "complaint"),
    [
        ({"with_ids": False}, "returns no token ids"),
        ({"added": 1}, "read 4 tokens of a prompt of 3"),
    ],
)
def test_a_server_that_cannot_be_used_is_named(
    llama_twin: Path, behaviour: dict[str, Any], complaint: str
) -> None:
    with serve(llama_twin, **behaviour) as twin, pytest.raises(EnvironmentFault, match=complaint):
        served.ask(served.Endpoint(Client(twin.url), "model"), [[1, 2, 3]], (), 2)


def test_the_target_is_found_among_several(llama_twin: Path) -> None:
    said: list[str] = []
    with serve(llama_twin, names=["a", "/models/tiny", "b"]) as twin:
        assert served.connect(twin.url, {"tiny"}, said.append).model == "/models/tiny"
        with pytest.raises(InputError, match="serves a, /models/tiny, b; expected"):
            served.connect(twin.url, {"large"}, said.append)
    assert not said
    with pytest.raises(EnvironmentFault, match="does not list models"):
        served.connect("http://127.0.0.1:9", {"tiny"}, said.append)


def test_a_token_beyond_the_targets_vocabulary(llama_twin: Path) -> None:
    target = features.head.of_model(models.load_reference(llama_twin, torch.float32))
    served.check_vocabulary(target, [[1, 255], []])
    with pytest.raises(InputError, match="holds the token 256, the target has 256"):
        served.check_vocabulary(target, [[1], [256]])


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 120))
def test_groups_are_whole_in_order_and_within_the_limit(lengths: list[int], tokens: int) -> None:
    found = list(served.groups(lengths, tokens))
    assert [length for group in found for length in lengths[group]] == lengths
    for group in found:
        held = lengths[group]
        assert held
        assert len(held) == 1 or sum(held) <= tokens


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://a b"])
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(ValueError, match="answers"):
        Features(answers=url)


def test_fp8_features_train_on_what_bf16_ones_do(ask: Callable[..., Any], llama_twin: Path) -> None:
    bench = ask(llama_twin)
    wide = bench.run("features", features.run, HERE)
    made = bench.run("fp8", features.run, HERE.model_copy(update={"storage": "fp8"}))
    assert made.lines("samples.jsonl") == wide.lines("samples.jsonl")
    assert made.metrics["zero_features"] == 0
    assert 0.005 < made.metrics["stored_state_error"] < 0.06
    assert made.metrics["feature_bytes"] < 0.7 * wide.metrics["feature_bytes"]
    head = features.head.Head.load(made.path, made.json("index.json")["head"])
    for one, other in zip(places(made.path), places(wide.path), strict=True):
        mine, theirs = (head.logits(place.read().last).argmax(-1) for place in (one, other))
        assert (mine == theirs).float().mean() > 0.8


def test_the_disk_is_looked_at_before_any_answer(
    ask: Callable[..., Any], llama_twin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = ask(llama_twin)
    asked: list[int] = []

    def full(folder: Path, width: int, storage: disk.Storage, tokens: int) -> None:
        asked.append(tokens)
        raise EnvironmentFault("full")

    monkeypatch.setattr(features.disk, "check", full)
    job = bench.job("features", HERE)
    with pytest.raises(EnvironmentFault, match="full"):
        features.run(job)
    prompts = bench.artifacts["data"].lines("training_prompts.jsonl")
    assert asked == [sum(len(p["ids"]) + 12 for p in prompts)]
    assert not list(job.scratch.iterdir())
