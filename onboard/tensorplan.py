"""What becomes of every tensor of a checkpoint, decided from its headers."""

from __future__ import annotations

import fnmatch
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from onboard.architectures import Role
from onboard.checkpoint.headers import Header, is_mtp
from onboard.errors import InputError
from onboard.modelconfig import ModelConfig
from onboard.recipe import Adapt

BLOCK = 16  # inputs that share one NVFP4 block scale
READABLE = ("BF16", "F16", "F32")  # formats of weights that the quantizer reads


@dataclass(frozen=True)
class Planned:
    """One tensor of the source, and whether it becomes NVFP4 (else `reason` says why not)."""

    role: Role
    dtype: str
    shape: tuple[int, ...]
    shard: str
    quantize: bool
    reason: str | None

    @property
    def parameters(self) -> int:
        return math.prod(self.shape)


Plan = Mapping[str, Planned]


def plan(config: ModelConfig, headers: Mapping[str, Header], params: Adapt) -> dict[str, Planned]:
    """Return the decision for every tensor.

    Raises InputError on tensors without a role that no `keep` pattern names, and on weights in a
    format that the quantizer cannot read.
    """
    tensors: dict[str, Planned] = {}
    for header in headers.values():
        role = role_of(config, header.name)
        reason = reason_to_keep(header, role, params)
        tensors[header.name] = Planned(
            role, header.dtype, header.shape, header.shard, reason is None, reason
        )
    _refuse_unknown(config, tensors, params)
    for unit in fused_units(config, tensors):
        _keep_together(tensors, unit)
    for name, tensor in tensors.items():
        if tensor.quantize and tensor.dtype not in READABLE:
            raise InputError(
                f"{tensor.shard}: {name} is {tensor.dtype}; expected one of {', '.join(READABLE)}",
                "start from the bf16 checkpoint of this model",
            )
    return tensors


def role_of(config: ModelConfig, name: str) -> Role:
    return Role.MTP if is_mtp(name, config.num_layers) else config.rules.role(name)


def reason_to_keep(header: Header, role: Role, params: Adapt) -> str | None:
    """Return why a tensor stays as it is, or None where it becomes NVFP4."""
    kept = [pattern for pattern in params.keep if fnmatch.fnmatchcase(header.name, pattern)]
    if kept:
        return f"kept by the pattern {kept[0]}"
    if role is Role.UNKNOWN:
        return "its role is unknown"
    if role not in params.quantize:
        return f"role {role} stays in high precision"
    if len(header.shape) not in (2, 3):
        return "not a matrix"
    if header.shape[-1] % BLOCK:
        return f"input width {header.shape[-1]} is not a multiple of {BLOCK}"
    return None


def fused_units(config: ModelConfig, tensors: Iterable[str]) -> list[list[str]]:
    """Return tensors that an engine holds as one: siblings, and the experts of a layer."""
    units: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name in tensors:
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
