"""No engine outlives its caller; no secret reaches it; a dead one's log is in the error."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from onboard.engines import guard
from onboard.engines.server import Launch, environment, running
from onboard.errors import EnvironmentFault

FAKE = Path(__file__).with_name("fake_engine.py")


def launch(work: Path, mode: str = "") -> Launch:
    return Launch((sys.executable, str(FAKE), "{port}", str(work), mode), {"ADDED": "1"})


def pids(work: Path, timeout: float = 30) -> list[int]:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if (work / "pids").exists() and (text := (work / "pids").read_text()).count(" ") == 2:
            return [int(pid) for pid in text.split()]
        time.sleep(0.05)
    raise AssertionError("the engine did not start")


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # it ended before, or while it was read
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def assert_gone(processes: list[int], timeout: float = guard.GRACE_SECONDS + 20) -> None:
    deadline = time.monotonic() + timeout
    while any(map(alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in processes if alive(pid)]


@pytest.mark.parametrize("mode", ["", "deaf"])
def test_the_whole_tree_ends_with_the_context(tmp_path: Path, mode: str) -> None:
    with running(launch(tmp_path, mode), tmp_path / "log", timeout=60) as server:
        assert server.startup_seconds > 0
        tree = pids(tmp_path)
        assert all(map(alive, tree))
    assert not [pid for pid in tree if alive(pid)]


def test_the_tree_ends_with_an_exception(tmp_path: Path) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        running(launch(tmp_path), tmp_path / "log", timeout=60),
    ):
        raise KeyboardInterrupt
    assert not [pid for pid in pids(tmp_path) if alive(pid)]


def test_the_tree_ends_when_the_caller_is_killed(tmp_path: Path) -> None:
    script = f"""
import time
from pathlib import Path
from onboard.engines.server import Launch, running
launch = Launch({launch(tmp_path).argv!r}, {{}})
with running(launch, Path({str(tmp_path / "log")!r}), 60):
    time.sleep(600)
"""
    caller = subprocess.Popen([sys.executable, "-c", script])
    tree = pids(tmp_path)
    assert all(map(alive, tree))
    os.kill(caller.pid, signal.SIGKILL)
    caller.wait()
    assert_gone(tree)


def test_an_engine_that_dies_is_quoted(tmp_path: Path) -> None:
    with (
        pytest.raises(EnvironmentFault, match="code 3") as caught,
        running(launch(tmp_path, "die"), tmp_path / "engine.log", timeout=60),
    ):
        raise AssertionError("it never was healthy")
    assert "ValueError: there is no tensor model.norm.weight" in caught.value.message
    assert str(tmp_path / "engine.log") in caught.value.message


def test_an_engine_that_never_answers_is_ended(tmp_path: Path) -> None:
    with (
        pytest.raises(EnvironmentFault, match="not ready after 5 s"),
        running(launch(tmp_path, "mute"), tmp_path / "log", timeout=5),
    ):
        raise AssertionError("it never was healthy")
    assert_gone(pids(tmp_path))


def test_secrets_do_not_reach_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_swordfish")
    monkeypatch.setenv("https_proxy", "http://user:swordfish@proxy.example:80")
    with running(launch(tmp_path), tmp_path / "log", timeout=60) as server:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        seen = opener.open(server.url).read().decode()
    assert "swordfish" not in seen
    assert "'ADDED': '1'" in seen
    assert "'HF_HUB_OFFLINE': '1'" in seen


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("HF_TOKEN", False),
        ("HUGGING_FACE_HUB_TOKEN", False),
        ("AWS_SECRET_ACCESS_KEY", False),
        ("AWS_ACCESS_KEY_ID", False),
        ("OPENAI_API_KEY", False),
        ("OPENAI_APIKEY", False),
        ("PGPASSWORD", False),
        ("GH_PAT", False),
        ("SSH_AUTH_SOCK", False),
        ("GOOGLE_APPLICATION_CREDENTIALS", False),
        ("PYTHONPATH", False),
        ("PATH", True),
        ("HOME", True),
        ("LD_LIBRARY_PATH", True),
        ("CUDA_VISIBLE_DEVICES", True),
        ("TOKENIZERS_PARALLELISM", True),
    ],
)
def test_which_variables_are_secret(name: str, kept: bool) -> None:
    assert (name in environment({name: "x"}, {})) is kept
