"""Put a finished directory in the place of an earlier one, with no moment without a whole one."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from pathlib import Path

from onboard.store import fsync

AT_FDCWD = -100
RENAME_EXCHANGE = 2  # linux/fs.h


def publish(built: Path, dest: Path) -> None:
    """Make `built` durable and rename it to its sibling `dest`; drop what was there before."""
    for path in [*built.rglob("*"), built]:
        fsync(path)
    if dest.exists():
        _exchange(built, dest)
    else:
        built.rename(dest)
    fsync(dest.parent)
    shutil.rmtree(built, ignore_errors=True)  # the earlier directory, after an exchange


def _exchange(one: Path, other: Path) -> None:
    """Swap two directories in one step; in two where the system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    paths = AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other)
    if hasattr(libc, "renameat2"):
        if libc.renameat2(*paths, RENAME_EXCHANGE) == 0:
            return
        code = ctypes.get_errno()
        if code not in (errno.EINVAL, errno.ENOSYS):
            raise OSError(code, os.strerror(code), str(other))
    earlier = other.with_name(f".{other.name}.earlier")
    shutil.rmtree(earlier, ignore_errors=True)
    other.rename(earlier)
    one.rename(other)
    earlier.rename(one)
