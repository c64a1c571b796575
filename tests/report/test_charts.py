"""Charts: geometry from written-out numbers, labels escaped, nothing drawn from nothing."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from onboard.report import charts, formats
from onboard.report import svg as svg_parts
from onboard.report.charts import Bar, Interval
from onboard.report.front import Point, front
from onboard.report.grid import format_map

positive = st.floats(1e-6, 1e6, allow_nan=False)


def numbers(svg: str, element: str, attribute: str) -> list[float]:
    found = ElementTree.fromstring(svg).iter(element)
    return [float(e.attrib[attribute]) for e in found if attribute in e.attrib]


def test_column_heights_are_proportional() -> None:
    heights = numbers(charts.columns([Bar("a", 1.0), Bar("b", 0.5)], "t"), "rect", "height")
    assert heights == [114.0, 57.0]


def test_columns_keep_to_their_scale() -> None:
    assert numbers(charts.columns([Bar("a", 0.25)], "t", 1.0), "rect", "height") == [28.5]


def test_interval_axis_begins_at_least() -> None:
    svg = charts.intervals([Interval("a", 1.5, 1.0, 2.0)], "t", least=1.0)
    left, width = charts.LABELS, charts.WIDTH - charts.NOTES - charts.LABELS
    assert numbers(svg, "circle", "cx") == [pytest.approx(left + 0.5 / 1.05 * width, abs=0.1)]


def test_a_draft_that_accepts_nothing_is_drawn_at_the_left_end() -> None:
    svg = charts.intervals([Interval("a", 1.0, 1.0, 1.0)], "t", least=1.0)
    assert numbers(svg, "circle", "cx") == [charts.LABELS]


def test_histogram_marks_stand_where_their_value_is() -> None:
    svg = charts.histogram([-2, -1, 0], [1, 3], "t", [("mean", 0.1), ("off", 5.0), ("zero", 0.0)])
    assert "mean" in svg
    assert "off" not in svg
    marks = re.findall(r'class="mark" x1="([\d.]+)"', svg)
    assert marks == [f"{charts.WIDTH / 2:.1f}"]  # 0.1 is the middle of 0.01 .. 1


def test_labels_are_escaped() -> None:
    svg = charts.shares([Bar("<b>&", 0.5)], '"><script>')
    assert "<script>" not in svg
    assert "<b>" not in svg
    ElementTree.fromstring(svg)


def test_nothing_is_drawn_from_nothing() -> None:
    assert charts.histogram([], [], "t") == ""
    assert charts.histogram([0, 1], [0], "t") == ""
    assert charts.intervals([], "t") == charts.columns([], "t") == charts.shares([], "t") == ""
    assert charts.lines([("loss", [])], "t", "step") == ""


@given(st.lists(st.tuples(positive, positive), min_size=1, max_size=6), st.none() | positive)
def test_intervals_stay_inside_the_picture(
    pairs: list[tuple[float, float]], limit: float | None
) -> None:
    rows = [Interval("a", v, v, v + d) for v, d in pairs]
    svg = charts.intervals(rows, "t", limit)
    for x in numbers(svg, "line", "x2") + numbers(svg, "circle", "cx"):
        assert 0 <= x <= charts.WIDTH


@given(st.lists(st.tuples(positive, positive), min_size=1, max_size=50))
def test_lines_stay_inside_the_picture(points: list[tuple[float, float]]) -> None:
    svg = charts.lines([("loss", points)], "t", "step")
    found = re.findall(r"([\d.e+-]+),([\d.e+-]+)", re.findall(r'points="([^"]*)"', svg)[0])
    assert len(found) == len(points)
    assert all(0 <= float(x) <= 400 and 0 <= float(y) <= 160 for x, y in found)


def test_the_front_has_a_logarithmic_axis_of_losses() -> None:
    points = [
        Point(4.5, 0.1, 0.1, 0.1, 0.1),
        Point(6.0, 0.01, 0.01, 0.01, 0.01, chosen=True),
        Point(9.0, 0.001, 0.001, 0.001, 0.001),
        Point(16.0, 0.0),  # nothing is lost in bf16; a logarithm has no place for it
    ]
    svg = front(points, "t", "bits per weight", limit=6.5)
    _legend, *dots = numbers(svg, "circle", "cy")
    first, middle, last = sorted(dots)
    assert middle - first == pytest.approx(last - middle, abs=0.11)
    assert "chosen: 6 bits per weight, KL 0.0100" in svg
    assert "limit 6.50" in svg
    assert len(re.findall(r"[\d.]+,[\d.]+", re.findall(r'points="([^"]*)"', svg)[0])) == 3


def test_a_choice_that_was_not_measured_is_called_a_prediction() -> None:
    svg = front([Point(5.0, 0.1, chosen=True), Point(6.0, 0.05)], "t", "bits per weight")
    assert "KL 0.100 (predicted)" in svg
    assert front([Point(16.0, 0.0)], "t", "bits") == front([], "t", "bits") == ""


@given(st.lists(st.tuples(positive, positive, positive), min_size=1, max_size=20), positive)
def test_the_front_stays_inside_the_picture(
    rows: list[tuple[float, float, float]], limit: float
) -> None:
    points = [Point(size, kl, kl, kl / 2, kl + half) for size, kl, half in rows]
    svg = front(points, "t", "bits", limit=limit, loss_limit=limit)
    for x, y in zip(numbers(svg, "circle", "cx"), numbers(svg, "circle", "cy"), strict=True):
        assert 0 <= x <= charts.WIDTH
        assert 0 <= y <= 264
    for y in numbers(svg, "line", "y1") + numbers(svg, "line", "y2"):
        assert -1 <= y <= 270


def test_a_unit_of_two_formats_is_drawn_in_proportion() -> None:
    cells = {
        ("mlp up", 0): [("nvfp4", 0.75, "most"), ("fp8", 0.25, "some")],
        ("mlp up", 1): [("odd", 1.0, "<b>")],
    }
    svg = format_map(cells, [], "t")
    widths = {
        css: float(width)
        for css, width in re.findall(r'class="format (\w+)"[^>]* width="([\d.]+)"', svg)
    }
    assert widths["fp8"] * 3 == pytest.approx(widths["nvfp4"], abs=0.2)
    assert widths["fp8"] * 4 == pytest.approx(widths["other"], abs=0.2)
    assert "<b>" not in svg
    assert format_map({}, [], "t") == ""


def test_a_chosen_row_stands_out() -> None:
    rows = [Interval("a", 2.0, 1.0, 3.0), Interval("b", 1.0, 1.0, 1.0, chosen=True)]
    svg = charts.intervals(rows, "t", 1.5, limit_label="target")
    assert svg.count('class="dot chosen"') == svg.count('class="chosen"') == 1
    assert "target 1.50" in svg


@given(positive, positive)
@example(879609.9999999999, 1e-06)  # a span of a few thousand steps between floats
def test_ticks_are_round_and_inside(least: float, span: float) -> None:
    ticks = svg_parts.ticks(least + span, least)
    slack = span * 1e-6 + 2 * math.ulp(least + span)
    assert len(ticks) <= 12
    assert all(least - slack <= t <= least + span + slack for t in ticks)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0, "0"), (40, "40"), (12840, "12,840"), (0.3127, "0.313"), (1.538, "1.54"),
        (0.00002, "2.00e−5"), (-0.0213, "−0.0213"), (123.456, "123"), (None, "–"), (True, "–"),
        (math.nan, "nan"), (math.inf, "inf"),
    ],
)  # fmt: skip
def test_numbers(value: float | None, written: str) -> None:
    assert formats.number(value) == written


def test_sizes_times_and_shares() -> None:
    assert formats.size(999) == "999 B"
    assert formats.size(116_500_000) == "116.5 MB"
    assert formats.size(1.575e12) == "1.57 TB"
    assert formats.seconds(61) == "1 min 01 s"
    assert formats.seconds(7200) == "2.0 h"
    assert formats.percent(0.7638) == "76.4%"


def test_a_command_is_shown_as_one_would_type_it() -> None:
    argv = ["{python}", "--set", "a.b=0.5", "--override", "x.y=a reason"]
    assert formats.command(argv) == "{python} --set a.b=0.5 --override 'x.y=a reason'"
