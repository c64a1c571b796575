"""Every tensor has a role and a reason; what would go wrong after hours is said in seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onboard import adapt, source, tensorplan
from onboard.architectures import QUANTIZABLE, Role, by_model_type, families
from onboard.checkpoint.headers import Header, read_headers
from onboard.errors import InputError
from onboard.modelconfig import ModelConfig, read_config
from onboard.recipe import Adapt, Source
from tests.shards import LLAMA_CONFIG, llama_shapes, write_model

MOE_CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
}
EXPERTS, WIDTH = 8, 32
ATTENTION = 2 * 64 * (64 + 32 + 32 + 64)  # two layers of q, k, v, o


def moe_shapes(fused: bool) -> dict[str, tuple[int, ...]]:
    shapes = {n: s for n, s in llama_shapes().items() if ".mlp." not in n}
    shapes["lm_head.weight"] = (128, 64)
    for layer in range(2):
        at = f"model.layers.{layer}.mlp"
        shapes[f"{at}.gate.weight"] = (EXPERTS, 64)
        if fused:
            shapes[f"{at}.experts.gate_up_proj"] = (EXPERTS, 2 * WIDTH, 64)
            shapes[f"{at}.experts.down_proj"] = (EXPERTS, 64, WIDTH)
            continue
        for expert in range(EXPERTS):
            shapes[f"{at}.experts.{expert}.gate_proj.weight"] = (WIDTH, 64)
            shapes[f"{at}.experts.{expert}.up_proj.weight"] = (WIDTH, 64)
            shapes[f"{at}.experts.{expert}.down_proj.weight"] = (64, WIDTH)
    return shapes


def adaptation(
    bench: Any,
    shapes: Mapping[str, tuple[int, ...]],
    config: Mapping[str, Any] = LLAMA_CONFIG,
    dtype: str = "BF16",
    **params: Any,
) -> dict[str, Any]:
    """Run `source` and `adapt` on a model of these tensors; return adaptation.json."""
    root = write_model(bench.folder / "model", shapes, config, dtype)
    bench.run("source", source.run, Source(model=str(root)))
    table: dict[str, Any] = bench.run("adapt", adapt.run, Adapt(**params)).json("adaptation.json")
    return table


def kept(table: Mapping[str, Any]) -> dict[str, str]:
    return {n: t["reason"] for n, t in table["tensors"].items() if not t["quantize"]}


def test_a_dense_model(bench: Any) -> None:
    table = adaptation(bench, llama_shapes())
    assert table["architecture"] == "LlamaForCausalLM"
    assert set(kept(table).values()) == {
        "role embed stays in high precision",
        "role norm stays in high precision",
    }
    at = "model.layers.1"
    assert [g for g in table["groups"] if g[0].startswith(at)] == [
        [f"{at}.self_attn.{p}_proj" for p in "qkv"],
        [f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj"],
    ]
    assert table["ignore"] == ["lm_head"]
    assert table["experts"] is None
    assert table["expected_share"] == {"attention": 1.0, "mlp": 1.0}


def test_tied_embeddings_are_no_linear_layer(bench: Any) -> None:
    table = adaptation(bench, llama_shapes())
    assert table["tied"]
    assert table["linear_parameters"] == ATTENTION + 2 * 3 * 96 * 64
    assert bench.artifacts["adapt"].metrics["expected_share"] == 1.0


def test_a_tied_head_that_the_file_repeats_counts_once(bench: Any) -> None:
    table = adaptation(bench, {**llama_shapes(), "lm_head.weight": (128, 64)})
    assert table["linear_parameters"] == ATTENTION + 2 * 3 * 96 * 64


def test_an_untied_head_counts_and_stays(bench: Any) -> None:
    config = {**LLAMA_CONFIG, "tie_word_embeddings": False}
    table = adaptation(bench, {**llama_shapes(), "lm_head.weight": (128, 64)}, config)
    assert table["linear_parameters"] == ATTENTION + 2 * 3 * 96 * 64 + 128 * 64
    assert kept(table)["lm_head.weight"] == "role head stays in high precision"


def test_an_untied_head_that_is_missing_is_an_error(bench: Any) -> None:
    with pytest.raises(InputError, match=r"no lm_head\.weight"):
        adaptation(bench, llama_shapes(), {**LLAMA_CONFIG, "tie_word_embeddings": False})


@pytest.mark.parametrize("fused", [True, False])
def test_experts_in_both_layouts_are_counted_from_headers(bench: Any, fused: bool) -> None:
    table = adaptation(bench, moe_shapes(fused), MOE_CONFIG)
    experts = 2 * EXPERTS * 3 * WIDTH * 64
    assert table["linear_parameters_by_role"] == {
        "attention": ATTENTION,
        "expert": experts,
        "head": 128 * 64,
        "router": 2 * EXPERTS * 64,
    }
    assert table["expected_share"] == {"attention": 1.0, "expert": 1.0}
    assert table["experts"]["layout"] == ("fused" if fused else "separate")
    assert table["experts"]["count"] == EXPERTS
    assert table["ignore"] == ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    expert_groups = [g for g in table["groups"] if ".experts." in g[0]]
    assert len(expert_groups) == (0 if fused else 2 * EXPERTS)
    if not fused:
        at = "model.layers.0.mlp.experts.0"
        assert expert_groups[0] == [f"{at}.gate_proj", f"{at}.up_proj"]


def test_both_layouts_agree_with_what_transformers_saves(
    qwen3_moe_twin: Path, llama_twin: Path
) -> None:
    """The names come from the library, not from us: every one has a role."""
    for twin in (qwen3_moe_twin, llama_twin):
        config = read_config(twin)
        roles = {tensorplan.role_of(config, name) for name in read_headers(twin)}
        assert Role.UNKNOWN not in roles
        assert Role.ATTENTION in roles


@pytest.mark.parametrize("model_type", sorted(by_model_type()))
def test_every_claimed_model_type_has_the_names_of_its_transformers_class(model_type: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    family = families()[by_model_type()[model_type]]
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = AutoConfig.for_model(model_type, **small, **heads, pad_token_id=0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert type(model).__name__ == family.model_types[model_type]
    unknown = [name for name in model.state_dict() if family.role(name) is Role.UNKNOWN]
    assert not unknown


def test_mtp_layers_are_recognised_and_kept(bench: Any) -> None:
    extra = {
        "model.layers.2.self_attn.q_proj.weight": (64, 64),
        "model.layers.2.eh_proj.weight": (64, 128),
        "mtp.fc.weight": (64, 128),
    }
    table = adaptation(bench, {**llama_shapes(), **extra})
    assert {table["tensors"][name]["role"] for name in extra} == {"mtp"}
    assert kept(table).keys() >= extra.keys()
    assert table["ignore"] == ["lm_head", "model.layers.2.*", "mtp.*"]
    assert bench.artifacts["adapt"].metrics["mtp_tensors"] == 3


def test_announced_mtp_layers_that_are_missing_are_a_warning(bench: Any) -> None:
    adaptation(bench, llama_shapes(), {**LLAMA_CONFIG, "num_nextn_predict_layers": 1})
    assert "announces 1 MTP layers" in bench.warnings[0]


def test_an_unknown_tensor_is_an_error_that_names_the_file_to_edit(bench: Any) -> None:
    shapes = {**llama_shapes(), "model.projector.weight": (64, 64)}
    with pytest.raises(InputError, match=r"model\.projector\.weight \[64, 64\]") as error:
        adaptation(bench, shapes)
    assert "onboard/architectures/llama.py" in str(error.value.hint)
    assert "adapt.keep=['model.projector.weight']" in str(error.value.hint)


def test_an_unknown_tensor_that_is_kept_by_name_is_never_quantized(bench: Any) -> None:
    shapes = {**llama_shapes(), "model.projector.weight": (64, 64)}
    table = adaptation(bench, shapes, keep=["*projector*"])
    assert table["tensors"]["model.projector.weight"] == {
        "role": "unknown",
        "dtype": "BF16",
        "shape": [64, 64],
        "shard": "model.safetensors",
        "quantize": False,
        "reason": "kept by the pattern *projector*",
    }
    assert "model.projector" in table["ignore"]
    assert bench.artifacts["adapt"].metrics["unknown_tensors"] == 0


def test_a_width_that_is_no_multiple_of_16_is_named_and_kept(bench: Any) -> None:
    table = adaptation(bench, llama_shapes(width=40))
    name = "model.layers.0.mlp.down_proj.weight"
    assert kept(table)[name] == "input width 40 is not a multiple of 16"
    assert table["tensors"]["model.layers.0.mlp.up_proj.weight"]["quantize"]
    assert table["expected_share"]["mlp"] == pytest.approx(2 / 3)
    assert name in bench.warnings[0]
    assert "model.layers.0.mlp.down_proj" in table["ignore"]


def test_fused_siblings_are_kept_together(bench: Any) -> None:
    table = adaptation(bench, llama_shapes(), keep=["model.layers.0.self_attn.k_proj.weight"])
    reasons = kept(table)
    for projection in "qv":
        name = f"model.layers.0.self_attn.{projection}_proj.weight"
        assert reasons[name].startswith("fused with model.layers.0.self_attn.k_proj.weight")
    assert "model.layers.0.self_attn.o_proj.weight" not in reasons
    assert "model.layers.1.self_attn.q_proj.weight" not in reasons


def test_the_experts_of_a_layer_are_kept_together_as_one_module(bench: Any) -> None:
    keep = ["model.layers.0.mlp.experts.3.down_proj.weight"]
    table = adaptation(bench, moe_shapes(fused=False), MOE_CONFIG, keep=keep)
    assert table["expected_share"]["expert"] == 0.5
    assert "model.layers.0.mlp.experts" in table["ignore"]
    assert not [name for name in table["ignore"] if ".experts." in name]


def test_a_pattern_that_names_nothing_is_a_warning(bench: Any) -> None:
    adaptation(bench, llama_shapes(), keep=["model.layer.0.*"])
    assert "'model.layer.0.*' names no tensor" in bench.warnings[0]


def test_a_misspelt_role(bench: Any) -> None:
    with pytest.raises(InputError, match="'experts' is none of the roles") as error:
        adaptation(bench, llama_shapes(), quantize=["experts"])
    assert error.value.hint == "did you mean expert?"


def test_the_router_cannot_be_quantized(bench: Any) -> None:
    with pytest.raises(InputError, match="'router' is none of the roles"):
        adaptation(bench, llama_shapes(), quantize=["router"])


def test_a_block_fp8_source_is_one_clear_error(bench: Any) -> None:
    with pytest.raises(InputError, match="is F8_E4M3; expected one of BF16"):
        adaptation(bench, llama_shapes(), dtype="F8_E4M3")


def test_a_missing_layer(bench: Any) -> None:
    with pytest.raises(InputError, match="no tensor of layer 2"):
        adaptation(bench, llama_shapes(), {**LLAMA_CONFIG, "num_hidden_layers": 4})


def config_of(folder: Path, **changes: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps({**LLAMA_CONFIG, **changes}))
    return read_config(folder)


def test_null_architectures_mean_the_familys_class(tmp_path: Path) -> None:
    assert config_of(tmp_path, architectures=None).architecture == "LlamaForCausalLM"


def test_another_head_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected LlamaForCausalLM"):
        config_of(tmp_path, architectures=["LlamaForSequenceClassification"])


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e5},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 5e5}},
    ],
)
def test_theta_is_read_where_it_was_published(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert config_of(tmp_path, **changes).rope_theta == 5e5


def test_two_thetas_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"10000\.0 at the top and 500000"):
        config_of(tmp_path, rope_parameters={"rope_theta": 500000})


def test_layer_types_shorter_than_the_layers(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="layer_types has 1 entries for num_hidden_layers = 2"):
        config_of(tmp_path, layer_types=["full_attention"])


@pytest.mark.parametrize("value", [None, 0, "2"])
def test_a_layer_count_that_is_none(tmp_path: Path, value: Any) -> None:
    with pytest.raises(InputError, match="num_hidden_layers: expected a positive integer"):
        config_of(tmp_path, num_hidden_layers=value)


def test_an_unsupported_model_type_names_the_nearest_family(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no architecture file for model_type 'qwen4_moe'") as e:
        config_of(tmp_path, model_type="qwen4_moe")
    assert "onboard/architectures/qwen4_moe.py" in str(e.value.hint)
    assert "onboard/architectures/qwen3_moe.py" in str(e.value.hint)


NAMES = st.sampled_from([*llama_shapes(), *moe_shapes(True), *moe_shapes(False), "vision.x.weight"])


@given(
    st.dictionaries(NAMES, st.lists(st.sampled_from([8, 16, 40, 64]), min_size=1, max_size=3)),
    st.sets(st.sampled_from([role.value for role in QUANTIZABLE])),
    st.lists(NAMES, max_size=3),
)
def test_whatever_the_tensors_a_plan_keeps_its_promises(
    shapes: dict[str, list[int]], roles: set[str], keep: list[str]
) -> None:
    config = ModelConfig("qwen3_moe", "Qwen3MoeForCausalLM", "qwen3_moe", 2, 0, 64, False, None)
    headers = {n: Header(n, "BF16", tuple(s), "m", 0, 0) for n, s in shapes.items()}
    params = Adapt(quantize=tuple(roles), keep=(*keep, "vision.*"))
    tensors = tensorplan.plan(config, headers, params)
    assert tensors.keys() == headers.keys()
    for name, tensor in tensors.items():
        assert tensor.quantize == (tensor.reason is None)
        if tensor.quantize:
            assert tensor.role in roles
            assert tensor.shape[-1] % 16 == 0
            assert name not in keep
    for unit in tensorplan.fused_units(config, tensors):
        assert len({tensors[name].quantize for name in unit}) == 1
    assert all(0 < share <= 1 for share in shares(config, tensors).values())


def shares(config: ModelConfig, tensors: tensorplan.Plan) -> dict[str, float]:
    return adapt.expected_share(tensors, adapt.linear_parameters(config, tensors))
