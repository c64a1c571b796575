"""Charts as SVG strings: pure functions, no scripts, no inline styles, colours by CSS class.

Every chart carries its title as `<title>` and `aria-label`; labels are escaped. Coordinates are
in units of the viewBox, which the page scales to the width of the column.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from onboard.report.formats import number

WIDTH = 936.0
LABELS, NOTES = 130.0, 190.0  # room left and right of horizontal rows


@dataclass(frozen=True)
class Interval:
    """A measured value with its bounds; `note` stands at the right end of the row."""

    label: str
    value: float
    lo: float
    hi: float
    note: str = ""


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
        body.append(_rect(x(lo) + 0.5, bottom - height, max(x(hi) - x(lo) - 1, 0.5), height, "bar"))
    body.append(_line(left, bottom, right, bottom, "axis"))
    for exponent in range(math.ceil(first), math.floor(last) + 1):
        body.append(_line(x(exponent), bottom, x(exponent), bottom + 5, "axis"))
        body.append(_text(x(exponent), bottom + 19, _power(exponent), "tick", "middle"))
    body += _marks([(m, x(math.log10(v))) for m, v in marks if v > 0], left, right, bottom)
    return _svg(title, bottom + 28, body)


def intervals(
    rows: Sequence[Interval], title: str, limit: float | None = None, least: float = 0.0
) -> Markup:
    """Draw one row per value: a dot, its interval, the figure; a dashed line at `limit`.

    The axis begins at `least`.
    """
    if not rows:
        return Markup("")
    left, right, top, step = LABELS, WIDTH - NOTES, 14.0 if limit is None else 26.0, 24.0
    most = max([row.hi for row in rows] + ([limit] if limit else []))
    most = most if most > least else least + 1
    bottom = top + step * len(rows)

    def x(value: float) -> float:
        return left + (max(value, least) - least) / ((most - least) * 1.05) * (right - left)

    body = [_line(left, bottom, right, bottom, "axis")]
    for tick in _ticks(most, least):
        body.append(_line(x(tick), top - 4, x(tick), bottom, "grid"))
        body.append(_text(x(tick), bottom + 16, f"{tick:g}", "tick", "middle"))
    for i, row in enumerate(rows):
        y = top + step * (i + 0.5)
        body += [
            _text(0, y + 4, row.label, "label", "start"),
            _line(x(row.lo), y, x(row.hi), y, "whisker"),
            _line(x(row.lo), y - 5, x(row.lo), y + 5, "whisker"),
            _line(x(row.hi), y - 5, x(row.hi), y + 5, "whisker"),
            f'<circle class="dot" cx="{x(row.value):.1f}" cy="{y:.1f}" r="4"/>',
            _text(right + 14, y + 4, number(row.value), "figure", "start"),
            _text(WIDTH - 4, y + 4, row.note, "tick", "end"),
        ]
    if limit is not None:
        body.append(_line(x(limit), top - 8, x(limit), bottom, "limit"))
        body.append(_text(x(limit), top - 12, f"limit {number(limit)}", "limit-label", "middle"))
    return _svg(title, bottom + 26, body)


def columns(rows: Sequence[Bar], title: str, most: float | None = None) -> Markup:
    """Draw one column per row with its figure on top and its label (and note) below."""
    if not rows:
        return Markup("")
    width, top, bottom = 400.0, 24.0, 138.0
    most = most or max(row.value for row in rows) or 1.0
    step = width / len(rows)
    body = [_line(0, bottom, width, bottom, "axis")]
    for i, row in enumerate(rows):
        height = min(row.value / most, 1.0) * (bottom - top)
        thick = min(step * 0.62, 64)
        middle = step * (i + 0.5)
        body += [
            _rect(middle - thick / 2, bottom - height, thick, height, "bar"),
            _text(middle, bottom - height - 6, number(row.value), "figure", "middle"),
            _text(middle, bottom + 17, row.label, "label", "middle"),
            _text(middle, bottom + 33, row.note, "tick", "middle"),
        ]
    noted = any(row.note for row in rows)
    return _svg(title, bottom + (40 if noted else 24), body, width=width)


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
            _text(0, y + 14, row.label, "label", "start"),
            _rect(left, y + 3, right - left, 14, "track"),
            _rect(left, y + 3, length, 14, "bar"),
            _text(right + 14, y + 14, f"{row.value * 100:.1f}%", "figure", "start"),
            _text(WIDTH - 4, y + 14, row.note, "tick", "end"),
        ]
    return _svg(title, 8 + step * len(rows), body)


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

    body = [_line(left, bottom, right, bottom, "axis")]
    for tick in _ticks(most):
        y = at(min(xs), tick)[1]
        body += [
            _line(left, y, right, y, "grid"),
            _text(left - 6, y + 4, f"{tick:g}", "tick", "end"),
        ]
    body += [
        _text(left, bottom + 17, number(min(xs)), "tick", "start"),
        _text(right, bottom + 17, f"{x_label} {number(max(xs))}", "tick", "end"),
    ]
    ends = _spread([at(*points[-1])[1] for _, points in drawn], 14)
    for i, ((name, points), end) in enumerate(zip(drawn, ends, strict=True)):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in points))
        body.append(f'<polyline class="series s{i}" points="{path}"/>')
        label = f"{name} {number(points[-1][1])}"
        body.append(_text(right + 6, end + 4, label, f"label t{i}", "start"))
    return _svg(title, bottom + 26, body, width=width)


def _svg(title: str, height: float, body: Sequence[str], width: float = WIDTH) -> Markup:
    label = escape(title)
    return Markup(
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{label}" '
        f'class="chart"><title>{label}</title>{"".join(body)}</svg>'
    )


def _rect(x: float, y: float, width: float, height: float, css: str) -> str:
    return (
        f'<rect class="{css}" x="{x:.1f}" y="{y:.1f}" '
        f'width="{max(width, 0):.1f}" height="{max(height, 0):.1f}"/>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    return f'<line class="{css}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, css: str, anchor: str) -> str:
    if not text:
        return ""
    return (
        f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def _marks(
    marks: Sequence[tuple[str, float]], left: float, right: float, bottom: float
) -> list[str]:
    body = []
    for row, (label, x) in enumerate(sorted(marks, key=lambda mark: mark[1])):
        if not left <= x <= right:
            continue
        y = 10.0 + 14 * (row % 3)
        anchor = "end" if x > WIDTH - 90 else "start"
        body.append(_line(x, y - 8, x, bottom, "mark"))
        body.append(_text(x + (4 if anchor == "start" else -4), y, label, "mark-label", anchor))
    return body


def _ticks(most: float, least: float = 0.0) -> list[float]:
    """Return about five round numbers from `least` to `most`, steps of 1, 2 or 5 times 10^n."""
    rough = (most - least) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    first, last = math.ceil(least / step - 1e-9), math.floor(most / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _spread(ys: Sequence[float], gap: float) -> list[float]:
    """Move labels apart until neighbours are `gap` away, keeping their order."""
    moved = [0.0] * len(ys)
    previous = -math.inf
    for i in sorted(range(len(ys)), key=lambda i: ys[i]):
        previous = max(ys[i], previous + gap)
        moved[i] = previous
    return moved


def _power(exponent: int) -> str:
    digits = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
    return {0: "1", 1: "10"}.get(exponent) or f"10{str(exponent).translate(digits)}"
