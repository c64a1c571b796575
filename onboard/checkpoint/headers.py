"""What a safetensors checkpoint holds, read from its headers alone: no torch, no tensor data.

Format: https://huggingface.co/docs/safetensors/index#format (u64 little-endian header length, JSON
header, data). Every number of a header is checked against the file's size, so that a truncated
shard is found before hours of work.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onboard.errors import InputError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    **dict.fromkeys(("U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
LENGTH = 8  # bytes at the start of a file that give the length of its header
_LONGEST_HEADER = 100_000_000  # bytes; the limit of the safetensors library itself


@dataclass(frozen=True)
class Header:
    """One tensor of a checkpoint. Its data are the bytes [begin, end) of the file `shard`."""

    name: str
    dtype: str  # the format's own word: "BF16", "F8_E4M3", ...
    shape: tuple[int, ...]
    shard: str  # file name inside the checkpoint's directory
    begin: int
    end: int

    @property
    def parameters(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.end - self.begin


def read_headers(root: Path) -> dict[str, Header]:
    """Return every tensor of the checkpoint in `root`, by name, in the order of its shards.

    Raises InputError where the index and the shards disagree, a shard is missing or truncated,
    a tensor is in two shards, or a path leads out of `root` (and out of its Hub cache's blobs).
    """
    found = (header for shard in shards(root) for header in read_shard(root, shard))
    return collect(str(root), read_index(root), found)


def collect(where: str, index: Mapping[str, str], found: Iterable[Header]) -> dict[str, Header]:
    """Return headers by name; raises InputError where they and the index disagree."""
    headers: dict[str, Header] = {}
    for header in found:
        if header.name in headers:
            first = headers[header.name].shard
            raise InputError(f"{where}: tensor {header.name} is in {first} and in {header.shard}")
        headers[header.name] = header
    _compare(where, index, headers)
    return headers


def shards(root: Path) -> tuple[str, ...]:
    """Return the file names of the checkpoint's shards, sorted."""
    if index := read_index(root):
        return tuple(sorted(set(index.values())))
    if (root / SINGLE).exists():
        return (SINGLE,)
    found = sorted(p.name for p in root.glob("*.safetensors"))
    if len(found) == 1:
        return (found[0],)
    if found:
        raise InputError(
            f"{root}: {len(found)} safetensors files but no {INDEX} that says which tensor is where"
        )
    raise no_weights(str(root), (p.name for p in root.iterdir()))


def no_weights(where: str, names: Iterable[str]) -> InputError:
    """Return the refusal of a folder without safetensors: pickles can run code when loaded."""
    pickles = sorted(name for name in names if name.endswith(PICKLES))
    if not pickles:
        return InputError(f"{where}: expected {SINGLE} or {INDEX}, found no safetensors file")
    return InputError(
        f"{where}: the weights are pickles ({', '.join(pickles[:3])}), which can run code when "
        "they are loaded; expected safetensors",
        "convert them in a sandbox with safetensors.torch.save_file and run again",
    )


def read_index(root: Path) -> dict[str, str]:
    """Return tensor -> shard as the index lists it; empty where there is no index."""
    path = root / INDEX
    if not path.exists():
        return {}
    return parse_index(contained(root, INDEX).read_bytes(), str(path))


def parse_index(data: bytes, where: str) -> dict[str, str]:
    """Return tensor -> shard of an index file's content; `where` names the file in errors."""
    try:
        table = json.loads(data)["weight_map"]
    except (ValueError, KeyError, TypeError) as e:
        raise InputError(f"{where}: expected JSON with a weight_map, found {e!r}") from e
    if (
        not isinstance(table, dict)
        or not table
        or not all(isinstance(v, str) for v in table.values())
    ):
        raise InputError(f"{where}: weight_map must map tensor names to file names")
    return table


def contained(root: Path, name: str) -> Path:
    """Return the real path of `root / name`.

    It must lie in `root`, or in the `blobs` of the Hub cache whose snapshot `root` is. Raises
    InputError where it lies elsewhere or does not exist.
    """
    path, home = (root / name).resolve(), root.resolve()
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed.append(home.parent.parent / "blobs")
    if not any(path.is_relative_to(folder) for folder in allowed):
        raise InputError(
            f"{root}: {name!r} leads to {path}, outside the source directory; it was not read",
            "copy the file into the directory, or point onboard at the directory that holds it",
        )
    if not path.is_file():
        raise InputError(f"{root}: {name} is missing", "download the checkpoint again")
    return path


def read_shard(root: Path, shard: str) -> list[Header]:
    """Return the tensors of one file by data offset; raises InputError where it is damaged."""
    path = contained(root, shard)
    size = path.stat().st_size
    with path.open("rb") as f:
        length = header_length(f.read(LENGTH), size, f"{root}/{shard}")
        return parse_shard(f.read(length), size, shard, str(root))


def header_length(start: bytes, size: int, where: str) -> int:
    """Return the bytes of the JSON header of a file of `size` bytes, from its first `LENGTH`."""
    length = int.from_bytes(start, "little")
    if size < LENGTH or length > min(size - LENGTH, _LONGEST_HEADER):
        raise _damaged(where, f"its header should take {length} bytes of {size}")
    return length


def parse_shard(header: bytes, size: int, shard: str, where: str) -> list[Header]:
    """Return the tensors of a JSON header by data offset, for a file of `size` bytes.

    Raises InputError, with the directory or repository `where`, on a damaged file.
    """
    expected = LENGTH + len(header)  # the format allows neither holes nor overlaps
    try:
        table = json.loads(header)
        table.pop("__metadata__", None)
        found = [_header(shard, name, row, expected) for name, row in table.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise _damaged(f"{where}/{shard}", f"its header cannot be read ({e})") from e
    found.sort(key=lambda header: (header.begin, header.name))
    for tensor in found:
        if tensor.begin != expected:
            raise _damaged(f"{where}/{shard}", f"{tensor.name} leaves a hole or overlaps")
        expected = tensor.end
    if expected != size:
        raise _damaged(
            f"{where}/{shard}", f"its header describes {expected} bytes, the file has {size}"
        )
    return found


def _header(shard: str, name: str, row: Mapping[str, Any], data: int) -> Header:
    begin, end = map(operator.index, row["data_offsets"])
    shape = tuple(map(operator.index, row["shape"]))
    header = Header(name, row["dtype"], shape, shard, data + begin, data + end)
    bits = BITS.get(header.dtype)
    if bits is None:
        raise ValueError(f"tensor {name} has the unknown dtype {header.dtype}")
    if header.bytes * 8 != header.parameters * bits or begin < 0 or min(shape, default=0) < 0:
        raise ValueError(f"tensor {name}: {header.bytes} bytes do not hold {header.shape}")
    return header


def _damaged(where: str, why: str) -> InputError:
    return InputError(
        f"{where}: truncated or damaged safetensors file: {why}",
        f"download {where.rpartition('/')[2]} again",
    )


def _compare(where: str, index: Mapping[str, str], headers: Mapping[str, Header]) -> None:
    for name, shard in index.items():
        if name not in headers:
            raise InputError(f"{where}/{INDEX} lists tensor {name} in {shard}, which lacks it")
        if headers[name].shard != shard:
            raise InputError(
                f"{where}/{INDEX} lists tensor {name} in {shard}, found in {headers[name].shard}"
            )


def is_mtp(name: str, num_layers: int) -> bool:
    """Whether a tensor belongs to a multi-token-prediction layer, which lies past the trunk.

    Published checkpoints call it `mtp.*` or `model.layers.N.*` with N >= `num_hidden_layers`.
    """
    layer = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    return re.search(r"(?:^|\.)mtp\.", name) is not None or (
        layer is not None and int(layer[1]) >= num_layers
    )
