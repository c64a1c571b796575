"""Methods and formats chosen by measurement, on tiny twins through the whole stage."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onboard import adapt, source
from onboard.checkpoint.models import load_candidate, load_reference
from onboard.checkpoint.reader import Reader
from onboard.errors import InputError
from onboard.evals.kl import kl_divergence
from onboard.quantize import calibrate, ladder, stage
from onboard.recipe import Adapt, Calibrate, Quantize, Source
from tests.quantize.test_quantize import documents

SELECTION = documents(24)[16:]


@pytest.fixture
def prepare(bench: Any, tmp_path: Path, make_tokenizer: Any) -> Any:
    """Return a bench with everything that the quantize stage reads of a twin."""

    def prepared(twin: Path, distillation: int = 0) -> Any:
        make_tokenizer(twin)
        bench.run("source", source.run, Source(model=str(twin)))
        bench.run("adapt", adapt.run, Adapt())
        bench.put(
            "data",
            calibration__jsonl=documents(8),
            selection__jsonl=SELECTION,
            distillation__jsonl=documents(16)[8 : 8 + distillation],
        )
        bench.run("calibrate", calibrate.run, Calibrate())
        return bench

    return prepared


def quantize(bench: Any, **params: Any) -> Any:
    section = Quantize(**{"documents": 8, "batch_size": 2, **params})
    return bench.run("quantize", stage.run, section)


def joint_kl(bench: Any, root: Path, checkpoint: Path | None = None) -> float:
    """The KL of the written checkpoint on the selection documents, computed plainly."""
    table = bench.artifacts["adapt"].json("adaptation.json")
    checkpoint = checkpoint or bench.artifacts["quantize"].path / "checkpoint"
    models = load_reference(root, torch.float32), load_candidate(checkpoint, table, torch.float32)
    ids = torch.tensor([row["ids"] for row in SELECTION])
    with torch.inference_mode():
        p, q = (model(ids, use_cache=False).logits[:, :-1] for model in models)
    return float(kl_divergence(p.flatten(0, 1), q.flatten(0, 1)).mean())


@pytest.mark.parametrize("twin", ["llama_twin", "qwen3_moe_twin"])
def test_auto_ships_the_rung_of_least_kl(
    request: pytest.FixtureRequest, prepare: Any, twin: str
) -> None:
    root = request.getfixturevalue(twin)
    bench = prepare(root)
    found = quantize(bench, method="auto").json("ladder.json")
    rungs = {rung["method"]: rung for rung in found["rungs"]}
    assert list(rungs) == ["rtn", "sweep", "gptq", "sequential"], "nothing to distil on: no qad"
    assert len({rung["bytes"] for rung in rungs.values()}) == 1
    chosen = [rung for rung in rungs.values() if rung["chosen"]]
    assert [rung["kl"] for rung in chosen] == [min(rung["kl"] for rung in rungs.values())]
    assert rungs["sequential"]["kl"] < rungs["rtn"]["kl"]
    assert chosen[0]["kl"] == pytest.approx(joint_kl(bench, root), rel=1e-3)
    assert all(rung["kl_lo"] <= rung["kl"] <= rung["kl_hi"] for rung in rungs.values())


def test_auto_stops_where_the_target_is_reached(prepare: Any, llama_twin: Path) -> None:
    found = quantize(prepare(llama_twin), method="auto", target_kl=1e6).json("ladder.json")
    assert [rung["method"] for rung in found["rungs"]] == ["rtn"]


def test_auto_begins_no_method_after_its_minutes(
    prepare: Any, llama_twin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 10**6, 100))  # every look at the clock is 100 seconds later
    monkeypatch.setattr(ladder, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    found = quantize(prepare(llama_twin), method="auto", minutes=6).json("ladder.json")
    assert [rung["method"] for rung in found["rungs"]] == ["rtn", "sweep"]


def test_auto_distils_where_there_are_documents(prepare: Any, llama_twin: Path) -> None:
    bench = prepare(llama_twin, distillation=8)
    artifact = quantize(bench, method="auto", distill={"evaluate_steps": 2, "epochs": 2})
    rungs = {rung["method"]: rung for rung in artifact.json("ladder.json")["rungs"]}
    assert rungs["qad"]["kl"] <= rungs["sequential"]["kl"] * 1.001, "never worse than it began"
    assert rungs["qad"]["bytes"] == rungs["rtn"]["bytes"]


def test_a_killed_climb_goes_on_with_the_bytes_it_had(
    prepare: Any, llama_twin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = prepare(llama_twin)
    params = Quantize(method="auto", documents=8, batch_size=2)
    job = bench.job("quantize", params)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stage.written, "metrics", killed)
        with pytest.raises(KeyboardInterrupt):
            stage.run(job)
    with monkeypatch.context() as patch:
        patch.setattr("onboard.quantize.making.compensate", killed)
        shutil.rmtree(job.out)  # what a kill leaves of it is thrown away
        stage.run(bench.job("quantize", params))
    notes = json.loads((job.out / "tensors.json").read_text())
    assert notes


@pytest.mark.parametrize("twin", ["llama_twin", "qwen3_moe_twin"])
@pytest.mark.parametrize("limit", [{"bits": 6.0}, {"speed": 2.4}])
def test_a_budget_is_kept_and_told(
    request: pytest.FixtureRequest, prepare: Any, twin: str, limit: dict[str, float]
) -> None:
    root = request.getfixturevalue(twin)
    bench = prepare(root)
    artifact = quantize(bench, method="sequential", budget={**limit, "documents": 4, "swaps": 1})
    found = artifact.json("allocation.json")
    chosen = [point for point in found["front"] if point["chosen"]]
    assert len(chosen) == 1
    assert chosen[0]["kl_measured"] == pytest.approx(joint_kl(bench, root), rel=1e-3)
    if "bits" in limit:
        assert artifact.metrics["effective_bits"] <= 6.05, (
            "fp32 scales of tiny matrices come on top"
        )
    assert {group["format"] for group in found["groups"]} != {"nvfp4"}
    mark = json.loads((artifact.path / "checkpoint" / "config.json").read_text())
    schemes = {w.scheme for w in Reader.open(artifact.path / "checkpoint").weights.values()}
    if "fp8" in {group["format"] for group in found["groups"]}:
        assert mark["quantization_config"]["quant_algo"] == "MIXED_PRECISION"
        assert "fp8_tensor" in schemes
    assert artifact.metrics["share_missing"] == 0
    assert len(found["swaps"]) <= 1


@pytest.mark.parametrize("activations", ["nvfp4", "none"])
def test_distillation_begins_with_what_the_mixed_checkpoint_computes(
    prepare: Any, llama_twin: Path, activations: str
) -> None:
    """Inputs of FP8 matrices are rounded with their own scales, in W4A16 too."""
    bench = prepare(llama_twin, distillation=4)
    artifact = quantize(
        bench,
        method="qad",
        activations=activations,
        budget={"bits": 6.0, "documents": 4, "swaps": 0},
        distill={"epochs": 1, "evaluate_steps": 1},
    )
    assert "fp8" in {group["format"] for group in artifact.json("allocation.json")["groups"]}
    (start,) = (bench.folder / "quantize.scratch").glob("sequential-*/checkpoint")
    before = artifact.json("distillation.json")["kl_before"]
    assert before == pytest.approx(joint_kl(bench, llama_twin, start), rel=1e-3)


def test_kl_max_is_met_by_measurement(prepare: Any, llama_twin: Path) -> None:
    bench = prepare(llama_twin)
    free = quantize(bench, method="auto").metrics["selection_kl"]
    bench.folder = bench.folder / "second"
    bench.folder.mkdir()
    artifact = quantize(
        bench, method="sweep", budget={"kl_max": free / 2, "documents": 4, "swaps": 0}
    )
    assert artifact.metrics["selection_kl"] <= free / 2
    assert artifact.metrics["effective_bits"] < 16


def test_without_selection_documents_nothing_can_be_chosen(prepare: Any, llama_twin: Path) -> None:
    bench = prepare(llama_twin)
    bench.folder = bench.folder / "second"
    bench.folder.mkdir()
    bench.put("data", calibration__jsonl=documents(8), selection__jsonl=[], distillation__jsonl=[])
    with pytest.raises(InputError, match="no selection documents"):
        quantize(bench, method="auto")
