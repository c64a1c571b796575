"""Write a run's report: one page for a reviewer, one JSON for a program, one XML for a CI server.

The page is laid out from the artifacts' files and the gates; no figure is computed here beyond
grouping rows of a table. It holds no script and fetches nothing: its Content-Security-Policy
allows its own style sheet by hash and nothing else, and every text is escaped.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import ChainableUndefined, Environment, FileSystemLoader, Undefined
from markupsafe import Markup

from onboard.pipeline import Run
from onboard.report import formats, sections
from onboard.report.facts import gather, read
from onboard.report.junit import junit
from onboard.report.labels import label
from onboard.report.rounding import FILES as ROUNDING
from onboard.report.rounding import rounding
from onboard.report.secrets import scrubber
from onboard.store import write_json

ROOM = Path(__file__).parent
FILES = {
    "adapt": ("adaptation.json",),
    "quantize": ("tensors.json", *ROUNDING),
    "fidelity": (
        "domains.json",
        "histogram.json",
        "confidence.json",
        "positions.json",
        "worst.json",
    ),
    "speculate": ("training.jsonl", "sweep.json"),
    "smoke": (
        "engine.json",
        "probes.json",
        "samples.jsonl",
        "acceptance.json",
        "speed.json",
        "sampling.json",
    ),
}


def write_report(run: Run, dest: Path) -> None:
    """Write `index.html`, `report.json` and `junit.xml` into the directory `dest`.

    A stage that did not run is shown as "not run" with its reason; nothing else is needed for a
    report to be written, so a failed run has one too.
    """
    facts = gather(run)
    files = _files(run)
    dest.mkdir(parents=True, exist_ok=True)
    write_json(dest / "report.json", facts)
    _write(dest / "junit.xml", junit(facts, files["smoke"].get("probes.json") or []))
    _write(dest / "index.html", page(facts, files))


def page(
    facts: Mapping[str, Any],
    files: Mapping[str, Mapping[str, Any]],
    undefined: type[Undefined] = ChainableUndefined,
) -> str:
    """Return the HTML of `facts` (see `facts.gather`) and the artifacts' files by stage.

    `undefined` decides what a value that no stage measured becomes: a dash, unless a test wants
    an error.
    """
    style = (ROOM / "report.css").read_text()
    metrics = facts["metrics"]
    limits = {gate["name"]: gate["limit"] for gate in facts["gates"]}
    return (
        _environment(undefined)
        .get_template("report.html.j2")
        .render(
            facts=facts,
            m=metrics,
            stages={stage["stage"]: stage for stage in facts["stages"]},
            gate={gate["name"]: gate for gate in facts["gates"]},
            style=Markup(style),
            style_hash=base64.b64encode(hashlib.sha256(style.encode()).digest()).decode(),
            fidelity=sections.fidelity(files["fidelity"], metrics, limits),
            quantization=sections.quantization(files["adapt"], files["quantize"], metrics),
            rounding=rounding(files["quantize"]),
            speculator=sections.speculator(files["speculate"], files["smoke"], metrics),
            engine=sections.engine(files["smoke"]),
        )
    )


def _environment(undefined: type[Undefined]) -> Environment:
    environment = Environment(
        loader=FileSystemLoader(ROOM),
        autoescape=True,
        undefined=undefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for write in (
        formats.number,
        formats.limit,
        formats.percent,
        formats.size,
        formats.seconds,
        formats.token,
        formats.prose,
        formats.pretty,
        formats.short,
        formats.words,
        formats.command,
        formats.breakable,
    ):
        environment.filters[write.__name__] = write
    environment.filters["label"] = label
    return environment


def _finalize(value: Any) -> Any:
    return formats.DASH if value is None or isinstance(value, Undefined) else value


def _files(run: Run) -> dict[str, dict[str, Any]]:
    scrub = scrubber()
    return {
        stage: scrub({name: read(run, stage, name) for name in names})
        for stage, names in FILES.items()
    }


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", errors="replace")  # a model can emit half a surrogate
