"""Copy a file without copying its bytes where the filesystem can share them safely."""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path

FICLONE = 0x40049409  # linux/fs.h: _IOW(0x94, 9, int)


def clone(source: Path, target: Path) -> None:
    """Make `target` a file of its own with the bytes of `source`.

    A reflink (btrfs, xfs, ...) shares the blocks until one side is written; elsewhere the bytes
    are copied. Never a hardlink: a change to the target must not reach the store.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as read, target.open("wb") as write:
        try:
            fcntl.ioctl(write.fileno(), FICLONE, read.fileno())
        except OSError:  # another filesystem, or one without reflinks
            shutil.copyfile(source, target)
    target.chmod(0o644)
