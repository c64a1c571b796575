"""Distillation on twins: it begins at the stored bytes, gains on held-out text, and never loses."""

from __future__ import annotations

import json
import os
import re
import socket
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from onboard import twins
from onboard.checkpoint import fp8, nvfp4
from onboard.checkpoint.matrices import Group, scale_groups
from onboard.checkpoint.models import load_candidate, load_reference, open_reference
from onboard.checkpoint.reader import Reader
from onboard.checkpoint.skeleton import decoder_of
from onboard.evals.kl import Head, kl_divergence
from onboard.quantize import distillation
from onboard.quantize.distillation import Outcome, distill, loss_and_gradient
from onboard.quantize.layers import Layers, save_layer
from onboard.quantize.straight_through import (
    HIGH,
    LOW,
    RoundedMatrix,
    SharedScale,
    latents,
    passed_through,
)
from onboard.quantize.student import Beginning, Student, begin
from onboard.recipe import Distill
from tests.families import config_of
from tests.quantize.test_quantize import documents, quantized, tensors

TWINS, HOW = ["llama_twin", "qwen3_moe_twin"], ["nvfp4", "none"]
QUICK = Distill(epochs=4, batch_size=4, evaluate_steps=8, learning_rate=5e-3, warmup_steps=2)
PATIENT = {"epochs": 10, "patience": 20}


@dataclass(frozen=True)
class Rounded:
    """A twin, and what round to nearest made of it."""

    root: Path
    adaptation: dict[str, Any]
    checkpoint: Path
    start: Layers
    folder: Path
    input_scale: Callable[[str], Tensor] | None

    @property
    def groups(self) -> list[Group]:
        return scale_groups(self.adaptation)

    def distill(self, scratch: str, params: Distill = QUICK, **more: Any) -> Outcome:
        room, own = self.folder / scratch, (self.root, self.start, self.groups, self.input_scale)
        room.mkdir(exist_ok=True)
        return distill(*own, texts(32), texts(8, 9), params, room, **more)

    def student(self, train: Any = "weights") -> Student:
        skeleton = open_reference(self.root, torch.float32, resident=True).skeleton
        reader = Reader.open(self.root)
        beginning = Beginning(skeleton, reader, self.start, self.groups, self.input_scale)
        return begin(beginning, train, distillation.INSET)


def texts(count: int, seed: int = 3) -> list[list[int]]:
    """Documents of several lengths, so that batches are padded."""
    random = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, 256, (24 + 4 * (n % 3),), generator=random).tolist() for n in range(count)
    ]


def layers_of(checkpoint: Path, folder: Path, in_fp8: str) -> Layers:
    """Take a checkpoint apart, a file a layer; modules that end with `in_fp8` become FP8."""
    found, files = tensors(checkpoint), defaultdict[str, dict[str, Tensor]](dict)
    modules = [n.removesuffix(".weight_scale_2") for n in found if n.endswith(".weight_scale_2")]
    for module in modules:
        parts = {n: found[f"{module}.{n}"] for n in ("weight", "weight_scale", "weight_scale_2")}
        if in_fp8 and module.endswith(in_fp8):
            weight = nvfp4.dequantize(*parts.values())
            scale = fp8.tensor_scale(weight.abs().amax())
            parts = {"weight": fp8.quantize(weight, scale), "weight_scale": scale}
        number = re.search(r"\d+", module)
        assert number is not None
        files[number[0]] |= {f"{module}.{name}": part for name, part in parts.items()}
    folder.mkdir()
    for layer, held in files.items():
        notes = {n.removesuffix(".weight"): {"role": "mlp"} for n in held if n.endswith(".weight")}
        save_layer(folder / f"layer-{int(layer):05d}.safetensors", held, notes)
    return Layers(folder)


@pytest.fixture
def rounded(request: pytest.FixtureRequest, bench: Any, tmp_path: Path) -> Callable[..., Rounded]:
    def make(twin: str | Path, activations: str = "none", in_fp8: str = "") -> Rounded:
        root = twin if isinstance(twin, Path) else request.getfixturevalue(twin)
        made = quantized(bench, root, documents(4), method="rtn", activations=activations)
        start = layers_of(made / "checkpoint", tmp_path / "rtn", in_fp8)
        adaptation = bench.artifacts["adapt"].json("adaptation.json")
        scales = Reader.open(made / "checkpoint").input_scales()
        scale = scales.__getitem__ if scales else None
        return Rounded(root, adaptation, made / "checkpoint", start, tmp_path, scale)

    return make


def files(folder: Path) -> dict[str, Tensor]:
    """Return every tensor in a folder's layers and replacements, as bytes."""
    tensors = {k: v for f in sorted(folder.glob("*.safetensors")) for k, v in load_file(f).items()}
    return {k: v.contiguous().reshape(-1).view(torch.uint8) for k, v in tensors.items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# --- the rounding


def test_cells_are_those_of_e2m1() -> None:
    """Just inside a cell's bounds a number rounds to its value, just outside to another."""
    for value, low, high in zip(nvfp4.E2M1, LOW, HIGH, strict=True):
        inside = torch.tensor([low + 1e-4, high - 1e-4])
        assert nvfp4.round_to_e2m1(inside).tolist() == [value, value]
    outside = torch.tensor([low - 1e-4 for low in LOW[1:]])
    assert nvfp4.round_to_e2m1(outside).tolist() == list(nvfp4.E2M1[:-1])


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=16, max_size=16), st.floats(0.001, 1))
def test_the_start_has_the_stored_codes_whatever_the_source(row: list[float], inset: float) -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    packed = nvfp4.pack(codes)
    found = latents(torch.tensor(row), nvfp4.unpack(packed), inset)
    assert torch.equal(nvfp4.pack(nvfp4.codes(nvfp4.round_to_e2m1(found))), packed)


def test_the_start_is_where_the_source_is_while_the_cell_allows() -> None:
    values = torch.tensor([2.0, 2.0, 2.0, -4.0, 6.0])
    source = torch.tensor([2.1, 0.3, 9.0, -4.3, 6.4])
    assert torch.allclose(latents(source, values, 0.5), torch.tensor([2.1, 1.875, 2.25, -4.3, 6.4]))


def test_a_rounded_input_forwards_and_an_untouched_gradient_back() -> None:
    x = torch.randn(4, 32, requires_grad=True)
    rounded = nvfp4.quantize_dequantize(x.detach(), torch.tensor(0.001))
    out = passed_through(x, rounded)
    weight = torch.randn(4, 32)
    (found,) = torch.autograd.grad((out * weight).sum(), x)
    assert torch.equal(out, rounded)
    assert torch.equal(found, weight)


def test_loss_and_gradient_are_autograds_over_all_tokens_at_once() -> None:
    random = torch.Generator().manual_seed(0)
    head = Head(torch.randn(60, 16, generator=random), 50, scale=0.5, softcap=3.0)
    teacher, found = torch.randn(2, 300, 16, generator=random).unbind()
    loss, gradient = loss_and_gradient(teacher, found, head)
    whole = found.clone().requires_grad_(True)
    expected = kl_divergence(head.logits(teacher), head.logits(whole)).sum()
    (exact,) = torch.autograd.grad(expected, whole)
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    assert torch.allclose(gradient, exact, atol=1e-6)


# --- the student


@pytest.mark.parametrize(
    ("case", "activations", "train"),
    [
        *((twin, how, train) for twin in TWINS for how in HOW for train in ("weights", "norms")),
        ("gpt_oss", "nvfp4", "norms"),
        ("gpt_oss", "none", "weights"),
        ("qwen3_5_moe", "none", "weights"),
        ("deepseek_v3", "none", "weights"),
        ("llama4", "none", "norms"),
    ],
)
def test_the_student_begins_as_the_written_checkpoint(
    rounded: Callable[..., Rounded], tmp_path: Path, case: str, activations: str, train: str
) -> None:
    """Its states are the checkpoint's, and it would store the same bytes, norms included."""
    made = rounded(case if case in TWINS else layout(case, tmp_path), activations)
    model, ids = made.student(train), torch.tensor([texts(1)[0]])
    candidate = load_candidate(made.checkpoint, made.adaptation, torch.float32)
    with torch.inference_mode():
        found = model(ids, torch.ones_like(ids))
        expected = decoder_of(candidate)(ids, use_cache=False).last_hidden_state
    if case == "deepseek_v3":  # what stays of its block FP8 is written in bf16
        assert torch.allclose(found, expected, atol=0.05)
    else:
        assert torch.equal(found, expected)
    changed = model.stored()
    assert changed.keys() == made.start.notes.keys()
    for module, new in changed.items():
        before = made.start.parts(module)
        assert all(torch.equal(part, before[name]) for name, part in new.items())
    reader = Reader.open(made.root)
    assert all(torch.equal(norm, reader.tensor(n)) for n, norm in model.replaced().items())
    assert len(model.replaced()) >= 5


def layout(case: str, folder: Path) -> Path:
    """Write a twin whose experts lie another way: interleaved, transposed, stacked by the class."""
    config = config_of(case)
    config.pop("auto_map", None)
    if case == "gpt_oss":
        del config["quantization_config"]  # bf16, as transformers saves it: nothing is exact
    return twins.write(twins.shrink(config, vocab_size=512), folder / "twin")


def test_after_a_step_the_model_computes_with_what_would_be_stored(
    rounded: Callable[..., Rounded],
) -> None:
    case = rounded("qwen3_moe_twin")
    model = case.student()
    ids = torch.tensor([texts(1)[0]])
    model(ids, torch.ones_like(ids)).square().sum().backward()
    model.take_gradients()
    matrices = [one for one in model.trained if isinstance(one, RoundedMatrix)]
    moved = 0
    for one in model.trained:
        if one.latent.grad is not None:
            one.latent.data -= 0.6 * one.latent.grad.sign()
    model.show()
    for one in matrices:
        parts = {**case.start.parts(one.module), **one.stored()}
        moved += not torch.equal(parts["weight"], case.start.parts(one.module)["weight"])
        held = one.place.of(one.parameter.data)
        assert torch.equal(held, nvfp4.dequantize(*parts.values()))
    assert moved > len(matrices) / 2, "most experts saw a token"


def share(one: RoundedMatrix) -> float:
    assert one.parameter.grad is not None
    return float(one.place.of(one.parameter.detach() * one.parameter.grad).sum())


@pytest.mark.parametrize("twin", TWINS)
def test_scales_get_the_gradient_of_their_weights(
    rounded: Callable[..., Rounded], twin: str
) -> None:
    """d loss / d log scale = sum of W * d loss / d W over the group, by autograd on the weights."""
    case, ids = rounded(twin), torch.tensor([texts(1)[0]])
    scales, weights = case.student("norms"), case.student("weights")
    for model in (scales, weights):
        model(ids, torch.ones_like(ids)).square().sum().backward()
    matrices = {one.module: one for one in weights.trained if isinstance(one, RoundedMatrix)}
    groups = [one for one in scales.trained if isinstance(one, SharedScale)]
    assert len(groups) == len(case.groups)
    for group in groups:
        own = [matrices[module] for module in group.parts]
        expected = sum(share(one) for one in own)
        found = 0.0 if group.latent.grad is None else float(group.latent.grad)
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-3)


# --- the whole


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("activations", HOW)
def test_held_out_kl_falls_and_the_result_is_what_was_measured(
    rounded: Callable[..., Rounded], twin: str, activations: str
) -> None:
    case, patient = rounded(twin, activations), QUICK.model_copy(update=PATIENT)
    outcome = case.distill("scratch", patient)
    assert outcome.kl_after < (0.95 if case.input_scale else 0.9) * outcome.kl_before
    assert outcome.kl_after == min(look.kl for look in outcome.curve)
    result = replace(case, start=Layers(outcome.folder))
    again = result.distill("again", QUICK.model_copy(update={"minutes": 1e-6}))
    assert again.kl_before == outcome.kl_after, "what is stored is what was measured"
    notes = Layers(outcome.folder).notes
    assert notes.keys() == case.start.notes.keys()
    assert any(note["codes_changed"] > 0 for note in notes.values())


@pytest.mark.parametrize("twin", TWINS)
def test_norms_and_shared_scales_alone_help_too(rounded: Callable[..., Rounded], twin: str) -> None:
    case = rounded(twin)
    outcome = case.distill("scratch", QUICK.model_copy(update={"train": "norms"}))
    assert outcome.kl_after < outcome.kl_before
    end = Layers(outcome.folder)
    for group in case.groups:
        stored = [end.parts(m.module) for m in group]
        assert len({part["weight_scale_2"].item() for part in stored}) == 1
        for matrix, part in zip(group, stored, strict=True):
            assert torch.equal(part["weight"], case.start.parts(matrix.module)["weight"])
    reader = Reader.open(case.root)
    assert end.replaced
    assert all(norm.dtype == reader.tensor(name).dtype for name, norm in end.replaced.items())


def test_what_would_be_worse_is_not_kept(rounded: Callable[..., Rounded]) -> None:
    case = rounded("llama_twin")
    outcome = case.distill("scratch", QUICK.model_copy(update={"learning_rate": 50.0}))
    assert (outcome.best_step, outcome.stopped) == (0, "patience")
    assert outcome.kl_after == outcome.kl_before
    assert_same(files(outcome.folder), files(case.folder / "rtn"))
    assert Layers(outcome.folder).notes == case.start.notes


def test_a_matrix_in_fp8_stays(rounded: Callable[..., Rounded]) -> None:
    case = rounded("llama_twin", in_fp8="down_proj")
    outcome = case.distill("scratch")
    assert outcome.kl_after < outcome.kl_before
    before, after = files(case.folder / "rtn"), files(outcome.folder)
    for name, stored in before.items():
        if "down_proj" in name:
            assert torch.equal(after[name], stored)


def test_minutes_end_it_and_the_state_is_kept(rounded: Callable[..., Rounded]) -> None:
    case = rounded("llama_twin")
    params = QUICK.model_copy(update={"minutes": 1e-4, "epochs": 1000})
    outcome = case.distill("scratch", params)
    assert outcome.stopped == "minutes"
    assert json.loads((outcome.folder / "distillation.json").read_text())["stopped"] == "minutes"


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("train", ["weights", "norms"])
def test_a_run_that_was_killed_ends_in_the_same_bytes(
    rounded: Callable[..., Rounded], monkeypatch: pytest.MonkeyPatch, twin: str, train: str
) -> None:
    case = rounded(twin)
    params = QUICK.model_copy(update={"train": train})
    whole = case.distill("whole", params)
    steps: list[int] = []

    def killed(what: str, done: int, total: int, unit: str) -> None:
        if what == "distilling":
            steps.append(done)
            if len(steps) == 11:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        case.distill("killed", params, progress=killed)
    resumed = case.distill("killed", params, progress=killed)
    assert steps[11] == 9, "the step after the look"
    assert_same(files(resumed.folder), files(whole.folder))
    assert [look.kl for look in resumed.curve] == [look.kl for look in whole.curve]
    monkeypatch.setattr(distillation, "open_reference", load_reference)  # would not fit
    assert case.distill("killed", params) == resumed, "finished: nothing is loaded"


def _distill_as_one_of_two(rank: int, case: Rounded, port: int, scratch: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
    case.distill(scratch)


def test_two_processes_train_as_one_does(
    rounded: Callable[..., Rounded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums are taken in another order, so the figures agree only as far as rounding lets them."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2])  # where children look for `tests`
    case = rounded("llama_twin")
    one = case.distill("one")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = (case, port, "two")
    spawn(_distill_as_one_of_two, arguments, nprocs=2)  # type: ignore[no-untyped-call]
    two = Outcome.read(case.folder / "two" / "distilled")
    assert two.kl_before == pytest.approx(one.kl_before, rel=1e-5)
    assert two.kl_after == pytest.approx(one.kl_after, rel=0.1)
    assert two.curve[1].train_loss == pytest.approx(one.curve[1].train_loss, rel=0.02)
