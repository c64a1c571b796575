"""An FP8 KV cache, by hand: what attention reads from it, and which layer has which scales."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Gemma3TextConfig

from onboard import twins
from onboard.checkpoint.cache import (
    Fp8Cache,
    Passing,
    fp8_cache,
    has_fp8_cache,
    projections,
    through_fp8,
)
from onboard.checkpoint.models import Runner, open_reference
from onboard.checkpoint.reader import Reader
from onboard.checkpoint.skeleton import decoder_of
from onboard.evals.hidden import last_hidden
from tests.conftest import SMALL, save_twin
from tests.families import config_of

DOCUMENTS = [[(7 * n + 3 * k) % 250 for k in range(40 + 9 * n)] for n in range(3)]


@pytest.fixture(scope="session")
def gemma3_twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers that see 8 tokens back and one that sees all."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = Gemma3TextConfig(
        **{**SMALL, "num_hidden_layers": 3}, sliding_window=8, layer_types=kinds
    )
    return save_twin(tmp_path_factory.mktemp("gemma3"), config)


@pytest.fixture
def twin(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of a twin by its name; gemma3 has sliding windows, deepseek_v3 caches a latent."""
    if request.param == "deepseek_v3":
        pytest.importorskip("aiconfigurator_core")
        return twins.write(twins.shrink(config_of("deepseek_v3"), vocab_size=256), tmp_path / "m")
    source: Path = request.getfixturevalue(f"{request.param}_twin")
    return Path(shutil.copytree(source, tmp_path / "m"))


every_kind = pytest.mark.parametrize(
    "twin", ["llama", "gemma3", "qwen3_moe", "deepseek_v3"], indirect=True
)


def nothing(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    return keys, values


def opened(root: Path, resident: bool = True) -> Runner:
    return open_reference(root, torch.float32, resident)


def add_scales(root: Path, scales: dict[str, float]) -> None:
    tensors = load_file(root / "model.safetensors")
    more = {name: torch.tensor(scale) for name, scale in scales.items()}
    save_file(tensors | more, root / "model.safetensors", {"format": "pt"})


def test_a_scale_by_hand_gives_the_predicted_rounding() -> None:
    """In steps of the scale, E4M3 has 16, 18, 20 between 16 and 32, and nothing beyond 448."""
    x = torch.tensor([0.0, -0.0, 1.0, 8.0, 8.5, 8.4, 9.0, 223.0, 224.0, 500.0, -1e6])
    expected = torch.tensor([0.0, -0.0, 1.0, 8.0, 8.0, 8.0, 9.0, 224.0, 224.0, 224.0, -224.0])
    found = through_fp8(x, torch.tensor(0.5))
    assert torch.equal(found, expected)
    assert torch.equal(found.signbit(), expected.signbit())
    assert through_fp8(x.to(torch.bfloat16), torch.tensor(0.5)).dtype == torch.bfloat16


def test_keys_and_values_have_their_own_scales_and_layers_without_have_one() -> None:
    cache = Fp8Cache({0: (torch.tensor(0.01), torch.tensor(1.0))})
    x = torch.tensor([1.06, 100.0])
    keys, values = cache._round(0, x, x)
    assert keys.tolist() == pytest.approx([1.04, 4.48])  # 106 lies between 104 and 112; 448 is most
    assert values.tolist() == [1.0, 96.0]  # of 1, 1.125 and of 96, 104
    assert torch.equal(cache._round(1, x, x)[0], values)


@every_kind
def test_a_cache_that_changes_nothing_changes_no_bit(twin: Path) -> None:
    model = opened(twin).model
    plain = last_hidden(model, DOCUMENTS)
    assert torch.equal(plain, last_hidden(model, DOCUMENTS, Passing(model.config, nothing)))


@every_kind
def test_attention_reads_what_the_cache_gives_back(twin: Path) -> None:
    """Rounding the projections' outputs, where they are the values as cached, does the same."""
    runner = opened(twin)
    model = runner.model
    read: list[tuple[int, Tensor]] = []

    def see(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        read.append((layer, values))
        return keys, through_fp8(values, torch.tensor(0.02))

    rounded = last_hidden(model, DOCUMENTS, Passing(model.config, see))
    assert [layer for layer, _ in read] == list(range(len(runner.skeleton.layers)))
    modules = projections(runner.skeleton)
    if not modules:  # latent attention projects after the cache
        assert not torch.equal(rounded, last_hidden(model, DOCUMENTS))
        return
    hooks = [
        runner.skeleton.model.get_submodule(found["v"]).register_forward_hook(
            lambda m, a, out: through_fp8(out, torch.tensor(0.02))
        )
        for found in modules.values()
    ]
    assert torch.equal(rounded, last_hidden(model, DOCUMENTS))
    assert len(hooks) == len(runner.skeleton.layers)


@every_kind
def test_a_streamed_model_rounds_alike(twin: Path) -> None:
    cache = Fp8Cache({0: (torch.tensor(0.02), torch.tensor(0.01))})

    def hidden(resident: bool) -> list[Tensor]:
        runner = opened(twin, resident)
        config = runner.model.config
        passes: list[Callable[[], Tensor]] = [
            lambda ids=ids: last_hidden(runner.model, [ids], cache.fresh(config))  # type: ignore[misc]
            for ids in DOCUMENTS
        ]
        return runner.run(passes)

    for whole, streamed in zip(hidden(True), hidden(False), strict=True):
        assert torch.equal(whole, streamed)


def test_layers_are_told_apart_by_the_cache_they_fill(tmp_path: Path) -> None:
    """A layer of LongCat has two attentions, and a cache of each."""
    pytest.importorskip("aiconfigurator_core")
    config = twins.shrink(config_of("longcat_flash"), vocab_size=256)
    runner = opened(twins.write(config, tmp_path))
    seen: list[int] = []

    def see(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(layer)
        return keys, values

    last_hidden(runner.model, DOCUMENTS, Passing(runner.model.config, see))
    assert seen == list(range(2 * len(runner.skeleton.layers)))


def test_scales_are_read_from_the_checkpoint(llama_twin: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(llama_twin, tmp_path / "m"))
    stem = "model.layers.{}.self_attn.{}_proj.{}_scale"
    both = {stem.format(0, part, part): value for part, value in (("k", 0.5), ("v", 0.25))}
    add_scales(root, both | {stem.format(1, "k", "k"): 2.0})
    cache = fp8_cache(Reader.open(root), opened(llama_twin).skeleton)
    assert cache is not None
    found = {layer: (k.item(), v.item()) for layer, (k, v) in cache.scales.items()}
    assert found == {0: (0.5, 0.25), 1: (2.0, 2.0)}  # vLLM takes the one that it finds for both


@pytest.mark.parametrize(
    ("file", "content"),
    [
        (
            "config.json",
            {"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}},
        ),
        ("hf_quant_config.json", {"quantization": {"kv_cache_quant_algo": "FP8"}}),
    ],
)
def test_a_declared_cache_without_scales_has_scale_one(
    llama_twin: Path, tmp_path: Path, file: str, content: dict[str, Any]
) -> None:
    root = Path(shutil.copytree(llama_twin, tmp_path / "m"))
    assert fp8_cache(Reader.open(root), opened(llama_twin).skeleton) is None
    path = root / file
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(before | content))
    assert has_fp8_cache(Reader.open(root))
    cache = fp8_cache(Reader.open(root), opened(llama_twin).skeleton)
    assert cache == Fp8Cache({})


def test_serving_gives_every_pass_a_cache_of_its_own(llama_twin: Path) -> None:
    model = opened(llama_twin).model
    cache = Fp8Cache({0: (torch.tensor(1e-4), torch.tensor(1e-4))})
    ids = torch.tensor(DOCUMENTS[:1])
    expected = decoder_of(model)(input_ids=ids, use_cache=True, cache=cache.fresh(model.config))
    plain = model(ids).logits
    with cache.serving(model):
        first, second = model(ids), model(ids, use_cache=False)
    assert torch.equal(first.logits, model.lm_head(expected.last_hidden_state))
    assert torch.equal(first.logits, second.logits)
    assert torch.equal(model(ids).logits, plain)
    assert not torch.equal(first.logits, plain)
