"""What onboard must know about a family of models: data, one small file each, no behaviour.

To add a family, write `onboard/architectures/<family>.py` with one `ARCHITECTURE`; it is found
by being there.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache


class Role(StrEnum):
    """What a tensor is for; recipes choose what to quantize by it."""

    EMBED = "embed"
    HEAD = "head"
    NORM = "norm"
    ATTENTION = "attention"
    MLP = "mlp"
    EXPERT = "expert"
    SHARED_EXPERT = "shared_expert"
    ROUTER = "router"
    MTP = "mtp"
    BIAS = "bias"
    BUFFER = "buffer"  # recomputed by every loader, such as inv_freq
    UNKNOWN = "unknown"


QUANTIZABLE = (Role.ATTENTION, Role.MLP, Role.EXPERT, Role.SHARED_EXPERT)
LINEAR = (*QUANTIZABLE, Role.ROUTER, Role.HEAD, Role.MTP)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One family.

    `model_types` maps config.json's `model_type` to the transformers class. `roles` maps each
    role to a regular expression that matches the whole tensor name. `siblings` are projections
    that engines fuse into one matrix: they share `weight_scale_2` and `input_scale`.
    `fused_experts` gives, for experts stored as one 3-D tensor, the tensor's last name part and
    its axes, experts first and inputs last.
    """

    model_types: Mapping[str, str]
    roles: Mapping[Role, str]
    siblings: tuple[tuple[str, ...], ...] = (
        ("q_proj", "k_proj", "v_proj"),
        ("gate_proj", "up_proj"),
    )
    fused_experts: Mapping[str, str] = field(default_factory=dict)

    def role(self, tensor: str) -> Role:
        """Return the role of a tensor, UNKNOWN where no pattern matches."""
        for role, pattern in self.roles.items():
            if re.fullmatch(pattern, tensor):
                return role
        return Role.UNKNOWN


@cache
def families() -> dict[str, Architecture]:
    """Return every family by the name of its file."""
    return {
        module.name: importlib.import_module(f"{__name__}.{module.name}").ARCHITECTURE
        for module in pkgutil.iter_modules(__path__)
    }


@cache
def by_model_type() -> dict[str, str]:
    """Return model_type -> family."""
    claims = [(kind, name) for name, family in families().items() for kind in family.model_types]
    table = dict(claims)
    assert len(table) == len(claims), "two files claim one model_type"
    return table
