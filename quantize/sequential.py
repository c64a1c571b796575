"""Round layer after layer on the quantized model's own activations, so that errors cancel.

Two kinds of passes go through the source in lock step: the unquantized ones say what every matrix
should have got, the others what it gets once everything before it is rounded. Each matrix is moved
towards the wanted outputs and rounded with compensation (`onboard.quantize.compensation`), before
the ones behind it are looked at. Memory: a layer, and what enters it. A layer that an earlier run
finished is loaded from scratch.
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

from onboard.checkpoint import nvfp4, taps
from onboard.checkpoint.matrices import Group, Matrix
from onboard.checkpoint.models import InputQuantizer, Runner
from onboard.checkpoint.streaming import Pass, TrialEnds, visit_layers
from onboard.checkpoint.taps import Point
from onboard.hardware import device_kind
from onboard.quantize.compensation import Inputs, corrected, gptq, shared_scale
from onboard.quantize.layers import save_layer

SHRINKAGE_TOKENS = 256  # weight of the layer's mean in the statistics of an expert
PARTS = ("weight", "weight_scale", "weight_scale_2")


class Flow:
    """What the taps do with what enters a matrix; passes run one after the other.

    In a pass of the unquantized model they keep the first input of every step: the places that read
    one tensor, or a layer's experts. In a pass of the quantized model they quantize it where the
    engine will; a trial ends when what is `watched` was seen.
    """

    def __init__(self, scales: Mapping[Point, Tensor]) -> None:
        self.quantize = InputQuantizer(scales) if scales else None
        self.quantized = False
        self.watched: frozenset[Point] = frozenset()
        self.seen: dict[Point, list[Tensor]] = defaultdict(list)
        self.steps: dict[Any, list[Point]] = {}
        self._step: list[Point] = []
        self._last: Tensor | None = None

    def __call__(self, point: Point, x: Tensor) -> Tensor | None:
        if not self.quantized:
            self._note(point, x)
            return None
        found = x if self.quantize is None else self.quantize(point, x)
        assert found is not None
        if point in self.watched:
            self.seen[point].append(found.flatten(0, -2).float())
            if point.expert is None:
                raise TrialEnds
        return found

    def _note(self, point: Point, x: Tensor) -> None:
        if point.expert is not None:
            self._step = self.steps.setdefault(point.parameter, [])
        elif x is not self._last:
            self._step = self.steps.setdefault(point, [])
            self.seen[point].append(x.flatten(0, -2).float())
        if point not in self._step:
            self._step.append(point)
        self._last = x

    def take(self) -> dict[Point, list[Tensor]]:
        """Return what was kept, [tokens, in] a pass, by point, and forget it."""
        found, self.seen = dict(self.seen), defaultdict(list)
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

    runner: Runner
    places: Mapping[Point, Sequence[Matrix]]
    groups: Mapping[str, Group]  # by module
    flow: Flow
    scratch: Path
    offsets: dict[tuple[str, str], int] = field(default_factory=dict)  # see `_view`

    def file(self, layer: int) -> Path:
        return self.scratch / f"layer-{layer:05d}.safetensors"

    def points(self, layer: int) -> list[Point]:
        prefix = f"{self.runner.skeleton.prefix}.{layer}."
        return [point for point in self.places if point.parameter.startswith(prefix)]


def compensate(
    runner: Runner,
    groups: Iterable[Group],
    batches: Sequence[Tensor],
    input_scale: Callable[[str], Tensor] | None,
    scratch: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write `layer-N.safetensors` for every layer, with what `Layers` reads, into `scratch`.

    `batches` are ids [documents, tokens]; `input_scale` gives a module's, None leaves activations.
    """
    by_module = {matrix.module: group for group in groups for matrix in group}
    every = [matrix for group in by_module.values() for matrix in group]
    places = taps.points(runner.skeleton, dict.fromkeys(every))
    scales = {}
    if input_scale is not None:
        scales = {p: input_scale(held[0].module).to(device_kind()) for p, held in places.items()}
    work = Work(runner, places, by_module, Flow(scales), scratch)
    taps.attach(runner.skeleton.model, places, work.flow)

    def forward(batch: Tensor) -> Callable[[], None]:
        def run() -> None:
            runner.model(batch.to(device_kind()), use_cache=False, logits_to_keep=1)

        return run

    def visit(layer: int, runs: Sequence[Pass[None]]) -> None:
        _round_layer(work, layer, runs[: len(batches)], runs[len(batches) :])
        progress(layer + 1, len(runner.skeleton.layers))

    passes = [forward(batch) for batch in (*batches, *batches)]
    visit_layers(runner.skeleton, runner.read, passes, visit)


def _round_layer(
    work: Work, layer: int, wanted: Sequence[Pass[None]], quantized: Sequence[Pass[None]]
) -> None:
    flow, file = work.flow, work.file(layer)
    flow.quantized = False
    for run in wanted:
        run.go_on()
    unquantized, steps = flow.take(), flow.take_steps(work.points(layer))
    flow.quantized, done = True, file.exists()
    tensors = load_file(file) if done else {}
    notes: dict[str, Any] = {}
    for step in steps:
        if not done:
            experts = step[0].expert is not None
            flow.watched = frozenset(step if experts else step[:1])
            for run in quantized:
                run.try_out()
            seen = flow.take()
            if experts:
                _round_experts(work, step, seen, tensors, notes)
            else:
                _round_dense(work, step, seen[step[0]], unquantized[step[0]], tensors, notes)
        for point in step:
            for matrix in work.places[point]:
                stored = nvfp4.dequantize(*(tensors[f"{matrix.module}.{p}"] for p in PARTS))
                _view(work, point, matrix).copy_(stored)
    if not done:
        save_layer(file, tensors, notes)
    flow.watched = frozenset()
    for run in quantized:
        run.go_on()


def _round_dense(
    work: Work,
    step: Sequence[Point],
    seen: Sequence[Tensor],
    wanted: Sequence[Tensor],
    tensors: dict[str, Tensor],
    notes: dict[str, Any],
) -> None:
    """Round matrices that read one input; every fourth pass judges how far they are moved."""
    fitted, judges = (
        Inputs.of(torch.cat(x), torch.cat(y))
        for x, y in zip(_parted(seen), _parted(wanted), strict=True)
    )
    hessian = (fitted + judges).hessian
    moved = {}
    for point in step:
        for matrix in work.places[point]:
            weight = _view(work, point, matrix).float()
            moved[matrix.module], share = corrected(weight, fitted, judges)
            notes[matrix.module] = {"correction": round(share, 4)}
    _round(work, moved, dict.fromkeys(moved, hessian), tensors, notes)


def _parted(parts: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the passes to fit on, and those that judge; both are all where there is one."""
    fitted = [part for n, part in enumerate(parts) if n % 4]
    judges = [part for n, part in enumerate(parts) if not n % 4]
    return fitted or list(parts), judges


def _round_experts(
    work: Work,
    step: Sequence[Point],
    seen: Mapping[Point, Sequence[Tensor]],
    tensors: dict[str, Tensor],
    notes: dict[str, Any],
) -> None:
    """Round a layer's experts, where they are: routing may send them other tokens than before.

    An expert's H is shrunk towards the layer's mean by its tokens; that mean stands for one unseen.
    """
    inputs = {point: torch.cat(list(parts)) for point, parts in seen.items()}
    own = {point: x.T @ x for point, x in inputs.items()}
    width = work.places[step[0]][0].shape[1]
    tokens = sum(map(len, inputs.values()))
    whole = sum(own.values(), torch.zeros(width, width, device=device_kind()))
    mean = whole / tokens if tokens else torch.eye(width, device=device_kind())
    weights, hessians = {}, {}
    for point in step:
        for matrix in work.places[point]:
            weights[matrix.module] = _view(work, point, matrix).float()
            hessians[matrix.module] = own.get(point, 0) + SHRINKAGE_TOKENS * mean
            notes[matrix.module] = {"correction": 0.0}
    _round(work, weights, hessians, tensors, notes)


def _round(
    work: Work,
    weights: Mapping[str, Tensor],
    hessians: Mapping[str, Tensor],
    tensors: dict[str, Tensor],
    notes: dict[str, Any],
) -> None:
    """Add the packed matrices to `tensors`; those that share a scale and an H go as one."""
    for group in {id(work.groups[m]): work.groups[m] for m in weights}.values():
        modules = [matrix.module for matrix in group]
        stacked = torch.cat([weights[module] for module in modules])
        scale_2 = shared_scale(stacked)
        codes, scale = gptq(stacked, hessians[modules[0]], scale_2)
        heights = [len(weights[module]) for module in modules]
        split = (torch.split(codes, heights), torch.split(scale, heights))
        for module, code, scales in zip(modules, *split, strict=True):
            stored = nvfp4.dequantize(code, scales, scale_2)
            norm, error = float(weights[module].norm()), float((stored - weights[module]).norm())
            notes[module]["relative_error"] = round(error / norm, 6) if norm else 0.0
            parts = zip(PARTS, (code, scales, scale_2), strict=True)
            tensors |= {f"{module}.{name}": part.cpu().clone() for name, part in parts}


def _view(work: Work, point: Point, matrix: Matrix) -> Tensor:
    """Return the part of the model's parameter that is a matrix, [out, in].

    Projections that the model stacks, and the source does not, follow each other in an order that
    one expert of a layer tells.
    """
    whole: Tensor = work.runner.skeleton.model.get_parameter(point.parameter).data
    one = whole if point.expert is None else whole[point.expert]
    if one.shape == matrix.shape:
        return one
    if matrix.expert is not None:
        return (one.T if matrix.transposed else one)[matrix.outputs]
    stacked = one if one.shape[1] == matrix.shape[1] else one.T
    place = (point.parameter, matrix.module.rpartition(".")[2])
    if place not in work.offsets:
        source = work.runner.read(matrix.tensor)[0].to(stacked)
        starts = range(0, len(stacked), matrix.shape[0])
        work.offsets[place] = next(i for i in starts if torch.equal(stacked[i], source))
    first = work.offsets[place]
    return stacked[first : first + matrix.shape[0]]
