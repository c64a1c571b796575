"""Every tensor has a role and a reason; what would go wrong after hours is said in seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onboard import adapt, source, tensorplan
from onboard.architectures import (
    QUANTIZABLE,
    Architecture,
    Fused,
    Role,
    by_model_type,
    families,
)
from onboard.checkpoint import formats
from onboard.checkpoint.formats import Weight
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
    "num_attention_heads": 4,
    "tie_word_embeddings": False,
}
EXPERTS, WIDTH = 8, 32
FUSED = {
    "gate_up_proj": {"parts": ["gate_proj", "up_proj"], "axes": "eoi", "interleaved": False},
    "down_proj": {"parts": ["down_proj"], "axes": "eoi", "interleaved": False},
}
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
    dtypes: Mapping[str, str] | None = None,
    **params: Any,
) -> dict[str, Any]:
    """Run `source` and `adapt` on a model of these tensors; return adaptation.json."""
    root = write_model(bench.folder / "model", shapes, config, dtype, dtypes)
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
    assert table["experts"]["fused"] == (FUSED if fused else {})
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


@pytest.mark.parametrize("model_type", sorted(families()["llama"].model_types))
def test_a_dense_model_type_has_the_names_of_its_transformers_class(model_type: str) -> None:
    """Other families' twins are loaded by tests/architectures/test_twins.py."""
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
    assert table["mtp"] == {"layers_announced": 0, "tensors": 3}


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
        "scheme": "plain",
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


def test_an_fp8_source_without_scales_is_one_clear_error(bench: Any) -> None:
    with pytest.raises(InputError, match=r"model\.safetensors.* is F8_E4M3: expected its scales"):
        adaptation(bench, llama_shapes(), dtype="F8_E4M3")


def test_a_dtype_that_cannot_be_quantized_is_one_clear_error(bench: Any) -> None:
    with pytest.raises(InputError, match=r"down_proj\.weight is F8_E8M0; expected one of BF16"):
        tensorplan.plan(
            config_of(bench.folder),
            {n: Weight(n, s, "plain", {"weight": Header(n, "F8_E8M0", s, "m", 0, 0)})
             for n, s in llama_shapes().items() if "down_proj" in n},
            Adapt(),
        )  # fmt: skip


BLOCK_FP8 = {"quant_method": "fp8", "weight_block_size": [64, 32]}
FP8_DTYPES = {"_proj.weight": "F8_E4M3", "_scale_inv": "F32"}


def block_fp8(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    stored = dict(shapes)
    for name, (rows, *columns) in shapes.items():
        if name.endswith("_proj.weight"):
            stored[f"{name}_scale_inv"] = (-(-rows // 64), -(-columns[0] // 32))
    return stored


def test_a_block_fp8_source_is_planned_over_its_weights(bench: Any) -> None:
    config = {**LLAMA_CONFIG, "quantization_config": BLOCK_FP8}
    table = adaptation(bench, block_fp8(llama_shapes()), config, dtypes=FP8_DTYPES)
    assert table["tensors"].keys() == llama_shapes().keys(), "no scale is a weight of its own"
    entry = table["tensors"]["model.layers.0.mlp.down_proj.weight"]
    assert (entry["scheme"], entry["dtype"], entry["shape"]) == ("fp8_block", "F8_E4M3", [64, 96])
    assert entry["quantize"]
    assert table["linear_parameters"] == ATTENTION + 2 * 3 * 96 * 64
    assert table["expected_share"] == {"attention": 1.0, "mlp": 1.0}


def test_an_mxfp4_or_int4_source_is_planned_at_its_weights_shapes(bench: Any) -> None:
    shapes = moe_shapes(fused=False)
    for name in list(shapes):
        if ".experts." in name:
            rows, columns = shapes.pop(name)
            shapes |= {f"{name}_packed": (rows, columns // 8), f"{name}_shape": (2,)}
            shapes |= {f"{name}_scale": (rows, columns // 32)}
    weights = {"num_bits": 4, "type": "int", "group_size": 32}
    quantization = {"quant_method": "compressed-tensors", "format": "pack-quantized",
                    "config_groups": {"group_0": {"weights": weights}}}  # fmt: skip
    config = {**MOE_CONFIG, "text_config": {"quantization_config": quantization}}
    table = adaptation(bench, shapes, config, dtypes={"_packed": "I32", "_shape": "I32"})
    assert table["linear_parameters_by_role"]["expert"] == 2 * EXPERTS * 3 * WIDTH * 64
    entry = table["tensors"]["model.layers.1.mlp.experts.7.down_proj.weight"]
    assert (entry["scheme"], entry["dtype"], entry["shape"]) == ("int4_group", "I32", [64, WIDTH])
    assert table["experts"]["count"] == EXPERTS


def test_an_unknown_quantization_method_is_refused_with_the_known_ones(bench: Any) -> None:
    config = {**LLAMA_CONFIG, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    with pytest.raises(InputError, match=r"'gptq' is none.*compressed-tensors, fbgemm_fp8, fp8"):
        adaptation(bench, llama_shapes(), config)


@pytest.mark.parametrize("nested", [True, False])
def test_an_nvfp4_source_is_refused_and_told_what_to_take(bench: Any, nested: bool) -> None:
    declared: dict[str, Any] = {"quantization_config": {"quant_algo": "NVFP4"}}
    config = {**LLAMA_CONFIG, **({"text_config": declared} if nested else declared)}
    with pytest.raises(InputError, match=r"config\.json says that the weights are NVFP4") as error:
        adaptation(bench, llama_shapes(), config)
    assert "base_model" in str(error.value.hint)


def family(**changes: Any) -> ModelConfig:
    """Return the config of a family made for the test: a prefixed decoder with a vision tower."""
    return Family("made_up", None, "made_up", 2, 1, 64, False, None, {}, Architecture(**{
        "model_types": {"made_up": None},
        "roots": {"made_up": "language_model."},
        "tensors": """
            attention  {root}model.layers.{any_layer}.self_attn.{q,k,v}_proj.weight  64, 64
            expert     {root}model.layers.{any_layer}.mlp.experts.{gate_up,down}_proj  4, 64, 64
            bias       {root}model.layers.{layer}.mlp.experts.gate_up_proj_bias  4, 64
            head       {root}lm_head.weight                   128, 64
            vision     vision_tower.layers.{block}.fc.weight  64, 64
        """,
        "quantize": (Role.EXPERT,),
        "fused_experts": {"gate_up_proj": Fused(("up_proj", "gate_proj"), "eio", True),
                          "down_proj": Fused(("down_proj",), "eio")},
        **changes,
    }))  # fmt: skip


@dataclass(frozen=True)
class Family(ModelConfig):
    made: Architecture

    @property
    def rules(self) -> Architecture:
        return self.made


def made_up_plan(
    config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], **params: Any
) -> dict[str, tensorplan.Planned]:
    headers = {n: Header(n, "BF16", s, "m", 0, 0) for n, s in shapes.items()}
    return tensorplan.plan(config, formats.weights(headers, {}), Adapt(**params))


AT = "language_model.model.layers"
PREFIXED: dict[str, tuple[int, ...]] = {
    f"{AT}.0.self_attn.q_proj.weight": (64, 64),
    f"{AT}.1.mlp.experts.gate_up_proj": (4, 64, 40),
    f"{AT}.1.mlp.experts.gate_up_proj_bias": (4, 40),
    f"{AT}.1.mlp.experts.down_proj": (4, 32, 64),
    f"{AT}.2.mlp.experts.down_proj": (4, 32, 64),
    "vision_tower.layers.9.fc.weight": (64, 64),
    "language_model.lm_head.weight": (128, 64),
}


def test_a_prefixed_model_ignores_its_own_names() -> None:
    config = family()
    tensors = made_up_plan(config, PREFIXED)
    assert adapt.ignored(config, tensors) == [
        "language_model.lm_head",
        f"{AT}.0.self_attn.q_proj",
        f"{AT}.2.*",
        "vision_tower.layers.9.fc",
    ]
    without = {n: t for n, t in tensors.items() if "lm_head" not in n}
    assert "language_model.lm_head" in adapt.ignored(config, without), "engines build one"
    assert "lm_head" not in adapt.ignored(config, without)


def test_layers_of_a_vision_tower_are_neither_mtp_nor_trunk() -> None:
    config = family()
    assert tensorplan.role_of(config, "vision_tower.layers.9.fc.weight") is Role.VISION
    assert tensorplan.role_of(config, f"{AT}.2.self_attn.q_proj.weight") is Role.MTP
    with pytest.raises(InputError, match="no tensor of layer 1"):
        adapt.check_complete(config, [f"{AT}.0.x", "vision_tower.layers.1.fc.weight"])
    with pytest.raises(InputError, match=r"no language_model\.lm_head\.weight"):
        adapt.check_complete(config, [f"{AT}.0.x", f"{AT}.1.x"])


def test_the_input_axis_decides_the_width_and_biases_decide_nothing() -> None:
    """[E, in, out]: 64 and 32 inputs; 40 outputs do not matter, nor does the bias beside them."""
    config = family()
    tensors = made_up_plan(config, PREFIXED)
    assert tensors[f"{AT}.1.mlp.experts.gate_up_proj"].quantize
    assert tensors[f"{AT}.1.mlp.experts.down_proj"].quantize
    assert adapt.experts(config, tensors) == {
        "layout": "fused",
        "count": 4,
        "per_token": None,
        "fused": {
            "gate_up_proj": {"parts": ("up_proj", "gate_proj"), "axes": "eio", "interleaved": True},
            "down_proj": {"parts": ("down_proj",), "axes": "eio", "interleaved": False},
        },
    }
    narrow = {**PREFIXED, f"{AT}.1.mlp.experts.gate_up_proj": (4, 40, 64)}
    reason = made_up_plan(config, narrow)[f"{AT}.1.mlp.experts.gate_up_proj"].reason
    assert reason == "input width 40 is not a multiple of 16"


def test_a_recipe_without_roles_takes_those_of_the_family() -> None:
    config, name = family(), f"{AT}.0.self_attn.q_proj.weight"
    assert made_up_plan(config, PREFIXED)[name].reason == "role attention stays in high precision"
    assert made_up_plan(config, PREFIXED, quantize=["attention"])[name].quantize


def test_the_familys_patterns_come_before_the_recipes_and_excuse_nothing_unknown() -> None:
    config = family(keep=("*.layers.1.*", "*.strange.*"))
    name = f"{AT}.1.mlp.experts.down_proj"
    tensors = made_up_plan(config, PREFIXED, keep=["*.experts.*"])
    assert tensors[name].reason == "kept by the family's pattern *.layers.1.*"
    strange = {**PREFIXED, f"{AT}.0.strange.weight": (64, 64)}
    with pytest.raises(InputError, match=r"strange\.weight \[64, 64\]"):
        made_up_plan(config, strange)
    kept = made_up_plan(config, strange, keep=["*.strange.*"])
    assert kept[f"{AT}.0.strange.weight"].reason == "kept by the pattern *.strange.*"


def test_a_3d_weight_without_a_fused_layout_is_no_matrix() -> None:
    config = family(fused_experts={})
    name = f"{AT}.1.mlp.experts.down_proj"
    assert made_up_plan(config, PREFIXED)[name].reason == "not a matrix"


def test_whether_kept_tensors_keep_the_sources_format_is_recorded() -> None:
    for keeps in (True, False):
        config = family(keeps_source_format=keeps)
        described = adapt.describe(config, made_up_plan(config, PREFIXED))
        assert described["keeps_source_format"] is keeps
        assert described["mtp"] == {"layers_announced": 1, "tensors": 1}


def test_a_missing_layer(bench: Any) -> None:
    with pytest.raises(InputError, match="no tensor of layer 2"):
        adaptation(bench, llama_shapes(), {**LLAMA_CONFIG, "num_hidden_layers": 4})


def config_of(folder: Path, **changes: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps({**LLAMA_CONFIG, **changes}))
    return read_config(folder)


def test_null_architectures_mean_the_familys_class(tmp_path: Path) -> None:
    assert config_of(tmp_path, architectures=None).architecture == "LlamaForCausalLM"


def test_another_head_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="found LlamaForSequenceClassification"):
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
    config = ModelConfig("qwen3_moe", "Qwen3MoeForCausalLM", "qwen3_moe", 2, 0, 64, False, None, {})
    headers = {n: Header(n, "BF16", tuple(s), "m", 0, 0) for n, s in shapes.items()}
    params = Adapt(quantize=tuple(roles), keep=(*keep, "vision.*"))
    tensors = tensorplan.plan(config, formats.weights(headers, {}), params)
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
