"""How values are written for a reader: numbers, sizes, and text that a model made."""

from __future__ import annotations

import json
import math
import re
import shlex
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup, escape

DASH = "–"
PLAIN_WORD = re.compile(r"[\w./:=@%+,{}-]+")
NAMED = {"\n": "⏎", "\t": "⇥", "\r": "␍", " ": "·"}


def number(value: Any, digits: int = 3) -> str:
    """Return `value` with `digits` significant digits, whole numbers in full: 0.312, 12,840."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return DASH
    if not math.isfinite(value):
        return str(value)
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}".replace("-", "−")
    if abs(value) < 10 ** -(digits + 1) or abs(value) >= 1e7:
        return f"{value:.{digits - 1}e}".replace("e-0", "e−").replace("e-", "e−").replace("-", "−")
    places = max(0, digits - 1 - _exponent(value))
    return f"{value:,.{places}f}".replace("-", "−")


def limit(gate: Mapping[str, Any]) -> str:
    """Return the limit of a gate as the recipe has it: ≤ 0.55."""
    sign = {"<=": "≤", ">=": "≥"}[gate["bound"]]
    return f"{sign} {gate['limit']:g}".replace("-", "−")


def percent(share: Any, places: int = 1) -> str:
    """Return a share of 1 as a percentage."""
    if isinstance(share, bool) or not isinstance(share, int | float):
        return DASH
    return f"{share * 100:.{places}f}%".replace("-", "−")


def size(count: Any) -> str:
    """Return bytes in decimal units: 103.5 MB."""
    if isinstance(count, bool) or not isinstance(count, int | float):
        return DASH
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.2f} TB"


def seconds(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return DASH
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes / 60:.1f} h"


def token(text: Any) -> str:
    """Return a token with its white space and control characters made visible."""
    return "".join(NAMED.get(c) or _shown(c) for c in str(text)) or "∅"


def prose(text: Any) -> str:
    """Return text in which nothing can hide: control and direction characters are spelt out."""
    return "".join(c if c in "\n\t" else _shown(c) for c in str(text).replace("\r\n", "\n"))


def pretty(value: Any) -> str:
    """Return a JSON value as indented text."""
    return json.dumps(value, indent=1, ensure_ascii=False, default=str)


def short(digest: Any, length: int = 12) -> str:
    """Return the first digits of a digest."""
    return str(digest)[:length] if digest else DASH


def words(name: Any) -> str:
    """Return an identifier as words: `share_missing` as "share missing"."""
    return str(name).replace("_", " ")


def command(argv: Sequence[str]) -> str:
    """Return a command line as one would type it, placeholders like {bundle} left bare."""
    return " ".join(w if PLAIN_WORD.fullmatch(w) else shlex.quote(w) for w in argv)


def breakable(identifier: Any) -> Markup:
    """Return an identifier that a narrow column may break after a dot or an underscore."""
    return Markup(re.sub(r"([._])", r"\1<wbr>", str(escape(identifier))))


def _shown(char: str) -> str:
    # Cc control, Cf format (bidirectional overrides), Cs lone surrogates, Co private use
    if unicodedata.category(char) in ("Cc", "Cf", "Cs") and char not in "\u200d":
        return f"⟨{ord(char):04X}⟩"
    return char


def _exponent(value: float) -> int:
    return int(f"{value:e}".partition("e")[2])
