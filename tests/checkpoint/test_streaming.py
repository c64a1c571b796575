"""A layer at a time gives what the whole model gives, and reads every tensor once."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onboard.checkpoint import taps
from onboard.checkpoint.matrices import Matrix
from onboard.checkpoint.models import load_reference, open_reference
from onboard.checkpoint.reader import Reader
from onboard.checkpoint.skeleton import Skeleton
from onboard.checkpoint.streaming import Pass, in_lock_step, pause, stream_layers
from onboard.errors import InputError

IDS = torch.arange(3, 67).view(2, 32)
EXPERTS = 8


@pytest.fixture(params=["llama_twin", "qwen3_moe_twin"])
def twin(request: pytest.FixtureRequest) -> Path:
    folder: Path = request.getfixturevalue(request.param)
    return folder


def expert(layer: int, number: int, part: str) -> Matrix:
    module = f"model.layers.{layer}.mlp.experts.{number}.{part}"
    return Matrix(module, f"{module}.weight", (32, 64), "expert")


def test_streamed_logits_are_the_whole_model_s(twin: Path) -> None:
    whole = load_reference(twin, torch.float32)
    streamed = open_reference(twin, torch.float32, resident=False)
    reads: Counter[str] = Counter()

    def read(name: str) -> torch.Tensor:
        reads[name] += 1
        return streamed.read(name)

    passes = [lambda row=row: streamed.model(row[None], use_cache=False).logits for row in IDS]
    found = torch.cat(replace(streamed, read=read).run(passes))
    with torch.no_grad():
        expected = torch.cat([whole(row[None], use_cache=False).logits for row in IDS])
    assert torch.equal(found, expected)
    layers = [n for names in streamed.skeleton.inside_layers() for n in names]
    assert reads == dict.fromkeys(layers, 1)
    assert all(p.is_meta for p in streamed.skeleton.layers.parameters()), "a layer was kept"


def test_every_layer_is_loaded_once_and_alone() -> None:
    layers = nn.ModuleList(nn.Identity() for _ in range(3))
    said: list[Any] = []
    calls: list[int] = []
    for number, layer in enumerate(layers):
        layer.forward = lambda x, number=number: calls.append(number) or x

    def forward(x: int) -> int:
        for number, layer in enumerate(layers):
            layer(torch.zeros(()))
            said.append((x, number))
        return x

    def visit(number: int, runs: Sequence[Pass[int]]) -> None:
        said.append(f"visit {number}")
        if number == 1:
            runs[0].try_out()
        for run in runs:
            run.go_on()

    result = in_lock_step(layers, visit, [lambda: forward(10), lambda: forward(11)])
    assert result == [10, 11]
    assert said == [step for n in range(3) for step in (f"visit {n}", (10, n), (11, n))]
    assert calls == [0, 0, 1, 1, 1, 2, 2], "tried out once, and nothing of it is left"


def test_a_paused_pass_goes_on_with_the_weights_of_then() -> None:
    layers = nn.ModuleList(nn.Identity() for _ in range(2))
    weight, said = [1.0], []

    def layer(x: float) -> float:
        pause()
        said.append(x * weight[0])
        return x * weight[0]

    layers[0].forward = layer

    def visit(number: int, runs: Sequence[Pass[float]]) -> None:
        if number == 0:
            for run in runs:
                run.try_out()
            assert said == [], "all of them wait inside"
            weight[0] = 3.0
        for run in runs:
            run.go_on()

    passes = [lambda x=x: layers[1](layers[0](x)) for x in (1.0, 2.0)]
    assert in_lock_step(layers, visit, passes) == [3.0, 6.0]
    assert said == [3.0, 6.0], "no part of the layer ran twice"


def test_gradient_modes_are_those_of_each_pass_and_the_thread_is_one() -> None:
    layers = nn.ModuleList([nn.Identity()])
    threads: set[int] = set()

    def modes() -> tuple[bool, bool]:
        threads.add(threading.get_ident())
        return torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def forward(inference: bool, gradients: bool) -> list[tuple[bool, bool]]:
        with torch.inference_mode(inference), torch.set_grad_enabled(gradients):
            before = modes()
            layers[0](torch.zeros(()))
            inside = modes()
        return [before, inside, modes()]

    def visit(number: int, runs: Sequence[Pass[Any]]) -> None:
        assert modes() == (False, True)
        for run in runs:
            run.go_on()
            assert modes() == (False, True)

    wanted = [(False, True), (True, False), (False, False)]
    found = in_lock_step(layers, visit, [lambda mode=mode: forward(*mode) for mode in wanted])
    assert found == [[mode, mode, (True, False)] for mode in wanted]
    assert threads == {threading.get_ident()}, "OpenMP gives every other thread a team of its own"


def test_an_error_inside_a_pass_is_raised() -> None:
    def fail() -> None:
        raise InputError("no")

    with pytest.raises(InputError, match="no"):
        in_lock_step(nn.ModuleList(), lambda number, runs: None, [fail])


def test_taps_count_each_routed_token_and_can_replace_it(qwen3_moe_twin: Path) -> None:
    model = load_reference(qwen3_moe_twin, torch.float32)
    reader = Reader.open(qwen3_moe_twin)
    skeleton = Skeleton(qwen3_moe_twin, reader.weights, torch.float32)
    matrices = [expert(0, e, p) for e in range(EXPERTS) for p in ("gate_proj", "down_proj")]
    places = taps.points(skeleton, matrices)
    assert len(places) == 2 * EXPERTS
    tokens: Counter[str] = Counter()

    def see(point: taps.Point, x: torch.Tensor) -> torch.Tensor:
        tokens[point.parameter.rpartition(".")[2]] += x.shape[:-1].numel()
        return torch.zeros_like(x)

    with torch.no_grad():
        before = model(IDS, use_cache=False).logits
        handles = taps.attach(model, places, see)
        after = model(IDS, use_cache=False).logits
        for handle in handles:
            handle.remove()
        again = model(IDS, use_cache=False).logits
    assert tokens == {"gate_up_proj": 2 * IDS.numel(), "down_proj": 2 * IDS.numel()}  # top 2
    assert not torch.allclose(before, after)
    assert torch.equal(before, again)


def test_a_missing_weight_is_named(qwen3_moe_twin: Path) -> None:
    reader = Reader.open(qwen3_moe_twin)
    names = [n for n in reader.weights if n != "model.layers.1.self_attn.q_proj.weight"]
    skeleton = Skeleton(qwen3_moe_twin, names, torch.float32)
    skeleton.load({name: reader.weight(name) for name in skeleton.outside_layers()})
    forward = [lambda: skeleton.model(IDS, use_cache=False)]
    with pytest.raises(InputError, match=r"model\.layers\.1\.self_attn\.q_proj\.weight"):
        stream_layers(skeleton, reader.weight, forward)


def test_a_tensor_that_the_class_ignores_is_named(llama_twin: Path) -> None:
    names = [*Reader.open(llama_twin).weights, "model.layers.0.self_attn.gate.weight"]
    with pytest.raises(InputError, match=r"ignores model\.layers\.0\.self_attn\.gate\.weight"):
        Skeleton(llama_twin, names, torch.float32)
