"""What a run says about itself, as one JSON value: report.json, and the core of the manifest."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from onboard import __version__
from onboard.pipeline import Outcome, Run
from onboard.report import rounding
from onboard.report.secrets import command_without_secrets, scrubber
from onboard.store import Artifact

SCHEMA = 1


def gather(run: Run) -> dict[str, Any]:
    """Return verdict, gates, stages, speculator, metrics and provenance, free of secrets."""
    facts = {
        "schema": SCHEMA,
        "run": run.id,
        "verdict": "pass" if run.passed else "fail",
        "name": run.recipe.name,
        "summary": run.recipe.summary,
        "model": model(run),
        "gates": [vars(gate) | {"stands": gate.stands} for gate in run.gates],
        "stages": [_stage(run, outcome) for outcome in run.outcomes],
        "adoptions": {o.stage: o.reason for o in run.outcomes if o.status == "adopted"},
        "overrides": {f"{g.stage}.{g.name}": g.override for g in run.gates if g.override},
        "speculator": speculator(run),
        "metrics": run.metrics,
        "rounding": rounding.figures(
            {name: read(run, "quantize", name) for name in rounding.FILES}
        ),
        "provenance": provenance(run),
        "recipe": _recipe(run),
    }
    scrubbed: dict[str, Any] = scrubber()(facts)
    return scrubbed


def model(run: Run) -> dict[str, Any]:
    """Return id, revision, kind and licence of the source; a local path gives its last part."""
    asked = run.recipe.source
    location = read(run, "source", "location.json") or {}
    name = str(location.get("model") or asked.model)
    if PurePath(name).is_absolute() or location.get("kind") == "directory":
        name = PurePath(name).name
    return {
        "id": name,
        "revision": location.get("revision") or asked.revision,
        "kind": location.get("kind"),
        "base_model": run.recipe.base_model or (name if location.get("kind") == "hub" else None),
        "licence": location.get("licence"),
    }


def speculator(run: Run) -> dict[str, Any] | None:
    """Return what the smoke stage decided (`evals/ship.py`); None where no speculator was trained.

    One that was not measured in an engine does not ship.
    """
    if "speculate" not in run.artifacts:
        return None
    reasons = ["it was not measured in an engine"]
    unmeasured = {"ships": False, "reasons": reasons, "criteria": [], "use": "plain"}
    decision: dict[str, Any] = read(run, "smoke", "ship.json") or unmeasured
    return decision


def provenance(run: Run) -> dict[str, Any]:
    """Return where everything came from: files, data, versions, hardware, seeds, commands."""
    engine = read(run, "smoke", "engine.json") or {}
    return {
        "command": command_without_secrets(run.command),
        "source_files": {
            kind: read(run, "source", f"{kind}.json") or []
            for kind in ("weights", "tokenizer", "other")
        },
        "data": read(run, "data", "sources.json") or [],
        "packages": {"onboard": __version__, "python": platform.python_version()}
        | _packages(run.artifacts),
        "hardware": _hardware(run.artifacts),
        "seeds": seeds(run),
        "engine": {name: engine.get(name) for name in ("engine", "version", "mode", "dtype")}
        if engine
        else None,
        "serving": {
            "commands": {
                name: command_without_secrets(argv)
                for name, argv in (engine.get("commands") or {}).items()
                if argv
            },
            "environment": engine.get("environment") or {},
        },
    }


def seeds(run: Run) -> dict[str, int]:
    sections = {name: getattr(run.recipe, name) for name in type(run.recipe).model_fields}
    return {name: s.seed for name, s in sections.items() if hasattr(s, "seed")}


def read(run: Run, stage: str, file: str) -> Any:
    """Return a JSON or JSONL file of a stage's artifact, or None where there is none."""
    artifact = run.artifacts.get(stage)
    if artifact is None or file not in artifact.manifest["files"]:
        return None
    return artifact.lines(file) if file.endswith(".jsonl") else artifact.json(file)


def _stage(run: Run, outcome: Outcome) -> dict[str, Any]:
    artifact = run.artifacts.get(outcome.stage)
    record: Mapping[str, Any] = artifact.record if artifact else {}
    return vars(outcome) | {
        "seconds": record.get("seconds"),
        "peak_rss_bytes": record.get("peak_rss_bytes"),
        "finished": record.get("finished"),
    }


def _packages(artifacts: Mapping[str, Artifact]) -> dict[str, str]:
    found: dict[str, str] = {}
    for artifact in artifacts.values():
        found |= artifact.manifest.get("environment", {}).get("packages", {})
    return dict(sorted(found.items()))


def _hardware(artifacts: Mapping[str, Artifact]) -> list[dict[str, Any]]:
    """Return each machine once, with the stages that it made."""
    machines: list[dict[str, Any]] = []
    for name, artifact in artifacts.items():
        hardware = dict(artifact.record.get("hardware") or {})
        known = next((m for m in machines if m["machine"] == hardware), None)
        if known:
            known["stages"].append(name)
        elif hardware:
            machines.append({"machine": hardware, "stages": [name]})
    return machines


def _recipe(run: Run) -> dict[str, Any]:
    recipe = run.recipe.model_dump(mode="json")
    recipe["source"]["model"] = model(run)["id"]
    if shares := recipe["data"]["traffic"]:  # of files, the names
        recipe["data"]["traffic"] = {PurePath(name).name: s for name, s in shares.items()}
    return recipe
