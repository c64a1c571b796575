"""The content-addressed store: a directory in `artifacts/` is complete, immutable and hashed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onboard.errors import EnvironmentFault, InputError, OnboardError

MANIFEST = "manifest.json"
SHORT = 16  # hex digits of a key that name a directory
FULL_BELOW = 4 * 2**20  # bytes free, under which a failed write is blamed on the disk


def digest(value: Any) -> str:
    """Return the sha256 (hex) of a JSON value, independent of key order and spacing."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def file_digest(path: Path) -> str:
    """Return the sha256 (hex) of a file's bytes."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Write `value` as stable, readable JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n")


@dataclass(frozen=True)
class Artifact:
    """A committed stage output.

    `manifest` holds `stage`, `key`, `digest`, `files` (name -> {sha256, size}), `params` and
    `inputs`; nothing in it depends on when or where the stage ran. `record` (seconds, peak
    memory, hardware) is kept beside the artifact, outside its digest.
    """

    path: Path
    manifest: Mapping[str, Any]
    record: Mapping[str, Any]
    adopted: str | None = None  # the reason, when a user kept it across a code change

    @property
    def digest(self) -> str:
        return str(self.manifest["digest"])

    def digest_of(self, name: str) -> str:
        """Return the sha256 of one file of the artifact."""
        return str(self.manifest["files"][name]["sha256"])

    def json(self, name: str) -> Any:
        return json.loads((self.path / name).read_text())

    def lines(self, name: str) -> list[Any]:
        """Return the rows of a JSONL file."""
        with (self.path / name).open(encoding="utf-8") as f:  # splitlines would split at U+2028
            return [json.loads(line) for line in f]

    @property
    def metrics(self) -> dict[str, float]:
        """Return the flat numbers of `metrics.json`, or nothing where the stage has none."""
        return dict(self.json("metrics.json")) if "metrics.json" in self.manifest["files"] else {}


@dataclass(frozen=True)
class Store:
    root: Path

    def find(self, stage: str, key: str) -> Artifact | None:
        """Return the artifact of `key`, or None where there is none or its files are damaged."""
        adoption = self._adoption(stage, key)
        held = adoption["key"] if adoption else key
        path = self.root / "artifacts" / stage / held[:SHORT]
        if not (path / MANIFEST).exists():
            return None
        manifest = json.loads((path / MANIFEST).read_text())
        for name, entry in manifest["files"].items():
            file = path / name
            if not file.exists() or file.stat().st_size != entry["size"]:
                return None
        record = self._record(stage, held)
        return Artifact(
            path,
            manifest,
            json.loads(record.read_text()) if record.exists() else {},
            adoption["reason"] if adoption else None,
        )

    def scratch(self, key: str) -> Path:
        """Return the directory where an unfinished stage keeps what a restart can use."""
        path = self.root / "scratch" / key[:SHORT]
        path.mkdir(parents=True, exist_ok=True)
        return path

    def run_dir(self, run: str) -> Path:
        path = self.root / "runs" / run
        path.mkdir(parents=True, exist_ok=True)
        return path

    @contextlib.contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Hold the key alone; the kernel drops the lock of a process that dies."""
        path = self.root / "locks" / key[:SHORT]
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as f:
            fcntl.flock(f, fcntl.LOCK_EX)
            yield

    @contextlib.contextmanager
    def writing(self, key: str) -> Iterator[Path]:
        """Yield an empty directory for the stage's output, dropped unless `commit` moved it.

        The caller holds the key's lock, so whatever an earlier process left here is an orphan.
        """
        tmp = self.root / "tmp" / key[:SHORT]
        shutil.rmtree(tmp, ignore_errors=True)
        tmp.mkdir(parents=True)
        try:
            yield tmp
        finally:
            shutil.rmtree(tmp, ignore_errors=True)

    def commit(
        self,
        tmp: Path,
        manifest: Mapping[str, Any],
        record: Mapping[str, Any],
        known_digests: Mapping[str, str],
    ) -> Artifact:
        """Publish `tmp` as the artifact of `manifest["key"]`: hash, fsync, one rename.

        `known_digests` are sha256 sums that the stage took while writing (name -> hex).
        """
        stage, key = manifest["stage"], manifest["key"]
        files = {
            str(path.relative_to(tmp)): {
                "sha256": known_digests.get(str(path.relative_to(tmp))) or file_digest(path),
                "size": path.stat().st_size,
            }
            for path in sorted(tmp.rglob("*"))
            if path.is_file()
        }
        content = {name: entry["sha256"] for name, entry in files.items()}
        write_json(tmp / MANIFEST, {**manifest, "files": files, "digest": digest(content)})
        for path in [*tmp.rglob("*"), tmp]:
            fsync(path)
        write_json(self._record(stage, key), record)
        final = self.root / "artifacts" / stage / key[:SHORT]
        final.parent.mkdir(parents=True, exist_ok=True)
        if final.exists():  # damaged, else find() had returned it
            shutil.rmtree(final)
        tmp.rename(final)
        fsync(final.parent)
        artifact = self.find(stage, key)
        assert artifact is not None
        return artifact

    def adopt(
        self, stage: str, new_key: str, old_key: str, reason: str, same: Mapping[str, Any]
    ) -> Artifact:
        """Let `new_key` stand for the artifact of `old_key`, whose inputs and settings are equal.

        `same` holds the `params` and `inputs` of the new key. Raises InputError where the old
        artifact is missing or differs in them: then its content could differ for a good reason.
        """
        old = self.find(stage, old_key)
        if old is None:
            raise InputError(f"--adopt: the store has no {stage} artifact with key {old_key}")
        changed = [name for name, value in same.items() if old.manifest[name] != value]
        if changed:
            raise InputError(
                f"--adopt: {stage} {old_key} was made with other {' and '.join(changed)}, "
                "not only other code",
                "run without --adopt to make it anew",
            )
        alias = self.root / "adoptions" / stage / f"{new_key[:SHORT]}.json"
        write_json(alias, {"key": old_key, "reason": reason})
        return replace(old, adopted=reason)

    def stage_of(self, key: str) -> str:
        """Return the stage whose artifact has this key (or its first 16 digits)."""
        found = [p.parent.name for p in self.root.glob(f"artifacts/*/{key[:SHORT]}")]
        if not found:
            raise InputError(f"--adopt: the store {self.root} has no artifact with key {key}")
        return found[0]

    def _adoption(self, stage: str, key: str) -> dict[str, str] | None:
        alias = self.root / "adoptions" / stage / f"{key[:SHORT]}.json"
        return json.loads(alias.read_text()) if alias.exists() else None

    def _record(self, stage: str, key: str) -> Path:
        return self.root / "records" / stage / f"{key[:SHORT]}.json"


@contextlib.contextmanager
def disk_faults(stage: str, root: Path) -> Iterator[None]:
    """Turn a full or read-only disk into one error; finished stages stay in the store."""
    try:
        yield
    except OnboardError:
        raise
    except Exception as e:
        if not _is_disk_fault(e, root):
            raise
        place = getattr(e, "filename", None) or root
        raise EnvironmentFault(
            f"{stage}: cannot write to {place}: {e}; what was finished is kept",
            "free some space (or set ONBOARD_HOME to another disk) and run the same command again",
        ) from e


def _is_disk_fault(error: Exception, root: Path) -> bool:
    """Whether a write failed for want of space: libraries in C++ and Rust raise their own kinds."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
    said = os.strerror(errno.ENOSPC) in str(error)
    return said or shutil.disk_usage(root).free < FULL_BELOW


def fsync(path: Path) -> None:
    """Make a file, or the entries of a directory, survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
