"""The fidelity stage on twins: nothing lost means zero, damage shows, a killed run resumes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from onboard.checkpoint import models
from onboard.evals import fidelity, summary
from onboard.recipe import Fidelity
from onboard.store import file_digest

PARAMS = Fidelity(batch_size=2, bootstrap=100, task_documents=6)


def rows() -> list[dict[str, Any]]:
    random = np.random.default_rng(0)
    return [
        {
            "id": f"d{n}",
            "domain": "code" if n % 2 else "chat",
            "source": "jsonl:mine.jsonl" if n == 3 else "python",
            "ids": random.integers(0, 256, 24 + n).tolist(),
        }
        for n in range(6)
    ]


def items() -> list[dict[str, Any]]:
    return [
        {"query": f"Item {n}:", "choices": ["yes", "no", "maybe", "never"], "gold": n % 4}
        for n in range(8)
    ]


def damage(root: Path) -> None:
    """Shake every weight matrix by a few percent."""
    path = root / "model.safetensors"
    torch.manual_seed(1)
    tensors = {
        name: (t + 0.05 * t.float().std() * torch.randn(t.shape)).to(t.dtype) if t.ndim > 1 else t
        for name, t in load_file(path).items()
    }
    save_file(tensors, path, {"format": "pt"})


@pytest.fixture
def measure(
    bench: Any, tmp_path: Path, llama_twin: Path, make_tokenizer: Callable[..., Path]
) -> Callable[..., Any]:
    """Run the stage on the twin against a copy of it, changed or not."""

    def run(change: Callable[[Path], None] = lambda root: None) -> Any:
        root = make_tokenizer(shutil.copytree(llama_twin, tmp_path / "model"))
        location = {"root": str(root), "model": "t", "revision": None, "kind": "directory"}
        bench.put("source", location__json={**location, "licence": None})
        bench.put("data", evaluation__jsonl=rows(), hellaswag__jsonl=items())
        kept = {name: {"quantize": False} for name in load_file(root / "model.safetensors")}
        bench.put("adapt", adaptation__json={"tensors": kept, "groups": []})
        quantize = bench.put("quantize")
        change(shutil.copytree(llama_twin, quantize.path / "checkpoint"))
        return bench.run("fidelity", fidelity.run, PARAMS)

    return run


def test_an_unchanged_checkpoint_loses_nothing(measure: Any) -> None:
    metrics = measure().metrics
    assert metrics["kl_max"] == metrics["kl_mean_weights_only"] == 0
    assert metrics["top1"] == metrics["ppl_ratio"] == 1
    assert metrics["hellaswag_drop"] == 0
    assert metrics["hellaswag_p"] == 1
    assert "kv_cache_fp8" not in metrics
    assert metrics["evaluation_tokens"] == sum(len(row["ids"]) - 1 for row in rows())
    assert 0 < metrics["kl_noise_floor"] < 0.5


def test_damage_shows_and_the_tables_add_up(measure: Any) -> None:
    artifact = measure(damage)
    metrics = artifact.metrics
    assert metrics["kl_noise_floor"] < metrics["kl_mean"]
    assert metrics["kl_mean_lo"] < metrics["kl_mean"] < metrics["kl_mean_hi"]
    assert metrics["kl_median"] <= metrics["kl_p90"] <= metrics["kl_p99"] <= metrics["kl_max"]
    tokens = metrics["evaluation_tokens"]
    assert sum(artifact.json("histogram.json")["counts"]) == tokens
    assert len(artifact.json("histogram.json")["edges"]) == 1 + len(
        artifact.json("histogram.json")["counts"]
    )
    assert sum(row["share"] for row in artifact.json("confidence.json")) == pytest.approx(1)
    for table in (artifact.json("domains.json"), artifact.lines("documents.jsonl")):
        total = sum(row["kl_mean"] * row["tokens"] for row in table)
        assert total / tokens == pytest.approx(metrics["kl_mean"])
    assert len(artifact.json("tasks.json")["pairs"]) == 6


def test_a_model_beyond_memory_is_measured_alike(
    measure: Any, bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer at a time, without HellaSwag, and a warning that says so."""
    whole = measure(damage)
    shutil.rmtree(whole.path)
    shutil.rmtree(bench.folder / "fidelity.scratch")
    monkeypatch.setattr(models, "device_memory", lambda: 0)
    streamed = bench.run("fidelity", fidelity.run, PARAMS)
    assert sum("not run" in warning for warning in bench.warnings) == 2
    for name, value in streamed.metrics.items():
        assert value == whole.metrics[name], name
    assert "hellaswag_drop" not in streamed.metrics


def fp8_cache(scale: float) -> Callable[[Path], None]:
    """Add the scales of an FP8 KV cache to a checkpoint."""

    def change(root: Path) -> None:
        path = root / "model.safetensors"
        stem = "model.layers.{}.self_attn.{}_proj.{}_scale"
        names = [stem.format(layer, part, part) for layer in range(2) for part in "kv"]
        scales = {name: torch.tensor(scale) for name in names}
        save_file(load_file(path) | scales, path, {"format": "pt"})

    return change


@pytest.mark.parametrize(("scale", "least", "most"), [(0.02, 1e-6, 0.05), (1e-4, 0.05, 100)])
def test_an_fp8_cache_is_part_of_what_is_served(
    measure: Any, scale: float, least: float, most: float
) -> None:
    """The weights are the source's: all there is comes from the cache, and a bad scale shows."""
    metrics = measure(fp8_cache(scale)).metrics
    assert metrics["kv_cache_fp8"] == 1
    assert metrics["kl_mean_weights_only"] == 0
    assert least < metrics["kl_mean"] < most


def test_an_fp8_cache_of_a_model_beyond_memory(
    measure: Any, bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = measure(fp8_cache(0.01))
    shutil.rmtree(whole.path)
    shutil.rmtree(bench.folder / "fidelity.scratch")
    monkeypatch.setattr(models, "device_memory", lambda: 0)
    streamed = bench.run("fidelity", fidelity.run, PARAMS)
    for name, value in streamed.metrics.items():
        assert value == whole.metrics[name], name


def test_the_worst_tokens_are_quoted_but_never_a_users_own(measure: Any) -> None:
    artifact = measure(damage)
    worst = artifact.json("worst.json")
    assert len(worst) == 20
    assert [row["kl"] for row in worst] == sorted((row["kl"] for row in worst), reverse=True)
    assert "d3" not in {row["document"] for row in worst}
    assert all(len(row["source_top"]) == len(row["candidate_top"]) == 5 for row in worst)


def test_a_killed_run_goes_on_and_ends_in_the_same_bytes(
    measure: Any, bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = measure(damage)
    digests = {name: entry["sha256"] for name, entry in whole.manifest["files"].items()}
    job = bench.job("fidelity", PARAMS, again=True)
    kept = ("reference-0000", "reference-0001", "tasks-source")
    kept += ("candidate-0000", "weights-0000", "worst-0000")
    for path in job.scratch.iterdir():
        if path.is_file() and not path.name.startswith(kept):
            path.unlink()
    seen = []
    hidden = fidelity.last_hidden
    monkeypatch.setattr(
        fidelity,
        "last_hidden",
        lambda model, ids, *cache: seen.append(len(ids)) or hidden(model, ids, *cache),
    )
    fidelity.run(job)
    assert seen.count(2) == 1 + 2  # one batch of the reference, two of the candidate
    assert {name: file_digest(job.out / name) for name in digests} == digests


def test_the_position_table_by_hand() -> None:
    measured = summary.Measured([{}, {}], [20, 2], {"kl": np.arange(22.0)})
    assert summary.by_position(measured) == [
        {"lo": 1, "hi": 16, "kl_mean": (sum(range(15)) + 20 + 21) / 17},
        {"lo": 16, "hi": 64, "kl_mean": 17.0},
    ]


def test_histogram_keeps_zeros_and_giants() -> None:
    counts = summary.histogram(np.array([0.0, 1.0, 1e9]))["counts"]
    assert counts[0] == counts[-1] == 1
    assert sum(counts) == 3


def test_confidence_of_one_belongs_to_the_last_bin() -> None:
    tokens = {"kl": np.array([1.0, 3.0]), "confidence": np.array([1.0, 0.1])}
    last = summary.by_confidence(summary.Measured([{}], [2], tokens))[-1]
    assert json.dumps(last) == '{"lo": 0.95, "hi": 1.0, "share": 0.5, "kl_mean": 1.0}'
