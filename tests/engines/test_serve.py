"""`onboard serve` becomes the engine with the bundle's own command."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from onboard.engines import serve
from onboard.engines.environment import Engine
from onboard.errors import InputError


class Became(Exception):
    """What the process would have become."""


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def execve(path: str, argv: list[str], environment: dict[str, str]) -> None:
        raise Became(argv, environment)

    engine = Engine("vllm", "0.32.0", Path(sys.executable))
    monkeypatch.setattr(serve, "find", lambda: engine)
    monkeypatch.setattr(os, "execve", execve)
    argv = ["{python}", "-m", "engine", "--model", "{bundle}/checkpoint", "--port", "{port}"]
    commands = {"plain": argv, "environment": {"KV": "1"}}
    (tmp_path / "serve").mkdir()
    (tmp_path / "serve" / "commands.json").write_text(json.dumps(commands))
    return tmp_path


def became(*arguments: Any) -> tuple[list[str], dict[str, str]]:
    with pytest.raises(Became) as caught:
        serve.serve(*arguments)
    argv, environment = caught.value.args
    return argv, environment


def test_the_command_is_filled_in_and_extended(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_swordfish")
    argv, environment = became(bundle, 8123, "none", ["--seed", "1"])
    model = str(bundle.resolve() / "checkpoint")
    python = sys.executable
    assert argv == [python, "-m", "engine", "--model", model, "--port", "8123", "--seed", "1"]
    assert environment["KV"] == "1"
    assert "HF_TOKEN" not in environment


def test_a_bundle_without_a_speculator(bundle: Path) -> None:
    with pytest.raises(InputError, match="ships no speculator") as caught:
        serve.serve(bundle, 8123, "speculator", [])
    assert caught.value.hint == f"onboard serve {bundle} --draft none"


@pytest.mark.parametrize(
    ("asked", "served"), [(None, "--own"), ("speculator", "--draft"), ("mtp", "--own")]
)
def test_what_the_smoke_test_chose_drafts_unless_asked(
    bundle: Path, asked: str | None, served: str
) -> None:
    path = bundle / "serve" / "commands.json"
    commands = json.loads(path.read_text())
    commands["speculative"] = [*commands["plain"], "--draft"]
    commands["mtp"] = [*commands["plain"], "--own"]
    path.write_text(json.dumps({**commands, "use": "mtp"}))
    argv, _ = became(bundle, 8123, asked, [])
    assert argv[-1] == served


def test_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no bundle of onboard.*serve/commands\.json"):
        serve.serve(tmp_path, 8123, None, [])
