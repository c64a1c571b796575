"""What onboard must know about a family of models: data, one small file each, no behaviour.

To add a family, write `onboard/architectures/<family>.py` with one `ARCHITECTURE`; it is found
by being there. The heart of a file is its table of tensors (`onboard.architectures.table`), which
gives every tensor its role and, from a config.json, all names and shapes of a checkpoint.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache, cached_property
from typing import Any, Literal

from onboard.architectures.table import Row, canonical, parse


class Role(StrEnum):
    """What a tensor is for; recipes choose what to quantize by it."""

    EMBED = "embed"
    HEAD = "head"
    NORM = "norm"
    ATTENTION = "attention"
    STATE = "state"  # linear attention and state spaces: projections, convolutions, decay
    INDEXER = "indexer"  # picks what a sparse attention reads
    MLP = "mlp"
    EXPERT = "expert"
    SHARED_EXPERT = "shared_expert"
    ROUTER = "router"
    MTP = "mtp"
    VISION = "vision"  # any tower of another modality, and its projector
    BIAS = "bias"
    BUFFER = "buffer"  # recomputed by every loader, such as inv_freq
    UNKNOWN = "unknown"


QUANTIZABLE = (Role.ATTENTION, Role.STATE, Role.MLP, Role.EXPERT, Role.SHARED_EXPERT)
LINEAR = (*QUANTIZABLE, Role.INDEXER, Role.ROUTER, Role.HEAD, Role.MTP)


@dataclass(frozen=True)
class Fused:
    """Experts that the source stores as one tensor, and how to take them apart.

    `axes` orders the tensor's dimensions: e expert, o output, i input. `parts` are the projections
    stacked along the outputs, in order, row by row where they are `interleaved`. The written
    checkpoint has one matrix per expert and part, `<experts>.<number>.<part>`.
    """

    parts: tuple[str, ...]
    axes: Literal["eoi", "eio"] = "eoi"
    interleaved: bool = False


@dataclass(frozen=True)
class Engine:
    """What serving the family needs.

    `cpu` says why the CPU engine cannot run it, `eagle3` why it takes no EAGLE-3 draft, where so.
    """

    minimum: str | None = None  # lowest vLLM version
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    prompt: Literal["jinja", "engine"] = "jinja"  # a chat template, or the engine's own encoding
    cpu: str | None = None
    eagle3: str | None = None


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One family.

    `model_types` maps config.json's `model_type` to the transformers class, None where there is
    none. `tensors` is the table of what a published checkpoint holds; `also` lists what other
    checkpoints of the family hold beside or instead (other layouts, biases, buffers): recognised,
    not generated. `roots` gives `{root}` in the templates, by model_type.

    Shapes and conditions are expressions over the keys of `text_config` (or the top of the config
    where that is empty), with `defaults` (expressions too) for absent or null keys. `ranges` bounds
    the further variables of the templates, such as `expert`.

    `quantize` and `keep` are what published NVFP4 checkpoints do: roles that become NVFP4, and
    patterns of names that stay in high precision nevertheless. `siblings` are projections that
    engines fuse into one matrix: they share `weight_scale_2` and `input_scale`.

    `keeps_source_format`: tensors that stay are copied in the source's own format, because the
    engine reads both; otherwise they are written as bf16.

    `cache` is an expression for the bytes that one token keeps in layer `layer` of an FP8 KV cache.
    `small` overrides what a rehearsal's twin takes from the config (see `onboard.twins`).
    """

    model_types: Mapping[str, str | None]
    tensors: str
    also: str = ""
    roots: Mapping[str, str] = field(default_factory=dict)
    text_config: str = ""
    defaults: Mapping[str, str] = field(default_factory=dict)
    ranges: Mapping[str, str] = field(default_factory=dict)
    quantize: tuple[Role, ...]
    keep: tuple[str, ...] = ()
    siblings: tuple[tuple[str, ...], ...] = (
        ("q_proj", "k_proj", "v_proj"),
        ("gate_proj", "up_proj"),
    )
    fused_experts: Mapping[str, Fused] = field(default_factory=dict)
    keeps_source_format: bool = False
    experts_per_token: str = "num_experts_per_tok"
    mtp_layers: str = "num_nextn_predict_layers"
    cache: str = "2 * num_key_value_heads * head_dim"
    small: Mapping[str, Any] = field(default_factory=dict)
    engine: Engine = Engine()
    origin: str = ""  # where the names and shapes were read
    traps: tuple[str, ...] = ()  # what goes wrong on day zero, a sentence each

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The published tensors' rows."""
        return parse(self.tensors)

    @cached_property
    def _roles(self) -> dict[str, Role]:
        roots = sorted(set(self.roots.values())) or [""]
        rows = [*parse(self.also), *self.rows]
        return {canonical(row.template.replace("{root}", root)): Role(row.role)
                for row in rows for root in roots}  # fmt: skip

    def role(self, tensor: str) -> Role:
        """Return the role of a tensor, UNKNOWN where no row matches."""
        return self._roles.get(canonical(tensor), Role.UNKNOWN)


@cache
def families() -> dict[str, Architecture]:
    """Return every family by the name of its file."""
    modules = {
        module.name: importlib.import_module(f"{__name__}.{module.name}")
        for module in pkgutil.iter_modules(__path__)
    }
    return {n: m.ARCHITECTURE for n, m in modules.items() if hasattr(m, "ARCHITECTURE")}


@cache
def by_model_type() -> dict[str, str]:
    """Return model_type -> family."""
    claims = [(kind, name) for name, family in families().items() for kind in family.model_types]
    table = dict(claims)
    assert len(table) == len(claims), "two files claim one model_type"
    return table
