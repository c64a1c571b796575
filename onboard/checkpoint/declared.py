"""The storage format that a config.json declares, for estimates where no header can be read."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from onboard.architectures import QUANTIZABLE, Role
from onboard.checkpoint.formats import quantization

BF16 = 16.0  # bits per parameter
MXFP4 = 4 + 8 / 32  # e2m1 and one e8m0 scale per 32


@dataclass(frozen=True)
class Declared:
    """Bits per parameter, scales included: of the matrices that it names, and of experts."""

    name: str
    bits: float = BF16
    expert_bits: float = BF16
    ignore: tuple[str, ...] = ()  # regular expressions of module names

    @cached_property
    def _ignored(self) -> re.Pattern[str]:
        return re.compile("|".join(f"(?:{pattern})" for pattern in self.ignore) or r"(?!)")

    def stored_bits(self, role: Role, name: str, shape: tuple[int, ...]) -> float:
        """Return the bits per parameter that a tensor takes in the source; an estimate."""
        module = name.removesuffix(".weight")
        is_matrix = len(shape) >= 2 and min(shape) > 1 and not name.endswith("_bias")
        covered = role in (*QUANTIZABLE, Role.MTP) and is_matrix
        if not covered or self._ignored.search(module):
            return BF16
        return self.expert_bits if role is Role.EXPERT or ".experts." in name else self.bits


def declared(config: Mapping[str, Any]) -> Declared:
    """Return what `quantization_config` says, at the top or in the text config."""
    table = quantization(config)
    if not table:
        return Declared(str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"))
    method = str(table.get("quant_method"))
    reader = {"fp8": _fp8, "mxfp4": _mxfp4, "compressed-tensors": _compressed}.get(method)
    return reader(config, table) if reader else Declared(f"{method} (size taken as bf16)")


def _fp8(config: Mapping[str, Any], table: Mapping[str, Any]) -> Declared:
    block = table.get("weight_block_size") or [0, 0]
    scale = 8 if table.get("scale_fmt") == "ue8m0" else 32
    bits = 8 + (scale / (block[0] * block[1]) if all(block) else 0)
    ignore = _globs(table.get("modules_to_not_convert") or ())
    name = f"FP8 in blocks of {block[0]}x{block[1]}" if all(block) else "FP8"
    if config.get("expert_dtype") == "fp4":
        return Declared(f"{name}, experts MXFP4", bits, MXFP4, ignore)
    return Declared(name, bits, bits, ignore)


def _mxfp4(config: Mapping[str, Any], table: Mapping[str, Any]) -> Declared:
    return Declared("MXFP4 experts", BF16, MXFP4)


def _compressed(config: Mapping[str, Any], table: Mapping[str, Any]) -> Declared:
    group: Mapping[str, Any] = next(iter((table.get("config_groups") or {}).values()), {})
    weights = group.get("weights") or {}
    kind = str(table.get("format") or group.get("format"))
    scale = 8 if "mxfp4" in kind else 16
    bits = float(weights.get("num_bits") or BF16) + scale / (weights.get("group_size") or 128)
    ignore = tuple(_expression(pattern) for pattern in table.get("ignore") or ())
    return Declared(f"compressed-tensors {kind}", bits, bits, ignore)


def _expression(pattern: str) -> str:
    """Return what to search for: compressed-tensors matches `re:` from the start of the name."""
    if not pattern.startswith("re:"):
        return f"^{re.escape(pattern)}$"
    body = pattern.removeprefix("re:").removesuffix(".*")
    return body.removeprefix(".*") if body.startswith(".*") else f"^(?:{body})"


def _globs(patterns: list[str] | tuple[str, ...]) -> tuple[str, ...]:
    """Return patterns of module names, which hold for the modules inside too, as expressions."""
    bodies = (fnmatch.translate(pattern).removesuffix(r"\Z") for pattern in patterns)
    return tuple(rf"(?:^|\.){body}(?:\.|$)" for body in bodies)
