"""Compensated rounding against what it must equal or beat, and the sequential flow on twins."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from onboard import adapt, source, twins
from onboard.checkpoint import fp8, nvfp4
from onboard.checkpoint.models import load_candidate, load_reference
from onboard.quantize import calibrate, compensation, rounding, sequential, stage
from onboard.quantize.compensation import (
    Inputs,
    compensate,
    corrected,
    damped,
    held_share,
    rounded,
)
from onboard.quantize.grids import Fp8, NvFp4, dequantize
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


def nvfp4_grid(weight: Tensor) -> NvFp4:
    return NvFp4(rounding.shared_scale(weight.abs().amax(), "sweep")[None])


def swept(weight: Tensor, importance: Tensor) -> Tensor:
    scale_2 = rounding.shared_scale(weight.abs().amax(), "sweep")
    packed = rounding.round_rows(weight, scale_2, "sweep", importance)
    return nvfp4.dequantize(packed.weight, packed.weight_scale, scale_2)


def test_compensation_beats_the_sweep_where_inputs_are_correlated() -> None:
    x, weight = inputs(512, 64), torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    hessian = x.T @ x
    compensated, _ = compensate(weight[None], damped(hessian[None], 0.01), nvfp4_grid(weight))
    plain = swept(weight, x.square().mean(0))
    better, worse = (output_error(q - weight, hessian) for q in (compensated[0], plain))
    assert better < 0.7 * worse


def test_without_correlation_compensation_is_the_sweep() -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    moment = torch.rand(64, generator=torch.Generator().manual_seed(2)) + 0.1
    found, _ = compensate(weight[None], torch.diag(moment)[None], nvfp4_grid(weight))
    assert torch.equal(found[0], swept(weight, moment))


def test_columns_beyond_one_lazy_block_are_compensated_too() -> None:
    """Against the textbook loop: a column at a time, every later column moved at once."""
    width = 2 * compensation.LAZY
    x, weight = inputs(1024, width), torch.randn(8, width)
    hessian = damped(x.T @ x, 0.01)
    found, steps = compensate(weight[None], hessian[None], nvfp4_grid(weight), polishes=0)
    upper = torch.linalg.cholesky(torch.linalg.inv(hessian.double()), upper=True).float()
    rest, step = weight.clone(), torch.stack([s[0] for s in steps], 1).repeat_interleave(16, 1)
    expected = torch.empty_like(weight)
    for column in range(width):
        quotient = rest[:, column] / step[:, column]
        expected[:, column] = nvfp4.round_to_e2m1(quotient) * step[:, column]
        error = (rest[:, column] - expected[:, column]) / upper[column, column]
        rest[:, column:] -= error[:, None] * upper[column, column:]
    assert float((found[0] != expected).float().mean()) < 0.01, "fp32 may tip single values"


def test_polishing_never_raises_the_error_and_ends_where_no_single_column_helps() -> None:
    x, weight = inputs(512, 64), torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    hessian, grid = damped(x.T @ x, 0.003), nvfp4_grid(weight)
    errors = []
    for rounds in (0, 1, 2, 50):
        found, steps = compensate(weight[None], hessian[None], grid, polishes=rounds)
        errors.append(output_error(found[0] - weight, hessian))
    assert errors[0] > errors[1] >= errors[2] >= errors[3]
    for column in range(64):
        step = steps[column // 16][0]
        for move in (-1, 1):
            tried = found[0].clone()
            tried[:, column] = grid.nearest(tried[:, column] / step + move * 0.6) * step
            before, after = found[0] - weight, tried - weight
            rows = ((after @ hessian) * after).sum(1) - ((before @ hessian) * before).sum(1)
            assert bool((rows >= -1e-3).all())


def test_a_batch_of_matrices_is_rounded_as_each_alone() -> None:
    random = torch.Generator().manual_seed(3)
    weights = torch.randn(3, 8, 32, generator=random)
    parts = torch.stack([inputs(256, 32, seed) for seed in range(6)])
    fitted, judges = parts[:3].transpose(1, 2) @ parts[:3], parts[3:].transpose(1, 2) @ parts[3:]
    scales = torch.stack([nvfp4_grid(weight).scale_2[0] for weight in weights])
    together = rounded(weights, fitted, judges, NvFp4(scales))
    for at in range(3):
        grid = NvFp4(scales[at : at + 1])
        one = rounded(weights[at, None], fitted[at, None], judges[at, None], grid)
        assert float(one.dampings) == float(together.dampings[at])
        assert float((one.values[0] != together.values[at]).float().mean()) < 0.02


def test_what_is_packed_is_what_was_rounded() -> None:
    """In both grids: the values of the stored bytes, and E4M3 scales that come back exactly."""
    x, weight = inputs(256, 32), torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    hessian = damped((x.T @ x)[None], 0.01)
    for grid in (nvfp4_grid(weight), Fp8(fp8.tensor_scale(weight.abs().amax())[None])):
        values, steps = compensate(weight[None], hessian, grid)
        assert torch.equal(dequantize(grid.pack(values, steps, 0)), values[0])


def test_fp8_is_compensated_too() -> None:
    x, weight = inputs(512, 64), torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    hessian, scale = x.T @ x, fp8.tensor_scale(weight.abs().amax())
    found, _ = compensate(weight[None], damped(hessian[None], 0.01), Fp8(scale[None]))
    plain = fp8.dequantize(fp8.quantize(weight, scale), scale)
    assert output_error(found[0] - weight, hessian) < 0.7 * output_error(plain - weight, hessian)


def test_the_judges_choose_the_damping() -> None:
    """Few tokens to fit on, many directions: trusting them does worse on others than damping."""
    weight = torch.randn(1, 32, 64, generator=torch.Generator().manual_seed(1))
    few, many = inputs(8, 64, seed=5), inputs(4096, 64, seed=5).flip(1)
    fitted, judges = (x.T @ x for x in (few, many))
    found = rounded(weight, fitted[None], judges[None], nvfp4_grid(weight[0]))
    assert float(found.dampings) > min(compensation.DAMPINGS)


def test_the_correction_undoes_a_linear_change_of_the_inputs() -> None:
    """X̂ = X A: then W A⁻ᵀ gives the wanted outputs exactly, and the judges agree."""
    x, weight = inputs(2048, 16), torch.randn(8, 16)
    change = torch.eye(16) + 0.1 * torch.randn(16, 16)
    halves = [(part @ change, part) for part in x.split(1024)]
    ((moved, share),) = corrected([weight], *(Inputs.of(seen, wanted) for seen, wanted in halves))
    wanted, seen = x @ weight.T, (x @ change) @ moved.T
    assert share == pytest.approx(1, abs=0.05)
    assert float((seen - wanted).norm() / wanted.norm()) < 0.05


def test_matrices_that_read_one_input_are_corrected_as_each_alone() -> None:
    x, noise = inputs(2048, 16), torch.randn(2048, 16)
    halves = [Inputs.of(x[half] + 0.1 * noise[half], x[half])
              for half in (slice(0, 1500), slice(1500, None))]  # fmt: skip
    weights = [torch.randn(8, 16), torch.randn(3, 16), torch.randn(20, 16)]
    together = corrected(weights, *halves)
    for weight, (moved, share) in zip(weights, together, strict=True):
        ((alone, alone_share),) = corrected([weight], *halves)
        assert share == pytest.approx(alone_share, rel=1e-4)
        assert torch.allclose(moved, alone, atol=1e-5)


def test_without_other_wishes_nothing_is_corrected() -> None:
    x, weight = inputs(64, 16), torch.randn(8, 16)
    ((moved, share),) = corrected([weight], Inputs.of(x, None), Inputs.of(x, None))
    assert moved is weight
    assert share == 0


def test_a_correction_that_is_noise_is_not_held() -> None:
    weight, x, noise = torch.randn(8, 16), inputs(4096, 16), torch.randn(4096, 16)
    judges = Inputs.of(x + 0.3 * noise, x + 0.3 * noise)
    assert held_share(weight, torch.randn(8, 16), judges) == (0, 0)


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
    kept = job.scratch / "sequential" / "layers" / "layer-00000.safetensors"
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
