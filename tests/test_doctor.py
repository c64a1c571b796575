"""`onboard doctor`: what is missing comes with the command that mends it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from onboard import doctor
from onboard.doctor import Check, diagnose


def check(name: str) -> Check:
    return next(c for c in diagnose() if c.name == name)


def test_every_check_says_what_it_found_expected_and_how_to_mend_it() -> None:
    checks = diagnose()
    assert len({c.name for c in checks}) == len(checks)
    for c in checks:
        assert c.found
        assert c.expected
        assert c.fix or c.ok


def test_this_environment_has_the_pinned_packages() -> None:
    packages = [c for c in diagnose() if c.name.startswith("package ")]
    assert {"package torch", "package transformers", "package nvidia-modelopt"} <= {
        c.name for c in packages
    }
    assert [c for c in packages if not c.ok] == []


def test_another_version_than_the_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", lambda _: ["rich==1.2.3", 'x==1; extra == "dev"'])
    (only,) = [c for c in diagnose() if c.name.startswith("package ")]
    assert not only.ok
    assert only.expected == "1.2.3"
    assert only.found == metadata.version("rich")
    assert only.fix == "make install"


def test_a_missing_data_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    version = metadata.version

    def without(name: str) -> str:
        if name == "bfcl-eval":
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", without)
    missing = check("data bfcl-eval")
    assert not missing.ok
    assert missing.found == "absent"
    assert "pip install --no-deps bfcl-eval" in missing.fix


def test_no_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ONBOARD_ENGINE_PYTHON", str(tmp_path / "python"))
    assert not check("engine").ok
    assert "engine plugin" not in {c.name for c in diagnose()}


def test_an_engine_without_our_plugin(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    (tmp_path / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
    assert doctor._plugin(python) == "absent"


def test_a_full_disk_and_a_small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=3 * doctor.GIB))
    monkeypatch.setattr(doctor, "describe", lambda: {"memory_bytes": 4 * doctor.GIB})
    monkeypatch.setattr(doctor, "_device", lambda: Check("device", True, "a", "b", ""))
    assert not check("disk").ok
    assert check("disk").found.startswith("3 GiB free")
    assert not check("memory").ok


def test_the_disk_of_a_home_that_is_not_there_yet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ONBOARD_HOME", str(tmp_path / "not" / "yet"))
    assert check("disk").found.endswith(f"at {tmp_path}")


def test_it_is_light() -> None:
    code = "import sys; from onboard.doctor import diagnose; diagnose(); print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "vllm"} & set(out.stdout.split())
