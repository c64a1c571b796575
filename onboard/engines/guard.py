"""Runs a command and makes sure that nothing of it outlives the caller. Standard library only.

    python guard.py COMMAND [ARGUMENT...]

The caller holds the other end of this process's standard input. When that end closes, because
the caller closed it or because it died in whatever way, the command's process group and every
process that has split off from it are ended. Exits with the command's own code, as a shell would.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

GRACE_SECONDS = 5.0
PR_SET_CHILD_SUBREAPER = 36


def main(command: list[str]) -> int:
    _adopt_orphans()
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    ended = os.pidfd_open(child.pid)
    select.select([sys.stdin.fileno(), ended], [], [])
    _end(child)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _adopt_orphans() -> None:
    """Become the parent of grandchildren whose own parent dies, so that none gets away."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def _end(child: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + GRACE_SECONDS
    for group in {child.pid, *_children()}:
        _signal(group, signal.SIGTERM)
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    _signal(child.pid, signal.SIGKILL)
    child.wait()
    while orphans := _children():
        for pid in orphans:
            _signal(pid, signal.SIGKILL)
        time.sleep(0.01)
        _reap()


def _signal(pid: int, number: signal.Signals) -> None:
    """Signal the group that `pid` leads, else `pid` alone."""
    with contextlib.suppress(ProcessLookupError):
        try:
            os.killpg(pid, number)
        except ProcessLookupError:
            os.kill(pid, number)


def _children() -> list[int]:
    own = os.getpid()
    return [
        int(pid)
        for task in Path(f"/proc/{own}/task").iterdir()
        for pid in (task / "children").read_text().split()
    ]


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
