"""Hold a bundle against its manifest: every byte, nothing missing, nothing added."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from onboard.bundle.manifest import MANIFEST, SCHEMA
from onboard.errors import InputError
from onboard.store import file_digest

SHOWN = 5  # problems that an error lists in full


def verify(bundle: Path, expect: str | None = None) -> str:
    """Hash every file of `bundle` again, compare it with `manifest.json`, return its sha256.

    `expect` pins the sha256 (hex, with or without `sha256:`) of the manifest itself, and with it
    everything the manifest lists. Raises InputError naming each file that is missing, changed,
    added, or not a plain file.
    """
    manifest, found = _read(bundle, expect)
    listed: dict[str, dict[str, Any]] = manifest["files"]
    present = dict(_walk(bundle))
    problems = [f"{name}: not in the manifest" for name in present.keys() - listed.keys()]
    problems += [f"{name}: missing" for name in listed.keys() - present.keys()]
    common = sorted(listed.keys() & present.keys())
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        checks = pool.map(lambda name: _problem(bundle, name, listed[name], present[name]), common)
        problems += filter(None, checks)
    if problems:
        shown = sorted(problems)[:SHOWN]
        more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise InputError(
            f"{bundle} is not the bundle that was made: {'; '.join(shown)}{more}",
            "make it anew with onboard run, or fetch it again",
        )
    return found


def _read(bundle: Path, expect: str | None) -> tuple[dict[str, Any], str]:
    """Return the manifest and its sha256, pinned by `expect`."""
    path = bundle / MANIFEST
    if path.is_symlink() or not path.is_file():
        raise InputError(f"{bundle}: no bundle here ({MANIFEST} is missing)")
    found = file_digest(path)
    if expect is not None and expect.removeprefix("sha256:").lower() != found:
        raise InputError(f"{path}: expected sha256 {expect}, found {found}")
    try:
        manifest = json.loads(path.read_text())
        schema, files = manifest["schema"], manifest["files"]
    except (ValueError, KeyError, TypeError) as e:
        raise InputError(f"{path}: not a bundle's manifest ({e})") from e
    if schema != SCHEMA:
        raise InputError(f"{path}: schema {schema}, this onboard reads {SCHEMA}")
    for name in files:
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts:
            raise InputError(f"{path}: lists {name!r}, which is outside the bundle")
    return manifest, found


def _walk(bundle: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield everything in the bundle that is no directory, links not followed."""
    for folder, folders, names in os.walk(bundle):
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        for name in (*names, *links):
            path = Path(folder) / name
            relative = path.relative_to(bundle).as_posix()
            if relative != MANIFEST:
                yield relative, path.lstat()


def _problem(bundle: Path, name: str, entry: dict[str, Any], status: os.stat_result) -> str | None:
    if not stat.S_ISREG(status.st_mode):
        return f"{name}: not a plain file"
    if status.st_size != entry["size"]:
        return f"{name}: expected {entry['size']} bytes, found {status.st_size}"
    found = file_digest(bundle / name)
    if found != entry["sha256"]:
        return f"{name}: expected sha256 {entry['sha256'][:16]}, found {found[:16]}"
    return None
