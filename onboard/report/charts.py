"""Charts as SVG strings: pure functions, no scripts, no inline styles, colours by CSS class.

Every chart carries its title as `<title>` and `aria-label`; labels are escaped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from onboard.report.formats import number
from onboard.report.svg import WIDTH, line, rect, spread, svg, text, ticks

LABELS, NOTES = 130.0, 190.0  # room left and right of horizontal rows


@dataclass(frozen=True)
class Interval:
    """A measured value with its bounds; `note` stands at the right end of the row."""

    label: str
    value: float
    lo: float
    hi: float
    note: str = ""
    chosen: bool = False


@dataclass(frozen=True)
class Bar:
    label: str
    value: float
    note: str = ""


def histogram(
    log10_edges: Sequence[float],
    counts: Sequence[float],
    title: str,
    marks: Sequence[tuple[str, float]] = (),
) -> Markup:
    """Draw counts over bins given by their log10 edges [n + 1], on a logarithmic x axis.

    `marks` are (label, value) lines in the natural unit; values that are not positive, or lie
    outside the edges, are left out.
    """
    if not counts or len(log10_edges) != len(counts) + 1 or not any(counts):
        return Markup("")
    left, right, top, bottom = 12.0, WIDTH - 12, 48.0, 210.0
    first, last, peak = log10_edges[0], log10_edges[-1], max(counts)

    def x(exponent: float) -> float:
        return left + (exponent - first) / (last - first) * (right - left)

    body = []
    for lo, hi, count in zip(log10_edges, log10_edges[1:], counts, strict=False):
        height = count / peak * (bottom - top)
        body.append(rect(x(lo) + 0.5, bottom - height, max(x(hi) - x(lo) - 1, 0.5), height, "bar"))
    body.append(line(left, bottom, right, bottom, "axis"))
    for exponent in range(math.ceil(first), math.floor(last) + 1):
        body.append(line(x(exponent), bottom, x(exponent), bottom + 5, "axis"))
        body.append(text(x(exponent), bottom + 19, _power(exponent), "tick", "middle"))
    body += _marks([(m, x(math.log10(v))) for m, v in marks if v > 0], left, right, bottom)
    return svg(title, bottom + 28, body)


def intervals(
    rows: Sequence[Interval],
    title: str,
    limit: float | None = None,
    least: float = 0.0,
    limit_label: str = "limit",
    notes: float = NOTES,
) -> Markup:
    """Draw one row per value: a dot, its interval, the figure; a dashed line at `limit`.

    The axis begins at `least`; `notes` is the room for figures and notes.
    """
    if not rows:
        return Markup("")
    left, right, top, step = LABELS, WIDTH - notes, 14.0 if limit is None else 26.0, 24.0
    most = max([row.hi for row in rows] + ([limit] if limit else []))
    most = most if most > least else least + 1
    bottom = top + step * len(rows)

    def x(value: float) -> float:
        return left + (max(value, least) - least) / ((most - least) * 1.05) * (right - left)

    body = [line(left, bottom, right, bottom, "axis")]
    for tick in ticks(most, least):
        body.append(line(x(tick), top - 4, x(tick), bottom, "grid"))
        body.append(text(x(tick), bottom + 16, f"{tick:g}", "tick", "middle"))
    for i, row in enumerate(rows):
        y = top + step * (i + 0.5)
        dot = "dot chosen" if row.chosen else "dot"
        body += [
            text(0, y + 4, row.label, "chosen" if row.chosen else "label", "start"),
            line(x(row.lo), y, x(row.hi), y, "whisker"),
            line(x(row.lo), y - 5, x(row.lo), y + 5, "whisker"),
            line(x(row.hi), y - 5, x(row.hi), y + 5, "whisker"),
            f'<circle class="{dot}" cx="{x(row.value):.1f}" cy="{y:.1f}" r="4"/>',
            text(right + 14, y + 4, number(row.value), "figure", "start"),
            text(WIDTH - 4, y + 4, row.note, "tick", "end"),
        ]
    if limit is not None:
        body.append(line(x(limit), top - 8, x(limit), bottom, "limit"))
        words = f"{limit_label} {number(limit)}"
        body.append(text(x(limit), top - 12, words, "limit-label", "middle"))
    return svg(title, bottom + 26, body)


def columns(rows: Sequence[Bar], title: str, most: float | None = None) -> Markup:
    """Draw one column per row with its figure on top and its label (and note) below."""
    if not rows:
        return Markup("")
    width, top, bottom = 400.0, 24.0, 138.0
    most = most or max(row.value for row in rows) or 1.0
    step = width / len(rows)
    body = [line(0, bottom, width, bottom, "axis")]
    for i, row in enumerate(rows):
        height = min(row.value / most, 1.0) * (bottom - top)
        thick = min(step * 0.62, 64)
        middle = step * (i + 0.5)
        body += [
            rect(middle - thick / 2, bottom - height, thick, height, "bar"),
            text(middle, bottom - height - 6, number(row.value), "figure", "middle"),
            text(middle, bottom + 17, row.label, "label", "middle"),
            text(middle, bottom + 33, row.note, "tick", "middle"),
        ]
    noted = any(row.note for row in rows)
    return svg(title, bottom + (40 if noted else 24), body, width=width)


def shares(rows: Sequence[Bar], title: str) -> Markup:
    """Draw one horizontal bar per row on a scale from 0 to 1."""
    if not rows:
        return Markup("")
    left, right, step = LABELS, WIDTH - NOTES, 24.0
    body = []
    for i, row in enumerate(rows):
        y = 6 + step * i
        length = max(0.0, min(row.value, 1.0)) * (right - left)
        body += [
            text(0, y + 14, row.label, "label", "start"),
            rect(left, y + 3, right - left, 14, "track"),
            rect(left, y + 3, length, 14, "bar"),
            text(right + 14, y + 14, f"{row.value * 100:.1f}%", "figure", "start"),
            text(WIDTH - 4, y + 14, row.note, "tick", "end"),
        ]
    return svg(title, 8 + step * len(rows), body)


def lines(
    series: Sequence[tuple[str, Sequence[tuple[float, float]]]], title: str, x_label: str
) -> Markup:
    """Draw up to four series of (x, y) points, each labelled at its right end; y starts at 0."""
    drawn = [(name, points) for name, points in series[:4] if points]
    if not drawn:
        return Markup("")
    left, right, top, bottom, width = 40.0, 322.0, 12.0, 150.0, 400.0
    xs = [x for _, points in drawn for x, _ in points]
    most = max(y for _, points in drawn for _, y in points) or 1.0
    span = (max(xs) - min(xs)) or 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            left + (x - min(xs)) / span * (right - left),
            bottom - max(y, 0) / (most * 1.05) * (bottom - top),
        )

    body = [line(left, bottom, right, bottom, "axis")]
    for tick in ticks(most):
        y = at(min(xs), tick)[1]
        body += [
            line(left, y, right, y, "grid"),
            text(left - 6, y + 4, f"{tick:g}", "tick", "end"),
        ]
    body += [
        text(left, bottom + 17, number(min(xs)), "tick", "start"),
        text(right, bottom + 17, f"{x_label} {number(max(xs))}", "tick", "end"),
    ]
    ends = spread([at(*points[-1])[1] for _, points in drawn], 14)
    for i, ((name, points), end) in enumerate(zip(drawn, ends, strict=True)):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in points))
        body.append(f'<polyline class="series s{i}" points="{path}"/>')
        label = f"{name} {number(points[-1][1])}"
        body.append(text(right + 6, end + 4, label, f"label t{i}", "start"))
    return svg(title, bottom + 26, body, width=width)


def _marks(
    marks: Sequence[tuple[str, float]], left: float, right: float, bottom: float
) -> list[str]:
    body = []
    for row, (label, x) in enumerate(sorted(marks, key=lambda mark: mark[1])):
        if not left <= x <= right:
            continue
        y = 10.0 + 14 * (row % 3)
        anchor = "end" if x > WIDTH - 90 else "start"
        body.append(line(x, y - 8, x, bottom, "mark"))
        body.append(text(x + (4 if anchor == "start" else -4), y, label, "mark-label", anchor))
    return body


def _power(exponent: int) -> str:
    digits = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
    return {0: "1", 1: "10"}.get(exponent) or f"10{str(exponent).translate(digits)}"
