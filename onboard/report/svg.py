"""The parts of which charts are drawn: SVG elements as strings, colours by CSS class, no scripts.

Coordinates are in units of the viewBox, which the page scales to the width of the column.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup, escape

WIDTH = 936.0


def svg(title: str, height: float, body: Sequence[str], width: float = WIDTH) -> Markup:
    """Return the picture, with its title as `<title>` and `aria-label`."""
    label = escape(title)
    return Markup(
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{label}" '
        f'class="chart"><title>{label}</title>{"".join(body)}</svg>'
    )


def rect(x: float, y: float, width: float, height: float, css: str) -> str:
    return (
        f'<rect class="{css}" x="{x:.1f}" y="{y:.1f}" '
        f'width="{max(width, 0):.1f}" height="{max(height, 0):.1f}"/>'
    )


def line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    return f'<line class="{css}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def text(x: float, y: float, words: str, css: str, anchor: str) -> str:
    """Return a line of text, escaped; nothing for no words."""
    if not words:
        return ""
    return (
        f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
    )


def ticks(most: float, least: float = 0.0) -> list[float]:
    """Return about five round numbers from `least` to `most`, steps of 1, 2 or 5 times 10^n."""
    rough = (most - least) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    first, last = math.ceil(least / step - 1e-9), math.floor(most / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def spread(ys: Sequence[float], gap: float) -> list[float]:
    """Move labels apart until neighbours are `gap` away, keeping their order."""
    moved = [0.0] * len(ys)
    previous = -math.inf
    for i in sorted(range(len(ys)), key=lambda i: ys[i]):
        previous = max(ys[i], previous + gap)
        moved[i] = previous
    return moved
