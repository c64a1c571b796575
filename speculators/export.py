"""The draft as engines load it: the speculators layout for vLLM, flat EAGLE-3 for SGLang.

Both keep to what loaders accept: Llama layers, three aux states, no bias, explicit `lm_head` and
`d2t`. Every switch whose default differs between engines is written. SGLang's loader knows one
layer of full attention without EAGLE-3.1's switches: other drafts, and the family P-EAGLE, are
written for vLLM alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from onboard.errors import InputError
from onboard.speculators.eagle3 import Eagle3
from onboard.speculators.shape import DraftConfig
from onboard.speculators.vocabulary import Vocabulary
from onboard.store import write_json

WEIGHTS = "model.safetensors"
DTYPE = torch.bfloat16
SPECULATORS_VERSION = "0.9.0"  # of the layout
VERIFIER = "checkpoint"  # beside the draft in a bundle; servers name the target themselves

# What each engine means by an aux layer id, as an offset from the index into HF `hidden_states`
# (0 = embedding, i = input of layer i): vLLM takes the input of layer `id`, SGLang the input of
# layer `id + 1`.
LAYER_ID_OFFSET = {"vllm": 0, "sglang": -1}
LAYER_PREFIX = {"vllm": "layers.0.", "sglang": "midlayer."}
SWITCHES = ("norm_before_residual", "norm_output", "fc_norm")  # fields of `DraftConfig`
OUTSIDE = ("draft_vocab_size", "mask_token_id", *SWITCHES)  # of the Llama's config


@dataclass(frozen=True)
class Export:
    """What a directory holds: the draft's shape, tensors under the names of `Eagle3`, tables."""

    config: DraftConfig
    aux_layers: tuple[int, ...]
    tensors: Mapping[str, Tensor]
    vocabulary: Vocabulary

    def draft(self) -> Eagle3:
        """Return the draft with exactly these weights (vLLM's: SGLang's has no embedding)."""
        with torch.device("meta"):
            draft = Eagle3(self.config)
        draft.load_state_dict(dict(self.tensors), strict=True, assign=True)
        return draft.float()


def engines(config: DraftConfig) -> list[str]:
    """Return the engines whose loaders know such a draft."""
    is_portable = config.num_hidden_layers == 1 and config.sliding_window is None
    is_portable &= config.mask_token_id is None
    is_portable &= not any(getattr(config, switch) for switch in SWITCHES)
    return ["vllm", "sglang"] if is_portable else ["vllm"]


def engine_layer_ids(aux_layers: tuple[int, ...], engine: str) -> list[int]:
    """Translate indices into HF `hidden_states` into the engine's aux layer ids."""
    return [i + LAYER_ID_OFFSET[engine] for i in aux_layers]


def write(
    directory: Path,
    engine: str,
    draft: Eagle3,
    vocabulary: Vocabulary,
    aux_layers: tuple[int, ...],
    target_architectures: list[str],
    speculative_tokens: int,
) -> None:
    """Write `config.json` and bf16 `model.safetensors` for `engine`: "vllm" or "sglang"."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(_tensors(draft, vocabulary, engine), directory / WEIGHTS, {"format": "pt"})
    ids = engine_layer_ids(aux_layers, engine)
    config = (
        _vllm_config(draft.config, ids, target_architectures, speculative_tokens)
        if engine == "vllm"
        else _sglang_config(draft.config, ids)
    )
    write_json(directory / "config.json", config)


def read(directory: Path, engine: str) -> Export:
    """Read an export back, strictly.

    Raises InputError naming the file and the field or tensor, where one is absent, unknown, of
    another dtype or shape, or contradicts another.
    """
    file = directory / "config.json"
    found = json.loads(file.read_text())
    shape, ids = _shape(found, engine, file)
    config = DraftConfig(**shape)
    tokens, architectures = _vllm_extras(found) if engine == "vllm" else (0, [])
    expected = (
        _vllm_config(config, ids, architectures, tokens)
        if engine == "vllm"
        else _sglang_config(config, ids)
    )
    _same(found, expected, str(file))
    tensors = load_file(directory / WEIGHTS)
    vocabulary = _tables(tensors, config, directory / WEIGHTS)
    prefix = LAYER_PREFIX[engine]
    named = {
        "layers.0." + n.removeprefix(prefix) if n.startswith(prefix) else n: t
        for n, t in tensors.items()
    }
    _check_tensors(named, config, engine, directory / WEIGHTS)
    aux_layers = tuple(i - LAYER_ID_OFFSET[engine] for i in ids)
    return Export(config, aux_layers, named, vocabulary)


def _tensors(draft: Eagle3, vocabulary: Vocabulary, engine: str) -> dict[str, Tensor]:
    prefix = LAYER_PREFIX[engine]
    tensors = {
        prefix + n.removeprefix("layers.0.") if n.startswith("layers.0.") else n: t
        for n, t in draft.state_dict().items()
        if engine == "vllm" or n != "embed_tokens.weight"  # SGLang shares the target's
    }
    tensors = {n: t.to("cpu", DTYPE).contiguous() for n, t in tensors.items()}
    if len(vocabulary) < vocabulary.target_size:  # engines refuse the tables of a full vocabulary
        tensors |= {"d2t": vocabulary.d2t.cpu(), "t2d": vocabulary.t2d.cpu()}
    return tensors


def _llama_config(c: DraftConfig) -> dict[str, Any]:
    """Every field of a small Llama; theta in both spellings that loaders read."""
    attention = "full_attention" if c.sliding_window is None else "sliding_attention"
    return {
        "model_type": "llama",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_hidden_layers,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "layer_types": [attention] * c.num_hidden_layers,
        "sliding_window": c.sliding_window,
        "hidden_act": "silu",
        "rms_norm_eps": c.rms_norm_eps,
        "max_position_embeddings": c.max_position_embeddings,
        "rope_theta": c.rope_theta,
        "rope_parameters": {"rope_theta": c.rope_theta, "rope_type": "default"},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": c.bos_token_id,
        "eos_token_id": c.eos_token_id,
        "pad_token_id": c.pad_token_id,
    }


def _switches(c: DraftConfig) -> dict[str, Any]:
    """Fields of EAGLE-3 itself; defaults differ between engines, so none is left out."""
    return {
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": c.hidden_size,
        "norm_before_fc": False,
        **{switch: getattr(c, switch) for switch in SWITCHES},
    }


def _vllm_config(
    c: DraftConfig, layer_ids: list[int], target: list[str], speculative_tokens: int
) -> dict[str, Any]:
    family = "eagle3" if c.mask_token_id is None else "peagle"
    return {
        "architectures": ["Eagle3Speculator" if family == "eagle3" else "PEagleDraftModel"],
        "speculators_model_type": family,
        "mask_token_id": c.mask_token_id,
        "speculators_version": SPECULATORS_VERSION,
        **_switches(c),
        "eagle_aux_hidden_state_layer_ids": layer_ids,
        "transformer_layer_config": _llama_config(c),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "speculators_config": {
            "algorithm": family,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": speculative_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": VERIFIER, "architectures": target},
        },
    }


def _sglang_config(c: DraftConfig, layer_ids: list[int]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_llama_config(c),
        **_switches(c),
        "mask_token_id": c.mask_token_id,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": layer_ids,
        },
    }


def _shape(found: Mapping[str, Any], engine: str, file: Path) -> tuple[dict[str, Any], list[int]]:
    try:
        llama = found["transformer_layer_config"] if engine == "vllm" else found
        place = found if engine == "vllm" else found["eagle_config"]
        shape = {
            name: (found if name in OUTSIDE else llama)[name]
            for name in DraftConfig.__dataclass_fields__
        }
        return shape, list(place["eagle_aux_hidden_state_layer_ids"])
    except KeyError as e:
        raise InputError(f"{file}: no field {e.args[0]!r}") from e


def _vllm_extras(found: Mapping[str, Any]) -> tuple[int, list[str]]:
    speculators = found["speculators_config"]
    return (
        speculators["proposal_methods"][0]["speculative_tokens"],
        speculators["verifier"]["architectures"],
    )


def _same(found: Any, expected: Any, where: str) -> None:
    """Compare field by field; a missing or unknown one differs too."""
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in sorted(found.keys() | expected.keys()):
            if key not in found or key not in expected:
                word = "no field" if key not in found else "unknown field"
                raise InputError(f"{where}: {word} {key!r}")
            _same(found[key], expected[key], f"{where}: {key}")
    elif found != expected:
        raise InputError(f"{where}: expected {expected!r}, found {found!r}")


def _tables(tensors: dict[str, Tensor], config: DraftConfig, file: Path) -> Vocabulary:
    """Take `d2t` and `t2d` out of `tensors`."""
    if config.draft_vocab_size == config.vocab_size:
        return Vocabulary(torch.arange(config.vocab_size), config.vocab_size)
    if absent := {"d2t", "t2d"} - tensors.keys():
        raise InputError(f"{file}: no tensor {sorted(absent)[0]}")
    vocabulary = Vocabulary.from_tables(tensors.pop("d2t"), tensors.pop("t2d"))
    if (len(vocabulary), vocabulary.target_size) != (config.draft_vocab_size, config.vocab_size):
        raise InputError(
            f"{file}: d2t holds {len(vocabulary)} of {vocabulary.target_size} tokens, config.json "
            f"says {config.draft_vocab_size} of {config.vocab_size}"
        )
    return vocabulary


def _check_tensors(
    tensors: Mapping[str, Tensor], config: DraftConfig, engine: str, file: Path
) -> None:
    with torch.device("meta"):
        expected = Eagle3(config).state_dict()
    if engine == "sglang":
        del expected["embed_tokens.weight"]
    if difference := sorted(tensors.keys() ^ expected.keys()):
        word = "unknown" if difference[0] in tensors else "no"
        raise InputError(f"{file}: {word} tensor {difference[0]}")
    for name, tensor in tensors.items():
        want = (DTYPE, expected[name].shape)
        if (tensor.dtype, tensor.shape) != want:
            raise InputError(
                f"{file}: {name} is {tensor.dtype} {list(tensor.shape)}, "
                f"expected {want[0]} {list(want[1])}"
            )
