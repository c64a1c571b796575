"""Opens what a recipe calls a corpus: a packaged reader, a JSONL file or a `datasets` id."""

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


def read(corpus: Corpus, limit: int) -> Iterator[Document]:
    """Yield the documents of a corpus; of a streamed dataset, the first `limit` rows.

    Raises InputError where the recipe or a row is wrong, EnvironmentFault where a package is
    not installed or the dataset cannot be reached.
    """
    origin = _origin(corpus)
    if origin == "reader":
        reader = _reader(corpus)
        source, licence, contents = reader.source, reader.licence, reader.read()
    elif origin == "jsonl":
        path = Path(str(corpus.jsonl))
        source, licence, contents = f"jsonl:{path.name}", corpus.licence, _jsonl(path, corpus.field)
    else:
        source, licence = f"dataset:{corpus.dataset}", corpus.licence
        contents = _dataset(corpus, limit)
    for content in contents:
        yield Document(content, corpus.domain, source, licence)


def identity(corpus: Corpus) -> Any:
    """Return a JSON value that changes when the documents of the corpus may have changed.

    Imports no tokenizer and reaches no network: a Hub dataset is known by its id and `@revision`.
    """
    origin = _origin(corpus)
    if origin == "reader":
        distribution = _reader(corpus).distribution
        return version(distribution) if distribution else platform.python_version()
    path = Path(str(corpus.jsonl or corpus.dataset))
    if path.is_file():
        return file_digest(path)
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file())
        return {str(p.relative_to(path)): file_digest(p) for p in files}
    return version("datasets") if origin == "dataset" else "absent"


def version(distribution: str) -> str:
    """Return a distribution with its installed version."""
    try:
        return f"{distribution} {metadata.version(distribution)}"
    except metadata.PackageNotFoundError:
        return f"{distribution} absent"


def _origin(corpus: Corpus) -> str:
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


def _jsonl(path: Path, field: str) -> Iterator[Content]:
    if not path.is_file():
        raise InputError(f"data.corpora: {path}: no such file")
    with path.open(encoding="utf-8") as f:
        for number, line in enumerate(f, 1):
            where = f"{path}:{number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as e:
                raise InputError(f"{where}: not valid JSON: {e.msg}") from e
            if not isinstance(row, dict):
                raise InputError(f"{where}: expected an object, found {type(row).__name__}")
            yield _content(row, field, where)


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
        + (f"found {type(value).__name__}" if field in row else f"found only {', '.join(row)}"),
        "set `field` of the corpus to the right column",
    )


def _is_message(item: Any) -> bool:
    return isinstance(item, dict) and all(isinstance(item.get(k), str) for k in ("role", "content"))


def _message(item: dict[str, Any]) -> Message:
    return {"role": item["role"], "content": item["content"]}
