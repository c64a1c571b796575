"""Every weight of a model with its role, its bytes in the source and in the NVFP4 checkpoint."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from onboard.architectures import Role
from onboard.architectures.table import Tensor, evaluate, generate, namespace
from onboard.checkpoint.declared import declared
from onboard.checkpoint.formats import Weight, weights
from onboard.checkpoint.headers import Header
from onboard.lookup import Found
from onboard.modelconfig import ModelConfig
from onboard.recipe import Adapt
from onboard.tensorplan import expert_container, plan, role_of

NVFP4_BITS = 4 + 8 / 16  # e2m1 and one e4m3 scale per 16; FACTS: NVFP4
MATRIX_SCALES = 8  # bytes per matrix: weight_scale_2 and input_scale, fp32


@dataclass(frozen=True)
class Entry:
    """One logical weight. `shape` is of its values, whatever format the source stores."""

    name: str
    role: Role
    shape: tuple[int, ...]
    source_bytes: int
    quantize: bool
    reason: str | None = None  # why it stays as it is

    @cached_property
    def parameters(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def output_bytes(self) -> int:
        """Bytes in the written checkpoint; what is not quantized is copied as it is stored."""
        if not self.quantize:
            return self.source_bytes
        matrices = self.shape[0] if len(self.shape) == 3 else 1
        return nvfp4_bytes(self.parameters) + matrices * MATRIX_SCALES


def nvfp4_bytes(parameters: int) -> int:
    """Return the bytes of weights in NVFP4, block scales included."""
    return round(parameters * NVFP4_BITS / 8)


@dataclass(frozen=True)
class Inventory:
    """The weights of a known architecture, and the names on which file and table disagree."""

    config: ModelConfig
    entries: tuple[Entry, ...]
    missing: tuple[str, ...]  # in the table, not in the file
    extra: tuple[str, ...]  # in the file, not in the table, but with a role
    unknown: tuple[str, ...]  # in the file, without a role

    @cached_property
    def _by_role(self) -> Counter[Role]:
        counted: Counter[Role] = Counter()
        for entry in self.entries:
            counted[entry.role] += entry.parameters
        return counted

    def total(self, role: Role) -> int:
        """Return the parameters of a role."""
        return self._by_role[role]

    @cached_property
    def experts(self) -> tuple[int, int]:
        """Routed experts that a token uses, and that a layer has; (0, 0) without experts."""
        if not self.total(Role.EXPERT):
            return 0, 0
        rules = self.config.rules
        names = namespace(rules, self.config.raw)
        used = int(evaluate(rules.experts_per_token, names, "experts per token"))
        return used, int(evaluate(rules.ranges["expert"], names, "number of experts"))

    @cached_property
    def parameters(self) -> int:
        """Parameters of the model as it is named: all but MTP layers; tied weights once."""
        return self._by_role.total() - self.total(Role.MTP)

    @cached_property
    def active(self) -> int:
        """Parameters that one text token is multiplied with, as gpt-oss's card counts them.

        All but MTP and vision; k of E routed experts, biases included; the output head. The
        embedding is a look-up and counts only where it is tied, as the output head.
        """
        used, of = self.experts
        idle = {Role.MTP, Role.VISION, Role.BUFFER}
        if self.total(Role.HEAD):
            idle.add(Role.EMBED)
        busy = [entry for entry in self.entries if entry.role not in idle]
        routed = sum(entry.parameters for entry in busy if expert_container(entry.name))
        dense = sum(entry.parameters for entry in busy) - routed
        return dense + (routed * used // of if of else routed)


def take(found: Found, config: ModelConfig, adapt: Adapt) -> Inventory:
    """Return the inventory of a model whose architecture is known, as `adapt` chooses."""
    expected = {
        tensor.name: tensor for tensor in generate(config.rules, config.model_type, config.raw)
    }
    stored = logical(found) if found.headers is not None else _imagined(found, config, expected)
    unknown = [name for name in stored if config.rules.role(name) is Role.UNKNOWN
               and role_of(config, name) is Role.UNKNOWN]  # fmt: skip
    keep = (*adapt.keep, *(_literal(name) for name in unknown))
    chosen = adapt.model_copy(update={"keep": keep})
    entries = tuple(
        Entry(name, tensor.role, tensor.shape, stored[name].bytes, tensor.quantize, tensor.reason)
        for name, tensor in plan(config, stored, chosen).items()
    )
    known = stored.keys() - set(unknown)
    return Inventory(
        config,
        entries,
        missing=tuple(name for name in expected if name not in stored),
        extra=tuple(name for name in stored if name in known and name not in expected),
        unknown=tuple(unknown),
    )


def logical(found: Found) -> dict[str, Weight]:
    """Return the weights of a file by name, whatever its storage format."""
    assert found.headers is not None
    return weights(found.headers, found.config)


def _imagined(
    found: Found, config: ModelConfig, expected: Mapping[str, Tensor]
) -> dict[str, Weight]:
    """Return the weights that a checkpoint with this config would have, at the declared sizes."""
    stored, imagined = declared(found.config), {}
    for tensor in expected.values():
        bits = stored.stored_bits(role_of(config, tensor.name), tensor.name, tensor.shape)
        size = math.ceil(math.prod(tensor.shape) * bits / 8)
        header = Header(tensor.name, "BF16", tensor.shape, "-", 0, size)
        imagined[tensor.name] = Weight(tensor.name, tensor.shape, "plain", {"weight": header})
    return imagined


def _literal(name: str) -> str:
    """Return a pattern that matches this name alone."""
    return name.replace("[", "[[]")
