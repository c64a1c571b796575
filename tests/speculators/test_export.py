from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from onboard.errors import InputError
from onboard.recipe import Draft
from onboard.speculators import export
from onboard.speculators.eagle3 import Eagle3
from onboard.speculators.shape import DraftConfig
from onboard.speculators.vocabulary import Vocabulary

from .conftest import TOY_CONFIG, VOCAB, toy_head

ENGINES = ("vllm", "sglang")
KEPT = torch.arange(2, VOCAB, 3)


def write(directory: Path, engine: str, kept: torch.Tensor = KEPT, **shape: Any) -> Eagle3:
    vocabulary = Vocabulary(kept, VOCAB)
    config = DraftConfig.of_target(
        {**TOY_CONFIG, "eos_token_id": [1, 2]}, len(kept), Draft(**shape)
    )
    draft = Eagle3.initial(config, toy_head(), vocabulary, seed=5)
    export.write(directory, engine, draft, vocabulary, (2, 15, 27), ["LlamaForCausalLM"], 3)
    return draft


@pytest.mark.parametrize("engine", ENGINES)
def test_everything_comes_back(tmp_path: Path, engine: str) -> None:
    draft = write(tmp_path, engine)
    found = export.read(tmp_path, engine)
    assert found.config == draft.config
    assert found.aux_layers == (2, 15, 27)
    assert torch.equal(found.vocabulary.kept, KEPT)
    for name, tensor in found.tensors.items():
        assert torch.equal(tensor, draft.state_dict()[name].to(torch.bfloat16)), name


@pytest.mark.parametrize(
    "shape",
    [
        {"layers": 3},
        {"window": 64, "kv_heads": 1, "head_dim": 16},
        {"norm_before_residual": True, "norm_output": True, "fc_norm": True},
        {"family": "peagle", "norm_before_residual": True},
    ],
)
def test_every_shape_comes_back(tmp_path: Path, shape: dict[str, Any]) -> None:
    draft = write(tmp_path, "vllm", **shape)
    found = export.read(tmp_path, "vllm")
    assert found.config == draft.config
    assert found.draft().state_dict().keys() == draft.state_dict().keys()
    assert export.engines(draft.config) == ["vllm"]


def test_a_portable_draft_is_for_every_engine(tmp_path: Path) -> None:
    assert export.engines(write(tmp_path, "vllm", kv_heads=4).config) == list(ENGINES)


def test_names_of_what_only_some_drafts_have(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain", "vllm").state_dict().keys()
    other = write(tmp_path / "other", "vllm", layers=2, fc_norm=True)
    added = set(load_file(tmp_path / "other" / "model.safetensors")) - set(plain) - {"d2t", "t2d"}
    parts = {n.removeprefix("layers.0.") for n in plain if n.startswith("layers.0.")}
    parts.remove("hidden_norm.weight")  # of the first layer alone
    assert added == {f"layers.1.{p}" for p in parts} | {f"fc_norm.{i}.weight" for i in range(3)}
    second = other.state_dict()["layers.1.self_attn.q_proj.weight"]
    assert second.shape[1] == other.config.hidden_size


@pytest.mark.parametrize(("engine", "ids"), [("vllm", [2, 15, 27]), ("sglang", [1, 14, 26])])
def test_each_engine_gets_its_own_layer_ids(tmp_path: Path, engine: str, ids: list[int]) -> None:
    """vLLM names the layer whose input it takes; SGLang adds one to what it is given."""
    write(tmp_path, engine)
    config = json.loads((tmp_path / "config.json").read_text())
    place = config if engine == "vllm" else config["eagle_config"]
    assert place["eagle_aux_hidden_state_layer_ids"] == ids


@pytest.mark.parametrize("engine", ENGINES)
def test_switches_whose_defaults_differ_are_written(tmp_path: Path, engine: str) -> None:
    write(tmp_path, engine)
    config = json.loads((tmp_path / "config.json").read_text())
    for switch in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        assert config[switch] is False
    assert config["tie_word_embeddings"] is False
    llama = config["transformer_layer_config"] if engine == "vllm" else config
    assert llama["rope_theta"] == llama["rope_parameters"]["rope_theta"] == 10000.0
    assert llama["attention_bias"] is False


def test_names_that_the_loaders_expect(tmp_path: Path) -> None:
    write(tmp_path / "vllm", "vllm")
    write(tmp_path / "sglang", "sglang")
    vllm = set(load_file(tmp_path / "vllm" / "model.safetensors"))
    sglang = set(load_file(tmp_path / "sglang" / "model.safetensors"))
    shared = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    parts = {
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
        "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
        "input_layernorm", "hidden_norm", "post_attention_layernorm",
    }  # fmt: skip
    assert vllm == shared | {"embed_tokens.weight"} | {f"layers.0.{p}.weight" for p in parts}
    assert sglang == shared | {f"midlayer.{p}.weight" for p in parts}


def test_a_full_vocabulary_has_no_tables(tmp_path: Path) -> None:
    write(tmp_path, "vllm", torch.arange(VOCAB))
    assert not {"d2t", "t2d"} & set(load_file(tmp_path / "model.safetensors"))
    assert len(export.read(tmp_path, "vllm").vocabulary) == VOCAB


def _set(config: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        config = config[parent]
    if value is None:
        del config[last]
    else:
        config[last] = value


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("norm_before_fc", True, "norm_before_fc: expected False, found True"),
        ("fc_norm", True, r"no tensor fc_norm\.0\.weight"),
        ("norm_before_residual", None, "no field 'norm_before_residual'"),
        ("input_norm", True, "unknown field 'input_norm'"),
        ("transformer_layer_config.rope_theta", None, "no field 'rope_theta'"),
        ("transformer_layer_config.mlp_bias", True, "mlp_bias: expected False"),
        ("draft_vocab_size", 5, "d2t holds 16 of 48 tokens"),
        ("transformer_layer_config.head_dim", 4, r"k_proj\.weight is torch\.bfloat16 \[16, 64\]"),
    ],
)
def test_a_changed_field_is_named(tmp_path: Path, key: str, value: Any, message: str) -> None:
    write(tmp_path, "vllm")
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    _set(config, key, value)
    file.write_text(json.dumps(config))
    with pytest.raises(InputError, match=message):
        export.read(tmp_path, "vllm")


def test_changed_tensors_are_named(tmp_path: Path) -> None:
    write(tmp_path, "vllm")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({n: t for n, t in tensors.items() if n != "fc.weight"}, file)
    with pytest.raises(InputError, match=r"no tensor fc\.weight"):
        export.read(tmp_path, "vllm")
    save_file({**tensors, "fc.weight": tensors["fc.weight"].float()}, file)
    with pytest.raises(InputError, match=r"fc\.weight is torch\.float32"):
        export.read(tmp_path, "vllm")
    save_file({n: t for n, t in tensors.items() if n != "d2t"}, file)
    with pytest.raises(InputError, match="no tensor d2t"):
        export.read(tmp_path, "vllm")
