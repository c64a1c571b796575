"""Estimated costs of single units against what rounding one really does to the predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from onboard import adapt, source, twins
from onboard.checkpoint import fp8, nvfp4, taps
from onboard.checkpoint.matrices import Group, Matrix, scale_groups
from onboard.checkpoint.models import Runner, open_reference
from onboard.checkpoint.skeleton import decoder_of
from onboard.evals.kl import Head, kl_divergence
from onboard.quantize import effects, sensitivity
from onboard.quantize.allocation import Unit
from onboard.quantize.effects import LOWER, Effects, InputScale, _signed
from onboard.quantize.sensitivity import Sensitivities, measure, units_of
from onboard.recipe import Adapt, Source
from tests.families import config_of
from tests.quantize.test_quantize import documents


def adaptation(bench: Any, root: Path) -> dict[str, Any]:
    bench.run("source", source.run, Source(model=str(root)))
    found: dict[str, Any] = bench.run("adapt", adapt.run, Adapt()).json("adaptation.json")
    return found


def moment(matrix: Matrix) -> Tensor:
    return torch.ones(matrix.shape[1])


def scale(module: str, format: str) -> Tensor:
    return {"nvfp4": nvfp4, "fp8": fp8}[format].tensor_scale(torch.tensor(4.0))


def weights_only(module: str, format: str) -> Tensor | None:
    """Engines quantize the inputs of FP8 matrices, always."""
    return scale(module, format) if format == "fp8" else None


def exact(module: str, format: str) -> Tensor | None:
    return None


def ids(count: int = 8, length: int = 24) -> list[Tensor]:
    return list(torch.tensor([row["ids"] for row in documents(count, length)]).split(4))


def sensitivities(
    root: Path, groups: list[Group], folder: Path, resident: bool = True, **changes: Any
) -> Sensitivities:
    runner = open_reference(root, torch.float32, resident=resident)
    settings = {"input_scale": exact, "scratch": folder, **changes}
    return measure(runner, groups, units_of(groups), ids(), moment, **settings)


def true_kl(root: Path, groups: list[Group], format: str, input_scale: InputScale) -> Tensor:
    """Return each unit's own KL, f64 [U], from whole forward passes."""
    runner: Runner = open_reference(root, torch.float32, resident=True)
    units = units_of(groups)
    work = Effects(runner, groups, units, moment, input_scale)
    taps.attach(runner.skeleton.model, work.places, work._see)

    def logits() -> Tensor:
        with torch.no_grad():
            return torch.cat([runner.model(b, use_cache=False).logits[:, :-1] for b in ids()])

    reference, found = logits(), []
    for unit in units:
        with work._rounded(unit, format):
            kl = kl_divergence(reference.flatten(0, 1), logits().flatten(0, 1))
        found.append(float(kl.mean()))
    return torch.tensor(found).double()


def rank_correlation(a: Tensor, b: Tensor) -> float:
    ranks = [np.argsort(np.argsort(x.numpy())) for x in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


@pytest.mark.parametrize("input_scale", [weights_only, scale], ids=["W4A16", "W4A4"])
@pytest.mark.parametrize("twin", ["llama_twin", "qwen3_moe_twin"])
def test_estimates_agree_with_single_units(
    request: pytest.FixtureRequest,
    bench: Any,
    tmp_path: Path,
    twin: str,
    input_scale: InputScale,
) -> None:
    root: Path = request.getfixturevalue(twin)
    groups = scale_groups(adaptation(bench, root))
    found = sensitivities(root, groups, tmp_path, draws=16, input_scale=input_scale)
    for format in LOWER:
        truth = true_kl(root, groups, format, input_scale)
        ratio = found.kl[format] / truth
        assert rank_correlation(found.kl[format], truth) > 0.8
        assert 0.5 < float(ratio.log().mean().exp()) < 1.5


@pytest.mark.parametrize(
    "case", ["gpt_oss", "qwen3_5_moe", "deepseek_v4", "llama4", "glm_moe_dsa", "nemotron_h"]
)
def test_the_way_back_is_that_of_autograd(bench: Any, tmp_path: Path, case: str) -> None:
    """A document's effects add up to <dL/dW, dW>, which one backward through the whole gives.

    Exactly for a single linear layer; where several matrices are rounded together, what is run
    again is not quite linear in them.
    """
    config = config_of(case)
    config.pop("auto_map", None)
    config.pop("quantization_config", None)
    root = twins.write(twins.shrink(config, vocab_size=256), tmp_path / "twin")
    groups = scale_groups(adaptation(bench, root))
    units, batch = units_of(groups), ids(4)[0]
    runner = open_reference(root, torch.float32, resident=False)
    work = Effects(runner, groups, units, moment, exact)
    found = work.measure([batch], 1, 5, tmp_path / "state", lambda done, total: None)
    for format in LOWER:
        sums = found[format][0][0].sum((0, 1))
        expected = whole_backward(root, groups, batch, format)
        assert torch.isfinite(sums).all()
        for n, unit in enumerate(units):
            tolerance = 0.35 if len(unit.modules) > 1 else 2e-3
            size = float(found[format][0][0, :, :, n].norm())
            assert float(sums[n]) == pytest.approx(float(expected[n]), abs=tolerance * size)


def whole_backward(root: Path, groups: list[Group], batch: Tensor, format: str) -> Tensor:
    runner = open_reference(root, torch.float32, resident=True)
    units = units_of(groups)
    work = Effects(runner, groups, units, moment, exact)
    model, named = runner.model, dict(runner.skeleton.model.named_parameters())
    head = Head.of(model, model.get_output_embeddings().weight.shape[0])
    own = {work.point[m].parameter for unit in units for m in unit.modules}
    for name in own:
        named[name].requires_grad_()
    hidden = decoder_of(model)(input_ids=batch, use_cache=False).last_hidden_state
    hidden.backward(_signed(head, hidden.detach(), 1, torch.Generator().manual_seed(5))[0])
    sums = []
    for unit in units:
        names = {work.point[m].parameter for m in unit.modules}
        before = {name: named[name].data for name in names}
        with work._rounded(unit, format):
            change = {name: named[name].data - before[name] for name in names}
        sums.append(sum(float((named[n].grad * change[n]).sum()) for n in names))
    return torch.tensor(sums)


def test_streamed_equals_resident(bench: Any, tmp_path: Path, qwen3_moe_twin: Path) -> None:
    groups = scale_groups(adaptation(bench, qwen3_moe_twin))
    found = []
    for resident in (True, False):
        folder = tmp_path / str(resident)
        folder.mkdir()
        found.append(
            sensitivities(qwen3_moe_twin, groups, folder, resident=resident, input_scale=scale)
        )
    for format in LOWER:
        assert torch.allclose(found[0].kl[format], found[1].kl[format], rtol=1e-5)
    assert torch.allclose(found[0].gram, found[1].gram, rtol=1e-4, atol=1e-9)


def test_a_killed_run_goes_on_where_it_was(
    bench: Any, tmp_path: Path, llama_twin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one layer of two: the head is not gone through again, and the result is the same."""
    groups = scale_groups(adaptation(bench, llama_twin))
    whole = tmp_path / "whole"
    whole.mkdir()

    def killed(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sensitivities(llama_twin, groups, tmp_path, resident=False, progress=killed)
    expected = sensitivities(llama_twin, groups, whole, resident=False)
    monkeypatch.delattr(effects, "_signed")
    layers: list[int] = []
    found = sensitivities(
        llama_twin, groups, tmp_path, False, progress=lambda done, total: layers.append(done)
    )
    assert layers == [2]
    assert torch.equal(found.gram, expected.gram)
    assert all(torch.equal(found.kl[f], expected.kl[f]) for f in LOWER)


def test_the_file_holds_everything(tmp_path: Path) -> None:
    units = (Unit("a", ("a.q", "a.k"), 32, "attention"), Unit("b", ("b",), 16, "expert", 0.25))
    kl = {format: torch.rand(2).double() for format in LOWER}
    stored = Sensitivities(units, kl, torch.rand(3, 2, 2).double(), (5, 5, 7))
    stored.save(tmp_path / "sensitivities.safetensors")
    read = Sensitivities.load(tmp_path / "sensitivities.safetensors")
    assert (read.units, read.tokens) == (units, (5, 5, 7))
    assert torch.equal(read.gram, stored.gram)
    assert all(torch.equal(read.kl[f], kl[f]) for f in LOWER)


def test_units_are_what_an_engine_gives_one_format(bench: Any, qwen3_moe_twin: Path) -> None:
    groups = scale_groups(adaptation(bench, qwen3_moe_twin))
    attention, out, experts = units_of(groups, experts_per_token=2)[:3]
    prefix = "model.layers.0"
    names = [unit.name for unit in (experts, attention, out)]
    assert sorted(names) == [
        f"{prefix}.mlp.experts",
        f"{prefix}.self_attn.o_proj",
        f"{prefix}.self_attn.q_proj",
    ]
    by_name = {unit.name: unit for unit in (attention, out, experts)}
    fused = by_name[f"{prefix}.self_attn.q_proj"]
    assert [m.rpartition(".")[2] for m in fused.modules] == ["q_proj", "k_proj", "v_proj"]
    routed = by_name[f"{prefix}.mlp.experts"]
    assert (len(routed.modules), routed.active) == (8 * 3, 0.25)
    assert routed.parameters == 8 * 3 * 32 * 64
    assert fused.active == 1.0


@pytest.fixture
def windows_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sensitivity, "WINDOW", 4)


@pytest.mark.usefixtures("windows_of_four")
def test_windows_are_summed_before_they_are_squared() -> None:
    """Five tokens, of which four predict: windows of 4 and 1; two draws count as one on average."""
    made_up = torch.tensor([[[1.0, 2, 3, 4, 5]], [[1.0, 1, 1, 1, 0]]]).unsqueeze(-1)
    gram = sensitivity._gram(made_up)
    assert gram.shape == (1, 1, 1)
    assert float(gram) == pytest.approx(((10**2 + 5**2) + 4**2) / 2 / 4)


@pytest.mark.usefixtures("windows_of_four")
def test_documents_count_by_their_tokens() -> None:
    """Two documents of 5 tokens, and one of 9: sums (4, 1) twice and (4, 4, 1), over 4 and 8."""
    batches = [torch.ones(1, 2, 5, 3), torch.ones(1, 1, 9, 3)]
    units = tuple(Unit(f"u{n}", (f"u{n}",), 1, "mlp") for n in range(3))
    found = sensitivity._summed_up(units, dict.fromkeys(LOWER, batches))
    assert found.tokens == (4, 4, 8)
    assert found.gram[:, 0, 0].tolist() == pytest.approx([17 / 4, 17 / 4, 33 / 8])
    assert found.kl["fp8"].tolist() == pytest.approx([(17 + 17 + 33) / 16 / 2] * 3)


def test_signed_gradients_have_the_fisher_information_for_covariance() -> None:
    """With an identity for a head, a gradient at a state is v itself, and E[v vᵀ] = F."""
    head = Head(torch.eye(4), 4)
    states = torch.tensor([[[2.0, 0.5, 0.0, -1.0], [1.0, 1.0, 1.0, 1.0]]])
    drawn = _signed(head, states, 20_000, torch.Generator().manual_seed(0))
    p = states[0, 0].softmax(-1)
    covariance = drawn[:, 0, 0].T @ drawn[:, 0, 0] / len(drawn)
    assert torch.allclose(covariance, torch.diag(p) - torch.outer(p, p), atol=0.01)
    assert not drawn[:, 0, 1].any(), "the last token predicts nothing"
