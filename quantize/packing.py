"""Matrices on their way from the source to the bytes that are written: a group at a time.

Each function yields, per matrix of a group, the chunks of `weight` (and, in NVFP4, of
`weight_scale`), and the group's fp32 scale []. `notes` are what the report says of a module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from onboard.checkpoint import fp8, mxfp4, nvfp4
from onboard.checkpoint.matrices import Group, Matrix
from onboard.checkpoint.reader import Reader
from onboard.checkpoint.writer import Chunks, tensor_bytes
from onboard.hardware import device_kind
from onboard.quantize import rounding
from onboard.quantize.layers import Layers
from onboard.quantize.layouts import Format

SLICE_WEIGHTS = 2**23  # weights read at a time
HELD_WEIGHTS = 2**25  # groups up to this are read once; larger ones twice, for amax and to round

Notes = dict[str, Any]
Packed = Iterator[tuple[Matrix, Iterable[Chunks], Tensor]]


def round_nvfp4(
    source: Reader, group: Group, method: str, moment: Callable[[Matrix], Tensor], notes: Notes
) -> Packed:
    """Round a group with one `weight_scale_2`; `moment` gives E[x_j^2] f32 [in] of a matrix."""
    weights = _Weights(source, group)
    scale_2 = rounding.shared_scale(weights.amax(), method)
    for matrix in group:
        note = notes[matrix.module] = describe(matrix, "nvfp4")
        importance = moment(matrix).to(scale_2.device)
        yield matrix, _nvfp4(weights.slices(matrix), scale_2, method, importance, note), scale_2


def round_fp8(source: Reader, group: Group, notes: Notes) -> Packed:
    """Round a group to nearest with one `weight_scale`."""
    weights = _Weights(source, group)
    scale = fp8.tensor_scale(weights.amax())
    for matrix in group:
        note = notes[matrix.module] = describe(matrix, "fp8")
        yield matrix, (_fp8(weights.slices(matrix), scale, note),), scale


def from_layers(layers: Layers, group: Group, form: Format, notes: Notes) -> Packed:
    """Take what was rounded earlier."""
    for matrix in group:
        notes[matrix.module] = {**describe(matrix, form), **layers.notes[matrix.module]}
        *packed, scale = layers.parts(matrix.module).values()
        assert len(packed) == (1 if form == "fp8" else 2), f"{matrix.module} is no {form}"
        yield matrix, map(tensor_bytes, packed), scale


def from_mxfp4(source: Reader, group: Group, notes: Notes) -> Packed:
    """Keep the values of an MXFP4 source; only blocks beyond E4M3's range are rounded."""
    stored = [source.mxfp4(m.tensor, m.expert, m.outputs) for m in group]
    found = mxfp4.to_nvfp4(stored)
    for at, matrix in enumerate(group):
        weight, scale = found.weights[at], found.weight_scales[at]
        exact = mxfp4.dequantize(*stored[at])
        kept = nvfp4.dequantize(weight, scale, found.weight_scale_2)
        error, norm = float((kept - exact).norm()), float(exact.norm())
        notes[matrix.module] = {
            **describe(matrix, "nvfp4"),
            "relative_error": round(error / norm, 6) if norm else 0.0,
            "rounded_blocks": found.rounded_blocks,
        }
        yield matrix, map(tensor_bytes, (weight, scale)), found.weight_scale_2


def describe(matrix: Matrix, form: Format) -> dict[str, Any]:
    return {"role": matrix.role, "shape": list(matrix.shape), "format": form}


def _nvfp4(
    slices: Iterable[Tensor], scale_2: Tensor, method: str, moment: Tensor, note: Notes
) -> Iterable[Chunks]:
    """Yield weight and weight_scale; `note` is complete after the first."""
    scales: list[Tensor] = []

    def weight() -> Chunks:
        error = norm = 0.0
        for rows in slices:
            packed = rounding.round_rows(rows, scale_2, method, moment)
            scales.append(packed.weight_scale)
            error, norm = error + packed.error, norm + packed.norm
            yield from tensor_bytes(packed.weight)
        note["relative_error"] = round((error / norm) ** 0.5, 6) if norm else 0.0

    yield weight()
    yield tensor_bytes(torch.cat(scales))


def _fp8(slices: Iterable[Tensor], scale: Tensor, note: Notes) -> Chunks:
    error = norm = 0.0
    for rows in slices:
        exact = rows.float()
        codes = fp8.quantize(exact, scale)
        error += float((fp8.dequantize(codes, scale) - exact).square().sum())
        norm += float(exact.square().sum())
        yield from tensor_bytes(codes)
    note["relative_error"] = round((error / norm) ** 0.5, 6) if norm else 0.0


class _Weights:
    """The matrices of a group, read in slices of rows; small groups are read once and kept."""

    def __init__(self, source: Reader, group: Group) -> None:
        self.source, self.group = source, group
        keep = sum(matrix.parameters for matrix in group) <= HELD_WEIGHTS
        self.held = {matrix.module: list(self._read(matrix)) for matrix in group} if keep else {}

    def slices(self, matrix: Matrix) -> Iterable[Tensor]:
        """Return [rows, in] on the compute device, in order."""
        return self.held.get(matrix.module) or self._read(matrix)

    def amax(self) -> Tensor:
        """Return the largest magnitude of all, f32 []."""
        ends = [torch.aminmax(rows) for m in self.group for rows in self.slices(m)]
        return torch.stack([end.abs().float() for pair in ends for end in pair]).amax()

    def _read(self, matrix: Matrix) -> Iterator[Tensor]:
        step = max(1, SLICE_WEIGHTS // matrix.shape[1])
        for first in range(0, matrix.shape[0], step):
            part = replace(
                matrix,
                first=matrix.first + first * matrix.step,
                shape=(min(step, matrix.shape[0] - first), matrix.shape[1]),
            )
            rows = self.source.rows(part.tensor, part.expert, part.outputs, part.transposed)
            yield rows.to(device_kind())
