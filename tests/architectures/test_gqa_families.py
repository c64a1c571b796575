"""Grouped-query and hybrid families: published totals out of the tables, and twins like them."""

from __future__ import annotations

import math
import re
from functools import cache
from typing import Any

import pytest

from onboard import twins
from onboard.architectures import Architecture, Role, by_model_type, families
from onboard.architectures.table import Tensor, evaluate, generate, namespace
from onboard.checkpoint.headers import is_mtp

# The sizes in the published config.json; what tables do not read is left out.
QWEN3_VISION = {
    "depth": 27,
    "hidden_size": 1152,
    "in_channels": 3,
    "intermediate_size": 4304,
    "num_position_embeddings": 2304,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
LLAMA4_VISION = {
    "hidden_size": 1408,
    "image_size": 336,
    "intermediate_size": 5632,
    "num_hidden_layers": 34,
    "patch_size": 14,
    "projector_input_dim": 4096,
    "projector_output_dim": 4096,
    "vision_output_dim": 4096,
}
LLAMA4_TEXT = {
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_experts_per_tok": 1,
}
GEMMA4_VISION = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "head_dim": 72,
    "patch_size": 16,
    "position_embedding_size": 10240,
    "standardize": True,
}
GEMMA4_LAYERS = ["sliding_attention"] * 5 + ["full_attention"]
STEP_LAYERS = ["full_attention"] + ["sliding_attention"] * 3
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3-235B-A22B": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
    "Qwen3-Next-80B-A3B": {
        "model_type": "qwen3_next",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "num_experts": 512,
        "num_experts_per_tok": 10,
    },
    "Qwen3.5-397B-A17B": {
        "model_type": "qwen3_5_moe",
        "text_config": {
            "vocab_size": 248320,
            "hidden_size": 4096,
            "moe_intermediate_size": 1024,
            "shared_expert_intermediate_size": 1024,
            "num_hidden_layers": 60,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 64,
            "linear_value_head_dim": 128,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "mtp_num_hidden_layers": 1,
            "rope_parameters": {"mrope_section": [11, 11, 10]},
        },
        "vision_config": QWEN3_VISION | {"out_hidden_size": 4096},
    },
    "Qwen3.5-27B": {
        "model_type": "qwen3_5",
        "text_config": {
            "vocab_size": 248320,
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "num_hidden_layers": 64,
            "num_attention_heads": 24,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 48,
            "linear_value_head_dim": 128,
            "mtp_num_hidden_layers": 1,
            "rope_parameters": {"mrope_section": [11, 11, 10]},
        },
        "vision_config": QWEN3_VISION | {"out_hidden_size": 5120},
    },
    "MiniMax-M2.5": {
        "model_type": "minimax_m2",
        "vocab_size": 200064,
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "num_hidden_layers": 62,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "use_mtp": True,
        "num_mtp_modules": 3,
    },
    "MiniMax-M3": {
        "model_type": "minimax_m3_vl",
        "text_config": {
            "vocab_size": 200064,
            "hidden_size": 6144,
            "intermediate_size": 3072,
            "dense_intermediate_size": 12288,
            "shared_intermediate_size": 3072,
            "num_hidden_layers": 60,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "num_mtp_modules": 1,
            "moe_layer_freq": [0] * 3 + [1] * 57,
            "sparse_attention_config": {
                "sparse_attention_freq": [0] * 3 + [1] * 57,
                "sparse_index_dim": 128,
                "sparse_num_index_heads": 4,
            },
        },
        "vision_config": {
            "hidden_size": 1280,
            "intermediate_size": 5120,
            "num_hidden_layers": 32,
            "num_channels": 3,
            "patch_size": 14,
        },
        "projector_hidden_size": 6144,
    },
    "gpt-oss-120b": {
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
    },
    "Llama-4-Maverick": {
        "model_type": "llama4",
        "text_config": LLAMA4_TEXT | {"num_local_experts": 128, "interleave_moe_layer_step": 2},
        "vision_config": LLAMA4_VISION,
    },
    "Llama-4-Scout": {
        "model_type": "llama4",
        "text_config": LLAMA4_TEXT | {"num_local_experts": 16, "interleave_moe_layer_step": 1},
        "vision_config": LLAMA4_VISION,
    },
    "Nemotron-3-Nano-30B-A3B": {
        "model_type": "nemotron_h",
        "vocab_size": 131072,
        "hidden_size": 2688,
        "intermediate_size": 1856,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "num_hidden_layers": 52,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "mamba_num_heads": 64,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
    },
    "MiMo-V2-Flash": {
        "model_type": "mimo_v2_flash",
        "vocab_size": 152576,
        "hidden_size": 4096,
        "intermediate_size": 16384,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 192,
        "v_head_dim": 128,
        "swa_num_attention_heads": 64,
        "swa_num_key_value_heads": 8,
        "swa_head_dim": 192,
        "swa_v_head_dim": 128,
        "hybrid_layer_pattern": [0, *([1] * 4 + [0]), *([1] * 5 + [0]) * 7],
        "moe_layer_freq": [0] + [1] * 47,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "add_swa_attention_sink_bias": True,
    },
    "ERNIE-4.5-21B-A3B": {
        "model_type": "ernie4_5_moe",
        "vocab_size": 103424,
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        "moe_k": 6,
        "moe_layer_end_index": 27,
        "num_nextn_predict_layers": 1,
    },
    "Hunyuan-A13B": {
        "model_type": "hunyuan_v1_moe",
        "vocab_size": 128167,
        "hidden_size": 4096,
        "intermediate_size": 3072,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_experts": 64,
        "moe_topk": [8] * 32,
        "tie_word_embeddings": True,
    },
    "gemma-3-27b": {
        "model_type": "gemma3",
        "text_config": {
            "head_dim": 128,
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "num_attention_heads": 32,
            "num_hidden_layers": 62,
            "num_key_value_heads": 16,
        },
        "vision_config": {
            "hidden_size": 1152,
            "image_size": 896,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "patch_size": 14,
        },
    },
    "gemma-4-26B-A4B": {
        "model_type": "gemma4",
        "text_config": {
            "vocab_size": 262144,
            "hidden_size": 2816,
            "intermediate_size": 2112,
            "moe_intermediate_size": 704,
            "num_hidden_layers": 30,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 2,
            "head_dim": 256,
            "global_head_dim": 512,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 128,
            "top_k_experts": 8,
            "layer_types": GEMMA4_LAYERS * 5,
        },
        "vision_config": GEMMA4_VISION,
    },
    "Step-3.7-Flash": {
        "model_type": "step3p7",
        "text_config": {
            "vocab_size": 128896,
            "hidden_size": 4096,
            "intermediate_size": 11264,
            "moe_intermediate_size": 1280,
            "share_expert_dim": 1280,
            "num_hidden_layers": 45,
            "num_attention_heads": 64,
            "num_attention_groups": 8,
            "head_dim": 128,
            "attention_other_setting": {
                "attention_type": "sliding_attention",
                "num_attention_heads": 96,
                "num_attention_groups": 8,
                "head_dim": 128,
            },
            "layer_types": STEP_LAYERS * 12,
            "moe_num_experts": 288,
            "moe_top_k": 8,
            "num_nextn_predict_layers": 3,
        },
        "vision_config": {
            "width": 1536,
            "layers": 47,
            "heads": 16,
            "image_size": 728,
            "patch_size": 14,
            "mlp_ratio": 8960 / 1536,
        },
    },
}
# Published sizes in billions without MTP layers: all, and used for a token (the embedding, a
# look-up, is not counted), where the vendor says so.
PUBLISHED: dict[str, tuple[float, float | None]] = {
    "Qwen3-235B-A22B": (235.09, 22),
    "Qwen3-Next-80B-A3B": (80, None),
    "Qwen3.5-397B-A17B": (397, 17),
    "Qwen3.5-27B": (27.4, None),
    "MiniMax-M2.5": (229, 10),
    "MiniMax-M3": (427, None),
    "gpt-oss-120b": (116.83, 5.13),
    "Llama-4-Maverick": (400, 17),
    "Llama-4-Scout": (109, 17),
    "Nemotron-3-Nano-30B-A3B": (31.6, 3.2),
    "MiMo-V2-Flash": (309, 15),
    "ERNIE-4.5-21B-A3B": (21.8, 3),
    "Hunyuan-A13B": (80.4, 13),
    "gemma-3-27b": (27.4, None),
    "gemma-4-26B-A4B": (25.8, None),
    "Step-3.7-Flash": (198.9, 11),  # 196 of text, 1.8 of vision tower and its projector
}
MTP = {
    "Qwen3-Next-80B-A3B": 1.65,
    "Qwen3.5-397B-A17B": 6.60,
    "Qwen3.5-27B": 0.42,
    "MiniMax-M3": 7.49,
    "MiMo-V2-Flash": 0.99,  # three layers of 0.33
    "ERNIE-4.5-21B-A3B": 0.12,
    "Step-3.7-Flash": 2.43,
}
# Bytes of FP8 cache per token over all layers, worked out by hand.
CACHE = {
    "Qwen3.5-397B-A17B": 15 * 2 * 2 * 256,
    "MiniMax-M2.5": 62 * 2 * 8 * 128,
    "MiniMax-M3": 60 * 2 * 4 * 128 + 57 * 128,
    "gpt-oss-120b": 36 * 2 * 8 * 64,
    "Nemotron-3-Nano-30B-A3B": 6 * 2 * 2 * 128,
    "MiMo-V2-Flash": 9 * 4 * 320 + 39 * 8 * 320,
    "gemma-4-26B-A4B": 25 * 2 * 8 * 256 + 5 * 2 * 2 * 512,
}


def rules_of(config: dict[str, Any]) -> Architecture:
    return families()[by_model_type()[config["model_type"]]]


@cache
def tensors_of(model: str) -> tuple[Tensor, ...]:
    config = CONFIGS[model]
    return tuple(generate(rules_of(config), config["model_type"], config))


def names_of(model: str) -> dict[str, Any]:
    return namespace(rules_of(CONFIGS[model]), CONFIGS[model])


def billions(tensors: list[Tensor]) -> float:
    return sum(math.prod(tensor.shape) for tensor in tensors) / 1e9


def kinds(tensors: list[Tensor] | tuple[Tensor, ...]) -> set[str]:
    return {re.sub(r"\.\d+(?=\.|$)", ".#", tensor.name) for tensor in tensors}


@pytest.mark.parametrize("model", CONFIGS)
def test_parameters_are_the_published_number(model: str) -> None:
    layers = names_of(model)["num_hidden_layers"]
    mtp = [tensor for tensor in tensors_of(model) if is_mtp(tensor.name, layers)]
    mtp += [t for t in tensors_of(model) if t.role == Role.MTP and t not in mtp]
    apart = {tensor.name for tensor in mtp}
    rest = [tensor for tensor in tensors_of(model) if tensor.name not in apart]
    total, active = PUBLISHED[model]
    assert billions(rest) == pytest.approx(total, rel=0.01)
    assert billions(mtp) == pytest.approx(MTP.get(model, 0), abs=0.01)
    if active is not None:
        rules, names = rules_of(CONFIGS[model]), names_of(model)
        every = evaluate(rules.ranges["expert"], names, "experts")
        chosen = evaluate(rules.experts_per_token, names, "experts per token")
        experts = billions([t for t in rest if t.role == Role.EXPERT])
        tied = all(t.role != Role.HEAD for t in rest)
        idle = () if tied else (Role.EMBED,)
        others = [t for t in rest if t.role not in (Role.EXPERT, Role.VISION, *idle)]
        assert billions(others) + experts * chosen / every == pytest.approx(active, rel=0.12)


@pytest.mark.parametrize("model", CONFIGS)
def test_every_name_is_once_and_has_the_role_of_its_row(model: str) -> None:
    tensors = tensors_of(model)
    rules = rules_of(CONFIGS[model])
    assert len({tensor.name for tensor in tensors}) == len(tensors)
    roles = {re.sub(r"\.\d+(?=\.|$)", ".7", t.name): t.role for t in tensors}
    assert {name: rules.role(name) for name in roles} == roles


@pytest.mark.parametrize("model", CONFIGS)
def test_a_twin_has_every_kind_of_tensor(model: str) -> None:
    small = twins.shrink(CONFIGS[model], vocab_size=512)
    twin = list(generate(rules_of(small), small["model_type"], small))
    assert kinds(twin) == kinds(tensors_of(model))
    assert billions(twin) < 0.01


@pytest.mark.parametrize("model", CACHE)
def test_cache_of_a_token(model: str) -> None:
    names, rules = names_of(model), rules_of(CONFIGS[model])
    per_layer = [
        evaluate(rules.cache, {**names, "layer": layer}, "cache")
        for layer in range(names["num_hidden_layers"])
    ]
    assert sum(per_layer) == CACHE[model]


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_5_moe_text", "llama4_text", "gemma3_text"])
def test_a_text_only_config_has_no_vision_tower(kind: str) -> None:
    model = {
        "qwen3_5_text": "Qwen3.5-27B",
        "qwen3_5_moe_text": "Qwen3.5-397B-A17B",
        "llama4_text": "Llama-4-Scout",
        "gemma3_text": "gemma-3-27b",
    }[kind]
    config = CONFIGS[model]["text_config"] | {"model_type": kind}
    for flat in (config, twins.shrink(config)):
        tensors = list(generate(rules_of(flat), kind, flat))
        assert not [t.name for t in tensors if t.role == Role.VISION]
        assert all(t.name.startswith(("model.", "mtp.", "lm_head.")) for t in tensors)
        assert "model.layers.0.input_layernorm.weight" in {t.name for t in tensors}


def test_new_and_old_nemotron_configs_give_the_same_tensors() -> None:
    old = CONFIGS["Nemotron-3-Nano-30B-A3B"]
    words = {"M": "mamba", "E": "moe", "*": "attention"}
    new = {
        k: v for k, v in old.items() if k not in ("hybrid_override_pattern", "num_hidden_layers")
    }
    new["layers_block_type"] = [words[letter] for letter in old["hybrid_override_pattern"]]
    assert tuple(generate(rules_of(new), "nemotron_h", new)) == tensors_of(
        "Nemotron-3-Nano-30B-A3B"
    )
