"""The writer: readable by the safetensors library, byte-exact copies, restartable by shard."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from onboard.checkpoint.headers import INDEX, read_headers
from onboard.checkpoint.writer import Chunks, Spec, Unit, copy_bytes, tensor_bytes, write
from onboard.errors import InputError


def unit(name: str, tensor: torch.Tensor, made: list[str] | None = None) -> Unit:
    def make(notes: dict[str, Any]) -> Iterable[Chunks]:
        if made is not None:
            made.append(name)
        notes[name] = {"sum": float(tensor.float().sum())}
        yield tensor_bytes(tensor)

    return Unit((Spec(name, "F32", tuple(tensor.shape)),), make)


def test_the_library_reads_what_was_written(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.randn(8, 16) for i in range(5)}
    written = write([unit(n, t) for n, t in tensors.items()], tmp_path, shard_bytes=1200)
    assert len(written.digests) == 3, "two 512-byte tensors fit in a shard of 1200 bytes"
    for name, tensor in tensors.items():
        assert torch.equal(load_file(tmp_path / written.weight_map[name])[name], tensor)
    assert list(read_headers(tmp_path)) == list(tensors)
    assert (tmp_path / INDEX).exists()
    for name, sha in written.digests.items():
        assert hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() == sha


def test_a_restart_makes_only_unfinished_shards(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((4, 4), float(i)) for i in range(3)}
    made: list[str] = []

    def broken(notes: dict[str, Any]) -> Iterable[Chunks]:
        raise KeyboardInterrupt

    units = [unit(n, t, made) for n, t in tensors.items()]
    with pytest.raises(KeyboardInterrupt):
        write([*units[:2], Unit(units[2].specs, broken)], tmp_path, shard_bytes=64)
    first = write(units, tmp_path, shard_bytes=64)
    assert made == ["t0", "t1", "t2"]
    assert first.notes["t1"] == {"sum": 16.0}, "notes of earlier shards are kept"
    clean = tmp_path / "clean"
    clean.mkdir()
    assert write(units, clean, shard_bytes=64).digests == first.digests


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64])
def test_copies_are_byte_for_byte(tmp_path: Path, dtype: torch.dtype) -> None:
    save_file({"a": torch.arange(7), "b": torch.arange(33).to(dtype)}, tmp_path / "x.safetensors")
    header = read_headers(tmp_path)["b"]
    raw = (tmp_path / "x.safetensors").read_bytes()[header.begin : header.end]
    assert b"".join(copy_bytes(tmp_path, header)) == raw


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_nan_or_inf_names_tensor_and_shard(tmp_path: Path, poison: float) -> None:
    bad = torch.ones(64, dtype=torch.bfloat16)
    bad[40] = poison
    save_file({"model.norm.weight": bad}, tmp_path / "model.safetensors")
    header = read_headers(tmp_path)["model.norm.weight"]
    with pytest.raises(InputError, match=r"model\.safetensors: tensor model\.norm\.weight"):
        list(copy_bytes(tmp_path, header))


def test_several_workers_write_the_same_bytes(tmp_path: Path) -> None:
    units = [unit(f"t{i}", torch.randn(64, 16)) for i in range(9)]
    for workers in (1, 3):
        (tmp_path / str(workers)).mkdir()
    alone, together = (write(units, tmp_path / str(n), 4096, workers=n) for n in (1, 3))
    assert alone == together
    assert len(alone.digests) == 9


KILLED = """
import os, signal, sys, time, torch
from pathlib import Path
from onboard.checkpoint.writer import Spec, Unit, tensor_bytes, write

def unit(n):
    def make(notes):
        if n == 5 and sys.argv[2] == "die":
            while not list(folder.glob("*.receipt.json")):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        yield tensor_bytes(torch.full((64, 64), float(n)))
    return Unit((Spec(f"t{n}", "F32", (64, 64)),), make)

folder = Path(sys.argv[1])
write([unit(n) for n in range(8)], folder, shard_bytes=16384, workers=2)
"""


def test_kill_9_while_writing_keeps_finished_shards(tmp_path: Path) -> None:
    def run(folder: Path, how: str) -> int:
        folder.mkdir(exist_ok=True)
        return subprocess.run([sys.executable, "-c", KILLED, str(folder), how]).returncode

    assert run(tmp_path / "killed", "die") == -signal.SIGKILL
    receipts = {p: p.stat().st_mtime_ns for p in (tmp_path / "killed").glob("*.receipt.json")}
    assert receipts, "no shard was finished before the kill"
    assert run(tmp_path / "killed", "live") == run(tmp_path / "whole", "live") == 0
    assert all(p.stat().st_mtime_ns == then for p, then in receipts.items()), "made twice"
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "killed" / path.name).read_bytes()
    assert not list((tmp_path / "killed").glob("*.partial"))


@pytest.mark.parametrize("codes", [0x7F, 0xFF])
def test_a_nan_among_fp8_codes_is_found(tmp_path: Path, codes: int) -> None:
    bad = torch.zeros(64, dtype=torch.uint8)
    bad[9] = codes
    save_file({"w": bad.view(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="tensor w holds NaN"):
        list(copy_bytes(tmp_path, read_headers(tmp_path)["w"]))
