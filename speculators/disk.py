"""The disk that features take, known before any of them is made; imports no torch."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

from onboard.errors import EnvironmentFault

Storage = Literal["auto", "bf16", "fp8", "online"]  # auto: until `chosen`

STATES = 3 + 1  # hidden states kept of a token: those that an EAGLE-3 head reads, and the last
BYTES = {"bf16": 2, "fp8": 1, "online": 0}  # of one value
SCALE_BYTES = {"bf16": 0, "fp8": 4, "online": 0}  # of one state


def bytes_per_token(hidden_size: int, storage: Storage) -> int:
    """Return (aux + 1) states of `hidden_size` values, with an f32 scale each in FP8."""
    return STATES * (hidden_size * BYTES[storage] + SCALE_BYTES[storage])


def chosen(storage: Storage, hidden_size: int, tokens: int, gigabytes: float) -> Storage:
    """Return how states are kept: `auto` stores them in bf16 up to so many GB, and none above."""
    if storage != "auto":
        return storage
    fits = bytes_per_token(hidden_size, "bf16") * tokens <= gigabytes * 1e9
    return "bf16" if fits else "online"


def check(folder: Path, hidden_size: int, storage: Storage, tokens: int) -> None:
    """Raise EnvironmentFault where `folder`'s disk cannot hold the features of `tokens`."""
    each = bytes_per_token(hidden_size, storage)
    need, free = each * tokens, shutil.disk_usage(folder).free
    if need <= free:
        return
    smaller = "features.storage=fp8, " if storage == "bf16" else ""
    raise EnvironmentFault(
        f"features: the hidden states take up to {need / 1e9:,.1f} GB ({each:,} bytes for each of "
        f"{tokens:,} tokens), and {free / 1e9:,.1f} GB are free at {folder}",
        "free some space or set ONBOARD_HOME to another disk; or ask for less: "
        f"features.storage=online, {smaller}a smaller data.training_prompts or "
        "features.max_new_tokens",
    )
