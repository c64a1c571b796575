"""`make bench-quality`: our checkpoints beside the peers' at the same bytes, and a verdict.

    python -m tests.quality [OUT]

Everything is measured on the same evaluation documents, from the weights that each wrote. OUT
(.onboard/bench-quality) gets results.json with every document's KL at every point, table.txt and
plot.svg; a run that was stopped goes on. The last line is PASS, or FAIL: and what falls short.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from onboard.quantize.allocation import BITS
from onboard.source import root
from tests.quality import continuous, experts, ours, peers, tiny_moe, verdict
from tests.quality.measure import Candidate, Reference
from tests.quality.ours import Point, Workshop
from tests.quality.plot import draw

CORES = len(os.sched_getaffinity(0))
WEIGHTS = {"activations": "none"}
QUICK = {"swaps": 0, "documents": 6}  # joint KLs would take longer than the whole choice
DISTILLATION = {"epochs": 50, "minutes": 6}
WEIGHT_ONLY = ("modelopt/w4a16", "modelopt/awq_lite", "modelopt/local_hessian", "modelopt/gptq",
               "llmcompressor/*", "autoround/iters-0")  # fmt: skip


class Bench:
    """The results so far, kept in a file after every point."""

    def __init__(self, out: Path) -> None:
        self.out, self.file = out, out / "results.json"
        out.mkdir(parents=True, exist_ok=True)
        self.results: dict[str, Any] = {"models": {}, "experts": [], "code_documents": []}
        if self.file.exists():
            self.results = json.loads(self.file.read_text())

    def save(self) -> None:
        partial = self.file.with_suffix(".partial")
        partial.write_text(json.dumps(self.results, indent=1))
        partial.rename(self.file)

    def keep(self, model: str, name: str, row: Mapping[str, Any]) -> None:
        self.results["models"].setdefault(model, {})[name] = dict(row)
        self.save()
        said = row.get("failed") or f"KL {np.mean(row['kl']):.4f}"
        print(f"{model:11} {name:34} {row.get('seconds', 0):6.0f} s  {said}", flush=True)

    def has(self, model: str, name: str) -> bool:
        return name in self.results["models"].get(model, {})


class Model:
    """A model in the comparison: our workshop for it, and its reference."""

    def __init__(self, bench: Bench, name: str, source: str) -> None:
        self.bench, self.name = bench, name
        self.shop = Workshop.of(source, bench.out / name)
        self._reference: Reference | None = None

    @property
    def reference(self) -> Reference:
        if self._reference is None:
            self._reference = Reference(self.shop.model, self.shop.ids("evaluation"))
        return self._reference

    def measured(self, candidate: Candidate) -> dict[str, Any]:
        found = self.reference.measure(candidate)
        return {"kl": found.kl, "accuracy": found.accuracy}

    def ours(self, name: str, method: str, beside: str | None = None, **params: Any) -> None:
        """Add a point of ours, unless it is there."""
        title = f"ours/{name}"
        if self.bench.has(self.name, title):
            return
        point = self.shop.make(name, method, beside, **params)
        self.bench.keep(self.name, title, _row(point) | self.measured(point.candidate))

    def peers(self, patterns: Sequence[str], group: str, at_once: int = 1) -> None:
        """Add the points of peers, unless they are there; those run at once share the cores."""
        ids = ours.calibration_file(self.shop)
        asked = [p for p in peers.selected(patterns) if not self.bench.has(self.name, p.name)]
        asked.sort(key=lambda peer: -peer.timeout)  # no core idles while the longest ends
        out = self.bench.out / self.name / "peers"

        def run(peer: peers.Peer) -> peers.Outcome:
            paths = (self.shop.model.absolute(), ids.absolute(), out.absolute())
            return peers.run(peer, *paths, threads=max(1, CORES // at_once))

        with ThreadPoolExecutor(at_once) as pool:
            outcomes = list(pool.map(run, asked))
        for peer, outcome in zip(asked, outcomes, strict=True):
            row: dict[str, Any] = {"group": group, "seconds": outcome.seconds,
                                   "bytes": outcome.bytes, "nvfp4_share": outcome.nvfp4_share,
                                   "select_seconds": outcome.select_seconds}  # fmt: skip
            if outcome.weights is None:
                row["failed"] = outcome.meta["failed"]
            else:
                row |= self.measured(Candidate(outcome.weights, outcome.input_scales, outcome.fp8))
                outcome.weights.unlink()
            self.bench.keep(self.name, peer.name, row)


def _row(point: Point) -> dict[str, Any]:
    return {
        "group": "ours",
        "seconds": point.seconds,
        "select_seconds": point.select_seconds,
        "bytes": point.bytes,
        "nvfp4_share": point.nvfp4_share,
    }


def smollm2(bench: Bench) -> Model:
    """The real model: every rung, every budget, every peer."""
    model = Model(bench, "smollm2", "smollm2-135m")
    rows = model.shop.rows("evaluation")
    bench.results["code_documents"] = ours.code_rows(rows)
    for method in ("rtn", "sweep", "gptq", "sequential"):
        model.ours(f"{method}-w4a16", method, **WEIGHTS)
    for method in ("rtn", "sequential"):
        model.ours(f"{method}-w4a4", method)
    model.peers(("modelopt/w4a4",), "W4A4 peer")
    model.peers(WEIGHT_ONLY, "weight-only peer", at_once=2)
    model.peers(("modelopt/autoquantize-*",), "allocating peer")
    points = bench.results["models"]["smollm2"]
    for bits in verdict.BUDGETS:
        names = [f"modelopt/autoquantize-{method}-{bits}" for method in verdict.SELECTORS]
        sizes = [points[name]["bytes"] for name in names if "kl" in points[name]]
        if sizes:  # one checkpoint of ours stands against both, at the bytes of the smaller
            limit = {"bytes": min(sizes), **QUICK}
            model.ours(f"bytes-{bits}", "sequential", budget=limit, **WEIGHTS)
    return model


def continuous_copy(bench: Bench, original: Model) -> None:
    """The same model with its weights off the grid that they came from."""
    folder = bench.out / "continuous-model"
    if not (folder / "config.json").exists():
        continuous.write(original.shop.model, folder)
    model = Model(bench, "continuous", str(folder))
    for method in ("rtn", "sequential"):
        model.ours(f"{method}-w4a16", method, **WEIGHTS)
    model.peers(peers.CONTINUOUS, "weight-only peer", at_once=2)


def distilled(model: Model) -> None:
    """What training adds to the rounding it starts from."""
    model.ours("qad-w4a4", "qad", beside="sequential-w4a4", distill=DISTILLATION)


def mixture(bench: Bench) -> None:
    """Experts that see many tokens and few."""
    folder = bench.out / "moe-model"
    if not (folder / "config.json").exists():
        tiny_moe.train(folder)
    model = Model(bench, "moe", str(folder))
    for method in ("rtn", "sequential"):
        model.ours(f"{method}-w4a16", method, **WEIGHTS)
    if not bench.results["experts"]:
        artifacts = model.shop.bench.artifacts
        bench.results["experts"] = experts.compare(
            root(artifacts["source"]),
            artifacts["adapt"].json("adaptation.json"),
            model.shop.ids("evaluation"),
            model.shop.folder / "sequential-w4a16.safetensors",
            model.shop.folder / "rtn-w4a16.safetensors",
            artifacts["calibrate"].json("tokens.json"),
        )
        bench.save()


def table(results: Mapping[str, Any]) -> str:
    """Return the points of all models, a line each."""
    lines = [f"{'model':11} {'point':34} {'KL':>7} {'95% interval':>17} {'bits':>6} "
             f"{'seconds':>8} {'select':>7}"]  # fmt: skip
    for model, points in results["models"].items():
        weights = points["ours/rtn-w4a16"]["bytes"] / BITS["nvfp4"]
        for name, point in sorted(points.items(), key=lambda kv: kv[1].get("group", "")):
            if "kl" not in point:
                lines.append(f"{model:11} {name:34} {point['failed']}")
                continue
            mean, lo, hi = verdict.interval(point["kl"])
            chosen = point["select_seconds"]
            select = "" if chosen is None else f"{chosen:.0f}"
            bits, seconds = point["bytes"] / weights, point["seconds"]
            lines.append(f"{model:11} {name:34} {mean:7.4f} [{lo:.4f}, {hi:.4f}] "
                         f"{bits:6.2f} {seconds:8.0f} {select:>7}")  # fmt: skip
    return "\n".join(lines)


def main(out: Path) -> None:
    began = time.monotonic()
    bench = Bench(out)
    mixture(bench)
    real = smollm2(bench)
    continuous_copy(bench, real)
    distilled(real)
    text = table(bench.results)
    (out / "table.txt").write_text(text + "\n")
    (out / "plot.svg").write_text(draw(bench.results["models"]["smollm2"]))
    print(f"\n{text}\n\n{(time.monotonic() - began) / 60:.0f} minutes; {out / 'plot.svg'}")
    fails = verdict.shortfalls(json.loads(bench.file.read_text()))
    print("FAIL: " + "; ".join(fails) if fails else "PASS")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else ".onboard/bench-quality"))
