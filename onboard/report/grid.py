"""A map of a model: a column per layer, a row per unit of one, coloured by the format it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from markupsafe import Markup, escape

from onboard.report.svg import WIDTH, rect, svg, text

LEFT, TOP, HEIGHT = 176.0, 34.0, 20.0
WIDEST = 40.0  # column
NAMES = {"nvfp4": "NVFP4", "fp8": "FP8", "bf16": "BF16"}

Parts = Sequence[tuple[str, float, str]]  # format, share of the cell, what it says when pointed at


def format_map(
    cells: Mapping[tuple[str, int], Parts], legend: Sequence[tuple[str, str]], title: str
) -> Markup:
    """Draw the parts of each (unit, layer), left to right by share; rows in the order given.

    `legend` holds formats with a note on each.
    """
    if not cells:
        return Markup("")
    units = list(dict.fromkeys(unit for unit, _ in cells))
    layers = sorted({layer for _, layer in cells})
    step = min(WIDEST, (WIDTH - LEFT) / len(layers))
    bottom = TOP + HEIGHT * len(units)
    body = _legend(legend)
    for row, unit in enumerate(units):
        body.append(text(0, TOP + HEIGHT * row + 14, unit, "label", "start"))
        for column, layer in enumerate(layers):
            x, y = LEFT + step * column, TOP + HEIGHT * row
            body += _cell(x, y, step, cells.get((unit, layer), ()))
    every = next(n for n in (1, 2, 5, 10, 20, 50, 100) if step * n >= 24)
    for column, layer in enumerate(layers):
        if column % every == 0:
            middle = LEFT + step * (column + 0.5)
            body.append(text(middle, bottom + 14, str(layer), "tick", "middle"))
    body.append(text(0, bottom + 14, "layer", "tick", "start"))
    return svg(title, bottom + 22, body)


def _cell(x: float, y: float, width: float, parts: Parts) -> list[str]:
    gap = min(2.0, width * 0.15)
    body = []
    for format_, share, words in parts:
        inside = (width - gap) * share
        box = rect(x, y + 1, inside, HEIGHT - 3, _css(format_))
        body.append(f"<g><title>{escape(words)}</title>{box}</g>")
        x += inside
    return body


def _legend(legend: Sequence[tuple[str, str]]) -> list[str]:
    body, x = [], LEFT
    for format_, note in legend:
        words = f"{NAMES.get(format_, format_)} {note}"
        body += [rect(x, 5, 14, 14, _css(format_)), text(x + 20, 16, words, "label", "start")]
        x += 20 + 6.6 * len(words) + 26
    return body


def _css(format_: str) -> str:
    return f"format {format_ if format_ in NAMES else 'other'}"
