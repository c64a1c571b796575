"""Read the weights of a checkpoint directory, whatever format stores them, a slice at a time.

Slices are read at their place in the file, not mapped: what is in memory is what was asked for.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from onboard.checkpoint import formats
from onboard.checkpoint.decode import check_shape, decode
from onboard.checkpoint.formats import Scheme, Weight
from onboard.checkpoint.headers import Header, contained, read_headers
from onboard.checkpoint.writer import FLOATS, check_finite
from onboard.errors import InputError

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}


@dataclass(frozen=True)
class Reader:
    """Lazy access to the safetensors of one directory; nothing stays in memory."""

    root: Path
    headers: dict[str, Header]

    @classmethod
    def open(cls, root: Path) -> Reader:
        return cls(root, read_headers(root))

    @cached_property
    def weights(self) -> dict[str, Weight]:
        """The weights by their names, in the format that config.json (if any) declares."""
        named = (self.root / "config.json").exists()
        config = json.loads(contained(self.root, "config.json").read_text()) if named else {}
        return formats.weights(self.headers, config)

    def __contains__(self, name: str) -> bool:
        return name in self.headers

    def tensor(self, name: str) -> Tensor:
        """Return one tensor as stored."""
        header = self.headers.get(name)
        if header is None:
            raise InputError(f"{self.root}: no tensor {name!r}")
        return self._read(header, 1, 0, 1).reshape(header.shape)

    def weight(self, name: str) -> Tensor:
        """Return a whole weight in its own shape: f32 where stored as codes, else as stored.

        Raises InputError naming tensor and shard on NaN or Inf.
        """
        weight = self._weight(name)
        if weight.scheme == "plain":
            stored = self.tensor(name)
            if self.headers[name].dtype in FLOATS:
                check_finite(self.headers[name], stored)
            return stored
        whole = torch.empty(weight.shape)
        for matrix, one in enumerate(whole.reshape(-1, *weight.shape[-2:])):
            stored = self._matrix(weight, matrix, 0, weight.rows)
            one.copy_(stored.T if weight.transposed else stored)
        return whole

    def rows(
        self, name: str, expert: int | None, outputs: slice, transposed: bool = False
    ) -> Tensor:
        """Return outputs of a matrix, or of one expert's in a fused weight, as [outputs, in].

        The dtype is f32 where the source is quantized, else as stored. `outputs` may have a step,
        for interleaved projections. `transposed` says that the weight's shape ends in [in, out];
        such a matrix is read whole. Raises InputError naming tensor and shard on NaN or Inf.
        """
        weight, matrix = self._weight(name), expert or 0
        assert len(weight.shape) == (2 if expert is None else 3), f"{name}: {weight.shape}"
        assert transposed or not weight.transposed, f"{name} is [expert, in, out]"
        if transposed and not weight.transposed:
            return self._matrix(weight, matrix, 0, weight.rows).T[outputs].contiguous()
        first, stop, step = outputs.indices(weight.rows)
        stored = self._matrix(weight, matrix, first, stop - first)
        return stored[::step].contiguous()

    def mxfp4(self, name: str, expert: int | None, outputs: slice) -> tuple[Tensor, Tensor]:
        """Return the codes u8 [outputs, in/2] and exponents u8 [outputs, in/32] of MXFP4 outputs.

        Bias 127, the low nibble holds the even input. Raises InputError naming tensor and shard
        where an exponent is NaN or too large for fp32.
        """
        weight = self._weight(name)
        assert weight.scheme == "mxfp4", f"{name} is {weight.scheme}"
        first, stop, step = outputs.indices(weight.rows)
        every, at = weight.matrices * weight.rows, (expert or 0) * weight.rows + first
        codes, exponents = (
            self._read(weight.parts[part], every, at, stop - first)[::step].view(torch.uint8)
            for part in ("weight", "scale")
        )
        check_finite(weight.parts["scale"], 6 * exponents.view(torch.float8_e8m0fnu).float())
        return codes.contiguous(), exponents.contiguous()

    def scheme(self, module: str) -> Scheme | None:
        """Return how a module's weight is stored; None where it is not there."""
        weight = self.weights.get(f"{module}.weight")
        return weight.scheme if weight else None

    def is_nvfp4(self, module: str) -> bool:
        return self.scheme(module) == "nvfp4"

    def input_scales(self) -> dict[str, Tensor]:
        """Return module -> `input_scale` f32 [] for every module quantized with one.

        It is NVFP4's or FP8's, as the module's `scheme` says.
        """
        scales = {}
        for name in self.headers:
            module, _, part = name.rpartition(".")
            if part == "input_scale":
                scales[module] = self.tensor(name).reshape(())
            elif part == "input_global_scale":
                scales[module] = self.tensor(name).reshape(()).reciprocal()
        return scales

    def _weight(self, name: str) -> Weight:
        if name not in self.weights:
            raise InputError(f"{self.root}: no weight {name!r}")
        return self.weights[name]

    def _matrix(self, weight: Weight, matrix: int, first: int, count: int) -> Tensor:
        if weight.scheme != "plain":
            check_shape(weight, self._read)
            return decode(weight, self._read, matrix, first, count)
        header, every = weight.parts["weight"], weight.matrices * weight.rows
        stored = self._read(header, every, matrix * weight.rows + first, count)
        check_finite(header, stored)
        return stored

    def _read(self, header: Header, rows: int, first: int, count: int) -> Tensor:
        """Return rows of a stored tensor seen as [rows, width]."""
        if header.dtype not in DTYPES:
            raise InputError(f"{header.shard}: tensor {header.name}: cannot read {header.dtype}")
        size = header.bytes // rows
        data = torch.empty(count * size, dtype=torch.uint8)
        _read_into(self.root / header.shard, header.begin + first * size, data)
        return data.view(DTYPES[header.dtype]).reshape(count, header.parameters // rows)


def _read_into(path: Path, begin: int, data: Tensor) -> None:
    """Fill u8 [n] with the file's bytes from `begin`."""
    left = memoryview(data.numpy().data)
    with path.open("rb", buffering=0) as f:
        f.seek(begin)
        while left:
            if not (read := f.readinto(left)):
                raise InputError(f"{path}: truncated while it was read")
            left = left[read:]
