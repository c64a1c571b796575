"""Publishing a directory: in one step where the kernel can, in two where it cannot."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace

import pytest

from onboard.bundle import swap
from onboard.bundle.swap import publish


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    built, dest = tmp_path / ".b.building", tmp_path / "b"
    for folder, text in ((built, "new"), (dest, "old")):
        folder.mkdir()
        (folder / "file").write_text(text)
    return built, dest


def test_publish_replaces_what_was_there(places: tuple[Path, Path]) -> None:
    built, dest = places
    publish(built, dest)
    assert (dest / "file").read_text() == "new"
    assert [p.name for p in dest.parent.iterdir()] == ["b"]


def test_publish_where_the_system_cannot_exchange(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    built, dest = places
    monkeypatch.setattr(swap, "ctypes", SimpleNamespace(CDLL=lambda *_, **__: object()))
    publish(built, dest)
    assert (dest / "file").read_text() == "new"
    assert [p.name for p in dest.parent.iterdir()] == ["b"]


def test_this_system_exchanges_in_one_step(places: tuple[Path, Path]) -> None:
    if not hasattr(ctypes.CDLL(None), "renameat2"):
        pytest.skip("the C library has no renameat2")
    built, dest = places
    inodes = built.stat().st_ino, dest.stat().st_ino
    swap._exchange(built, dest)
    assert (dest.stat().st_ino, built.stat().st_ino) == inodes
