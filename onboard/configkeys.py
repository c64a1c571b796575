"""Which keys of a config.json nobody here has heard of, found without importing torch.

Known are: what the transformers config class names (read from its source, not imported), what the
family's table uses, what the published configs that ship use for this model_type, and the keys that
every config has.
"""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from onboard.architectures import Architecture
from onboard.lookup import PUBLISHED

# Written by transformers 4 and 5 into any config.json, whatever the model.
_WRITTEN = """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path
    add_cross_attention architectures attention_bias attention_dropout auto_map bad_words_ids
    begin_suppress_tokens bos_token_id chunk_size_feed_forward cross_attention_hidden_size
    decoder_start_token_id diversity_penalty do_sample dtype early_stopping
    encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id hidden_act id2label initializer_range is_composition
    is_decoder is_encoder_decoder label2id length_penalty max_length max_position_embeddings
    min_length model_type no_repeat_ngram_size num_beam_groups num_beams num_return_sequences
    output_attentions output_hidden_states output_scores pad_token_id partial_rotary_factor
    prefix pretraining_tp problem_type pruned_heads quantization_config remove_invalid_values
    repetition_penalty return_dict return_dict_in_generate rope_parameters rope_scaling
    rope_theta sep_token_id sliding_window suppress_tokens task_specific_params temperature
    text_config tf_legacy_loss tie_encoder_decoder tie_word_embeddings tokenizer_class top_k
    top_p torch_dtype torchscript transformers_version typical_p unsloth_fixed unsloth_version
    use_bfloat16 use_cache vision_config vocab_size
"""
COMMON = frozenset(_WRITTEN.split())
SKIPPED = ("quantization_config", "vision_config", "audio_config", "id2label", "label2id")


def unknown_keys(config: Mapping[str, Any], rules: Architecture) -> list[str]:
    """Return the keys (dotted where nested) that neither transformers nor `rules` know."""
    text = config.get("text_config") or {}
    kinds = {config.get("model_type"), text.get("model_type"), *rules.model_types}
    known = set(COMMON) | expression_names(rules)
    for kind in kinds - {None}:
        known |= class_keys(str(kind)) | shipped_keys(str(kind))
    return [key for key in dotted(config) if key.rpartition(".")[2] not in known]


def dotted(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield every key, those of nested tables as `table.key`, but for tables of other parts."""
    for key, value in config.items():
        if isinstance(value, Mapping) and key not in SKIPPED and not key.startswith("rope_"):
            yield from dotted(value, f"{prefix}{key}.")
        else:
            yield prefix + key


@cache
def _names(expression: str) -> frozenset[str]:
    nodes = list(ast.walk(ast.parse(expression.strip(), mode="eval")))
    named = {node.id for node in nodes if isinstance(node, ast.Name)}
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    texts = {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    return frozenset(named | attributes | texts)  # texts: getattr(config, "key", 0)


def expression_names(rules: Architecture) -> set[str]:
    """Return every config key that the family's expressions read."""
    rows = [part for row in rules.rows for part in (row.shape, row.condition) if part]
    parts = [*rows, *rules.defaults.values(), *rules.ranges.values(), rules.cache]
    parts += [rules.experts_per_token, rules.mtp_layers]
    small = {part for key in rules.small for part in key.split(".")}
    return small.union(rules.defaults, *map(_names, parts))


@cache
def shipped_keys(model_type: str) -> frozenset[str]:
    """Return the keys of the shipped configs whose model_type, or text model_type, is this."""
    found: set[str] = set()
    for path in PUBLISHED.glob("*.json"):
        config = json.loads(path.read_text())
        text = config.get("text_config") or {}
        if model_type in (config["model_type"], text.get("model_type")):
            found |= {key.rpartition(".")[2] for key in dotted(config)}
    return frozenset(found)


@cache
def class_keys(model_type: str) -> frozenset[str]:
    """Return the keys that the transformers config class of a model_type names."""
    return frozenset(
        key for path in _config_files(model_type) for key in _declared(path.read_text())
    )


def _config_files(model_type: str) -> list[Path]:
    spec = importlib.util.find_spec("transformers")  # looked up, never imported
    if spec is None or not spec.submodule_search_locations:
        return []
    models = Path(spec.submodule_search_locations[0]) / "models"
    own = sorted((models / model_type).glob("configuration_*.py"))
    if own or not model_type.endswith("_text"):
        return own
    return sorted((models / model_type.removesuffix("_text")).glob("configuration_*.py"))


def _declared(code: str) -> Iterator[str]:
    """Yield annotated class attributes, parameters of `__init__` and what `attribute_map` maps."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.FunctionDef) and node.name == "__init__":
            yield from (argument.arg for argument in node.args.args)
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "attribute_map":
            assert isinstance(node.value, ast.Dict)
            keys = (key.value for key in node.value.keys if isinstance(key, ast.Constant))
            yield from (key for key in keys if isinstance(key, str))
