"""What the written checkpoint is made of: a unit of tensors at a time, in the source's order.

A matrix that is quantized becomes `weight` u8, `weight_scale` E4M3, `weight_scale_2` and
`input_scale` f32 (the ModelOpt layout); every other tensor is copied byte for byte.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from onboard.checkpoint import mxfp4, nvfp4
from onboard.checkpoint.formats import Weight
from onboard.checkpoint.headers import Header
from onboard.checkpoint.matrices import Group, Matrix
from onboard.checkpoint.reader import Reader
from onboard.checkpoint.writer import Chunks, Spec, Unit, copy_bytes, tensor_bytes
from onboard.hardware import device_kind
from onboard.quantize import rounding
from onboard.quantize.layers import Layers
from onboard.recipe import Quantize

SLICE_WEIGHTS = 2**23  # weights read at a time
HELD_WEIGHTS = 2**25  # groups up to this are read once; larger ones twice, for amax and to round


@dataclass(frozen=True)
class Activations:
    """What calibrate measured, by module; read from its file when asked for."""

    path: Path

    @cached_property
    def _names(self) -> frozenset[str]:
        with safe_open(self.path, framework="pt") as f:
            return frozenset(f.keys())

    def _read(self, name: str) -> Tensor:
        with safe_open(self.path, framework="pt") as f:
            tensor: Tensor = f.get_tensor(name)
        return tensor

    def input_scale(self, module: str) -> Tensor:
        """Return `input_scale` f32 []: the range over 6 * 448."""
        return nvfp4.tensor_scale(self._read(f"{module}.amax"))

    def cache_scales(self) -> dict[str, Tensor]:
        """Return the scales of an FP8 KV cache, f32 [], by the name that the checkpoint has."""
        return {
            n: self._read(n) for n in sorted(self._names) if n.endswith((".k_scale", ".v_scale"))
        }

    def second_moment(self, matrix: Matrix) -> Tensor:
        """Return E[x_j^2], f32 [in]; ones where nothing was measured."""
        if not self._names:
            return torch.ones(matrix.shape[1])
        return self._read(f"{matrix.module}.second_moment")


def plan_units(
    source: Reader,
    adaptation: Mapping[str, Any],
    groups: Iterable[Group],
    activations: Activations,
    params: Quantize,
    layers: Layers | None = None,
) -> list[Unit]:
    """Return what to write, in the source's order: a unit per scale group, or per kept weight.

    `layers` holds matrices that are rounded already.
    """
    by_tensor: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        by_tensor[group[0].tensor].append(group)
    members = {matrix.tensor for tensor in by_tensor for g in by_tensor[tensor] for matrix in g}
    units: list[Unit] = []
    for name, weight in source.weights.items():
        if name in by_tensor:
            units += [_quantized(source, g, activations, params, layers) for g in by_tensor[name]]
        elif name not in members:
            copied = weight.scheme == "plain" or adaptation["keeps_source_format"]
            headers = weight.parts.values()
            units += [_copied(source, h) for h in headers] if copied else [_decoded(source, weight)]
    return [*units, *(_scale(name, scale) for name, scale in activations.cache_scales().items())]


def _scale(name: str, scale: Tensor) -> Unit:
    return Unit((Spec(name, "F32", ()),), lambda notes: [tensor_bytes(scale)])


def _copied(source: Reader, header: Header) -> Unit:
    def make(notes: dict[str, Any]) -> Iterable[Chunks]:
        yield copy_bytes(source.root, header)

    return Unit((Spec(header.name, header.dtype, header.shape),), make)


def _decoded(source: Reader, weight: Weight) -> Unit:
    """A weight that stays, but whose format the written checkpoint does not have: bf16."""

    def make(notes: dict[str, Any]) -> Iterable[Chunks]:
        yield tensor_bytes(source.weight(weight.name).to(torch.bfloat16))

    return Unit((Spec(weight.name, "BF16", weight.shape),), make)


def _quantized(
    source: Reader,
    group: Group,
    activations: Activations,
    params: Quantize,
    layers: Layers | None,
) -> Unit:
    schemes = {source.weights[matrix.tensor].scheme for matrix in group}

    def convert(notes: dict[str, Any]) -> Parts:
        if layers is not None and group[0].module in layers:
            return _from_layers(layers, group, notes)
        if schemes == {"mxfp4"}:
            return _from_mxfp4(source, group, notes)
        return _rounded(source, group, activations, params, notes)

    def make(notes: dict[str, Any]) -> Iterable[Chunks]:
        for matrix, parts in convert(notes):
            yield from parts
            if params.activations == "nvfp4":
                yield tensor_bytes(activations.input_scale(matrix.module))

    return Unit(tuple(spec for matrix in group for spec in _specs(matrix, params)), make)


Parts = Iterator[tuple[Matrix, Iterable[Chunks]]]  # weight, weight_scale, weight_scale_2


def _rounded(
    source: Reader,
    group: Group,
    activations: Activations,
    params: Quantize,
    notes: dict[str, Any],
) -> Parts:
    weights = _Weights(source, group)
    scale_2 = rounding.shared_scale(weights.amax(), params.method)
    for matrix in group:
        moment = activations.second_moment(matrix).to(scale_2.device)
        note = notes[matrix.module] = _note(matrix)
        slices = weights.slices(matrix)
        yield matrix, _round(slices, scale_2, params.method, moment, note)


def _from_layers(layers: Layers, group: Group, notes: dict[str, Any]) -> Parts:
    for matrix in group:
        notes[matrix.module] = {**_note(matrix), **layers.notes[matrix.module]}
        yield matrix, map(tensor_bytes, layers.parts(matrix.module).values())


def _from_mxfp4(source: Reader, group: Group, notes: dict[str, Any]) -> Parts:
    """Keep the values of an MXFP4 source; only blocks beyond E4M3's range are rounded."""
    stored = [source.mxfp4(m.tensor, m.expert, m.outputs) for m in group]
    found = mxfp4.to_nvfp4(stored)
    for at, matrix in enumerate(group):
        weight, scale = found.weights[at], found.weight_scales[at]
        exact = mxfp4.dequantize(*stored[at])
        kept = nvfp4.dequantize(weight, scale, found.weight_scale_2)
        error, norm = float((kept - exact).norm()), float(exact.norm())
        notes[matrix.module] = {
            **_note(matrix),
            "relative_error": round(error / norm, 6) if norm else 0.0,
            "rounded_blocks": found.rounded_blocks,
        }
        yield matrix, map(tensor_bytes, (weight, scale, found.weight_scale_2))


def _note(matrix: Matrix) -> dict[str, Any]:
    return {"role": matrix.role, "shape": list(matrix.shape)}


def _round(
    slices: Iterable[Tensor], scale_2: Tensor, method: str, moment: Tensor, note: dict[str, Any]
) -> Iterable[Chunks]:
    """Yield weight, weight_scale and weight_scale_2; `note` is complete after the first."""
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
    yield tensor_bytes(scale_2)


def _specs(matrix: Matrix, params: Quantize) -> list[Spec]:
    out, width = matrix.shape
    specs = [
        Spec(f"{matrix.module}.weight", "U8", (out, width // 2)),
        Spec(f"{matrix.module}.weight_scale", "F8_E4M3", (out, width // nvfp4.BLOCK)),
        Spec(f"{matrix.module}.weight_scale_2", "F32", ()),
    ]
    if params.activations == "nvfp4":
        specs.append(Spec(f"{matrix.module}.input_scale", "F32", ()))
    return specs


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
