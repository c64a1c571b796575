"""A source artifact that holds a byte-level tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def put_source(bench: Any, tmp_path: Path, make_tokenizer: Any) -> Callable[..., Any]:
    """Make the source artifact of a model directory that has a tokenizer."""

    def put(*template: str | None) -> Any:
        root = make_tokenizer(tmp_path / "model", *template)
        location = {
            "root": str(root),
            "model": "twin",
            "revision": None,
            "kind": "directory",
            "licence": None,
        }
        return bench.put("source", location__json=location)

    return put
