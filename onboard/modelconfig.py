"""What a published config.json says about the model, read as published."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onboard.architectures import Architecture, by_model_type, families
from onboard.architectures.table import namespace, num_mtp_layers
from onboard.errors import InputError

GENERATES = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")


@dataclass(frozen=True)
class ModelConfig:
    """The facts that decide roles and layout. `tied` is None where the config does not say."""

    model_type: str
    architecture: str | None  # transformers class, None where there is none
    family: str  # file in onboard/architectures
    num_layers: int
    num_mtp_layers: int
    hidden_size: int
    tied: bool | None
    rope_theta: float | None
    raw: Mapping[str, Any]  # the whole config.json

    @property
    def rules(self) -> Architecture:
        return families()[self.family]


def read_config(root: Path) -> ModelConfig:
    """Return the facts of `root/config.json`; raises InputError where it contradicts itself."""
    path = root / "config.json"
    return parse_config(json.loads(path.read_text()), path)


def parse_config(config: Mapping[str, Any], path: Path) -> ModelConfig:
    """Return the facts of a config.json that was read from `path`."""
    model_type = config.get("model_type")
    family = _family(path, model_type)
    rules = families()[family]
    text = config.get(rules.text_config, config) if rules.text_config else config
    names = namespace(rules, config)
    layers = _number(path, names, "num_hidden_layers")
    mtp = num_mtp_layers(rules, names)
    _check_per_layer(path, text, layers, mtp)
    assert model_type is not None
    _check_architecture(path, config)
    return ModelConfig(
        model_type=model_type,
        architecture=rules.model_types[model_type],
        family=family,
        num_layers=layers,
        num_mtp_layers=mtp,
        hidden_size=_number(path, text, "hidden_size"),
        tied=text.get("tie_word_embeddings", config.get("tie_word_embeddings")),
        rope_theta=_rope_theta(path, text),
        raw=config,
    )


def _family(path: Path, model_type: str | None) -> str:
    known = by_model_type()
    if model_type in known:
        return known[model_type]
    if not model_type:
        raise InputError(f"{path}: expected a model_type, found none")
    near = difflib.get_close_matches(model_type, known, 1, 0.3)
    nearest = known[near[0]] if near else "llama"
    raise InputError(
        f"{path}: no architecture file for model_type {model_type!r}; "
        f"known: {', '.join(sorted(known))}",
        f"write onboard/architectures/{model_type}.py, starting from the nearest family: "
        f"onboard/architectures/{nearest}.py",
    )


def _number(path: Path, config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise InputError(f"{path}: {key}: expected a positive integer, found {value!r}")
    return value


def _check_architecture(path: Path, config: Mapping[str, Any]) -> None:
    """Raise InputError on a class that generates no text; null or absent is the family's own."""
    listed = (config.get("architectures") or [""])[0]
    if listed and not listed.endswith(GENERATES):
        raise InputError(
            f"{path}: architectures: expected a class that ends in {' or '.join(GENERATES)}, "
            f"found {listed}"
        )


def _check_per_layer(path: Path, config: Mapping[str, Any], layers: int, mtp: int) -> None:
    for key in ("layer_types", "mlp_layer_types"):
        entries = config.get(key)
        if entries is not None and len(entries) not in (layers, layers + mtp):
            raise InputError(
                f"{path}: {key} has {len(entries)} entries for num_hidden_layers = {layers}",
                "take the config.json of the published checkpoint, or correct one of the two",
            )


def _rope_theta(path: Path, config: Mapping[str, Any]) -> float | None:
    """Return the rotary base, written at the top (older) or inside `rope_parameters` (newer)."""
    nested = (config.get("rope_parameters") or {}).get("rope_theta")
    top = config.get("rope_theta")
    if None not in (nested, top) and nested != top:
        raise InputError(f"{path}: rope_theta is {top} at the top and {nested} in rope_parameters")
    found = top if nested is None else nested
    return float(found) if isinstance(found, int | float) else None  # Step has one a layer
