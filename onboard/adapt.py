"""Stage `adapt`: every weight's role, what becomes NVFP4 and why the rest does not.

It reads headers and config.json only, so that a wrong plan costs seconds, not hours.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from onboard import source
from onboard.architectures import LINEAR, QUANTIZABLE, Role
from onboard.architectures.table import evaluate, namespace
from onboard.checkpoint.formats import check_method, weights
from onboard.checkpoint.headers import read_headers
from onboard.errors import InputError
from onboard.modelconfig import ModelConfig, read_config
from onboard.pipeline import Job
from onboard.recipe import Adapt
from onboard.store import write_json
from onboard.tensorplan import (
    Plan,
    expert_container,
    is_unknown,
    last_part,
    module_of,
    plan,
    role_of,
    split_module,
)

NO_LINEAR_LAYER = (Role.EMBED, Role.NORM, Role.BIAS, Role.BUFFER)
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
# vLLM fuses these two under a name of its own, and not every model class of it maps that back.
ENGINE_NAMES = dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), "fused_qkv_a_proj")
# Of projections that engines fuse: what the fused module is called.
FUSED_NAMES = {
    **ENGINE_NAMES,
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}
LOOK_UPS = ("embed_tokens", "embed", "tok_emb")  # the copies that MTP layers hold


def run(job: Job[Adapt]) -> None:
    """Write `adaptation.json`: the role table and what follows from it for the later stages.

    `groups` are modules that share `weight_scale_2` and `input_scale`, `ignore` the modules that
    the quantization config names as not quantized, `expected_share` the part of each role's
    parameters that becomes NVFP4, `linear_parameters` those of all linear layers and experts. The
    tensors are weights by their own names and shapes, whatever stores them (`scheme`).
    """
    root = source.root(job.inputs["source"])
    config = read_config(root)
    check_recipe(job.params)
    check_method(config.raw)
    held = weights(read_headers(root), config.raw)
    check_complete(config, held)
    tensors = plan(config, held, job.params)
    for warning in warnings(config, tensors, job.params):
        job.warn(warning)
    write_json(job.out / "adaptation.json", describe(config, tensors))
    write_json(job.out / "metrics.json", metrics(config, tensors))


def groups(config: ModelConfig, tensors: Plan) -> list[list[str]]:
    """Return the quantized modules that share scales, siblings in the engine's order.

    A fused expert tensor holds its own siblings and is in no group.
    """
    found: dict[tuple[str, ...], dict[str, str]] = defaultdict(dict)
    for name, tensor in tensors.items():
        module = module_of(name)
        parent, projection = split_module(module)
        for siblings in config.rules.siblings:
            if tensor.quantize and projection in siblings and len(tensor.shape) == 2:
                found[(parent, *siblings)][projection] = module
    ordered = ([held[s] for s in siblings if s in held] for (_, *siblings), held in found.items())
    return [group for group in ordered if len(group) > 1]


def ignored(config: ModelConfig, tensors: Plan) -> list[str]:
    """Return the modules that an engine must not take for NVFP4.

    An output head that is tied, and so absent, is named too: engines build one. Kept experts
    appear as their container, which is one module to an engine; MTP layers as one wildcard each.
    """
    names = {head_module(config)}
    for name, tensor in tensors.items():
        if tensor.role is Role.MTP:
            names.add(_mtp_wildcard(name))
        elif tensor.quantize or len(tensor.shape) < 2 or tensor.role in NO_LINEAR_LAYER:
            continue
        else:
            module = expert_container(name) or module_of(name)
            parent, projection = split_module(module)
            names.add(module)
            if projection in ENGINE_NAMES:
                names.add(f"{parent}.{ENGINE_NAMES[projection]}")
    return sorted(names)


def ignored_beside(adaptation: Mapping[str, Any], formats: Mapping[str, str]) -> list[str]:
    """Return `ignored` and the modules that `formats` keeps in bf16, by their fused names too.

    `formats` holds "fp8" or "bf16" by module. Experts appear as their container.
    """
    names = set(adaptation["ignore"])
    for module in (module for module, form in formats.items() if form == "bf16"):
        parent, projection = split_module(module)
        if container := expert_container(module):
            names.add(container)
        else:
            names |= {module, f"{parent}.{FUSED_NAMES.get(projection, projection)}"}
    return sorted(names)


def expected_share(tensors: Plan, totals: Mapping[str, int]) -> dict[str, float]:
    """Return role -> NVFP4 parameters / parameters of its matrices, where any are quantized."""
    chosen: Counter[str] = Counter()
    for tensor in tensors.values():
        if tensor.quantize:
            chosen[tensor.role] += tensor.parameters
    return {role: chosen[role] / totals[role] for role in sorted(chosen)}


def linear_parameters(config: ModelConfig, tensors: Plan) -> dict[str, int]:
    """Return role -> parameters of its linear layers and experts.

    Embeddings are look-ups, not linear layers; a tied output head is the embedding and does not
    count, whether or not the file repeats it.
    """
    totals: Counter[str] = Counter()
    tied = is_tied(config, tensors)
    for name, tensor in tensors.items():
        is_linear = tensor.role in LINEAR and len(tensor.shape) >= 2
        if not is_linear or (tensor.role is Role.HEAD and tied) or last_part(name) in LOOK_UPS:
            continue
        totals[tensor.role] += tensor.parameters
    return dict(sorted(totals.items()))


def is_tied(config: ModelConfig, tensors: Iterable[str]) -> bool:
    """Whether the output head is the embedding; where the config is silent the file decides."""
    return f"{head_module(config)}.weight" not in tensors if config.tied is None else config.tied


def head_module(config: ModelConfig) -> str:
    """Return the output head's module as the family's table names it, there or not."""
    root = config.rules.roots.get(config.model_type, "")
    heads = [row for row in config.rules.rows if row.role == Role.HEAD and not row.variables]
    return module_of(heads[0].template.replace("{root}", root)) if heads else "lm_head"


def describe(config: ModelConfig, tensors: Plan) -> dict[str, Any]:
    """Return the content of `adaptation.json`."""
    totals = linear_parameters(config, tensors)
    return {
        "model_type": config.model_type,
        "architecture": config.architecture,
        "family": config.family,
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "rope_theta": config.rope_theta,
        "tied": is_tied(config, tensors),
        "tensors": {name: asdict(tensor) for name, tensor in tensors.items()},
        "groups": groups(config, tensors),
        "ignore": ignored(config, tensors),
        "experts": experts(config, tensors),
        "mtp": {"layers_announced": config.num_mtp_layers, "tensors": _num_mtp(tensors)},
        "keeps_source_format": config.rules.keeps_source_format,
        "expected_share": expected_share(tensors, totals),
        "linear_parameters": sum(totals.values()),
        "linear_parameters_by_role": totals,
    }


def experts(config: ModelConfig, tensors: Plan) -> dict[str, Any] | None:
    """Return how routed experts are stored, None without any.

    A token uses `per_token` of `count`. `layout` is "separate", one weight each, or "fused",
    [E, ...]; `fused` then holds the parts, axes and interleaving of each fused weight by the last
    part of its name.
    """
    names = [name for name, tensor in tensors.items() if tensor.role is Role.EXPERT]
    if not names:
        return None
    rules = config.rules.fused_experts
    used = _experts_per_token(config)
    fused = [n for n in names if len(tensors[n].shape) == 3 and last_part(n) in rules]
    if fused:
        layouts = {last: asdict(rules[last]) for last in sorted({last_part(n) for n in fused})}
        count = tensors[fused[0]].shape[0]
        return {"layout": "fused", "count": count, "per_token": used, "fused": layouts}
    numbers = {match[1] for name in names if (match := re.search(r"\.experts\.(\d+)\.", name))}
    return {"layout": "separate", "count": len(numbers), "per_token": used, "fused": {}}


def _experts_per_token(config: ModelConfig) -> int | None:
    """Return what config.json says, None where it is silent: only budgets for speed need it."""
    try:
        names = namespace(config.rules, config.raw)
        return int(evaluate(config.rules.experts_per_token, names, "experts per token"))
    except InputError:
        return None


def metrics(config: ModelConfig, tensors: Plan) -> dict[str, float]:
    totals = linear_parameters(config, tensors)
    quantizable = sum(t.parameters for t in tensors.values() if t.quantize)
    shares = expected_share(tensors, totals)
    unknown = [name for name, tensor in tensors.items() if is_unknown(tensor)]
    return {
        "unknown_tensors": len(unknown),
        "source_tensors": len(tensors),
        "mtp_tensors": _num_mtp(tensors),
        "quantizable_parameters": quantizable,
        "linear_parameters": sum(totals.values()),
        "expected_share": quantizable / max(1, sum(totals.values())),
        **{f"expected_share_{role}": share for role, share in shares.items()},
    }


def warnings(config: ModelConfig, tensors: Plan, params: Adapt) -> list[str]:
    """Return what a person should know about the plan, though it can be carried out."""
    said = [
        f"adapt.keep: the pattern {pattern!r} names no tensor"
        for pattern in params.keep
        if not fnmatch.filter(tensors, pattern)
    ]
    narrow = [name for name, t in tensors.items() if "multiple of" in (t.reason or "")]
    if narrow:
        said.append(f"{len(narrow)} tensors stay in high precision: {narrow[0]}: "
                    f"{tensors[narrow[0]].reason}")  # fmt: skip
    if config.num_mtp_layers and not _num_mtp(tensors):
        said.append(
            f"config.json announces {config.num_mtp_layers} MTP layers, the checkpoint has none: "
            "an engine would draft with random weights"
        )
    return said


def check_recipe(params: Adapt) -> None:
    """Raise InputError on a role that does not exist or cannot be quantized."""
    allowed = [role.value for role in QUANTIZABLE]
    for role in params.quantize or ():
        if role not in allowed:
            near = difflib.get_close_matches(role, allowed, 1)
            hint = f"did you mean {near[0]}?" if near else None
            raise InputError(
                f"adapt.quantize: {role!r} is none of the roles {', '.join(allowed)}", hint
            )


def check_complete(config: ModelConfig, names: Iterable[str]) -> None:
    """Raise InputError where a layer or an untied output head is missing from the files."""
    names = list(names)
    layers = {match[1]: name for name in names if (match := re.search(_LAYER, name))
              and role_of(config, name) is not Role.VISION}  # fmt: skip
    missing = sorted(set(range(config.num_layers)) - set(map(int, layers)))
    if missing:
        raise InputError(
            f"config.json says num_hidden_layers = {config.num_layers}, but the checkpoint has no "
            f"tensor of layer {missing[0]}"
        )
    head = f"{head_module(config)}.weight"
    if config.tied is False and head not in names:
        raise InputError(
            f"config.json says tie_word_embeddings = false, but the checkpoint has no {head}"
        )


def _num_mtp(tensors: Plan) -> int:
    return sum(tensor.role is Role.MTP for tensor in tensors.values())


def _mtp_wildcard(name: str) -> str:
    block = re.match(r"(?:.*?\.)?mtp\w*\.", name) or re.match(r"(?:.*\.)?layers\.\d+\.", name)
    return f"{block[0]}*" if block else module_of(name)
