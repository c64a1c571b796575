"""Runs for the bundle tests: the builder of the report tests."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from onboard.pipeline import Run


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("synthetic_run", _BUILDER)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


_BUILDER = Path(__file__).parent.parent / "report" / "synthetic.py"
synthetic = _load()


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Run]:
    """Return a builder: `make_run(overrides=..., files=...)` commits a run into a fresh store."""

    def make(**changes: Any) -> Run:
        return synthetic.build(tmp_path / "store", synthetic.Synthetic(**changes))

    return make


FAILED = {
    "recipe": {"fidelity": {"gates": {"kl_mean": 0.0001}}},
    "skipped": {
        "features": "gate fidelity.kl_mean failed",
        "speculate": "needs features",
        "smoke": "needs speculate",
    },
}


@pytest.fixture
def failed_run(make_run: Callable[..., Run]) -> Run:
    return make_run(**FAILED)
