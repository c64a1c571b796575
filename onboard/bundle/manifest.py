"""`manifest.json`: what is in a bundle, what it was made from, and what it was judged by."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onboard.bundle.serving import shipped
from onboard.errors import EnvironmentFault
from onboard.pipeline import Run
from onboard.report.facts import gather
from onboard.store import Artifact, digest, file_digest

SCHEMA = 1
MANIFEST = "manifest.json"
ROOMS = ("bundle", "report")

File = dict[str, Any]  # sha256 (hex) and size (bytes)


def describe(run: Run, files: Mapping[str, File]) -> dict[str, Any]:
    """Return the manifest of a bundle that holds `files` (relative name -> sha256, size)."""
    facts = gather(run)
    made, speculator = facts["provenance"], facts["speculator"]
    return {
        "schema": SCHEMA,
        "bundle": facts["name"],
        "verdict": facts["verdict"],
        "run": facts["run"],
        "identity": identity(run),
        "source": {**facts["model"], "files": made["source_files"]},
        "stages": {s["stage"]: {"key": s["key"], "digest": s["digest"]} for s in facts["stages"]},
        "gates": facts["gates"],
        "overrides": facts["overrides"],
        "adoptions": facts["adoptions"],
        "speculator": speculator,
        "recipe": facts["recipe"],
        "data": made["data"],
        "packages": made["packages"],
        "engine": made["engine"],
        "hardware": made["hardware"],
        "seeds": made["seeds"],
        "commands": {
            "run": made["command"],
            "serve": shipped(made["serving"]["commands"], speculator),
        },
        "files": dict(sorted(files.items())),
    }


def identity(run: Run) -> str:
    """Return the digest of all that decides a bundle's content, except when it was made.

    Two runs with the same artifacts, gates and reasons, under the same code of the bundle and the
    report, make the same bundle but for the run's id.
    """
    facts = gather(run)
    stages = {o.stage: [o.key, o.digest] for o in run.outcomes}
    decisive = ("verdict", "name", "summary", "model", "gates", "adoptions", "overrides", "recipe")
    return digest([stages, {name: facts[name] for name in decisive}, _code()])


def inventory(bundle: Path, known: Mapping[str, Artifact]) -> dict[str, File]:
    """Return sha256 and size of every file, read back from the bundle's own bytes.

    `known` maps a folder of the bundle to the artifact it was copied from: a file that came out
    different from what the store's manifest says raises EnvironmentFault, naming it.
    """
    files: dict[str, File] = {}
    for path in sorted(p for p in bundle.rglob("*") if p.is_file()):
        name = path.relative_to(bundle).as_posix()
        files[name] = {"sha256": file_digest(path), "size": path.stat().st_size}
        folder, _, rest = name.partition("/")
        if folder in known:
            artifact = known[folder]
            inner = f"checkpoint/{rest}" if folder == "checkpoint" else rest
            entry = artifact.manifest["files"].get(inner)
            if entry and entry["sha256"] != files[name]["sha256"]:
                raise EnvironmentFault(
                    f"{artifact.path / inner}: its bytes are not those that were committed "
                    f"(expected sha256 {entry['sha256'][:16]}, found {files[name]['sha256'][:16]})",
                    f"rm -r {artifact.path} and run the same command again",
                )
    return files


def _code() -> str:
    """Return the sha256 of the code, templates and style that lay a bundle out."""
    total = hashlib.sha256()
    room = Path(__file__).parent.parent
    for path in sorted(p for name in ROOMS for p in (room / name).iterdir() if p.is_file()):
        total.update(f"{path.name} {file_digest(path)}\n".encode())
    return total.hexdigest()
