"""A tiny random twin of a model: the real config made small, under the published tensor names.

Same module graph, same pattern of layer types, few layers, small widths, MTP layers included.
What would fail at hour 8 of the real model fails in seconds here.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from onboard.architectures import Architecture, by_model_type, families
from onboard.architectures.table import Tensor, evaluate, generate, namespace, num_mtp_layers

# What the common keys become; a width is a multiple of 64 so that every kernel takes it.
COMMON: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "routed_expert_hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,  # as published: engines have kernels for this width alone
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 4096,
}
MOST_LAYERS = 8
INIT = 0.08  # standard deviation of a random matrix
# Of an embedding that is not the head too: the last token then decides what follows, and answers
# do not end in one token for ever. A tied one would repeat it.
LOUD = 1.0


def shrink(config: Mapping[str, Any], vocab_size: int | None = None) -> dict[str, Any]:
    """Return a small config of the same family.

    Lists with an entry per layer are cut to the layers that stay; those are as many as it takes
    for every kind of layer to appear, at least two. Keys of a family's `small` win.
    """
    rules = families()[by_model_type()[config["model_type"]]]
    small = copy.deepcopy(dict(config))
    text = small.get(rules.text_config, small) if rules.text_config else small
    real = namespace(rules, config)
    layers = real["num_hidden_layers"]
    kept = rules.small.get("num_hidden_layers") or _layers_needed(rules, config, layers)
    mtp = num_mtp_layers(rules, real)
    for table in (small, text):
        for key, value in list(table.items()):
            per_layer = isinstance(value, list) or (
                isinstance(value, str) and key.endswith("_pattern")  # a letter per layer
            )
            if per_layer and len(value) in (layers, layers + mtp) and layers > 2:
                table[key] = value[:kept] + value[layers:]
            elif key in COMMON and isinstance(value, int):
                table[key] = min(value, COMMON[key])
    if "num_hidden_layers" in text:
        text["num_hidden_layers"] = kept
    small = _lay_over(small, text, rules.small)
    return small if vocab_size is None else with_vocabulary(small, vocab_size)


def with_vocabulary(config: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """Return a config whose vocabulary is `tokens` long; ids of special tokens stay inside it."""
    changed = copy.deepcopy(dict(config))
    rules = families()[by_model_type()[config["model_type"]]]
    for table in (changed, changed.get(rules.text_config, {})):
        for key, value in table.items():
            if key in ("vocab_size", "vocab_size_per_layer_input"):
                table[key] = tokens
            elif key.endswith("_token_id"):
                table[key] = _inside(value, tokens)
    return changed


def _inside(ids: Any, tokens: int) -> Any:
    """Return special token ids moved below `tokens`, apart from each other."""
    if isinstance(ids, list):
        return [_inside(i, tokens) for i in ids]
    return ids % tokens if isinstance(ids, int) and ids >= tokens else ids


def _layers_needed(rules: Architecture, config: Mapping[str, Any], layers: int) -> int:
    """Return the least number of first layers that show every set of tensors and every type."""
    kinds: list[Any] = [set() for _ in range(layers)]
    names = namespace(rules, config)
    per_layer = [v for v in names.values() if isinstance(v, list) and len(v) >= layers > 2]
    for row in rules.rows:
        if "{layer}" in row.template or "{any_layer}" in row.template:
            for layer, kind in enumerate(kinds):
                seen_there = {**names, "layer": layer}
                if not row.condition or evaluate(row.condition, seen_there, row.template):
                    kind.add(row.template)
    full = [(frozenset(k), *(json.dumps(v[i]) for v in per_layer)) for i, k in enumerate(kinds)]
    wanted, seen = set(full), set()
    for number, kind in enumerate(full, 1):
        seen.add(kind)
        if seen == wanted and number >= 2:
            return number
        if number >= MOST_LAYERS:
            break
    return min(layers, MOST_LAYERS)


def _lay_over(
    small: dict[str, Any], text: dict[str, Any], changes: Mapping[str, Any]
) -> dict[str, Any]:
    for key, value in changes.items():
        path = key.split(".")
        table = small if path[0] in small and path[0] not in text else text
        for part in path[:-1]:
            table = table.get(part) or {}  # a text-only config has no vision_config
        table[path[-1]] = value
    return small


def write(
    config: Mapping[str, Any], folder: Path, seed: int = 0, tensors: Iterable[Tensor] | None = None
) -> Path:
    """Write a random checkpoint with this config's names and shapes into `folder`.

    It is in the format that the config declares, bf16 without one. Norms are ones, biases small,
    matrices normal with a spread that keeps the outputs peaked.
    """
    import torch
    from safetensors.torch import save_file

    from onboard.checkpoint.encode import encode

    rules = families()[by_model_type()[config["model_type"]]]
    generator = torch.Generator().manual_seed(seed)
    state = {}
    listed = list(tensors or generate(rules, config["model_type"], config))
    untied = any(tensor.role == "head" for tensor in listed)
    for tensor in listed:
        spread = LOUD if tensor.role == "embed" and untied else INIT
        values = torch.randn(tensor.shape, generator=generator) * spread
        if tensor.role == "norm" or tensor.name.endswith("norm.weight"):
            values = torch.ones(tensor.shape)
        state[tensor.name] = values.to(torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(encode(state, config), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return folder
