"""The CPU plugin inside the real vLLM: kernels against its own emulation, whole models loaded."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from onboard.checkpoint import nvfp4
from onboard.engines.environment import find
from onboard.engines.server import environment
from onboard.engines.vllm import modes
from onboard.errors import EnvironmentFault

HERE = Path(__file__).parent
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26]

pytestmark = pytest.mark.engine


def run_in_engine(script: str, *arguments: str) -> tuple[Any, str]:
    """Run a script of this folder in the engine: its last line as JSON, and its log."""
    try:
        python = find().python
    except EnvironmentFault as e:
        pytest.skip(e.message)
    variables = {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    done = subprocess.run(
        [python, HERE / script, *arguments],
        env=environment(os.environ, variables),
        capture_output=True,
        text=True,
        cwd=HERE.parent,
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr


def test_kernels_equal_vllm_s_own_emulation() -> None:
    found, _ = run_in_engine("nvfp4_parity.py")
    assert found["rounding"] is True
    assert found["linear"] < 1e-6, "theirs sums in fp32, ours in fp64"
    assert found["weight_only"] < 1e-6
    assert found["experts"] < 1e-5
    assert found["fp8_rounding"] is True
    assert found["fp8_linear"] < 1e-6
    assert found["fp8_experts"] < 1e-5
    assert found["row_by_row"] is True, "greedy outputs must not depend on the batch"


def quantize(source: Path, activations: bool) -> dict[str, torch.Tensor]:
    """Rewrite a twin as a ModelOpt NVFP4 checkpoint; return the weights an engine computes with."""
    tensors = load_file(source / "model.safetensors")
    effective, written = dict(tensors), dict(tensors)
    for name in [n for n in tensors if re.search(r"(self_attn|mlp).*_proj\.weight$", n)]:
        module = name.removesuffix(".weight")
        weight = tensors[name].float()
        # One scale for all: fused siblings and experts then share theirs.
        scale_2 = nvfp4.tensor_scale(torch.tensor(2.0))
        scale = nvfp4.block_scale(nvfp4.block_amax(weight), scale_2)
        packed = nvfp4.quantize(weight, scale, scale_2)
        effective[name] = nvfp4.dequantize(packed, scale, scale_2)
        written[name] = packed
        written[f"{module}.weight_scale"] = scale
        written[f"{module}.weight_scale_2"] = scale_2
        if activations:
            written[f"{module}.input_scale"] = nvfp4.tensor_scale(torch.tensor(20.0))
    save_file(written, source / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    form = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    group = {"weights": form, "targets": ["Linear"]}
    config["quantization_config"] = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4" if activations else "W4A16_NVFP4",
        "ignore": ["lm_head", "*.mlp.gate"],
        "config_groups": {
            "group_0": {**group, "input_activations": form} if activations else group
        },
    }
    (source / "config.json").write_text(json.dumps(config))
    return effective


@pytest.fixture
def moe(tmp_path: Path) -> Path:
    """Save a tiny Qwen3-MoE whose heads are as wide as vLLM's CPU attention wants (32)."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)  # else every output is nearly uniform
    model.save_pretrained(tmp_path / "twin")
    return tmp_path / "twin"


@pytest.mark.slow
def test_a_weight_only_moe_gives_the_source_s_numbers(moe: Path) -> None:
    from transformers import AutoModelForCausalLM

    reference = shutil.copytree(moe, moe.parent / "effective")
    effective = quantize(moe, activations=False)
    save_file(effective, reference / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32)
    with torch.no_grad():
        logprobs = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    expected = [logprobs[i, token].item() for i, token in enumerate(PROMPT[1:])]
    found, log = run_in_engine("prompt_logprobs.py", str(moe), json.dumps(PROMPT))
    assert found == pytest.approx(expected, abs=2e-3)
    assert any("experts W4A16" in mode for mode in modes(log))


@pytest.mark.slow
def test_a_w4a4_moe_loads_and_says_so(moe: Path) -> None:
    quantize(moe, activations=True)
    found, log = run_in_engine("prompt_logprobs.py", str(moe), json.dumps(PROMPT))
    assert all(value < 0 for value in found)
    assert [mode.split(",")[1].strip() for mode in modes(log)] == ["linear W4A4", "experts W4A4"]
