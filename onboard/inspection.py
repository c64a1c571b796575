"""What `onboard inspect` says of a model: facts from config.json and headers, no weights, no torch.

A known model_type gets figures by role; an unknown one the nearest family, guessed roles and the
text of an architecture file.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from onboard.architectures import Role, by_model_type, families
from onboard.architectures.table import canonical, evaluate, namespace
from onboard.checkpoint.declared import declared
from onboard.checkpoint.headers import is_mtp
from onboard.configkeys import unknown_keys
from onboard.inventory import Inventory, logical, take
from onboard.lookup import Found
from onboard.modelconfig import ModelConfig, parse_config
from onboard.unknown.names import Shapes
from onboard.unknown.nearest import nearest
from onboard.unknown.sketch import Sketch, file_name, sketch, source

Facts = dict[str, Any]
PRESENT = (Role.ATTENTION, Role.STATE, Role.INDEXER, Role.MLP, Role.EXPERT, Role.SHARED_EXPERT)


def inspect(found: Found) -> Facts:
    """Return the facts, ready for JSON. Bytes are bytes, parameters are counts."""
    if found.config.get("model_type") in by_model_type():
        config = parse_config(found.config, Path(found.path))
        return _known(found, take(found, config, found.recipe.adapt))
    return _unknown(found)


def _known(found: Found, held: Inventory) -> Facts:
    config, rules = held.config, held.config.rules
    names = differences(held)
    keys = unknown_keys(found.config, rules)
    used, of = held.experts
    return {
        **_heading(found),
        "verdict": "new architecture" if names["unknown"] else "config delta" if keys
        else "supported",
        "family": config.family,
        "transformers_class": config.architecture,
        "layers": {
            "count": config.num_layers,
            "kinds": layer_kinds(held),
            "mtp": config.num_mtp_layers,
        },
        "hidden_size": config.hidden_size,
        "experts": {"used": used, "of": of} if of else None,
        "parameters": {
            "total": held.parameters,
            "active": held.active,
            "mtp": held.total(Role.MTP),
        },
        "roles": by_role(held),
        "mtp": _mtp(held),
        "kv_cache_bytes_per_token": kv_cache_bytes(config),
        "quantized_by_default": {"roles": list(rules.quantize), "keep": list(rules.keep)},
        "output": output(held),
        "engine": asdict(rules.engine),
        "traps": list(rules.traps),
        "names": names,
        "unknown_config_keys": keys,
    }  # fmt: skip


def _heading(found: Found) -> Facts:
    return {
        "model": found.recipe.source.model,
        "origin": found.origin,
        "model_type": found.config.get("model_type"),
        "source_format": declared(found.config).name,
        "stored": _dtypes(found),
    }


def _dtypes(found: Found) -> dict[str, int] | None:
    """Return dtype -> bytes of the file's tensors, None where no header was read."""
    if found.headers is None:
        return None
    stored: Counter[str] = Counter()
    for header in found.headers.values():
        stored[header.dtype] += header.bytes
    return dict(stored.most_common())


def by_role(held: Inventory) -> Facts:
    """Return role -> tensors, parameters, bytes in the source and after, what becomes NVFP4."""
    table: dict[str, Facts] = {}
    for weight in held.entries:
        row = table.setdefault(weight.role, dict.fromkeys(
            ("tensors", "parameters", "source_bytes", "output_bytes", "nvfp4_parameters"), 0
        ))  # fmt: skip
        row["tensors"] += 1
        row["parameters"] += weight.parameters
        row["source_bytes"] += weight.source_bytes
        row["output_bytes"] += weight.output_bytes
        row["nvfp4_parameters"] += weight.parameters * weight.quantize
    return {role: table[role] for role in sorted(table, key=lambda r: -table[r]["parameters"])}


def output(held: Inventory) -> Facts:
    """Return the bytes of the written checkpoint, MTP apart: engines can leave it out."""
    mtp = sum(w.output_bytes for w in held.entries if w.role is Role.MTP)
    return {
        "source_bytes": sum(w.source_bytes for w in held.entries),
        "bytes": sum(w.output_bytes for w in held.entries) - mtp,
        "mtp_bytes": mtp,
        "nvfp4_parameters": sum(w.parameters for w in held.entries if w.quantize),
    }


def _mtp(held: Inventory) -> Facts:
    tensors = [w for w in held.entries if w.role is Role.MTP]
    return {"tensors": len(tensors), "bytes": sum(w.source_bytes for w in tensors)}


def kv_cache_bytes(config: ModelConfig) -> int:
    """Return the bytes that one token keeps in an FP8 KV cache, over the trunk's layers."""
    names = namespace(config.rules, config.raw)
    layers = range(config.num_layers)
    return sum(int(evaluate(config.rules.cache, {**names, "layer": n}, "cache")) for n in layers)


def layer_kinds(held: Inventory) -> list[Facts]:
    """Return how many layers hold which roles, and which `layer_types` the config gives them."""
    roles: dict[int, set[Role]] = defaultdict(set)
    for weight in held.entries:
        layer = re.search(r"(?:^|\.)layers\.(\d+)\.", weight.name)
        if layer and weight.role in PRESENT and not is_mtp(weight.name, held.config.num_layers):
            roles[int(layer[1])].add(weight.role)
    types = namespace(held.config.rules, held.config.raw).get("layer_types") or ()
    kinds: Counter[tuple[str, ...]] = Counter()
    for number, present in sorted(roles.items()):
        said = [str(types[number])] if number < len(types) else []
        kinds[(*said, *(role.value for role in PRESENT if role in present))] += 1
    return [{"layers": count, "holds": list(kind)} for kind, count in kinds.items()]


def differences(held: Inventory) -> Facts:
    """Return templates with the number of their tensors that file and table disagree on.

    `extra` have a role all the same: another layout of the family.
    """
    return {
        "missing": _templates(held.missing),
        "extra": _templates(held.extra),
        "unknown": _templates(held.unknown),
    }


def _templates(names: Iterable[str]) -> dict[str, int]:
    return dict(Counter(map(canonical, names)))


def _unknown(found: Found) -> Facts:
    shapes = None if found.headers is None else {n: h.shape for n, h in logical(found).items()}
    near = nearest(found.config, shapes)
    facts = {
        **_heading(found),
        "verdict": near.verdict,
        "family": None,
        "nearest": {
            "family": near.family,
            "likeness": round(near.likeness, 3),
            "names": near.name_overlap,
            "keys": near.key_overlap,
            "covered": near.covered,
            "regenerates": near.regenerates,
        },
        "unknown_config_keys": list(near.unknown_keys),
        "next": _next(near.family, str(found.config.get("model_type")), near.verdict),
    }
    if shapes is None:
        return facts
    made = draw(found, shapes, near.family)
    return facts | _guessed(made, shapes) | {
        "file": f"onboard/architectures/{file_name(str(found.config.get('model_type')))}",
        "architecture": source(made, found.origin, near.family),
    }  # fmt: skip


def _next(family: str, model_type: str, verdict: str) -> str:
    if verdict == "config delta":
        return f"add {model_type!r} to model_types in onboard/architectures/{family}.py"
    return (
        f"onboard inspect MODEL --write onboard/architectures/{file_name(model_type)}, then edit "
        f"it beside the nearest, onboard/architectures/{family}.py"
    )


def draw(found: Found, shapes: Shapes, family: str) -> Sketch:
    """Return the sketch of an architecture file, with the nearest family's roles where it knows."""
    rules = families()[family]
    known = {canonical(name): rules.role(name) for name in shapes}
    return sketch(found.config, shapes, known)


def _guessed(made: Sketch, shapes: Shapes) -> Facts:
    counted, sizes, first = Counter[str](), Counter[str](), dict[str, list[int]]()
    for name, shape in shapes.items():
        template = canonical(name)
        counted[template] += 1
        sizes[template] += math.prod(shape)
        first.setdefault(template, list(shape))
    return {
        "parameters": {"total": sum(sizes.values())},
        "guesses": [
            {
                "template": template,
                "tensors": counted[template],
                "shape": first[template],
                "parameters": sizes[template],
                "role": found.role.value,
                "confidence": found.confidence,
                "evidence": found.evidence,
            }
            for template, found in made.guesses.items()
        ],
        "regenerates": made.regenerated == dict(shapes),
    }
