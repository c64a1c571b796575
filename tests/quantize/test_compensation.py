"""Compensated rounding against what it must equal or beat, and the sequential flow on twins."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from onboard import adapt, source, twins
from onboard.checkpoint import nvfp4
from onboard.checkpoint.models import load_candidate, load_reference
from onboard.quantize import calibrate, compensation, rounding, sequential, stage
from onboard.quantize.compensation import Inputs, corrected, gptq, held_share, shared_scale
from onboard.recipe import Adapt, Calibrate, Quantize, Source
from onboard.store import file_digest
from tests.families import config_of
from tests.quantize.test_quantize import documents, quantized, tensors


def inputs(tokens: int, width: int, seed: int = 0) -> Tensor:
    """Correlated activations, as models have them: a few directions carry most."""
    random = torch.Generator().manual_seed(seed)
    mixing = torch.randn(width, width, generator=random) / width**0.5
    return torch.randn(tokens, width, generator=random) @ (mixing + 0.3 * torch.eye(width))


def output_error(error: Tensor, hessian: Tensor) -> float:
    """Return tr(E H Eᵀ), the squared error of the outputs."""
    return float(((error @ hessian) * error).sum())


def test_compensation_beats_the_sweep_where_inputs_are_correlated() -> None:
    x, weight = inputs(512, 64), torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    hessian, scale_2 = x.T @ x, shared_scale(weight)
    codes, scale = gptq(weight, hessian, scale_2)
    compensated = nvfp4.dequantize(codes, scale, scale_2)
    swept = rounding.round_rows(weight, scale_2, "sweep", x.square().mean(0))
    plain = nvfp4.dequantize(swept.weight, swept.weight_scale, scale_2)
    better, worse = (output_error(q - weight, hessian) for q in (compensated, plain))
    assert better < 0.7 * worse


def test_without_correlation_compensation_is_the_sweep() -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    moment = torch.rand(64, generator=torch.Generator().manual_seed(2)) + 0.1
    scale_2 = shared_scale(weight)
    codes, scale = gptq(weight, torch.diag(moment), scale_2)
    importance = compensation.damped(torch.diag(moment)).diagonal()
    swept = rounding.round_rows(weight, scale_2, "sweep", importance)
    assert torch.equal(codes, swept.weight)
    assert torch.equal(scale.float(), swept.weight_scale.float())


def test_columns_beyond_one_lazy_block_are_compensated_too() -> None:
    """Against the textbook loop: a column at a time, every later column moved at once."""
    width = 2 * compensation.LAZY
    x, weight = inputs(1024, width), torch.randn(8, width)
    hessian, scale_2 = x.T @ x, shared_scale(weight)
    codes, scale = gptq(weight, hessian, scale_2)
    inverse = torch.linalg.inv(compensation.damped(hessian).double())
    upper = torch.linalg.cholesky(inverse, upper=True).float()
    rest, step = weight.clone(), (scale.float() * scale_2).repeat_interleave(16, 1)
    expected = torch.empty_like(weight)
    for column in range(width):
        quotient = rest[:, column] / step[:, column]
        expected[:, column] = nvfp4.round_to_e2m1(quotient) * step[:, column]
        error = (rest[:, column] - expected[:, column]) / upper[column, column]
        rest[:, column:] -= error[:, None] * upper[column, column:]
    found = nvfp4.dequantize(codes, scale, scale_2)
    assert float((found != expected).float().mean()) < 0.01, "fp32 may tip single values"


def test_the_correction_undoes_a_linear_change_of_the_inputs() -> None:
    """X̂ = X A: then W A⁻ᵀ gives the wanted outputs exactly, and the judges agree."""
    x, weight = inputs(2048, 16), torch.randn(8, 16)
    change = torch.eye(16) + 0.1 * torch.randn(16, 16)
    halves = [(part @ change, part) for part in x.split(1024)]
    moved, share = corrected(weight, *(Inputs.of(seen, wanted) for seen, wanted in halves))
    wanted, seen = x @ weight.T, (x @ change) @ moved.T
    assert share == pytest.approx(1, abs=0.05)
    assert float((seen - wanted).norm() / wanted.norm()) < 0.05


def test_a_correction_that_is_noise_is_not_held() -> None:
    weight, x, noise = torch.randn(8, 16), inputs(4096, 16), torch.randn(4096, 16)
    judges = Inputs.of(x + 0.3 * noise, x + 0.3 * noise)
    assert held_share(weight, torch.randn(8, 16), judges) == 0


@pytest.mark.parametrize("twin", ["llama_twin", "qwen3_moe_twin"])
def test_layer_after_layer_is_closer_to_the_source(
    request: pytest.FixtureRequest, bench: Any, tmp_path: Path, twin: str
) -> None:
    root: Path = request.getfixturevalue(twin)
    reference = load_reference(root, torch.float32)
    ids = torch.tensor([row["ids"] for row in documents(20)[12:]])
    divergence = {}
    for method in ("sweep", "sequential"):
        own = type(bench)(tmp_path / method)
        own.folder.mkdir()
        folder = quantized(own, root, documents(12), method=method, batch_size=2)
        table = own.artifacts["adapt"].json("adaptation.json")
        model = load_candidate(folder / "checkpoint", table, torch.float32)
        with torch.inference_mode():
            p, q = (m(ids, use_cache=False).logits.log_softmax(-1) for m in (reference, model))
        divergence[method] = float((p.exp() * (p - q)).sum(-1).mean())
    assert divergence["sequential"] < divergence["sweep"]


def test_a_layer_that_was_finished_is_not_rounded_again(
    bench: Any, qwen3_moe_twin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after the first layer: the second run rounds the second alone, to the same bytes."""
    bench.run("source", source.run, Source(model=str(qwen3_moe_twin)))
    bench.run("adapt", adapt.run, Adapt())
    bench.put("data", calibration__jsonl=documents())
    bench.run("calibrate", calibrate.run, Calibrate())
    params = Quantize(method="sequential", batch_size=4)
    job = bench.job("quantize", params)
    save = sequential.save_layer

    def killed(path: Path, *rest: Any) -> None:
        save(path, *rest)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sequential, "save_layer", killed)
        with pytest.raises(KeyboardInterrupt):
            stage.run(job)
    kept = job.scratch / "layers" / "layer-00000.safetensors"
    before = kept.stat().st_mtime_ns
    stage.run(job)
    assert kept.stat().st_mtime_ns == before
    resumed = file_digest(job.out / "checkpoint" / "model.safetensors")
    shutil.rmtree(job.scratch)
    job.scratch.mkdir()
    shutil.rmtree(job.out / "checkpoint")
    stage.run(job)
    assert file_digest(job.out / "checkpoint" / "model.safetensors") == resumed


@pytest.mark.parametrize("case", ["gpt_oss", "qwen3_5_moe", "deepseek_v3", "llama4"])
def test_every_layout_of_experts_is_rounded_in_place(bench: Any, tmp_path: Path, case: str) -> None:
    """Interleaved, transposed, stacked by the class or by the source: no matrix is missed."""
    config = config_of(case)
    config.pop("auto_map", None)
    if case == "gpt_oss":
        del config["quantization_config"]  # bf16, as transformers saves it: nothing is exact
    twin = twins.write(twins.shrink(config, vocab_size=512), tmp_path / "twin")
    folder = quantized(bench, twin, documents(4), method="sequential", batch_size=2)
    found = tensors(folder / "checkpoint")
    packed = [name for name in found if name.endswith("weight_scale_2")]
    notes = bench.artifacts["quantize"].json("tensors.json")
    assert len(packed) == len(notes)
    assert all("correction" in note for note in notes.values())
    assert 0 < max(note["relative_error"] for note in notes.values()) < 0.2


def test_three_tokens_leave_unseen_experts_finite(bench: Any, qwen3_moe_twin: Path) -> None:
    folder = quantized(bench, qwen3_moe_twin, documents(1, 3), method="sequential")
    for name, tensor in tensors(folder / "checkpoint").items():
        assert torch.isfinite(tensor.float()).all(), name
