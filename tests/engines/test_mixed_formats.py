"""Mixed checkpoints inside the real vLLM: what it computes is what the candidate computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from onboard.checkpoint.models import load_candidate
from onboard.engines.vllm import modes
from tests.conftest import SMALL, save_twin
from tests.engines.test_nvfp4_cpu import PROMPT, run_in_engine
from tests.quantize.mixed import Mixed, calibrated, formats_by, write_mixed

pytestmark = [pytest.mark.engine, pytest.mark.slow]

WIDE_HEADS = {**SMALL, "head_dim": 32, "tie_word_embeddings": False}  # vLLM's CPU attention: 32
ATTENTION = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "fp8")


@pytest.fixture
def llama(bench: Any, tmp_path: Path) -> Any:
    from transformers import LlamaConfig

    return calibrated(bench, save_twin(tmp_path / "twin", LlamaConfig(**WIDE_HEADS)))


@pytest.fixture
def moe(bench: Any, tmp_path: Path) -> Any:
    from transformers import Qwen3MoeConfig

    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = Qwen3MoeConfig(**WIDE_HEADS, **experts)
    config.num_hidden_layers = 3
    return calibrated(bench, save_twin(tmp_path / "twin", config))


def served(mixed: Mixed) -> tuple[dict[str, str], str]:
    """Hold vLLM's log-probabilities against the candidate's; return its layers' formats and log."""
    model = load_candidate(mixed.checkpoint, mixed.adaptation, torch.float32)
    with torch.no_grad():
        logprobs = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    expected = [logprobs[i, token].item() for i, token in enumerate(PROMPT[1:])]
    found, log = run_in_engine("mixed_logprobs.py", str(mixed.checkpoint), json.dumps(PROMPT))
    assert found["logprobs"] == pytest.approx(expected, abs=2e-3)
    return {name.removeprefix("model."): form for name, form in found["formats"].items()}, log


def mix(bench: Any, **chosen: str) -> dict[str, str]:
    from onboard.checkpoint.matrices import scale_groups

    groups = scale_groups(bench.artifacts["adapt"].json("adaptation.json"))
    return formats_by(groups, **chosen)


def test_a_llama_in_three_formats(llama: Any) -> None:
    formats = mix(llama, **ATTENTION, down_proj="fp8", gate_proj="bf16", up_proj="bf16")
    formats = {name: form for name, form in formats.items() if ".layers.0." in name}
    found, log = served(write_mixed(llama, formats))
    layer = "layers.0"
    assert found[f"{layer}.self_attn.qkv_proj"] == "fp8"
    assert found[f"{layer}.self_attn.o_proj"] == "fp4"
    assert found[f"{layer}.mlp.gate_up_proj"] == "plain"
    assert found[f"{layer}.mlp.down_proj"] == "fp8"
    assert {found[name] for name in found if name.startswith("layers.1.")} == {"fp4"}
    assert [mode.split(",")[1].strip() for mode in modes(log)] == [
        "linear FP8 W8A8", "linear W4A4"
    ]  # fmt: skip


def test_nvfp4_beside_bf16_alone_is_plain_nvfp4(llama: Any) -> None:
    formats = mix(llama, q_proj="bf16", k_proj="bf16", v_proj="bf16", gate_proj="bf16",
                  up_proj="bf16")  # fmt: skip
    mixed = write_mixed(llama, formats)
    said = json.loads((mixed.checkpoint / "config.json").read_text())["quantization_config"]
    assert said["quant_algo"] == "NVFP4"
    found, _ = served(mixed)
    assert found["layers.1.self_attn.qkv_proj"] == found["layers.1.mlp.gate_up_proj"] == "plain"
    assert found["layers.1.self_attn.o_proj"] == found["layers.1.mlp.down_proj"] == "fp4"


def test_a_moe_whose_layers_hold_experts_in_three_formats(moe: Any) -> None:
    formats = mix(moe, layer_0="bf16", layer_1="fp8", o_proj="fp8")
    found, log = served(write_mixed(moe, formats))
    experts = {n: form for n, form in found.items() if "experts" in n}
    assert [experts[name] for name in sorted(experts)] == ["plain", "fp8", "fp4"]
    assert found["layers.2.self_attn.o_proj"] == "fp8"
    assert found["layers.2.self_attn.qkv_proj"] == "fp4"
    assert {"experts FP8 W8A8", "experts W4A4"} <= {
        mode.split(",")[1].strip() for mode in modes(log)
    }


def test_a_moe_in_the_layout_of_compressed_tensors(moe: Any) -> None:
    formats = mix(moe, layer_0="bf16", q_proj="bf16", k_proj="bf16", v_proj="bf16")
    found, log = served(write_mixed(moe, formats, layout="compressed-tensors"))
    experts = {n: form for n, form in found.items() if "experts" in n}
    assert [experts[name] for name in sorted(experts)] == ["plain", "fp4", "fp4"]
    assert found["layers.1.self_attn.qkv_proj"] == "plain"
    assert found["layers.1.self_attn.o_proj"] == "fp4"
    assert found["layers.0.self_attn.o_proj"] == "plain"
    assert "experts W4A4" in [mode.split(",")[1].strip() for mode in modes(log)]
