"""Bytes against KL, ours and the peers', with intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tests.quality import verdict

WIDTH, HEIGHT = 860, 520
LEFT, RIGHT, TOP, BOTTOM = 70, 250, 30, 50
COLOURS = {"ours": "#0b6e4f", "peer": "#b3541e"}


def draw(points: Mapping[str, Mapping[str, Any]]) -> str:
    """Return an SVG of all points that have KLs; both axes are logarithmic."""
    shown = {
        name: (point["bytes"] / 1e6, *verdict.interval(point["kl"]))
        for name, point in points.items()
        if "kl" in point and not name.endswith("w4a4")
    }
    sizes = [size for size, *_ in shown.values()]
    losses = [value for _, *values in shown.values() for value in values if value > 0]
    x = _axis(min(sizes) / 1.05, max(sizes) * 1.05, LEFT, WIDTH - RIGHT)
    y = _axis(max(losses) * 1.2, min(losses) / 1.2, TOP, HEIGHT - BOTTOM)
    body = [f'<text x="{LEFT}" y="18">KL in nats a token, weights only, against MB of all linear '
            "layers with their scales</text>"]  # fmt: skip
    for size in (60, 70, 80, 100, 120, 150, 200):
        if min(sizes) / 1.05 < size < max(sizes) * 1.05:
            body.append(f'<text x="{x(size):.0f}" y="{HEIGHT - 30}" text-anchor="middle">{size}'
                        "</text>")  # fmt: skip
    for loss in (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5):
        if min(losses) / 1.2 < loss < max(losses) * 1.2:
            body.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(loss):.1f}" '
                        f'y2="{y(loss):.1f}" stroke="#ddd"/><text x="{LEFT - 6}" '
                        f'y="{y(loss) + 4:.1f}" text-anchor="end">{loss:g}</text>')  # fmt: skip
    labels: dict[str, float] = {}
    for name, (_, mean, *_rest) in sorted(shown.items(), key=lambda item: item[1][1], reverse=True):
        labels[name] = max([y(mean), *(place + 12 for place in labels.values())])
    for name, (size, mean, lo, hi) in shown.items():
        colour = COLOURS["ours" if name.startswith("ours/") else "peer"]
        body.append(
            f'<g stroke="{colour}" fill="{colour}"><line x1="{x(size):.1f}" x2="{x(size):.1f}" '
            f'y1="{y(max(lo, 1e-9)):.1f}" y2="{y(hi):.1f}"/><circle cx="{x(size):.1f}" '
            f'cy="{y(mean):.1f}" r="3.5"/><line x1="{x(size):.1f}" y1="{y(mean):.1f}" '
            f'x2="{WIDTH - RIGHT + 8}" y2="{labels[name]:.1f}" stroke-opacity="0.25"/>'
            f'<text stroke="none" x="{WIDTH - RIGHT + 12}" y="{labels[name] + 4:.1f}">{name} '
            f"{mean:.4f}</text></g>"
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="11"><rect width="{WIDTH}" height="{HEIGHT}" '
        f'fill="white"/>{"".join(body)}</svg>\n'
    )


def _axis(first: float, last: float, begin: float, end: float) -> Any:
    """Return a logarithmic scale from [first, last] to [begin, end]."""
    span = math.log(last / first)
    return lambda value: begin + (end - begin) * math.log(value / first) / span
