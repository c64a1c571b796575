"""How the quantize stage chose: its ladder of methods, the formats it gave out, its training."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from onboard.report import charts
from onboard.report.charts import Bar, Interval
from onboard.report.formats import number, percent, seconds, size
from onboard.report.front import Point, front
from onboard.report.grid import NAMES, Parts, format_map

FILES = ("ladder.json", "allocation.json", "distillation.json")
METHODS = {
    "rtn": ("RTN", "rounds to the nearest value"),
    "sweep": ("sweep", "tries seven scales for each block of 16, weighing errors by the inputs"),
    "gptq": ("GPTQ", "makes each column's error good in the columns that follow"),
    "sequential": ("sequential", "works layer after layer on what the rounded layers before give"),
    "qad": ("QAD", "trains the rounded model to predict as the source does"),
}
STOPPED = {
    "epochs": "all epochs were done",
    "patience": "held-out KL fell no further",
    "minutes": "the recipe's time was over",
}
UNIT_LENGTH = 27  # characters that fit beside the map
LAYER = re.compile(r"(?:^|\.)(\d+)\.")
EXPERT = re.compile(r"\bexperts\.\d+\.")

Row = Mapping[str, Any]


def rounding(files: Row) -> dict[str, Any]:
    """Return charts and rows of the artifact's files; None for a file that is not there."""
    ladder, allocation, distillation = (files.get(name) for name in FILES)
    return {
        "ladder": _ladder(ladder) if ladder else None,
        "allocation": _allocation(allocation) if allocation else None,
        "distillation": _distillation(distillation) if distillation else None,
    }


def figures(files: Row) -> dict[str, Any]:
    """Return the same data for programs, by file; of a group's modules no more than their number.

    Their names are in the artifact: a large mixture of experts has tens of thousands.
    """
    found = {name.removesuffix(".json"): files[name] for name in FILES if files.get(name)}
    if "allocation" in found:
        groups = [
            {**group, "modules": len(group["modules"])} for group in found["allocation"]["groups"]
        ]
        found["allocation"] = {**found["allocation"], "groups": groups}
    return found


# --- the ladder


def _ladder(ladder: Row) -> dict[str, Any]:
    rungs = ladder["rungs"]
    return {
        "chart": charts.intervals(
            [_rung(rung) for rung in rungs],
            "KL divergence of each rounding method on the selection documents, with 95% intervals",
            ladder.get("target_kl"),
            limit_label="target",
            notes=240.0,
        ),
        "documents": ladder.get("documents"),
        "target": ladder.get("target_kl"),
        "chosen": next((_method(r["method"]) for r in rungs if r.get("chosen")), None),
        "methods": [METHODS[r["method"]] for r in rungs if r["method"] in METHODS],
    }


def _rung(rung: Row) -> Interval:
    kl, chosen = rung["kl"], bool(rung.get("chosen"))
    known = (
        write(rung[name])
        for name, write in (("seconds", seconds), ("bytes", size))
        if rung.get(name) is not None
    )
    label = _method(rung["method"]) + (", chosen" if chosen else "")
    lo, hi = (_or(rung.get(name), kl) for name in ("kl_lo", "kl_hi"))
    return Interval(label, kl, lo, hi, " · ".join(known), chosen)


def _method(name: str) -> str:
    return METHODS[name][0] if name in METHODS else name


# --- formats under a budget


def _allocation(allocation: Row) -> dict[str, Any]:
    groups = allocation.get("groups") or []
    weights: dict[str, int] = defaultdict(int)
    for group in groups:
        weights[group["format"]] += group["parameters"]
    total = sum(weights.values()) or 1
    order = [*NAMES, *sorted(set(weights) - set(NAMES))]
    legend = [(f, f"{percent(weights[f] / total)} of the weights") for f in order if f in weights]
    limit = allocation.get("limit") or {}
    interactions = allocation.get("interactions")
    return {
        "front": _front(allocation.get("front") or [], limit),
        "map": format_map(_cells(groups), legend, "Format of every unit, layer by layer"),
        "outside": [
            (group["name"], NAMES.get(group["format"], group["format"]))
            for group in groups
            if _layer(group) is None
        ],
        "limit": _limit(limit),
        "interactions": interactions,
        "kinds": (interactions or {}).get("kinds") or [],
        "swaps": allocation.get("swaps") or [],
    }


def _limit(limit: Row) -> str | None:
    write = {
        "bits": lambda v: f"{number(v)} bits per weight, scales included",
        "bytes": lambda v: f"{size(v)} for all weights that may be quantized",
        "speed": lambda v: f"{number(v)} times as fast as BF16, by bytes read per token",
        "kl_max": lambda v: f"a KL divergence of at most {number(v)} on the selection documents",
    }.get(str(limit.get("name")))
    return write(limit.get("value")) if write else None


def _front(rows: Sequence[Row], limit: Row) -> Any:
    """Draw KL over bits per weight, or over bytes where the budget is in bytes."""
    axis = "bytes" if limit.get("name") == "bytes" else "bits"
    value = limit.get("value")
    points = [
        Point(
            row[axis],
            row.get("kl_predicted"),
            row.get("kl_measured"),
            row.get("kl_lo"),
            row.get("kl_hi"),
            bool(row.get("chosen")),
        )
        for row in rows
    ]
    return front(
        points,
        "KL divergence against size: predicted from single groups, and measured",
        "" if axis == "bytes" else "bits per weight",
        size if axis == "bytes" else number,
        value if limit.get("name") == axis else None,
        value if limit.get("name") == "kl_max" else None,
    )


def _cells(groups: Sequence[Row]) -> dict[tuple[str, int], Parts]:
    """Return the formats of every unit of every layer, with the share of its weights in each."""
    inside: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for group in groups:
        if (layer := _layer(group)) is not None:
            inside[_unit(group["modules"]), layer].append(group)
    return {place: _parts(place, members) for place, members in inside.items()}


def _parts(place: tuple[str, int], groups: Sequence[Row]) -> Parts:
    by_format: dict[str, list[Row]] = defaultdict(list)
    for group in groups:
        by_format[group["format"]].append(group)
    total = sum(group["parameters"] for group in groups) or 1
    parts = []
    for format_, members in by_format.items():
        share = sum(group["parameters"] for group in members) / total
        words = f"layer {place[1]}, {place[0]}: {NAMES.get(format_, format_)}"
        if len(groups) > 1:
            words += f", {len(members)} of {len(groups)} groups"
        else:
            words += _sensitivity(members[0])
        parts.append((format_, share, words))
    return parts


def _sensitivity(group: Row) -> str:
    found = [f"{number(kl)} in {NAMES.get(f, f)}" for f, kl in (group.get("kl") or {}).items()]
    return f"; KL alone {', '.join(found)}" if found else ""


def _layer(group: Row) -> int | None:
    found = next((m for module in group["modules"] if (m := LAYER.search(module))), None)
    return int(found[1]) if found else None


def _unit(modules: Sequence[str]) -> str:
    """Return what the modules of a layer are called together: "self_attn q k v"."""
    leaves: dict[str, dict[str, None]] = defaultdict(dict)
    for module in modules:
        inside = LAYER.split(module, maxsplit=1)[-1]
        parent, _, leaf = EXPERT.sub("experts.", inside).rpartition(".")
        leaves[parent][leaf.removesuffix("_proj")] = None
    name = ", ".join(f"{parent} {' '.join(names)}".strip() for parent, names in leaves.items())
    return name if len(name) <= UNIT_LENGTH else name[: UNIT_LENGTH - 1] + "…"


# --- distillation


def _distillation(distillation: Row) -> dict[str, Any]:
    curve = distillation.get("curve") or []
    series = [
        (name, [(row["step"], row[key]) for row in curve if row.get(key) is not None])
        for name, key in (("train", "train_loss"), ("held out", "held_out_kl"))
    ]
    ends = [
        Bar(name, distillation[key])
        for name, key in (("before", "kl_before"), ("after", "kl_after"))
        if distillation.get(key) is not None
    ]
    return {
        "curve": charts.lines(series, "KL divergence during distillation, by step", "step"),
        "ends": charts.columns(ends, "KL divergence on held-out documents before and after"),
        "before": distillation.get("kl_before"),
        "after": distillation.get("kl_after"),
        "stopped": STOPPED.get(str(distillation.get("stopped")), distillation.get("stopped")),
        "last": curve[-1] if curve else None,
    }


def _or(value: float | None, other: float) -> float:
    return other if value is None else value
