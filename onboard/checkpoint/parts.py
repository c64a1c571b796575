"""Which files of a model's directory count, and for what."""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import Literal

from onboard.checkpoint.headers import INDEX, shards

Part = Literal["weights", "tokenizer", "other"]

LICENCES = ("LICEN[SC]E*", "NOTICE*", "COPYING*")
PATTERNS: dict[Part, tuple[str, ...]] = {
    "weights": ("config.json", INDEX, "*.safetensors"),
    "tokenizer": (
        *("tokenizer*", "vocab*", "merges*", "special_tokens_map*", "added_tokens*", "spiece*"),
        *("*.jinja", "chat_template*", "generation_config.json", "*.tiktoken"),
        *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    ),
    "other": (*LICENCES, "README*", "USE_POLICY*"),
}


def part_of(name: str) -> Part | None:
    """Return which of the three lists a file belongs to, None where it does not travel."""
    for part, patterns in PATTERNS.items():
        if matches(name, patterns):
            return part
    return None


def parts_of(folder: Path) -> dict[Part, list[str]]:
    """Return the names of the files in `folder` that count, by part, sorted."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    parts: dict[Part, list[str]] = {
        part: [name for name in names if part_of(name) == part] for part in PATTERNS
    }
    described = [name for name in ("config.json", INDEX) if name in names]
    parts["weights"] = sorted([*described, *shards(folder)])  # not further copies beside them
    return parts


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
