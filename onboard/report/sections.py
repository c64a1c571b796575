"""Artifact files turned into what the page lays out: one function per section, charts included."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from onboard.report import charts
from onboard.report.charts import Bar, Interval
from onboard.report.formats import number, percent

WORST_SHOWN = 10
SAMPLES_SHOWN = 4
CURVE_POINTS = 200
KINDS = {"greedy": "", "sampled": ", sampled"}  # of answers; what a row's label ends with

Row = Mapping[str, Any]


def fidelity(files: Row, metrics: Row, limits: Mapping[str, float]) -> dict[str, Any]:
    """Charts and tables of KL divergence: histogram, by domain, confidence and position."""
    spread = files.get("histogram.json") or {"edges": [], "counts": []}
    domains = files.get("domains.json") or []
    worst = files.get("worst.json") or []
    marks = [
        (f"{name} {number(metrics[key])}", metrics[key])
        for name, key in (("median", "kl_median"), ("mean", "kl_mean"), ("p99", "kl_p99"))
        if key in metrics
    ]
    rows = [
        Interval(
            d["domain"],
            d["kl_mean"],
            d["kl_mean_lo"],
            d["kl_mean_hi"],
            f"{number(d['documents'])} documents",
        )
        for d in domains
    ]
    overall = "kl_mean_lo" in metrics and "kl_mean_hi" in metrics
    if rows and overall:
        total = (metrics["kl_mean"], metrics["kl_mean_lo"], metrics["kl_mean_hi"])
        documents = number(metrics.get("evaluation_documents"))
        rows.append(Interval("all", *total, f"{documents} documents"))
    return {
        "histogram": charts.histogram(
            spread["edges"],
            spread["counts"],
            "KL divergence per token in nats, logarithmic axis, count of tokens",
            marks,
        ),
        "domain_chart": charts.intervals(
            rows,
            "Mean KL divergence by domain in nats per token, with 95% intervals",
            limits.get("kl_mean"),
        ),
        "domains": domains,
        "confidence": charts.columns(
            [
                Bar(_range(r["lo"], r["hi"]), r["kl_mean"], percent(r["share"], 0))
                for r in files.get("confidence.json") or []
            ],
            "Mean KL divergence by the source's confidence in its top token",
        ),
        "positions": charts.columns(
            [
                Bar(_range(r["lo"], r["hi"]), r["kl_mean"])
                for r in files.get("positions.json") or []
            ],
            "Mean KL divergence by position in the document",
        ),
        "worst": worst[:WORST_SHOWN],
        "more_worst": worst[WORST_SHOWN:],
    }


def quantization(adapt: Row, quantize: Row, metrics: Row) -> dict[str, Any]:
    """Share and error per role, and what stayed in high precision with the reason."""
    prefix = "quantized_share_"
    roles = {k.removeprefix(prefix): v for k, v in metrics.items() if k.startswith(prefix)}
    measured = [t for t in _named(quantize.get("tensors.json")) if t.get("relative_error")]
    tensors = (adapt.get("adaptation.json") or {}).get("tensors", {})
    kept = [t | {"name": n} for n, t in tensors.items() if not t["quantize"]]
    return {
        "shares": charts.shares(
            [Bar(role.replace("_", " "), share) for role, share in roles.items()],
            "Share of parameters in NVFP4 by role",
        ),
        "errors": charts.intervals(
            [_error_row(role, rows) for role, rows in _grouped(measured, "role")],
            "Relative error of the quantized weights by role: least, mean and largest tensor",
        ),
        "largest_errors": sorted(measured, key=lambda t: -t["relative_error"])[:8],
        "kept": _kept(kept),
    }


def speculator(speculate: Row, smoke: Row, metrics: Row) -> dict[str, Any]:
    """Training curves, a sweep's drafts, acceptance by position and by domain, speed."""
    log = speculate.get("training.jsonl") or []
    rows = log[:: max(1, len(log) // CURVE_POINTS)]
    steps = max((len(r.get("accuracy") or []) for r in rows), default=0)
    accuracy = [
        (f"step {k + 1}", [(r["step"], r["accuracy"][k]) for r in rows if k < len(r["accuracy"])])
        for k in range(steps)
    ]
    learned = [(r["tokens"], r["held_out_length"]) for r in log if "held_out_length" in r]
    acceptance = smoke.get("acceptance.json") or {}
    own = smoke.get("mtp.json") or {}
    timed = smoke.get("speed.json") or {}
    compared = [
        Bar(label, metrics[key])
        for label, key in (
            ("offline estimate", "offline_acceptance_length"),
            ("engine, greedy", "acceptance_length"),
            ("engine, sampled", "acceptance_length_sampled"),
            ("MTP, greedy", "mtp_acceptance_length"),
        )
        if key in metrics
    ]
    return {
        "loss": charts.lines(
            [("loss", [(r["step"], r["loss"]) for r in rows])], "Training loss by step", "step"
        ),
        "accuracy": charts.lines(accuracy, "Training accuracy by draft position", "step"),
        "learned": charts.lines(
            [("length", learned)], "Estimated acceptance length by tokens trained on", "token"
        ),
        "sweep": _sweep(speculate.get("sweep.json") or []),
        "positions": charts.intervals(
            _position_acceptance(acceptance),
            "Share of drafts accepted at each position in the engine, with 95% intervals",
        ),
        "compared": charts.columns(compared, "Acceptance length: offline estimate and engine"),
        "domains": charts.intervals(
            [
                *_domain_acceptance(acceptance),
                *_whole_acceptance(acceptance, metrics),
                *_mtp_acceptance(own.get("acceptance") or {}),
            ],
            "Acceptance length in the engine by domain, with 95% intervals",
            least=1.0,
        ),
        "speed": timed.get("rows") or [],
        "bytes": {name: timed.get(name) for name in ("draft_bytes", "target_bytes", "drafted")},
        "sampling": smoke.get("sampling.json"),
        "mtp": own,
    }


def _sweep(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the fields in which drafts differ, and the drafts; nothing where there is but one."""
    if len(rows) < 2:
        return {}
    shapes = [row["draft"] for row in rows]
    return {
        "fields": [name for name in shapes[0] if any(s[name] != shapes[0][name] for s in shapes)],
        "rows": rows,
    }


def engine(smoke: Row) -> dict[str, Any]:
    """Probes with the failed first, and samples with what is not equal first."""
    probes = sorted(smoke.get("probes.json") or [], key=lambda p: bool(p["passed"]))
    order = {"diverged": 0, "near-tie": 1}
    samples = smoke.get("samples.jsonl") or []
    unequal = [s for s in samples if s.get("agreement") in order]
    first = _one_of_each(samples, "domain")
    return {
        "probes": probes,
        "unequal": sorted(unequal, key=lambda s: order[s["agreement"]]),
        "samples": first[:SAMPLES_SHOWN],
        "more_samples": [s for s in samples if s not in first[:SAMPLES_SHOWN]],
    }


def _range(lo: float, hi: float) -> str:
    return f"{number(lo, 2)}–{number(hi, 2)}"


def _named(tensors: Any) -> list[dict[str, Any]]:
    """Return {name: row} as rows with their name, largest tables included."""
    return [{**row, "name": name} for name, row in (tensors or {}).items()]


def _grouped(rows: Iterable[Row], key: str) -> list[tuple[str, list[Row]]]:
    ordered = sorted(rows, key=lambda r: str(r[key]))
    return [(name, list(group)) for name, group in groupby(ordered, lambda r: str(r[key]))]


def _error_row(role: str, tensors: Sequence[Row]) -> Interval:
    errors = [t["relative_error"] for t in tensors]
    mean = sum(errors) / len(errors)
    note = f"{len(errors)} tensor{'s' if len(errors) > 1 else ''}"
    return Interval(role.replace("_", " "), mean, min(errors), max(errors), note)


def _kept(tensors: Sequence[Row]) -> list[dict[str, Any]]:
    """Return one row per role and reason, the largest first."""
    rows = [
        {
            "role": role,
            "reason": reason,
            "tensors": len(group),
            "parameters": sum(math.prod(t["shape"]) for t in group),
            "dtype": ", ".join(sorted({str(t["dtype"]) for t in group})),
            "example": group[0]["name"],
        }
        for role, of_role in _grouped(tensors, "role")
        for reason, group in _grouped(of_role, "reason")
    ]
    return sorted(rows, key=lambda row: -int(row["parameters"]))


def _position_acceptance(acceptance: Row) -> list[Interval]:
    """Return a row per draft position and kind of answer, the kinds of a position together."""
    rows = [
        (place, Interval(f"token {place}{KINDS[kind]}", row["rate"], row["lo"], row["hi"]))
        for kind in KINDS
        for place, row in enumerate((acceptance.get(kind) or {}).get("positions", []), 1)
    ]
    return [row for _, row in sorted(rows, key=lambda pair: pair[0])]


def _domain_acceptance(acceptance: Row) -> list[Interval]:
    """Return a row per domain and kind of answer, the kinds of a domain together."""
    rows = [
        (row["domain"], _length(f"{row['domain']}{KINDS[kind]}", row, row["prompts"]))
        for kind in KINDS
        for row in (acceptance.get(kind) or {}).get("domains", [])
    ]
    return [row for _, row in sorted(rows, key=lambda pair: str(pair[0]))]


def _whole_acceptance(acceptance: Row, metrics: Row) -> list[Interval]:
    """Return a row over all domains per kind of answer."""
    suffixes = {"greedy": "", "sampled": "_sampled"}
    return [
        _length(f"all{KINDS[kind]}", metrics, acceptance[kind]["prompts"], suffixes[kind])
        for kind in KINDS
        if kind in acceptance and f"acceptance_length{suffixes[kind]}" in metrics
    ]


def _mtp_acceptance(acceptance: Row) -> list[Interval]:
    """Return a row per domain of the greedy answers that the model's own MTP layers drafted."""
    rows = (acceptance.get("greedy") or {}).get("domains", [])
    return [_length(f"{row['domain']}, MTP", row, row["prompts"]) for row in rows]


def _length(label: str, row: Row, prompts: int, suffix: str = "") -> Interval:
    name = f"acceptance_length{suffix}"
    return Interval(label, row[name], row[f"{name}_lo"], row[f"{name}_hi"], f"{prompts} prompts")


def _one_of_each(rows: Sequence[Row], key: str) -> list[Row]:
    return list({row.get(key): row for row in reversed(rows)}.values())[::-1]
