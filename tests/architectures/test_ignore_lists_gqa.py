"""What published NVFP4 checkpoints keep in high precision is what our files keep."""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from onboard.architectures import LINEAR, Architecture, Role, by_model_type, families
from onboard.architectures.table import Tensor, generate

# Kinds of modules on which we and a published list differ, and why. Every reason also stands in
# the architecture file.
ROUTER = "not in the list because transformers holds it as a parameter; it is not quantized"
HEAD = "the published head is W4A16 NVFP4; we keep it"
SHARED = "the published shared expert is W4A16 NVFP4; we keep it"
MAMBA = "only the six layers before an attention are kept; we keep all"
DENSE = "the dense mlp beside the experts is kept; we quantize it"
EXPLAINED: dict[str, dict[str, str]] = {
    "nvidia--Qwen3-235B-A22B-NVFP4": {},
    "nvidia--Qwen3.5-122B-A10B-NVFP4": {"model.language_model.layers.#.mlp.gate": ROUTER},
    "nvidia--Qwen3.5-397B-A17B-NVFP4": {
        "model.language_model.layers.#.mlp.gate": ROUTER,
        "mtp.fc": "the list names mtp.layers.0 only, but mtp.fc is stored in bf16",
    },
    "nvidia--Qwen3.6-27B-NVFP4": {"lm_head": HEAD},
    "nvidia--Qwen3.6-35B-A3B-NVFP4": {
        "lm_head": HEAD,
        "model.language_model.layers.#.mlp.shared_expert.gate_proj": SHARED,
        "model.language_model.layers.#.mlp.shared_expert.up_proj": SHARED,
        "model.language_model.layers.#.mlp.shared_expert.down_proj": SHARED,
    },
    "nvidia--MiniMax-M2.5-NVFP4": {},
    "nvidia--MiniMax-M2.7-NVFP4": {},
    "nvidia--MiniMax-M3-NVFP4": {},
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4": {
        "backbone.layers.#.mixer.gate": ROUTER,
        "backbone.layers.#.mixer.in_proj": MAMBA,
        "backbone.layers.#.mixer.out_proj": MAMBA,
    },
    "nvidia--NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4": {"lm_head": HEAD},
    "nvidia--Gemma-4-31B-IT-NVFP4": {},
    "nvidia--Gemma-4-26B-A4B-NVFP4": {
        "model.language_model.layers.#.mlp.gate_proj": DENSE,
        "model.language_model.layers.#.mlp.up_proj": DENSE,
        "model.language_model.layers.#.mlp.down_proj": DENSE,
    },
}


@pytest.mark.parametrize("checkpoint", EXPLAINED)
def test_published_list_and_ours_differ_only_where_explained(checkpoint: str) -> None:
    config, quantization = published(checkpoint)
    rules = families()[by_model_type()[config["model_type"]]]
    linear = [t for t in generate(rules, config["model_type"], config) if is_linear(t)]
    different = {
        re.sub(r"\.\d+(?=\.|$)", ".#", module_of(tensor))
        for tensor in linear
        if kept_by_us(rules, tensor) != kept_by_list(module_of(tensor), quantization)
    }
    assert different == set(EXPLAINED[checkpoint])
    quantized = [t for t in linear if not kept_by_us(rules, t)]
    assert quantized, "the family quantizes nothing"


def published(checkpoint: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return config.json and the quantization table that aiconfigurator-core bundles."""
    spec = importlib.util.find_spec("aiconfigurator_core")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("aiconfigurator-core 0.12 is not installed")
    folder = Path(spec.submodule_search_locations[0]) / "model_configs"
    config = json.loads((folder / f"{checkpoint}_config.json").read_text())
    table = json.loads((folder / f"{checkpoint}_hf_quant_config.json").read_text())
    return config, table.get("quantization", table)


def is_linear(tensor: Tensor) -> bool:
    return tensor.role in (*LINEAR, Role.VISION) and len(tensor.shape) > 1


def module_of(tensor: Tensor) -> str:
    return tensor.name.removesuffix(".weight")


def kept_by_us(rules: Architecture, tensor: Tensor) -> bool:
    return tensor.role not in rules.quantize or any(
        fnmatch.fnmatchcase(tensor.name, pattern) for pattern in rules.keep
    )


def kept_by_list(module: str, quantization: dict[str, Any]) -> bool:
    """Whether a list leaves a module out of NVFP4; FP8 and MXFP8 count as high precision."""
    named = quantization.get("quantized_layers")
    if named is not None:  # MIXED_PRECISION names what it quantizes; fused experts by container
        entry = named.get(module) or named.get(module.rpartition(".")[0]) or {}
        return "NVFP4" not in entry.get("quant_algo", "")
    return any(fnmatch.fnmatchcase(module, p) for p in quantization["exclude_modules"])
