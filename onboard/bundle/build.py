"""Make the bundle: what an engineer serves and a reviewer signs.

Every file is a copy of its own (a reflink where the filesystem has them), never a hardlink into
the store: someone who edits a bundle must not be able to alter the artifact behind it, and
`verify` must be able to tell. The bundle is built in a hidden sibling directory and swapped in by
one rename, so that an interrupted build leaves the earlier bundle whole.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from onboard.bundle.card import card
from onboard.bundle.manifest import MANIFEST, SCHEMA, describe, identity, inventory
from onboard.bundle.serving import write_serving
from onboard.bundle.swap import publish
from onboard.checkpoint.assemble import assemble
from onboard.checkpoint.clone import clone
from onboard.errors import InputError
from onboard.pipeline import Run
from onboard.report.facts import speculator
from onboard.report.render import write_report
from onboard.source import root
from onboard.store import digest, disk_faults, write_json

LICENCES = ("LICENSE", "LICENCE", "NOTICE", "COPYING", "USE_POLICY", "COPYRIGHT")


def build_bundle(run: Run, dest: Path) -> Path:
    """Write the bundle of a run that passed into `dest` and return it.

    Where `dest` holds the bundle of the same artifacts, gates and code already, with every file
    at its size, it is left as it is. Raises InputError where a gate failed, a stage was skipped,
    or `dest` holds something that is no bundle.
    """
    if not run.passed:
        raise InputError(
            f"no bundle: run {run.id} did not pass",
            f"onboard report {run.id} says why",
        )
    dest = dest.absolute()
    _check_place(dest)
    with run.store.lock(digest(["bundle", str(dest)])), disk_faults("bundle", dest):
        if not _is_current(run, dest):
            built = dest.with_name(f".{dest.name}.building")
            shutil.rmtree(built, ignore_errors=True)
            built.mkdir(parents=True)
            try:
                _fill(run, built)
                publish(built, dest)
            finally:
                shutil.rmtree(built, ignore_errors=True)
    return dest


def _fill(run: Run, bundle: Path) -> None:
    source, quantize = run.artifacts["source"], run.artifacts["quantize"]
    assemble(quantize, source, bundle / "checkpoint")
    for entry in source.json("other.json"):
        if entry["name"].upper().startswith(LICENCES):
            clone(root(source) / entry["name"], bundle / entry["name"])
    decision = speculator(run)
    draft = run.artifacts["speculate"] if decision and decision["ships"] else None
    if draft:
        for name in draft.manifest["files"]:
            if name.startswith(("vllm/", "sglang/")):
                clone(draft.path / name, bundle / "speculator" / name)
    if smoke := run.artifacts.get("smoke"):
        write_serving(smoke.json("engine.json"), decision, bundle / "serve")
    write_report(run, bundle / "report")
    (bundle / "README.md").write_text(card(run), encoding="utf-8", errors="replace")
    known = {"checkpoint": quantize} | ({"speculator": draft} if draft else {})
    write_json(bundle / MANIFEST, describe(run, inventory(bundle, known)))


def _is_current(run: Run, dest: Path) -> bool:
    """Tell whether `dest` is the bundle of this run's content, judged by name and size."""
    if not (dest / MANIFEST).is_file():
        return False
    manifest = json.loads((dest / MANIFEST).read_text())
    if manifest.get("schema") != SCHEMA or manifest.get("identity") != identity(run):
        return False
    found = {
        path.relative_to(dest).as_posix(): path.stat().st_size
        for path in dest.rglob("*")
        if path.is_file() and path != dest / MANIFEST
    }
    return found == {name: entry["size"] for name, entry in manifest["files"].items()}


def _check_place(dest: Path) -> None:
    """Refuse to replace a directory that onboard did not write."""
    if not dest.exists() and not dest.is_symlink():
        return
    if not dest.is_dir() or dest.is_symlink():
        raise InputError(f"bundle: {dest} is there and is no directory", "choose another place")
    if any(dest.iterdir()) and "identity" not in _json(dest / MANIFEST):
        raise InputError(
            f"bundle: {dest} is not empty and holds no bundle; nothing was touched",
            "choose another place",
        )


def _json(path: Path) -> dict[str, object]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
