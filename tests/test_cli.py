"""The command line: stable exit codes, one JSON document, start-up without torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from onboard.cli import _print_verdict

ONBOARD = (sys.executable, "-m", "onboard")


def run(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "ONBOARD_HOME": str(home)}
    return subprocess.run(
        [*ONBOARD, *arguments], capture_output=True, text=True, env=variables, check=False
    )


def test_the_commands_that_exist(tmp_path: Path) -> None:
    shown = run("--help", home=tmp_path).stdout
    listed = [line.split()[0] for line in shown.split("Commands:")[1].splitlines() if line.strip()]
    names = [name for name in listed if name.isalpha() and name.islower()]
    assert {"run", "recipes", "doctor", "report", "verify", "serve"} <= set(names)


def test_help_imports_neither_torch_nor_pydantic() -> None:
    code = (
        "import sys; from onboard.cli import main; sys.argv = ['onboard', '--help']\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'pydantic', 'rich'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "--bogus"),
        ("run", "nonsense"),
        ("run", "smollm2-135m", "--set", "fidelity.bath_size=2"),
        ("run", "smollm2-135m", "--set", "nonsense"),
        ("run", "smollm2-135m", "--override", "fidelity.kl_mean_hi="),
        ("run", "smollm2-135m", "--adopt", "0123456789abcdef"),
        ("verify", "/nowhere"),
        ("nonsense",),
    ],
)
def test_wrong_input_is_exit_2_with_one_message(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = run(*arguments, home=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    as_json = run(*arguments, "--json", home=tmp_path)
    assert as_json.returncode == 2
    assert json.loads(as_json.stdout)["error"]["exit_code"] == 2


@pytest.mark.parametrize(
    ("speculator", "last"),
    [
        ({"ships": True, "reasons": []}, "bundle   /b"),
        (None, "bundle   /b"),
        (
            {"ships": False, "reasons": ["too slow", "never right"]},
            "         without the speculator: too slow; never right",
        ),
    ],
)
def test_a_speculator_that_stays_out_is_said(
    speculator: dict[str, object] | None, last: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = {
        "gates": [], "verdict": "pass", "report": "/r", "bundle": "/b", "speculator": speculator,
    }  # fmt: skip
    _print_verdict(result)
    assert capsys.readouterr().out.splitlines()[-1] == last


def test_an_interrupted_run_is_exit_130(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*ONBOARD, "run", "smollm2-135m", "--json"],
        cwd=tmp_path,
        env={**os.environ, "ONBOARD_HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background
    )
    while not list(tmp_path.glob("runs/*/events.jsonl")) and process.poll() is None:
        time.sleep(0.05)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130


@pytest.mark.parametrize(("swallowed", "code"), [(True, 130), (False, 0)])
def test_an_interrupt_that_something_else_swallows(swallowed: bool, code: int) -> None:
    """A package interrupted while it is imported says it cannot be; at exit it is too late."""
    script = f"""
import atexit, os, signal, time
from onboard import cli

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.1)

def app(standalone_mode):
    if not {swallowed}:
        return 0
    try:
        interrupt()
    except KeyboardInterrupt:
        raise ImportError("half of it")

atexit.register(interrupt)
cli.app = app
cli.main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert done.returncode == code, done.stderr
    assert done.stderr == b""
