"""Keep secrets and home directories of this machine out of what leaves it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

SECRET_NAME = re.compile(
    r"(^|_)(API_?KEY|ACCESS_?KEY|KEY|TOKEN|SECRETS?|PASSWORD|PASSWD|CREDENTIALS?)(_|$)", re.I
)
# Hugging Face, OpenAI-like, GitHub, AWS and Slack tokens, and passwords inside URLs.
SECRET_VALUE = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}|\bsk-[A-Za-z0-9_-]{20,}|\bgh[pousr]_[A-Za-z0-9]{20,}"
    r"|\bAKIA[A-Z0-9]{16}\b|\bxox[abpr]-[A-Za-z0-9-]{10,}|(?<=://)[^/@\s:]+:[^/@\s]+(?=@)"
)
SHORTEST = 8  # a shorter value would hit ordinary words
REDACTED = "[redacted]"

T = TypeVar("T")


def scrubber(environment: Mapping[str, str] | None = None) -> Callable[[T], T]:
    """Return a function that removes secrets from a JSON value, keys and nesting kept.

    Removed are: values of environment variables whose name says secret, strings shaped like a
    known token, values under a mapping key whose name says secret. The home directory becomes `~`.
    """
    environment = os.environ if environment is None else environment
    known = sorted(
        (v for k, v in environment.items() if SECRET_NAME.search(k) and len(v) >= SHORTEST),
        key=len,
        reverse=True,
    )
    secrets = re.compile("|".join([*map(re.escape, known), SECRET_VALUE.pattern]))
    home = f"{Path.home()}/"

    def text(value: str) -> str:
        return secrets.sub(REDACTED, value).replace(home, "~/")

    def walk(value: Any) -> Any:
        match value:
            case str():
                return text(value)
            case Mapping():
                return {
                    k: REDACTED if isinstance(v, str) and is_secret_name(k) else walk(v)
                    for k, v in value.items()
                }
            case list() | tuple():
                return [walk(item) for item in value]
        return value

    return walk


def is_secret_name(name: Any) -> bool:
    """Tell whether a variable of this name holds a secret; `draft_token` of a model does not."""
    return isinstance(name, str) and name.isupper() and bool(SECRET_NAME.search(name))


def command_without_secrets(argv: tuple[str, ...] | list[str]) -> list[str]:
    """Return a command line whose `--api-key X`, `--token=X` and the like are redacted."""
    clean: list[str] = []
    hide = False
    for word in argv:
        option, equals, _ = word.partition("=")
        secret = option.startswith("--") and SECRET_NAME.search(option[2:].replace("-", "_"))
        if hide and not word.startswith("--"):
            clean.append(REDACTED)
        else:
            clean.append(f"{option}={REDACTED}" if secret and equals else word)
        hide = bool(secret) and not equals
    return clean
