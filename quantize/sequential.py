"""Round layer after layer on the quantized model's own activations, so that errors cancel.

Two kinds of passes go through the source in lock step: the unquantized ones say what every matrix
should have got, the others what it gets once everything before it is rounded. Each matrix is moved
towards the wanted outputs and rounded with compensation (`onboard.quantize.compensation`), before
the ones behind it are looked at. Without propagation there are unquantized passes alone, and every
matrix is rounded for what it gets there: plain GPTQ. Memory: a layer, and what enters it. A layer
that an earlier run finished is loaded from scratch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from onboard.checkpoint import fp8, taps
from onboard.checkpoint.matrices import Group, Matrix
from onboard.checkpoint.models import InputQuantizer, Runner
from onboard.checkpoint.streaming import Pass, pause, visit_layers
from onboard.checkpoint.taps import Point
from onboard.hardware import device_kind
from onboard.quantize import rounding
from onboard.quantize.compensation import Inputs, corrected, rounded
from onboard.quantize.grids import Fp8, Grid, NvFp4, Packed, dequantize
from onboard.quantize.layers import save_layer
from onboard.quantize.views import Views

SHRINKAGE_TOKENS = 256  # weight of the layer's mean in the statistics of an expert
JUDGING_TOKENS = 32  # the same among the tokens that judge
BATCH_WEIGHTS = 2**26  # of the statistics of experts that are rounded at once
JUDGE = 4  # every so many-th pass judges what the others fit

Seen = Mapping[int, Tensor]  # what entered [tokens, in] f32, by pass
Formats = Mapping[str, str]  # "fp8" by module; all others become NVFP4


class Flow:
    """What the taps do with what enters a matrix; passes run one after the other.

    In a pass of the unquantized model they keep the first input of every step: the places that read
    one tensor, or a layer's experts. In a pass of the quantized model they quantize it where the
    engine will, and the pass pauses there when it is `watched`, until its matrices are rounded;
    watched experts are seen in a trial of the whole layer.
    """

    def __init__(self, quantize: InputQuantizer) -> None:
        self.quantize = quantize
        self.quantized = False
        self.keeps_experts = False  # in unquantized passes
        self.number = 0  # of the pass that runs
        self.watched: frozenset[Point] = frozenset()
        self.seen: dict[Point, dict[int, Tensor]] = defaultdict(dict)
        self.steps: dict[Any, list[Point]] = {}
        self._step: list[Point] = []
        self._last: Tensor | None = None

    def __call__(self, point: Point, x: Tensor) -> Tensor | None:
        if not self.quantized:
            self._note(point, x)
            return None
        found = self.as_served(point, x)
        if point in self.watched:
            self._keep(point, found)
            if point.expert is None:
                pause()
        return found

    def as_served(self, point: Point, x: Tensor) -> Tensor:
        """Return what an engine multiplies with."""
        found = self.quantize(point, x)
        return x if found is None else found

    def _note(self, point: Point, x: Tensor) -> None:
        if point.expert is not None:
            self._step = self.steps.setdefault(point.parameter, [])
            if self.keeps_experts:
                self._keep(point, x)
        elif x is not self._last:
            self._step = self.steps.setdefault(point, [])
            self._keep(point, x)
        if point not in self._step:
            self._step.append(point)
        self._last = x

    def _keep(self, point: Point, x: Tensor) -> None:
        rows = x.flatten(0, -2).float()
        held = self.seen[point].get(self.number)
        self.seen[point][self.number] = rows if held is None else torch.cat([held, rows])

    def take(self) -> dict[Point, dict[int, Tensor]]:
        """Return what was kept, by point and pass, and forget it."""
        found, self.seen = dict(self.seen), defaultdict(dict)
        return found

    def take_steps(self, points: Iterable[Point]) -> list[list[Point]]:
        """Return the steps in order, experts that no token reached among those of their layer."""
        steps, self.steps, self._last = self.steps, {}, None
        noted = {point for step in steps.values() for point in step}
        for point in points:
            if point not in noted:
                steps.setdefault(point.parameter, []).append(point)
        return list(steps.values())


@dataclass(frozen=True)
class Work:
    """A model, the matrices to round by place, their groups, and where a finished layer goes."""

    view: Views
    places: Mapping[Point, Sequence[Matrix]]
    groups: Mapping[str, Group]  # by module
    formats: Formats
    flow: Flow
    layers: str  # what all layers' names begin with
    scratch: Path

    def file(self, layer: int) -> Path:
        return self.scratch / f"layer-{layer:05d}.safetensors"

    def points(self, layer: int) -> list[Point]:
        prefix = f"{self.layers}.{layer}."
        return [point for point in self.places if point.parameter.startswith(prefix)]

    def grid(self, weights: Tensor, module: str) -> Grid:
        """Return the grid of matrices [B, out, in], each a group with a scale of its own."""
        amax = weights.abs().amax((1, 2))
        if self.formats.get(module) == "fp8":
            return Fp8(torch.stack([fp8.tensor_scale(each) for each in amax]))
        scales = [rounding.shared_scale(each, "sweep") for each in amax]
        return NvFp4(torch.stack(scales))


@dataclass
class Layer:
    """What a layer's file will hold."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    notes: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, module: str, parts: Packed, weight: Tensor, **notes: Any) -> None:
        """Add a packed matrix; `weight` [out, in] is what it stands for."""
        norm, error = float(weight.norm()), float((dequantize(parts) - weight).norm())
        self.notes[module] = {"relative_error": round(error / norm, 6) if norm else 0.0, **notes}
        self.tensors |= {f"{module}.{name}": part.cpu().clone() for name, part in parts.items()}

    def values(self, module: str) -> Tensor:
        """Return a matrix as it is stored, f32 [out, in]."""
        names = ("weight", "weight_scale", "weight_scale_2")
        held = {n: self.tensors[f"{module}.{n}"] for n in names if f"{module}.{n}" in self.tensors}
        return dequantize(held)


def compensate(
    runner: Runner,
    groups: Iterable[Group],
    batches: Sequence[Tensor],
    input_scale: Callable[[str], Tensor | None],
    scratch: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
    formats: Formats | None = None,
    propagate: bool = True,
) -> None:
    """Write `layer-N.safetensors` for every layer, with what `Layers` reads, into `scratch`.

    `batches` are ids [documents, tokens]; `input_scale` gives that of a module whose inputs an
    engine quantizes, or None. `groups` are those to round, to NVFP4 or what `formats` says.
    """
    formats = formats or {}
    by_module = {matrix.module: group for group in groups for matrix in group}
    every = [matrix for group in by_module.values() for matrix in group]
    places = taps.points(runner.skeleton, dict.fromkeys(every))
    flow = Flow(_quantizer(places, input_scale, formats))
    flow.keeps_experts = not propagate
    layers = runner.skeleton.prefix
    work = Work(Views.of(runner), places, by_module, formats, flow, layers, scratch)
    taps.attach(runner.skeleton.model, places, flow)

    def forward(batch: Tensor) -> Callable[[], None]:
        def run() -> None:
            runner.model(batch.to(device_kind()), use_cache=False, logits_to_keep=1)

        return run

    def visit(layer: int, runs: Sequence[Pass[None]]) -> None:
        _round_layer(work, layer, runs[: len(batches)], runs[len(batches) :])
        progress(layer + 1, len(runner.skeleton.layers))

    passes = [forward(batch) for batch in batches] * (2 if propagate else 1)
    visit_layers(runner.skeleton, runner.read, passes, visit)


def _quantizer(
    places: Mapping[Point, Sequence[Matrix]],
    input_scale: Callable[[str], Tensor | None],
    formats: Formats,
) -> InputQuantizer:
    found = {point: input_scale(held[0].module) for point, held in places.items()}
    scales = {point: scale for point, scale in found.items() if scale is not None}
    coarse = {p for p in scales if formats.get(places[p][0].module) == "fp8"}
    return InputQuantizer(scales, coarse)


def _round_layer(
    work: Work, layer: int, wanted: Sequence[Pass[None]], quantized: Sequence[Pass[None]]
) -> None:
    flow, file = work.flow, work.file(layer)
    flow.quantized = False
    for flow.number, run in enumerate(wanted):
        run.go_on()
    unquantized, steps = flow.take(), flow.take_steps(work.points(layer))
    if not quantized:
        if not file.exists():
            _round_steps(work, steps, unquantized, file)
        return
    flow.quantized, done = True, file.exists()
    result = Layer(load_file(file)) if done else Layer()
    for step in steps:
        if not done:
            flow.watched = frozenset(step if step[0].expert is not None else step[:1])
            for flow.number, run in enumerate(quantized):
                run.try_out()
            _round_step(work, step, flow.take(), unquantized, result)
        for point in step:
            for matrix in work.places[point]:
                work.view(point, matrix).copy_(result.values(matrix.module))
    if not done:
        save_layer(file, result.tensors, result.notes)
    flow.watched = frozenset()
    for run in quantized:
        run.go_on()


def _round_steps(
    work: Work,
    steps: Iterable[Sequence[Point]],
    unquantized: Mapping[Point, Seen],
    file: Path,
) -> None:
    """Round a layer for the inputs of the unquantized model, as an engine quantizes them."""
    result = Layer()
    for step in steps:
        came = {
            point: {n: work.flow.as_served(point, x) for n, x in unquantized[point].items()}
            for point in step
            if point in unquantized
        }
        _round_step(work, step, came, came, result)
    save_layer(file, result.tensors, result.notes)


def _round_step(
    work: Work,
    step: Sequence[Point],
    seen: Mapping[Point, Seen],
    wanted: Mapping[Point, Seen],
    result: Layer,
) -> None:
    if step[0].expert is None:
        _round_dense(work, step, seen[step[0]], wanted[step[0]], result)
    else:
        _round_experts(work, step, seen, result)


def _round_dense(
    work: Work, step: Sequence[Point], seen: Seen, wanted: Seen, result: Layer
) -> None:
    """Round matrices that read one input, moved towards the wanted outputs."""
    names = [matrix.module for point in step for matrix in work.places[point]]
    weights = [work.view(point, m).float() for point in step for m in work.places[point]]
    fitted, judges = (_inputs(part, seen, wanted) for part in _parted(seen))
    moved = dict(zip(names, corrected(weights, fitted, judges), strict=True))
    for group in {id(work.groups[m]): work.groups[m] for m in names}.values():
        stacked = torch.cat([moved[matrix.module][0] for matrix in group])[None]
        grid = work.grid(stacked, group[0].module)
        found = rounded(stacked, fitted.hessian[None], judges.hessian[None], grid)
        parts, first = grid.pack(found.values, found.steps, 0), 0
        for matrix in group:
            rows = slice(first, first := first + matrix.shape[0])
            weight, share = moved[matrix.module]
            notes = {"correction": round(share, 4), "damping": float(found.dampings)}
            result.add(matrix.module, _rows(parts, rows), weight, **notes)


def _inputs(passes: Sequence[int], seen: Seen, wanted: Seen) -> Inputs:
    came = torch.cat([seen[n] for n in passes])
    return Inputs.of(came, None if wanted is seen else torch.cat([wanted[n] for n in passes]))


def _rows(parts: Packed, rows: slice) -> Packed:
    return {name: part[rows] if part.ndim else part for name, part in parts.items()}


def _parted(seen: Iterable[int]) -> tuple[list[int], list[int]]:
    """Return the passes to fit on, and those that judge; both are all where there is one."""
    every = sorted(seen)
    fitted = [n for at, n in enumerate(every) if at % JUDGE]
    return fitted or every, [n for at, n in enumerate(every) if not at % JUDGE]


def _round_experts(
    work: Work, step: Sequence[Point], seen: Mapping[Point, Seen], result: Layer
) -> None:
    """Round a layer's experts, where they are: routing may send them other tokens than before.

    An expert's H is shrunk towards the layer's mean by its tokens; that mean stands for one unseen.
    """
    by_shape: dict[tuple[int, int], list[tuple[Point, Group]]] = defaultdict(list)
    for point in step:
        held = {id(work.groups[m.module]): work.groups[m.module] for m in work.places[point]}
        for group in held.values():
            shape = (sum(matrix.shape[0] for matrix in group), group[0].shape[1])
            by_shape[shape].append((point, group))
    passes = sorted({n for parts in seen.values() for n in parts})
    parts = [frozenset(part) for part in _parted(passes)]
    for (height, width), members in by_shape.items():
        means = [_mean_gram(seen.values(), part, width) for part in parts]
        size = max(1, BATCH_WEIGHTS // max(width * width, height * width))
        for first in range(0, len(members), size):
            _round_batch(work, members[first : first + size], seen, parts, means, result)


def _mean_gram(seen: Iterable[Seen], passes: frozenset[int], width: int) -> Tensor:
    """Return X̂ᵀX̂ a token of all experts together, f32 [in, in]; the identity without tokens."""
    total, tokens = torch.zeros(width, width, device=device_kind()), 0
    for rows in (rows for parts in seen for n, rows in parts.items() if n in passes):
        total += rows.T @ rows
        tokens += len(rows)
    return total / tokens if tokens else torch.eye(width, device=device_kind())


def _round_batch(
    work: Work,
    members: Sequence[tuple[Point, Group]],
    seen: Mapping[Point, Seen],
    parts: Sequence[frozenset[int]],
    means: Sequence[Tensor],
    result: Layer,
) -> None:
    """Round experts of one shape, each for its own tokens."""
    weights = torch.stack([_stacked(work, *member) for member in members])
    pulls = (SHRINKAGE_TOKENS, JUDGING_TOKENS)
    fitted, judges = (
        torch.stack([_gram(seen.get(point, {}), part, pull * mean) for point, _ in members])
        for part, mean, pull in zip(parts, means, pulls, strict=True)
    )
    grid = work.grid(weights, members[0][1][0].module)
    found = rounded(weights, fitted, judges, grid)
    for at, (point, group) in enumerate(members):
        packed, first = grid.pack(found.values, found.steps, at), 0
        notes = {
            "correction": 0.0,
            "damping": float(found.dampings[at]),
            "tokens": sum(len(rows) for rows in seen.get(point, {}).values()),
        }
        for matrix in group:
            rows = slice(first, first := first + matrix.shape[0])
            result.add(matrix.module, _rows(packed, rows), weights[at, rows], **notes)


def _stacked(work: Work, point: Point, group: Group) -> Tensor:
    return torch.cat([work.view(point, matrix).float() for matrix in group])


def _gram(seen: Seen, passes: frozenset[int], prior: Tensor) -> Tensor:
    """Return X̂ᵀX̂ f32 [in, in] of the tokens of some passes, plus a prior."""
    return sum((rows.T @ rows for n, rows in seen.items() if n in passes), prior)
