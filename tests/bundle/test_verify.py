"""Verification names the file, whatever was done to it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from onboard.bundle.build import build_bundle
from onboard.bundle.verify import verify
from onboard.errors import InputError
from onboard.pipeline import Run
from onboard.store import file_digest

SHARD = "checkpoint/model-00001-of-00001.safetensors"


@pytest.fixture
def bundle(make_run: Callable[..., Run], tmp_path: Path) -> Path:
    return build_bundle(make_run(), tmp_path / "b")


def test_passes_and_returns_the_manifest_s_digest(bundle: Path) -> None:
    assert verify(bundle) == file_digest(bundle / "manifest.json")


@pytest.mark.parametrize("name", [SHARD, "README.md", "report/index.html", "serve/vllm.sh"])
def test_one_flipped_byte(bundle: Path, name: str) -> None:
    data = bytearray((bundle / name).read_bytes())
    data[len(data) // 2] ^= 1
    (bundle / name).write_bytes(data)
    with pytest.raises(InputError, match=f"{name}: expected sha256"):
        verify(bundle)


def test_a_file_cut_short(bundle: Path) -> None:
    (bundle / SHARD).write_bytes((bundle / SHARD).read_bytes()[:-1])
    with pytest.raises(InputError, match=f"{SHARD}: expected 6000 bytes, found 5999"):
        verify(bundle)


def test_a_file_removed_and_one_added(bundle: Path) -> None:
    (bundle / "LICENSE").unlink()
    (bundle / "checkpoint" / "modeling.py").write_text("print()")
    with pytest.raises(InputError) as error:
        verify(bundle)
    assert "LICENSE: missing" in error.value.message
    assert "checkpoint/modeling.py: not in the manifest" in error.value.message


def test_a_link_in_the_place_of_a_file(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "twin").write_bytes((bundle / SHARD).read_bytes())
    (bundle / SHARD).unlink()
    (bundle / SHARD).symlink_to(tmp_path / "twin")
    with pytest.raises(InputError, match=f"{SHARD}: not a plain file"):
        verify(bundle)


def test_a_linked_folder(bundle: Path, tmp_path: Path) -> None:
    (bundle / "more").symlink_to(tmp_path)
    with pytest.raises(InputError, match="more: not in the manifest"):
        verify(bundle)


def test_the_manifest_can_be_pinned(bundle: Path) -> None:
    pin = verify(bundle)
    assert verify(bundle, pin) == pin
    assert verify(bundle, f"sha256:{pin.upper()}") == pin
    said = json.loads((bundle / "manifest.json").read_text())
    said["verdict"] = "better"
    (bundle / "manifest.json").write_text(json.dumps(said))
    verify(bundle)  # consistent in itself
    with pytest.raises(InputError, match=f"expected sha256 {pin}"):
        verify(bundle, pin)


def test_a_manifest_that_points_outside(bundle: Path) -> None:
    said = json.loads((bundle / "manifest.json").read_text())
    said["files"]["../secret"] = {"sha256": "0" * 64, "size": 1}
    (bundle / "manifest.json").write_text(json.dumps(said))
    with pytest.raises(InputError, match="outside the bundle"):
        verify(bundle)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 99, "files": {}}'])
def test_what_is_no_manifest(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(InputError, match=r"manifest\.json"):
        verify(tmp_path)


def test_no_bundle_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no bundle here"):
        verify(tmp_path / "nowhere")
