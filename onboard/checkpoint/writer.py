"""Write a sharded safetensors checkpoint as a stream: one unit of tensors in memory at a time.

The names, dtypes and shapes of everything are known before the first byte, so a shard's header is
written first, tensors follow in order, and the sha256 is taken on the way. A finished shard is
renamed into place with a receipt; a restart writes only the shards without one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onboard.checkpoint.headers import BITS, INDEX, Header
from onboard.errors import InputError

CHUNK = 16 * 2**20  # bytes copied at a time; a multiple of every dtype's width
FLOATS = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
}

Chunks = Iterator[bytes | bytearray | memoryview]


@dataclass(frozen=True)
class Spec:
    """A tensor to write. `dtype` is the safetensors word for it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * BITS[self.dtype] // 8


@dataclass(frozen=True)
class Unit:
    """Tensors that are made together: `make` yields the bytes of each spec, in order.

    `make` may fill `notes`, which end in the shard's receipt.
    """

    specs: tuple[Spec, ...]
    make: Callable[[dict[str, Any]], Iterable[Chunks]]

    @property
    def bytes(self) -> int:
        return sum(spec.bytes for spec in self.specs)


@dataclass
class Written:
    """What `write` produced: file -> sha256, tensor -> file, and the units' notes."""

    digests: dict[str, str] = field(default_factory=dict)
    weight_map: dict[str, str] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    bytes: int = 0


def write(
    units: Sequence[Unit],
    folder: Path,
    shard_bytes: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
    workers: int = 1,
) -> Written:
    """Write `units` into shards of about `shard_bytes` (at least one unit each) in `folder`.

    `workers` shards are written at once. `progress` gets bytes done and in all. The index is
    written too when there are several shards.
    """
    plan = _shards(units, shard_bytes)
    total, done = sum(unit.bytes for unit in units), 0
    many = len(plan) > 1
    names = [f"model-{n:05d}-of-{len(plan):05d}.safetensors" if many else "model.safetensors"
             for n in range(1, len(plan) + 1)]  # fmt: skip
    with ThreadPoolExecutor(1) as disk, _threads(min(workers, len(plan))) as pool:
        jobs = {
            pool.submit(_finish_shard, members, folder / name, disk): members
            for name, members in zip(names, plan, strict=True)
        }
        sealed = []
        for job in as_completed(jobs):
            sealed.append(job.result())
            done += sum(unit.bytes for unit in jobs[job])
            progress(done, total)
        for seal in sealed:
            if seal is not None:
                seal.result()
    written = Written()
    for name, members in zip(names, plan, strict=True):
        receipt = json.loads(_receipt(folder / name).read_text())
        written.digests[name] = receipt["sha256"]
        written.notes |= receipt["notes"]
        written.weight_map |= {spec.name: name for unit in members for spec in unit.specs}
        written.bytes += (folder / name).stat().st_size
    if many:
        index = {
            "metadata": {"total_size": total},
            "weight_map": dict(sorted(written.weight_map.items())),
        }
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    return written


@contextlib.contextmanager
def _threads(workers: int) -> Iterator[ThreadPoolExecutor]:
    """Yield a pool whose members compute on one core each; an error cancels what has not begun."""
    cores = torch.get_num_threads()
    pool = ThreadPoolExecutor(workers)
    if workers > 1:
        torch.set_num_threads(1)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(cores)


def _finish_shard(
    units: Sequence[Unit], path: Path, disk: ThreadPoolExecutor
) -> Future[None] | None:
    """Write a shard that has no receipt; the next one need not wait until the disk has it."""
    if _receipt(path).exists() and path.exists():
        return None
    sha, notes = _write_shard(units, _partial(path))
    return disk.submit(_seal, path, {"sha256": sha, "notes": notes})


def _seal(path: Path, receipt: Mapping[str, Any]) -> None:
    """Bring a shard to the disk, then give it its name and its receipt."""
    with _partial(path).open("rb") as f:
        os.fsync(f.fileno())
    _partial(path).rename(path)
    note = _partial(_receipt(path))
    note.write_text(json.dumps(receipt))
    note.rename(_receipt(path))


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


def _receipt(path: Path) -> Path:
    return path.with_name(f"{path.name}.receipt.json")


def move_finished(written: Written, folder: Path, destination: Path) -> None:
    """Move the shards and their index from `folder` into `destination`, receipts left behind."""
    for name in [*written.digests, INDEX]:
        if (folder / name).exists():
            (folder / name).rename(destination / name)


def copy_bytes(root: Path, header: Header) -> Chunks:
    """Yield a source tensor byte for byte; raises InputError where it holds NaN or Inf."""
    with (root / header.shard).open("rb") as f:
        f.seek(header.begin)
        left = header.bytes
        while left:
            data = bytearray(f.read(min(CHUNK, left)))
            if header.dtype in FLOATS:
                check_finite(header, torch.frombuffer(data, dtype=FLOATS[header.dtype]))
            left -= len(data)
            yield data


def check_finite(header: Header, tensor: Tensor) -> None:
    """Raise InputError for a NaN or an infinity, naming the tensor and its shard."""
    values = tensor.float() if tensor.element_size() == 1 else tensor  # float8 has no maximum
    if values.numel() and not torch.stack(torch.aminmax(values)).isfinite().all():
        raise InputError(
            f"{header.shard}: tensor {header.name} holds NaN or Inf",
            "download the shard again, or report it to the model's publisher",
        )


def tensor_bytes(tensor: Tensor) -> Chunks:
    """Yield a tensor's bytes as safetensors stores them (little endian, row major)."""
    yield tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data


def _shards(units: Sequence[Unit], shard_bytes: int) -> list[list[Unit]]:
    plan: list[list[Unit]] = [[]]
    size = 0
    for unit in units:
        if plan[-1] and size + unit.bytes > shard_bytes:
            plan.append([])
            size = 0
        plan[-1].append(unit)
        size += unit.bytes
    return plan


def _write_shard(units: Sequence[Unit], partial: Path) -> tuple[str, dict[str, Any]]:
    """Write a shard's bytes; return their sha256 and the units' notes."""
    sha = hashlib.sha256()
    notes: dict[str, Any] = {}
    with partial.open("wb") as f:

        def put(data: bytes | bytearray | memoryview) -> None:
            f.write(data)
            sha.update(data)

        put(_header_bytes([spec for unit in units for spec in unit.specs]))
        for unit in units:
            for spec, chunks in zip(unit.specs, unit.make(notes), strict=True):
                size = 0
                for chunk in chunks:
                    put(chunk)
                    size += len(chunk)
                assert size == spec.bytes, f"{spec.name}: {size} bytes, planned {spec.bytes}"
    return sha.hexdigest(), notes


def _header_bytes(specs: Sequence[Spec]) -> bytes:
    table: dict[str, Mapping[str, Any]] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        end = offset + spec.bytes
        table[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
