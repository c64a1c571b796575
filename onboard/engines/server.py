"""A real engine as a separate process: start, wait until it is healthy, and end it for certain."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from onboard.engines import guard
from onboard.errors import EnvironmentFault

HOST = "127.0.0.1"
ERRORS = 3
LAST_LINES = 5
END_SECONDS = guard.GRACE_SECONDS + 20

# A part of a name that ends so holds a secret: HF_TOKEN, AWS_SECRET_ACCESS_KEY, PGPASSWORD.
_SECRET = re.compile(
    r"(TOKEN|SECRET|KEY|PASSWORD|PASSWD|PASS|CREDENTIAL|AUTH|COOKIE|(^|_)PAT)S?(_|$)", re.IGNORECASE
)
_URL_WITH_PASSWORD = re.compile(r"://[^/\s]*:[^/\s]*@")
# (Worker pid=7) ERROR 11-29 18:36:08 [core.py:1510] [rank0]:
_LOG_PREFIX = re.compile(
    r"^(\(\w+ pid=\d+\) )?([A-Z]+ [\d-]+ [\d:]+ \[[^]]*\] )?(\[rank\d+\]: )?\s*"
)
# The engine has its own interpreter: the caller's would reach it through these.
_PYTHON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy to 127.0.0.1
_OFFLINE = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}


@dataclass(frozen=True)
class Launch:
    """A command with a health URL. `{port}` in it stands for the port it will listen on."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]  # on top of the caller's, less its secrets
    health: str = "/health"


@dataclass(frozen=True)
class Server:
    """An engine that answers."""

    url: str
    log: Path
    startup_seconds: float


@contextlib.contextmanager
def running(
    launch: Launch,
    log: Path,
    timeout: float,
    waiting: Callable[[float], None] = lambda seconds: None,
    hint: str | None = None,
) -> Iterator[Server]:
    """Start the engine, yield it once it is healthy, end it and all its children in the end.

    It listens on 127.0.0.1 only, sees no secret of this process's environment, and writes to
    `log`. It ends with this process, however that dies (see `guard`). `waiting` is told the
    seconds waited so far, `hint` is what an error advises.

    Raises EnvironmentFault with the log's telling lines where the engine dies or is not healthy
    after `timeout` seconds.
    """
    port = free_port()
    argv = [part.replace("{port}", str(port)) for part in launch.argv]
    began = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-I", guard.__file__, *argv],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment(os.environ, launch.environment),
            start_new_session=True,
        )
    try:
        url = f"http://{HOST}:{port}"
        while not answers(url + launch.health):
            seconds = time.monotonic() - began
            if process.poll() is not None:
                raise _fault(f"the engine ended with code {process.returncode}", log, hint)
            if seconds > timeout:
                raise _fault(f"the engine was not ready after {timeout:.0f} s", log, hint)
            waiting(seconds)
            time.sleep(0.25)
        yield Server(url, log, time.monotonic() - began)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(END_SECONDS)


def environment(inherited: Mapping[str, str], added: Mapping[str, str]) -> dict[str, str]:
    """Return the engine's environment: the caller's without secrets, offline, and `added`."""
    kept = {
        name: value
        for name, value in inherited.items()
        if not _SECRET.search(name) and not _URL_WITH_PASSWORD.search(value) and name not in _PYTHON
    }
    return {**kept, **_OFFLINE, **added}


def free_port() -> int:
    with socket.socket() as s:
        s.bind((HOST, 0))
        return int(s.getsockname()[1])


def answers(url: str) -> bool:
    """Return whether a GET of `url` succeeds within two seconds."""
    try:
        with DIRECT.open(url, timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def telling_lines(log: Path) -> list[str]:
    """Return the first different errors of the log, and its last lines.

    An engine's first error is the cause; what follows are its consequences in other processes.
    """
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    messages = (_LOG_PREFIX.sub("", line) for line in lines if "WARNING" not in line)
    errors = dict.fromkeys(m for m in messages if re.match(r"[\w.]*(Error|Exception)\b.*:", m))
    return [*list(errors)[:ERRORS], "...", *lines[-LAST_LINES:]]


def _fault(what: str, log: Path, hint: str | None) -> EnvironmentFault:
    lines = "\n  ".join(telling_lines(log))
    return EnvironmentFault(f"{what}; its log {log} says:\n  {lines}", hint or f"less {log}")
