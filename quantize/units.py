"""What the written checkpoint is made of: a unit of tensors at a time, in the source's order.

A matrix becomes NVFP4 or FP8 under the names of `onboard.quantize.layouts`; every other tensor is
copied byte for byte, or written in bf16 where its source's format is none that engines read here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from onboard.checkpoint import fp8, nvfp4
from onboard.checkpoint.formats import Weight
from onboard.checkpoint.headers import Header
from onboard.checkpoint.matrices import Group, Matrix
from onboard.checkpoint.reader import DTYPES, Reader
from onboard.checkpoint.reciprocal import invertible
from onboard.checkpoint.writer import Chunks, Spec, Unit, copy_bytes, tensor_bytes
from onboard.errors import InputError
from onboard.quantize.layers import Layers
from onboard.quantize.layouts import LAYOUTS, Format, check_formats, format_of
from onboard.quantize.packing import (
    Notes,
    Packed,
    describe,
    from_layers,
    from_mxfp4,
    round_fp8,
    round_nvfp4,
)
from onboard.recipe import Quantize


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
        """Return NVFP4's `input_scale` f32 []: the range over 6 * 448, made invertible."""
        return invertible(nvfp4.tensor_scale(self._read(f"{module}.range")))

    def fp8_input_scale(self, module: str) -> Tensor:
        """Return FP8's `input_scale` f32 []: the range over 448.

        Raises InputError where nothing was measured: engines quantize the inputs of FP8 matrices
        with the scale in the file, always.
        """
        if f"{module}.amax" not in self._names:
            raise InputError(
                f"{module} is to be FP8, but its inputs were not measured: FP8 needs their range",
                "keep this model to NVFP4 and BF16",
            )
        return fp8.tensor_scale(self._read(f"{module}.amax"))

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
    formats: Mapping[str, str] = MappingProxyType({}),
) -> list[Unit]:
    """Return what to write, in the source's order: a unit per scale group, or per kept weight.

    `formats` holds "fp8" or "bf16" by module; all others become NVFP4. An FP8 matrix gets an
    `input_scale` whatever `params.activations` says: vLLM has no weight-only FP8 in this dialect.
    `layers` holds matrices that are rounded already, and kept weights that were trained.

    Raises InputError on formats that engines cannot read, and on an FP8 matrix without a range.
    """
    groups = list(groups)
    check_formats(groups, formats, params.layout)
    if adaptation["keeps_source_format"] and "fp8" in formats.values():
        raise InputError("this model keeps its source's own FP8; its engine reads no other beside")
    by_tensor: dict[str, list[Group]] = defaultdict(list)
    members: set[str] = set()
    kept: dict[str, list[Matrix]] = defaultdict(list)
    for group in groups:
        if format_of(group, formats) == "bf16":
            for matrix in group:
                kept[matrix.tensor].append(matrix)
        else:
            by_tensor[group[0].tensor].append(group)
            members.update(matrix.tensor for matrix in group)
    trained = layers.replaced if layers else {}
    quantized = _Quantized(source, activations, params, layers, formats)
    units: list[Unit] = []
    for name, weight in source.weights.items():
        if name in by_tensor:
            units += [quantized.unit(group) for group in by_tensor[name]]
        elif name not in members:
            as_stored = weight.scheme == "plain" or adaptation["keeps_source_format"]
            said = {m.module: describe(m, "bf16") for m in kept[name]}
            units += _kept(source, weight, as_stored, trained.get(name), said)
    return [*units, *(_scale(name, scale) for name, scale in activations.cache_scales().items())]


def _scale(name: str, scale: Tensor) -> Unit:
    return Unit((Spec(name, "F32", ()),), lambda notes: [tensor_bytes(scale)])


def _kept(
    source: Reader, weight: Weight, as_stored: bool, trained: Tensor | None, said: Notes
) -> list[Unit]:
    """Return a weight that stays: as it was trained, byte for byte, or decoded to bf16.

    `said` are the notes of matrices in it that could have been quantized.
    """
    if trained is not None:
        dtype = weight.dtype if weight.scheme == "plain" else "BF16"
        return [_made(Spec(weight.name, dtype, weight.shape), said, lambda: trained)]
    if as_stored:
        return [_copied(source, header, said) for header in weight.parts.values()]
    spec = Spec(weight.name, "BF16", weight.shape)
    return [_made(spec, said, lambda: source.weight(weight.name))]


def _copied(source: Reader, header: Header, said: Notes) -> Unit:
    def make(notes: Notes) -> Iterable[Chunks]:
        notes.update(said)
        yield copy_bytes(source.root, header)

    return Unit((Spec(header.name, header.dtype, header.shape),), make)


def _made(spec: Spec, said: Notes, values: Callable[[], Tensor]) -> Unit:
    def make(notes: Notes) -> Iterable[Chunks]:
        notes.update(said)
        tensor = values()
        assert tensor.shape == spec.shape, f"{spec.name}: {list(tensor.shape)}"
        yield tensor_bytes(tensor.to(DTYPES[spec.dtype]))

    return Unit((spec,), make)


@dataclass(frozen=True)
class _Quantized:
    """Makes the unit of a group: its matrices rounded, and stored as the layout says."""

    source: Reader
    activations: Activations
    params: Quantize
    layers: Layers | None
    formats: Mapping[str, str]

    def unit(self, group: Group) -> Unit:
        form, layout = format_of(group, self.formats), LAYOUTS[self.params.layout]
        quantizes_inputs = form == "fp8" or self.params.activations == "nvfp4"

        def make(notes: Notes) -> Iterable[Chunks]:
            for matrix, packed, scale in self._pack(group, form, notes):
                yield from packed
                yield tensor_bytes(layout.scalar(scale))
                if quantizes_inputs:
                    yield tensor_bytes(layout.scalar(self._input_scale(matrix, form)))

        specs = (spec for m in group for spec in layout.specs(m, form, quantizes_inputs))
        return Unit(tuple(specs), make)

    def _pack(self, group: Group, form: Format, notes: Notes) -> Packed:
        if self.layers is not None and group[0].module in self.layers:
            return from_layers(self.layers, group, form, notes)
        if form == "fp8":
            return round_fp8(self.source, group, notes)
        if {self.source.weights[matrix.tensor].scheme for matrix in group} == {"mxfp4"}:
            return from_mxfp4(self.source, group, notes)
        moment, method = self.activations.second_moment, self.params.method
        return round_nvfp4(self.source, group, method, moment, notes)

    def _input_scale(self, matrix: Matrix, form: Format) -> Tensor:
        if form == "fp8":
            return self.activations.fp8_input_scale(matrix.module)
        return self.activations.input_scale(matrix.module)
