"""What becomes of every weight of a checkpoint, decided from its headers."""

from __future__ import annotations

import fnmatch
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from onboard.architectures import QUANTIZABLE, Architecture, Role
from onboard.checkpoint.formats import Scheme, Weight
from onboard.checkpoint.headers import is_mtp
from onboard.errors import InputError
from onboard.modelconfig import ModelConfig
from onboard.recipe import Adapt

BLOCK = 16  # inputs that share one NVFP4 block scale
READABLE = ("BF16", "F16", "F32")  # dtypes of plain weights that the quantizer reads
CACHE_SCALE = re.compile(r"\.[kv]_scale$")  # of an FP8 KV cache, in quantized sources


@dataclass(frozen=True)
class Planned:
    """One weight of the source, and whether it becomes NVFP4 (else `reason` says why not).

    `shape` is of its values; `dtype` and `shard` are of the stored tensor with its values or codes,
    `scheme` says how to read them (`onboard.checkpoint.formats`).
    """

    role: Role
    scheme: Scheme
    dtype: str
    shape: tuple[int, ...]
    shard: str
    quantize: bool
    reason: str | None

    @property
    def parameters(self) -> int:
        return math.prod(self.shape)


Plan = Mapping[str, Planned]


def plan(config: ModelConfig, weights: Mapping[str, Weight], params: Adapt) -> dict[str, Planned]:
    """Return the decision for every weight.

    Raises InputError on weights without a role that no `keep` pattern of the recipe names, and on
    a dtype that the quantizer cannot read.
    """
    tensors: dict[str, Planned] = {}
    for name, weight in weights.items():
        role = role_of(config, name)
        reason = reason_to_keep(config.rules, weight, role, params)
        tensors[name] = Planned(
            role, weight.scheme, weight.dtype, weight.shape, weight.shard, reason is None, reason
        )
    _refuse_unknown(config, tensors, params)
    for unit in fused_units(config, tensors):
        _keep_together(tensors, unit)
    for name, tensor in tensors.items():
        if tensor.quantize and tensor.scheme == "plain" and tensor.dtype not in READABLE:
            raise InputError(
                f"{tensor.shard}: {name} is {tensor.dtype}; expected one of {', '.join(READABLE)}",
                "start from the bf16 checkpoint of this model",
            )
    return tensors


def role_of(config: ModelConfig, name: str) -> Role:
    """Return a weight's role: MTP where its layer lies past the trunk, else the family's table."""
    role = config.rules.role(name)
    if role is not Role.VISION and is_mtp(name, config.num_layers):  # towers count for themselves
        return Role.MTP
    return Role.BUFFER if role is Role.UNKNOWN and CACHE_SCALE.search(name) else role


def roles_to_quantize(rules: Architecture, params: Adapt) -> tuple[str, ...]:
    """Return the recipe's roles, or the family's where the recipe names none."""
    return rules.quantize if params.quantize is None else params.quantize


def reason_to_keep(rules: Architecture, weight: Weight, role: Role, params: Adapt) -> str | None:
    """Return why a weight stays as it is, or None where it becomes NVFP4.

    A family's patterns excuse no weight from having a role; a recipe's do.
    """
    if role is not Role.UNKNOWN and (pattern := _first_match(weight.name, rules.keep)):
        return f"kept by the family's pattern {pattern}"
    if pattern := _first_match(weight.name, params.keep):
        return f"kept by the pattern {pattern}"
    if role is Role.UNKNOWN:
        return "its role is unknown"
    if role not in roles_to_quantize(rules, params):
        return f"role {role} stays in high precision"
    fused = len(weight.shape) == 3
    layout = rules.fused_experts.get(last_part(weight.name)) if fused else None
    if len(weight.shape) != 2 and layout is None:
        return "not a matrix"
    assert not weight.transposed or (layout and layout.axes == "eio"), f"axes of {weight.name}"
    width = weight.shape[1 if layout and layout.axes == "eio" else -1]
    if width % BLOCK:
        return f"input width {width} is not a multiple of {BLOCK}"
    return None


def fused_units(config: ModelConfig, tensors: Plan) -> list[list[str]]:
    """Return matrices that an engine holds as one: siblings, and the experts of a layer."""
    units: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        if tensor.role not in QUANTIZABLE:  # biases among them have no format of their own
            continue
        container = expert_container(name)
        parent, projection = split_module(module_of(name))
        for siblings in config.rules.siblings:
            if projection in siblings and not container:
                units[(parent, *siblings)].append(name)
        if container:
            units[(container,)].append(name)
    return list(units.values())


def module_of(name: str) -> str:
    """Return the module of a tensor: its name without `.weight`."""
    return name.removesuffix(".weight")


def expert_container(name: str) -> str | None:
    """Return "….experts" for a tensor of a routed expert."""
    head, found, _ = name.rpartition(".experts.")
    return f"{head}.experts" if found else None


def split_module(module: str) -> tuple[str, str]:
    parent, _, projection = module.rpartition(".")
    return parent, projection


def last_part(name: str) -> str:
    """Return "down_proj" of "….experts.down_proj" or "….mlp.down_proj.weight"."""
    return split_module(module_of(name))[1]


def _first_match(name: str, patterns: Iterable[str]) -> str | None:
    return next((pattern for pattern in patterns if fnmatch.fnmatchcase(name, pattern)), None)


def _keep_together(tensors: dict[str, Planned], unit: list[str]) -> None:
    """Keep all of `unit` where one of it is kept: an engine gives the fused matrix one format."""
    kept = next((name for name in unit if not tensors[name].quantize), None)
    if kept is None:
        return
    for name in unit:
        if tensors[name].quantize:
            reason = f"fused with {kept}: {tensors[kept].reason}"
            tensors[name] = replace(tensors[name], quantize=False, reason=reason)


def is_unknown(tensor: Planned) -> bool:
    return tensor.role is Role.UNKNOWN and not (tensor.reason or "").startswith("kept by")


def _refuse_unknown(config: ModelConfig, tensors: Plan, params: Adapt) -> None:
    unknown = [name for name, tensor in tensors.items() if is_unknown(tensor)]
    if unknown:
        first = ", ".join(f"{name} {list(tensors[name].shape)}" for name in unknown[:3])
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise InputError(
            f"{len(unknown)} tensors have no role in the family {config.family}: {first}{more}",
            f"add them to onboard/architectures/{config.family}.py, or copy them unchanged: "
            f"--set 'adapt.keep={[*params.keep, unknown[0]]}'",
        )
