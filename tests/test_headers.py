"""Safetensors headers: what is damaged, missing or outside is one error before any work."""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onboard.checkpoint.headers import read_headers, read_shard
from onboard.errors import InputError
from tests.shards import write_index, write_shard


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write_shard(tmp_path / "a.safetensors", {"x": (2, 3), "y": (4,)})
    write_shard(tmp_path / "b.safetensors", {"z": (5, 1)})
    write_index(tmp_path, {"x": "a.safetensors", "y": "a.safetensors", "z": "b.safetensors"})
    return tmp_path


def test_offsets_point_at_the_bytes_of_a_peers_file(tmp_path: Path) -> None:
    import numpy
    from safetensors.numpy import save_file

    x, y = numpy.arange(6, dtype="f4").reshape(2, 3), numpy.arange(4, dtype="i8")
    save_file({"x": x, "y": y}, tmp_path / "model.safetensors", {"format": "pt"})
    headers = read_headers(tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    assert {n: (h.dtype, h.shape) for n, h in headers.items()} == {
        "x": ("F32", (2, 3)),
        "y": ("I8", (4,)) if y.dtype.itemsize == 1 else ("I64", (4,)),
    }
    assert data[headers["x"].begin : headers["x"].end] == x.tobytes()
    assert data[headers["y"].begin : headers["y"].end] == y.tobytes()


def test_shards_of_an_index_are_read_and_others_are_not(sharded: Path) -> None:
    write_shard(sharded / "consolidated.safetensors", {"x": (2, 3)})
    assert {n: h.shard for n, h in read_headers(sharded).items()} == {
        "x": "a.safetensors",
        "y": "a.safetensors",
        "z": "b.safetensors",
    }


def test_index_lists_a_tensor_that_no_shard_has(sharded: Path) -> None:
    write_index(sharded, {"x": "a.safetensors", "ghost": "b.safetensors"})
    with pytest.raises(InputError, match=r"lists tensor ghost in b\.safetensors, which lacks it"):
        read_headers(sharded)


def test_index_names_the_wrong_shard(sharded: Path) -> None:
    write_index(sharded, {"x": "b.safetensors", "y": "a.safetensors"})
    with pytest.raises(InputError, match=r"lists tensor x in b\.safetensors, found in a"):
        read_headers(sharded)


def test_missing_shard(sharded: Path) -> None:
    (sharded / "b.safetensors").unlink()
    with pytest.raises(InputError, match=r"b\.safetensors is missing"):
        read_headers(sharded)


@pytest.mark.parametrize("cut", [1, 9, 60])
def test_truncated_shard(sharded: Path, cut: int) -> None:
    path = sharded / "a.safetensors"
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(InputError, match=r"a\.safetensors: truncated or damaged"):
        read_headers(sharded)


def test_a_tensor_in_two_shards(sharded: Path) -> None:
    write_shard(sharded / "b.safetensors", {"z": (5, 1), "x": (2, 3)})
    with pytest.raises(InputError, match=r"x is in a\.safetensors and in b"):
        read_headers(sharded)


@pytest.mark.parametrize("inside", ["../secret.safetensors", "sub/../../secret.safetensors"])
def test_a_path_out_of_the_directory_is_not_read(tmp_path: Path, inside: str) -> None:
    root = tmp_path / "model"
    (root / "sub").mkdir(parents=True)
    write_shard(tmp_path / "secret.safetensors", {"x": (1,)})
    write_index(root, {"x": inside})
    with pytest.raises(InputError, match="outside the source directory; it was not read"):
        read_headers(root)


def test_a_link_out_of_the_directory_is_not_read(tmp_path: Path) -> None:
    root = tmp_path / "model"
    root.mkdir()
    write_shard(tmp_path / "elsewhere", {"x": (1,)})
    (root / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="outside the source directory"):
        read_headers(root)


def test_the_links_of_a_hub_cache_are_fine(tmp_path: Path) -> None:
    cache = tmp_path / "models--acme--tiny"
    snapshot = cache / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    write_shard(cache / "blobs" / "abc", {"x": (1,)})
    (snapshot / "model.safetensors").symlink_to("../../blobs/abc")
    assert list(read_headers(snapshot)) == ["x"]


def test_pickles_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(InputError, match=r"pickles \(pytorch_model\.bin\)"):
        read_headers(tmp_path)


def test_several_files_without_an_index(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    with pytest.raises(InputError, match="2 safetensors files but no"):
        read_headers(sharded)


@given(st.binary(max_size=200))
def test_no_bytes_whatever_crash_the_reader(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "m.safetensors").write_bytes(data)
        _only_input_errors(Path(folder))


HEADER = st.recursive(
    st.none() | st.integers() | st.text(max_size=8) | st.lists(st.integers(), max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["x", "dtype", "shape", "data_offsets", "__metadata__"]),
            inner,
            max_size=4,
        )
    ),
)


@given(HEADER)
def test_no_json_whatever_crashes_the_reader(header: object) -> None:
    text = json.dumps(header).encode()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "m.safetensors"
        file.write_bytes(len(text).to_bytes(8, "little") + text)
        _only_input_errors(Path(folder))


def _only_input_errors(folder: Path) -> None:
    """Any other exception would escape and fail the test."""
    with contextlib.suppress(InputError):
        read_shard(folder, "m.safetensors")
