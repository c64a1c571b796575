"""Training that takes hidden states from the target ends where training from stored ones does."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from onboard.checkpoint.models import open_reference
from onboard.recipe import Draft, Features, Speculate
from onboard.speculators import disk, export, features, online, stage
from onboard.speculators.fit import LOG, Work, fit
from onboard.speculators.shards import Place, places

HERE = Features(target="source", max_new_tokens=12, batch_size=4, storage="online")
SPECULATE = Speculate(draft_vocab_size=64, epochs=2, batch_size=4, warmup_steps=1, buffer_tokens=60)


def place(name: str, length: int) -> Place:
    return Place(name, Path("none"), 0, length)


def ids(groups: Sequence[Sequence[Sequence[Place]]]) -> list[list[str]]:
    return [["".join(p.id for p in batch) for batch in group] for group in groups]


def test_a_buffer_holds_what_it_may_and_counts_a_document_once() -> None:
    a, b, c, d = (place(name, 10) for name in "abcd")
    order = [[a, b], [b, a], [c], [a, d], [c]]
    assert ids(list(online.buffered(order, 30))) == [["ab", "ba", "c"], ["ad", "c"]]
    assert ids(list(online.buffered(order, 5))) == [["ab"], ["ba"], ["c"], ["ad"], ["c"]]
    assert list(online.buffered([], 30)) == []


@pytest.mark.parametrize(
    ("storage", "tokens", "expected"),
    [("auto", 10_000, "bf16"), ("auto", 20_000, "online"), ("fp8", 20_000, "fp8")],
)
def test_what_is_too_much_for_the_disk_is_not_stored(
    storage: disk.Storage, tokens: int, expected: str
) -> None:
    """Of GLM-5.2, 49,152 bytes a token: 0.49 and 0.98 GB."""
    assert disk.chosen(storage, 6144, tokens, 0.5) == expected


@pytest.fixture
def made(ask: Callable[..., Any], llama_twin: Path) -> Any:
    bench = ask(llama_twin)
    bench.run("features", features.run, HERE)
    return bench


def test_no_state_is_stored(made: Any) -> None:
    found = made.artifacts["features"]
    assert found.json("index.json")["storage"] == "online"
    assert found.metrics["feature_bytes"] < 40 * found.metrics["feature_tokens"]
    assert found.metrics["zero_features"] == 0
    assert found.metrics["trained_tokens"] > 0


@pytest.mark.parametrize("resident", [True, False])
def test_states_are_those_of_the_target(made: Any, llama_twin: Path, resident: bool) -> None:
    runner = open_reference(llama_twin, torch.float32, resident=resident)
    held = places(made.artifacts["features"].path)
    documents = online.read(runner, held)
    assert features.state_error(runner, documents) < 1e-3
    for document, at in zip(documents, held, strict=True):
        ids, mask = at.read_tokens()
        assert torch.equal(document.ids, ids)
        assert torch.equal(document.mask, mask)


def weights(draft: Any) -> dict[str, torch.Tensor]:
    written = export.read(draft.path / "vllm", "vllm")
    return dict(written.draft().named_parameters())


def test_the_draft_is_that_of_stored_states(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored as the target gives them to texts alone, they train the same draft, byte for byte."""
    streamed = made.run("streamed", stage.run, SPECULATE)
    small = made.run("small", stage.run, SPECULATE.model_copy(update={"buffer_tokens": 1}))
    for name, tensor in weights(streamed).items():
        assert torch.equal(weights(small)[name], tensor)
    assert streamed.metrics == small.metrics

    def all_stored(runner: Any, order: Any, tokens: int) -> Any:
        held = places(made.artifacts["features"].path)
        kept = {p.id: p for p in online.store(runner, held, made.folder, 100)}
        return ([kept[p.id].read() for p in batch] for batch in order)

    monkeypatch.setattr(online, "feed", all_stored)
    from_disk = made.run("stored", stage.run, SPECULATE)
    for name, tensor in weights(from_disk).items():
        assert torch.equal(weights(streamed)[name], tensor)


def test_two_processes_take_their_own_states(made: Any) -> None:
    one, two = (
        made.run(str(n), stage.run, SPECULATE.model_copy(update={"processes": n})) for n in (1, 2)
    )
    losses = [[row["loss"] for row in made.lines("training.jsonl")] for made in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_shot_dead_it_ends_in_the_same_bytes(made: Any, llama_twin: Path, tmp_path: Path) -> None:
    """kill -9 between two checkpoints, with half a buffer read."""
    params = SPECULATE.model_copy(update={"checkpoint_steps": 2})

    def work(name: str) -> Work:
        folder, target = tmp_path / name, online.Target(llama_twin)
        folder.mkdir()
        features, config = made.artifacts["features"].path, llama_twin / "config.json"
        return Work(features, config, params, Draft(), folder, target)

    whole, cut = work("whole"), work("cut")
    script = (
        "import os, signal\n"
        "from pathlib import Path\n"
        "from onboard.speculators.fit import Work, fit_here\n"
        "shoot = lambda done, total: done == 3 and os.kill(os.getpid(), signal.SIGKILL)\n"
        f"fit_here(Work.read(Path({str(cut.write())!r})), shoot)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False)
    assert done.returncode == -signal.SIGKILL
    assert (cut.folder / "training.pt").exists()
    for each in (whole, cut):
        fit(each, lambda done, total: None)
    assert (cut.folder / LOG).read_bytes() == (whole.folder / LOG).read_bytes()
    for file in (whole.folder / "vllm").iterdir():
        assert (cut.folder / "vllm" / file.name).read_bytes() == file.read_bytes()
