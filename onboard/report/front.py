"""What is lost against what is spent: a curve of predictions, and what was measured on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from onboard.report.formats import number
from onboard.report.svg import WIDTH, line, svg, text, ticks

LEFT, RIGHT, TOP, BOTTOM = 62.0, WIDTH - 30, 44.0, 264.0
DECADES = 4  # that the axis shows at most, from the largest value down


@dataclass(frozen=True)
class Point:
    """A choice of formats: its size, and the loss that was predicted and measured, or None."""

    size: float
    predicted: float | None
    measured: float | None = None
    lo: float | None = None
    hi: float | None = None
    chosen: bool = False


@dataclass(frozen=True)
class Axes:
    """Where a size and a loss lie in the picture; losses are on a logarithmic axis."""

    sizes: tuple[float, float]
    losses: tuple[float, float]

    @classmethod
    def of(cls, sizes: Sequence[float], losses: Sequence[float]) -> Axes | None:
        """Return axes that hold all sizes and the positive losses; None without any of them."""
        positive = [value for value in losses if value > 0]
        if not positive or not sizes:
            return None
        most = max(positive)
        least = max(min(positive), most / 10**DECADES)
        room = (max(sizes) - min(sizes)) * 0.03 or max(sizes) * 0.1 or 1.0
        return cls((min(sizes) - room, max(sizes) + room), (least / 1.25, most * 1.25))

    def x(self, size: float) -> float:
        first, last = self.sizes
        return LEFT + (size - first) / (last - first) * (RIGHT - LEFT)

    def y(self, loss: float) -> float:
        least, most = map(math.log10, self.losses)
        return BOTTOM - (math.log10(loss) - least) / (most - least) * (BOTTOM - TOP)

    def shows(self, loss: float | None) -> bool:
        return loss is not None and loss >= self.losses[0]


def front(
    points: Sequence[Point],
    title: str,
    unit: str,
    size_text: Callable[[float], str] = number,
    limit: float | None = None,
    loss_limit: float | None = None,
) -> Markup:
    """Draw predictions as a line, measured losses as dots with intervals, the chosen one named.

    `limit` is a size, `loss_limit` a loss; each is a dashed line. `size_text` writes a size, `unit`
    stands behind it where there is room.
    """
    sizes = [p.size for p in points] + ([limit] if limit is not None else [])
    losses = [v for p in points for v in (p.predicted, p.measured, p.lo, p.hi) if v is not None]
    axes = Axes.of(sizes, losses + ([loss_limit] if loss_limit is not None else []))
    if axes is None:
        return Markup("")
    body = [*_axes(axes, unit, size_text), *_limits(axes, size_text, limit, loss_limit)]
    body += [*_legend(), _curve(axes, points)]
    for point in sorted(points, key=lambda p: p.chosen):
        body += _dot(axes, point, unit, size_text)
    return svg(title, BOTTOM + 40, body)


def _axes(axes: Axes, unit: str, size_text: Callable[[float], str]) -> list[str]:
    body = [line(LEFT, BOTTOM, RIGHT, BOTTOM, "axis")]
    for loss in _loss_ticks(*axes.losses):
        y = axes.y(loss)
        body += [
            line(LEFT, y, RIGHT, y, "grid"),
            text(LEFT - 8, y + 4, _short(loss), "tick", "end"),
        ]
    for size in ticks(axes.sizes[1], axes.sizes[0]):
        x = axes.x(size)
        body += [
            line(x, BOTTOM, x, BOTTOM + 5, "axis"),
            text(x, BOTTOM + 18, size_text(size), "tick", "middle"),
        ]
    return [*body, text(RIGHT, BOTTOM + 34, unit or "size of the weights", "tick", "end")]


def _loss_ticks(least: float, most: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten inside the range; powers alone where it is wide."""
    steps = (1, 2, 5) if most / least < 300 else (1,)
    powers = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
    every = [float(f"{step}e{power}") for power in powers for step in steps]
    return [value for value in every if least <= value <= most]


def _short(loss: float) -> str:
    return f"{loss:g}".replace("e-0", "e−")


def _limits(
    axes: Axes,
    size_text: Callable[[float], str],
    limit: float | None,
    loss_limit: float | None,
) -> list[str]:
    body = []
    if limit is not None:
        x = axes.x(limit)
        anchor = "end" if x > WIDTH - 120 else "start"
        shift = -5 if anchor == "end" else 5
        body.append(line(x, TOP - 8, x, BOTTOM, "limit"))
        body.append(text(x + shift, TOP - 2, f"limit {size_text(limit)}", "limit-label", anchor))
    if axes.shows(loss_limit) and loss_limit is not None:
        y = axes.y(loss_limit)
        body.append(line(LEFT, y, RIGHT, y, "limit"))
        body.append(text(RIGHT, y - 5, f"limit {number(loss_limit)}", "limit-label", "end"))
    return body


def _legend() -> list[str]:
    return [
        line(LEFT, 12, LEFT + 22, 12, "series s1"),
        text(LEFT + 28, 16, "predicted", "label", "start"),
        _circle(LEFT + 112, 12, 4, "dot", ""),
        text(LEFT + 122, 16, "measured, with its 95% interval", "label", "start"),
    ]


def _curve(axes: Axes, points: Sequence[Point]) -> str:
    known = [(p.size, p.predicted) for p in points if p.predicted is not None]
    path = " ".join(
        f"{axes.x(size):.1f},{axes.y(loss):.1f}" for size, loss in sorted(known) if axes.shows(loss)
    )
    return f'<polyline class="series s1" points="{path}"/>' if path else ""


def _dot(axes: Axes, point: Point, unit: str, size_text: Callable[[float], str]) -> list[str]:
    loss = point.predicted if point.measured is None else point.measured
    if loss is None or not axes.shows(loss) or (point.measured is None and not point.chosen):
        return []
    x, y = axes.x(point.size), axes.y(loss)
    body = []
    if point.lo is not None and point.hi is not None and point.measured is not None:
        low, high = axes.y(max(point.lo, axes.losses[0])), axes.y(point.hi)
        body.append(line(x, low, x, high, "whisker"))
        body += [line(x - 5, end, x + 5, end, "whisker") for end in (low, high)]
    guess = " (predicted)" if point.measured is None else ""
    size = f"{size_text(point.size)} {unit}".strip()
    words = f"{size}, KL {number(loss)}{guess}"
    css = "dot chosen" if point.chosen else "dot"
    body.append(_circle(x, y, 5 if point.chosen else 4, css, words))
    if point.chosen:
        end = x > WIDTH * 0.7
        label = f"chosen: {words}"
        body.append(
            text(x - 11 if end else x + 11, y - 7, label, "chosen", "end" if end else "start")
        )
    return body


def _circle(x: float, y: float, radius: float, css: str, title: str) -> str:
    inside = f"<title>{escape(title)}</title>" if title else ""
    return f'<circle class="{css}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.0f}">{inside}</circle>'
