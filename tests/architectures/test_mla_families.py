"""Latent-attention families: totals and lists of the published checkpoints out of the tables."""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from onboard import twins
from onboard.architectures import LINEAR, Role, families
from onboard.architectures.table import Tensor, evaluate, generate, namespace
from onboard.checkpoint.headers import is_mtp

BILLION = 10**9

# The sizes in the published config.json; what tables do not read is left out.
MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
DEEPSEEK_V3 = MLA | {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
}
DSA = {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
KIMI_K2 = DEEPSEEK_V3 | {
    "model_type": "kimi_k2",
    "vocab_size": 163840,
    "num_attention_heads": 64,
    "n_routed_experts": 384,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}
GLM_5 = DEEPSEEK_V3 | {
    "model_type": "glm_moe_dsa",
    "vocab_size": 154880,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "index_n_heads": 32,
    "index_head_dim": 128,
}
KIMI_K3 = MLA | {
    "vocab_size": 163840,
    "hidden_size": 7168,
    "intermediate_size": 33792,
    "moe_intermediate_size": 3072,
    "num_hidden_layers": 93,
    "num_attention_heads": 96,
    "q_lora_rank": 1536,
    "mla_use_output_gate": True,
    "num_experts": 896,
    "num_experts_per_token": 16,
    "num_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_expert_hidden_size": 3584,
    "latent_moe_use_norm": True,
    "attn_res_block_size": 12,
    "linear_attn_config": {
        "full_attn_layers": [*range(4, 93, 4), 93],
        "kda_layers": [layer for layer in range(1, 93) if layer % 4],
        "head_dim": 128,
        "num_heads": 96,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
    },
}
MOONVIT = {
    "patch_size": 14,
    "init_pos_emb_height": 64,
    "init_pos_emb_width": 64,
    "vt_hidden_size": 1024,
    "mm_hidden_size": 1024,
    "qkv_hidden_size": 1536,
    "vt_intermediate_size": 4096,
    "vt_num_hidden_layers": 27,
    "merge_kernel_size": [2, 2],
}
DEEPSEEK_V4_FLASH = {
    "model_type": "deepseek_v4",
    "vocab_size": 129280,
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "hc_mult": 4,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "num_nextn_predict_layers": 1,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
}
CONFIGS: dict[str, dict[str, Any]] = {
    "DeepSeek-V3": DEEPSEEK_V3,
    "DeepSeek-V3.2": DEEPSEEK_V3 | DSA | {"model_type": "deepseek_v32"},
    "DeepSeek-V4-Flash": DEEPSEEK_V4_FLASH,
    "DeepSeek-V4-Pro": DEEPSEEK_V4_FLASH
    | {
        "hidden_size": 7168,
        "moe_intermediate_size": 3072,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "o_groups": 16,
        "n_routed_experts": 384,
        "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
    },
    "GLM-4.5-Air": {
        "model_type": "glm4_moe",
        "vocab_size": 151552,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
    },
    "GLM-5": GLM_5,
    "GLM-5.2": GLM_5 | {"index_topk_freq": 4, "index_skip_topk_offset": 3},
    "Kimi-K2": KIMI_K2,
    "Kimi-K3": {"model_type": "kimi_k3", "text_config": KIMI_K3, "vision_config": MOONVIT},
    "Kimi-Linear": KIMI_K3
    | {
        "model_type": "kimi_linear",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "moe_intermediate_size": 1024,
        "num_hidden_layers": 27,
        "num_attention_heads": 32,
        "q_lora_rank": None,
        "mla_use_output_gate": False,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "num_shared_experts": 1,
        "routed_expert_hidden_size": None,
        "attn_res_block_size": None,
        "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
            "kda_layers": [layer for layer in range(1, 27) if layer % 4],
            "head_dim": 128,
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
    },
    "LongCat-Flash": MLA
    | {
        "model_type": "longcat_flash",
        "vocab_size": 131072,
        "hidden_size": 6144,
        "ffn_hidden_size": 12288,
        "expert_ffn_hidden_size": 2048,
        "num_layers": 28,
        "num_attention_heads": 64,
        "q_lora_rank": 1536,
        "n_routed_experts": 512,
        "zero_expert_num": 256,
        "moe_topk": 12,
    },
}


@dataclass
class Totals:
    """Parameters and tensors by role; those of MTP layers apart, whatever their role."""

    parameters: Counter[str] = field(default_factory=Counter)
    tensors: Counter[str] = field(default_factory=Counter)
    names: set[str] = field(default_factory=set)

    @property
    def main(self) -> int:
        return self.parameters.total() - self.parameters[Role.MTP]


def family_of(model_type: str) -> str:
    return next(name for name, rules in families().items() if model_type in rules.model_types)


def described(config: Mapping[str, Any]) -> Iterable[tuple[str, Tensor]]:
    """Yield every tensor of a config with its role, MTP where its layer lies past the trunk."""
    rules = families()[family_of(config["model_type"])]
    layers = namespace(rules, config)["num_hidden_layers"]
    for tensor in generate(rules, config["model_type"], config):
        yield (Role.MTP if is_mtp(tensor.name, layers) else tensor.role), tensor


@cache
def totals(model: str) -> Totals:
    found = Totals()
    for role, tensor in described(CONFIGS[model]):
        found.parameters[role] += math.prod(tensor.shape)
        found.tensors[role] += 1
        found.names.add(tensor.name)
    assert len(found.names) == found.tensors.total()
    return found


def active(model: str) -> float:
    """Parameters that one token meets: no look-ups, only its experts."""
    config = CONFIGS[model]
    rules = families()[family_of(config["model_type"])]
    names = namespace(rules, config)
    chosen = evaluate(rules.experts_per_token, names, "k") / evaluate(
        rules.ranges["expert"], names, "experts"
    )
    found = totals(model)
    idle = found.parameters[Role.EMBED] + found.parameters[Role.VISION]
    return float(found.main - idle - found.parameters[Role.EXPERT] * (1 - chosen))


def cache_bytes(model: str) -> float:
    config = CONFIGS[model]
    rules = families()[family_of(config["model_type"])]
    names = namespace(rules, config)
    layers = range(names["num_hidden_layers"])
    return float(sum(evaluate(rules.cache, {**names, "layer": layer}, "cache") for layer in layers))


# Published: DeepSeek-V3 "671B main and 14B MTP, 685B in all"; V4 284B and 1.6T; GLM-5 744B, 5.2
# 743B; GLM-4.5-Air 106B; Kimi K2 1T, K3 2.8T, Linear 48B; LongCat 560B.
@pytest.mark.parametrize(
    ("model", "main", "mtp"),
    [
        ("DeepSeek-V3", 671.03, 13.46),
        ("DeepSeek-V3.2", 671.88, 13.48),
        ("DeepSeek-V4-Flash", 284.33, 6.61),
        ("DeepSeek-V4-Pro", 1573.00, 25.84),
        ("GLM-4.5-Air", 106.85, 2.38),
        ("GLM-5", 743.91, 9.95),
        ("GLM-5.2", 743.38, 9.95),
        ("Kimi-K2", 1026.41, 0),
        ("Kimi-K3", 2779.93, 0),
        ("Kimi-Linear", 49.12, 0),
        ("LongCat-Flash", 560.66, 1.20),
    ],
)
def test_totals_are_the_published_ones(model: str, main: float, mtp: float) -> None:
    found = totals(model)
    assert found.main / BILLION == pytest.approx(main, abs=0.006)
    assert found.parameters[Role.MTP] / BILLION == pytest.approx(mtp, abs=0.006)


def test_counts_of_tensors_are_those_of_the_published_indexes() -> None:
    # GLM-5.2: 791 tensors in layer 78.
    assert totals("GLM-5.2").tensors[Role.MTP] == 791
    # Kimi-K3's index lists 497,220 tensors, of which an expert's MXFP4 matrix has two.
    kimi = totals("Kimi-K3").tensors
    assert kimi.total() + kimi[Role.EXPERT] == 497_220
    # DeepSeek-V4-Flash's lists 69,187: also a scale for each matrix of an expert, in each of 44
    # layers five of the attention and three of the shared expert, the indexers' wq_b, and the
    # MTP layer's two projections.
    flash = totals("DeepSeek-V4-Flash").tensors
    assert flash.total() + 44 * (3 * 256 + 5 + 3) + 21 + 2 == 69_187


def test_glm_5_2_owns_few_indexers() -> None:
    names = totals("GLM-5.2").names
    owners = {
        layer for layer in range(78) if any(f".{layer}.self_attn.indexer." in n for n in names)
    }
    assert owners == {0, 1, 2, *range(6, 78, 4)}
    assert 78 - len(owners) == 57
    assert "model.layers.78.self_attn.indexer.wk.weight" in names
    assert all(f"model.layers.{n}.self_attn.indexer.wk.weight" in totals("GLM-5").names
               for n in range(79))  # fmt: skip


def test_glm_5_2_sizes() -> None:
    """743.3B, 444.7 GB and 40.2B are without MTP layer, and without routers (0.12B).

    Routers are no linear modules to transformers; with them it is 743.4B, 444.9 GB and 40.3B.
    """
    found = totals("GLM-5.2")
    routers = found.parameters[Role.ROUTER]
    assert (found.main - routers) / BILLION == pytest.approx(743.3, abs=0.05)
    assert (active("GLM-5.2") - routers) / BILLION == pytest.approx(40.2, abs=0.05)
    experts = found.parameters[Role.EXPERT]
    mixed = experts * 4.5 / 8 + (found.main - experts) * 2
    assert mixed / BILLION == pytest.approx(444.9, abs=0.05)
    assert (mixed - 2 * routers) / BILLION == pytest.approx(444.7, abs=0.05)
    assert 2 * found.parameters[Role.MTP] / BILLION == pytest.approx(19.9, abs=0.05)


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("DeepSeek-V3", 37),
        ("DeepSeek-V4-Flash", 13),
        ("DeepSeek-V4-Pro", 49),
        ("Kimi-K2", 32),
        ("Kimi-Linear", 3),
    ],
)
def test_active_parameters(model: str, billions: int) -> None:
    assert active(model) / BILLION == pytest.approx(billions, abs=0.6)


def test_cache_bytes() -> None:
    assert cache_bytes("GLM-5.2") == 78 * 656 + 21 * 132 == 53_940
    assert cache_bytes("DeepSeek-V3.2") == 61 * (656 + 132)
    assert cache_bytes("DeepSeek-V3") == 61 * 576
    assert cache_bytes("Kimi-K3") == 24 * 576  # nothing grows in the delta-rule layers
    assert cache_bytes("LongCat-Flash") == 2 * 28 * 576
    assert cache_bytes("DeepSeek-V4-Flash") == 21 * (584 + 132) / 4 + 20 * 584 / 128


@pytest.mark.parametrize("model", CONFIGS)
def test_names_lead_back_to_their_roles(model: str) -> None:
    config = CONFIGS[model]
    rules = families()[family_of(config["model_type"])]
    small = twins.shrink(config)
    for tensor in generate(rules, config["model_type"], small):
        assert rules.role(tensor.name) == tensor.role, tensor.name


@pytest.mark.parametrize("model", CONFIGS)
def test_twins_have_every_kind_of_tensor(model: str) -> None:
    config = CONFIGS[model]
    kinds = {kind(name) for name in totals(model).names}
    small = {kind(tensor.name) for _, tensor in described(twins.shrink(config))}
    assert small == kinds


def kind(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".#", name)


# Lists of published NVFP4 checkpoints.

ROUTERS = r"\.gate$"
DENSE = r"\.mlp\.(gate|up|down)_proj$"
SHARED = r"\.shared_experts\."
LATENT = r"\.routed_expert_(down|up)_proj$"
MIXERS = r"_res_proj$"
EXPLAINED: dict[str, str] = {
    ROUTERS: "routers were no nn.Linear to the quantizer: no list names them, and they stay",
    DENSE: "the first checkpoint of a family also took dense MLPs and shared experts",
    SHARED: "the first checkpoint of a family also took dense MLPs and shared experts",
    LATENT: "K3's list does not name its latent projections; they are bf16",
    MIXERS: "K3's list does not name its residual mixers; they are bf16",
}
FIRST = {ROUTERS, DENSE, SHARED}
PUBLISHED: dict[str, set[str]] = {
    "nvidia--DeepSeek-V3.1-NVFP4": {ROUTERS},
    "nvidia--DeepSeek-V3.2-NVFP4": {ROUTERS},
    "nvidia--DeepSeek-V4-Flash-NVFP4": set(),
    "nvidia--DeepSeek-V4-Pro-NVFP4": set(),
    "nvidia--GLM-5-NVFP4": FIRST,
    "nvidia--GLM-5.1-NVFP4": {ROUTERS},
    "nvidia--GLM-5.2-NVFP4": {ROUTERS},
    "nvidia--GLM-5.3-NVFP4": {ROUTERS},
    "nvidia--Kimi-K2.5-NVFP4": FIRST,
    "nvidia--Kimi-K2.6-NVFP4": {ROUTERS},
    "nvidia--Kimi-K2.7-Code-NVFP4": {ROUTERS},
    "moonshotai--Kimi-K3": {ROUTERS, LATENT, MIXERS},  # MXFP4
}


@pytest.fixture(scope="session")
def published() -> Path:
    """Folder of published configs; located without importing its package, which is heavy."""
    spec = importlib.util.find_spec("aiconfigurator_core")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("aiconfigurator-core is not installed")
    return Path(next(iter(spec.submodule_search_locations))) / "model_configs"


def modules(config: dict[str, Any]) -> dict[str, tuple[str, Tensor]]:
    """Return every matrix's module, with two experts a layer instead of hundreds."""
    text = config.get("text_config", config)
    text |= {key: 2 for key in ("n_routed_experts", "num_experts") if key in text}
    return {
        tensor.name.removesuffix(".weight"): (role, tensor)
        for role, tensor in described(config)
        if tensor.name.endswith(".weight") and len(tensor.shape) > 1 and role != Role.EMBED
    }


def stays(config: Mapping[str, Any], role: str, name: str) -> bool:
    rules = families()[family_of(config["model_type"])]
    kept = any(fnmatch.fnmatchcase(name, pattern) for pattern in rules.keep)
    assert role in LINEAR or role == Role.VISION, f"{name}: a module of role {role}"
    return kept or role not in rules.quantize


def listed(config: Mapping[str, Any], sidecar: Mapping[str, Any], names: Iterable[str]) -> set[str]:
    """Return the modules that the published lists leave in high precision."""
    text = config.get("text_config", config)
    quantized = sidecar.get("quantization", {}).get("quantized_layers")
    if quantized is not None:
        return {n for n in names if not any(n.startswith(f"{layer}.") for layer in quantized)}
    block = config.get("quantization_config") or text.get("quantization_config", {})
    patterns = sidecar.get("quantization", {}).get("exclude_modules") or block["ignore"]
    every = re.compile("|".join(p.removeprefix("re:") if p.startswith("re:")
                                else fnmatch.translate(p) for p in patterns))  # fmt: skip
    return {name for name in names if every.match(name)}


@pytest.mark.parametrize("checkpoint", PUBLISHED)
def test_what_stays_is_what_the_published_list_keeps(checkpoint: str, published: Path) -> None:
    config = json.loads((published / f"{checkpoint}_config.json").read_text())
    path = published / f"{checkpoint}_hf_quant_config.json"
    sidecar = json.loads(path.read_text()) if path.is_file() else {}
    found = modules(config)
    ours = {module for module, (role, t) in found.items() if stays(config, role, t.name)}
    different = ours ^ listed(config, sidecar, found)
    reasons = {next((p for p in PUBLISHED[checkpoint] if re.search(p, m)), m)
               for m in different}  # fmt: skip
    assert reasons == PUBLISHED[checkpoint]
    assert reasons <= set(EXPLAINED)
    assert {Role.EXPERT} <= {role for module, (role, _) in found.items() if module not in ours}
