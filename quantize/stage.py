"""Stage quantize: stream the source into an NVFP4 checkpoint under its own tensor names.

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
from onboard.checkpoint.matrices import Group, Matrix, scale_groups
from onboard.checkpoint.models import compute_dtype, open_reference
from onboard.checkpoint.reader import Reader
from onboard.checkpoint.writer import (
    Chunks,
    Spec,
    Unit,
    copy_bytes,
    move_finished,
    tensor_bytes,
    write,
)
from onboard.hardware import cores, device_kind
from onboard.pipeline import Job
from onboard.quantize import config, rounding
from onboard.quantize.calibrate import document_batches
from onboard.quantize.sequential import Layers, compensate
from onboard.recipe import Quantize
from onboard.source import root
from onboard.store import write_json

SLICE_WEIGHTS = 2**23  # weights read at a time
HELD_WEIGHTS = 2**25  # groups up to this are read once; larger ones twice, for amax and to round


def run(job: Job[Quantize]) -> None:
    """Write `checkpoint/` and `tensors.json`; shards that a killed run finished are kept."""
    source = Reader.open(root(job.inputs["source"]))
    adaptation = job.inputs["adapt"].json("adaptation.json")
    groups = scale_groups(adaptation)
    params = job.params
    if adaptation["architecture"] is None:  # calibrate ran no forward pass, and said so
        params = params.model_copy(update={"activations": "none"})
    ranges = Activations(job.inputs["calibrate"].path / "activations.safetensors")
    layers = None
    if params.rounding == "sequential" and adaptation["architecture"] is not None:
        layers = _compensate(job, source, groups, ranges)
    units = plan_units(source, adaptation, groups, ranges, params, layers)
    written = write(
        units,
        job.scratch,
        job.params.shard_bytes,
        lambda done, total: job.progress("writing", done >> 20, total >> 20, "MiB"),
        workers=job.params.workers or cores(),
    )
    checkpoint = job.out / "checkpoint"
    checkpoint.mkdir()
    move_finished(written, job.scratch, checkpoint)
    config.write(
        source.root, checkpoint, adaptation, params.activations, bool(ranges.cache_scales())
    )
    job.known_digests.update({f"checkpoint/{n}": sha for n, sha in written.digests.items()})
    write_json(job.out / "tensors.json", written.notes)
    write_json(job.out / "metrics.json", metrics(adaptation, groups, checkpoint, written.notes))


def _compensate(
    job: Job[Quantize], source: Reader, groups: Iterable[Group], ranges: Activations
) -> Layers:
    """Round layer after layer on the calibration documents; what MXFP4 holds exactly stays."""
    folder = job.scratch / "layers"
    folder.mkdir(exist_ok=True)
    rows = job.inputs["data"].lines("calibration.jsonl")[: job.params.documents]
    documents = [row["ids"] for row in rows]
    inexact = [g for g in groups if {source.weights[m.tensor].scheme for m in g} != {"mxfp4"}]
    compensate(
        open_reference(source.root, compute_dtype(), resident=False),
        inexact,
        document_batches(documents, job.params.batch_size),
        ranges.input_scale if job.params.activations == "nvfp4" else None,
        folder,
        lambda done, total: job.progress("rounding", done, total, "layers"),
    )
    return Layers(folder)


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
    scale_2 = rounding.shared_scale(weights.amax(), params.rounding)
    for matrix in group:
        moment = activations.second_moment(matrix).to(scale_2.device)
        note = notes[matrix.module] = _note(matrix)
        slices = weights.slices(matrix)
        yield matrix, _round(slices, scale_2, params.rounding, moment, note)


def _from_layers(layers: Layers, group: Group, notes: dict[str, Any]) -> Parts:
    for matrix in group:
        notes[matrix.module] = {**_note(matrix), **layers.notes[matrix.module]}
        yield matrix, map(tensor_bytes, layers.parts(matrix.module))


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


def metrics(
    adaptation: Mapping[str, Any],
    groups: Iterable[Group],
    checkpoint: Path,
    notes: Mapping[str, Mapping[str, Any]],
) -> dict[str, float]:
    """Return what the written files hold, read back from their headers."""
    reader = Reader.open(checkpoint)
    stored: dict[str, int] = defaultdict(int)
    for module, note in notes.items():
        if reader.is_nvfp4(module) and reader.headers[f"{module}.weight"].dtype == "U8":
            stored[note["role"]] += 2 * reader.headers[f"{module}.weight"].parameters
    expected: Mapping[str, float] = adaptation["expected_share"]
    total: Mapping[str, int] = adaptation["linear_parameters_by_role"]
    shares = {role: stored[role] / total[role] for role in expected}
    packed = {matrix.tensor for group in groups for matrix in group}
    lost = [n for n in adaptation["tensors"] if n not in packed and n not in reader.headers]
    lost += [m.module for g in groups for m in g if not reader.is_nvfp4(m.module)]
    errors = torch.tensor([note["relative_error"] for note in notes.values()] or [0.0])
    return {
        "weights_quantized_share": sum(stored.values()) / adaptation["linear_parameters"],
        **{f"quantized_share_{role}": share for role, share in shares.items()},
        "share_missing": max(
            (max(0.0, share - shares[role]) for role, share in expected.items()), default=0.0
        ),
        "tensors_lost": len(lost),
        "tensors_written": len(reader.headers),
        "checkpoint_bytes": sum(p.stat().st_size for p in checkpoint.glob("*.safetensors")),
        "relative_error_max": float(errors.max()),
        "relative_error_mean": float(errors.mean()),
    }
