"""Opens what a recipe names: a packaged reader, a JSONL file, a `datasets` id, or own requests."""

from __future__ import annotations

import difflib
import json
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from onboard.data.documents import Content, Document, Message
from onboard.data.readers import READERS, Reader
from onboard.errors import EnvironmentFault, InputError
from onboard.recipe import Corpus
from onboard.store import file_digest

Origin = Corpus | Path  # a path: JSONL of the user's own requests

OWN_DOMAIN = "traffic"
OWN_FIELDS = ("messages", "prompt", "text")  # of a request; the first that a row has
# How conversations are also written down: {"from": "human", "value": ...}.
SHAREGPT = {"human": "user", "gpt": "assistant"}


def read(origin: Origin, limit: int) -> Iterator[Document]:
    """Yield the documents of an origin; of a streamed dataset, the first `limit` rows.

    Raises InputError where the recipe or a row is wrong, EnvironmentFault where a package is
    not installed or the dataset cannot be reached.
    """
    if isinstance(origin, Path):
        yield from _own(origin)
        return
    corpus, kind = origin, _kind(origin)
    if kind == "reader":
        reader = _reader(corpus)
        source, licence, contents = reader.source, reader.licence, reader.read()
    elif kind == "jsonl":
        path = Path(str(corpus.jsonl))
        source, licence = f"jsonl:{path.name}", corpus.licence
        contents = (_content(row, corpus.field, at) for at, row in _jsonl(path, "data.corpora"))
    else:
        source, licence = f"dataset:{corpus.dataset}", corpus.licence
        contents = _dataset(corpus, limit)
    for content in contents:
        yield Document(content, corpus.domain, source, licence)


def domain(origin: Origin) -> str:
    """Return the domain under which the origin's documents are reported."""
    return OWN_DOMAIN if isinstance(origin, Path) else origin.domain


def identity(origin: Origin) -> Any:
    """Return a JSON value that changes when the documents of the origin may have changed.

    Imports no tokenizer and reaches no network: a Hub dataset is known by its id and `@revision`.
    """
    if isinstance(origin, Path):
        return file_digest(origin) if origin.is_file() else "absent"
    corpus, kind = origin, _kind(origin)
    if kind == "reader":
        distribution = _reader(corpus).distribution
        return version(distribution) if distribution else platform.python_version()
    path = Path(str(corpus.jsonl or corpus.dataset))
    if path.is_file():
        return file_digest(path)
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file())
        return {str(p.relative_to(path)): file_digest(p) for p in files}
    return version("datasets") if kind == "dataset" else "absent"


def version(distribution: str) -> str:
    """Return a distribution with its installed version."""
    try:
        return f"{distribution} {metadata.version(distribution)}"
    except metadata.PackageNotFoundError:
        return f"{distribution} absent"


def _kind(corpus: Corpus) -> str:
    given = [name for name in ("reader", "dataset", "jsonl") if getattr(corpus, name)]
    if len(given) != 1:
        raise InputError(
            f"data.corpora: a {corpus.domain} corpus needs one of reader, dataset, jsonl; "
            f"found {' and '.join(given) or 'none'}"
        )
    return given[0]


def _reader(corpus: Corpus) -> Reader:
    name = str(corpus.reader)
    if name not in READERS:
        near = difflib.get_close_matches(name, READERS, 1)
        raise InputError(
            f"data.corpora: no reader {name!r}",
            f"did you mean {near[0]}?" if near else f"readers: {', '.join(READERS)}",
        )
    return READERS[name]


def _own(path: Path) -> Iterator[Document]:
    """Yield the user's requests, which are marked as private: no report may show them."""
    for where, row in _jsonl(path, "data.traffic"):
        field = next((name for name in OWN_FIELDS if name in row), None)
        if field is None:
            raise InputError(
                f"{where}: expected one of {', '.join(OWN_FIELDS)}, found only {', '.join(row)}",
                'a request is {"messages": [{"role": ..., "content": ...}]} or {"prompt": "..."}',
            )
        content = _content(row, field, where)
        if field == "prompt" and isinstance(content, str):
            content = [{"role": "user", "content": content}]
        if isinstance(content, list) and all(turn["role"] != "user" for turn in content):
            raise InputError(f"{where}: {field} has no message of the user, so nothing to answer")
        yield Document(content, OWN_DOMAIN, "the user's own traffic", "private", where, True)


def _jsonl(path: Path, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (file:line, row); blank lines are passed over."""
    if not path.is_file():
        raise InputError(f"{key}: {path}: no such file")
    with path.open(encoding="utf-8") as f:
        for number, line in enumerate(f, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as e:
                raise InputError(f"{where}: not valid JSON: {e.msg}") from e
            if not isinstance(row, dict):
                raise InputError(f"{where}: expected an object, found {type(row).__name__}")
            yield where, row


def _dataset(corpus: Corpus, limit: int) -> Iterator[Content]:
    """Yield rows of a local directory or file of data, or of a Hub id with or without @revision."""
    import datasets

    name, revision = str(corpus.dataset), None
    if not Path(name).exists():
        name, _, revision = name.partition("@")
    try:
        rows = datasets.load_dataset(
            name, corpus.config, split=corpus.split, revision=revision or None, streaming=True
        )
        for number, row in enumerate(rows.take(limit), 1):
            yield _content(row, corpus.field, f"dataset {name}, row {number}")
    except ValueError as e:  # an unknown config or split; the message lists the known ones
        raise InputError(f"data.corpora: dataset {name}: {e}") from e
    except (OSError, RuntimeError) as e:
        raise EnvironmentFault(
            f"data.corpora: dataset {corpus.dataset} cannot be read: {type(e).__name__}: {e}",
            "check the network (or HF_TOKEN for a gated dataset), or give a local path or `jsonl`",
        ) from e


def _content(row: dict[str, Any], field: str, where: str) -> Content:
    value = row.get(field)
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(map(_is_message, value)):
        return [_message(item) for item in value]
    raise InputError(
        f"{where}: field {field!r} should hold a text or a list of chat messages, "
        + (f"found {_found(value)}" if field in row else f"found only {', '.join(row)}"),
        'a message is {"role": "...", "content": "..."}; `field` of a corpus names the column',
    )


def _found(value: Any) -> str:
    """Say what is wrong with a value, without repeating what may be confidential."""
    if not isinstance(value, list) or not value:
        return "an empty list" if value == [] else type(value).__name__
    number, item = next((n, i) for n, i in enumerate(value, 1) if not _is_message(i))
    keys = ", ".join(item) if isinstance(item, dict) else type(item).__name__
    return f"a list whose item {number} is no message of text ({keys})"


def _is_message(item: Any) -> bool:
    return isinstance(item, dict) and any(
        all(isinstance(item.get(key), str) for key in keys)
        for keys in (("role", "content"), ("from", "value"))
    )


def _message(item: dict[str, Any]) -> Message:
    if "role" in item:
        return {"role": item["role"], "content": item["content"]}
    return {"role": SHAREGPT.get(item["from"], item["from"]), "content": item["value"]}
