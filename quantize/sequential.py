"""Round layer after layer on the quantized model's own activations, so that errors cancel.

Two kinds of passes go through the source in lock step: the unquantized ones say what every matrix
should have got, the others what it gets once everything before it is rounded. Each matrix is moved
towards the wanted outputs and rounded with compensation (`onboard.quantize.compensation`), before
the ones behind it are looked at. Memory: a layer, and what enters it. A layer that an earlier run
finished is loaded from scratch.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from onboard.checkpoint import nvfp4, taps
from onboard.checkpoint.matrices import Group, Matrix
from onboard.checkpoint.models import Runner
from onboard.checkpoint.streaming import Pass, visit_layers
from onboard.checkpoint.taps import Point
from onboard.hardware import device_kind
from onboard.quantize.compensation import corrected, gptq, shared_scale

SHRINKAGE_TOKENS = 256  # weight of the layer's mean in the statistics of an expert
PARTS = ("weight", "weight_scale", "weight_scale_2")


class Flow:
    """What the taps do with what enters a matrix.

    In a pass of the unquantized model they keep it, and note which places read one tensor: a step.
    In a pass of the quantized one they quantize it where the engine will, and keep what is watched.
    """

    def __init__(self, scales: Mapping[Point, Tensor]) -> None:
        self.scales = scales  # input_scale; empty where activations stay
        self.quantized = False
        self.watched: frozenset[Point] = frozenset()
        self.seen: dict[Point, list[Tensor]] = defaultdict(list)
        self.steps: dict[Any, list[Point]] = {}
        self._last: Tensor | None = None

    def __call__(self, point: Point, x: Tensor) -> Tensor | None:
        if not self.quantized:
            self._note(point, x)
        elif point in self.scales:
            x = nvfp4.quantize_dequantize(x, self.scales[point])
        if point in self.watched:
            self.seen[point].append(x.flatten(0, -2).float())
        return x

    def _note(self, point: Point, x: Tensor) -> None:
        if any(point in step for step in self.steps.values()):
            return
        reads_the_same = point.expert is None and x is self._last and self.steps
        key = point.parameter if point.expert is not None else len(self.steps)
        step = list(self.steps.values())[-1] if reads_the_same else self.steps.setdefault(key, [])
        step.append(point)
        self._last = x

    def take(self) -> dict[Point, Tensor]:
        """Return what was kept, [tokens, in] by point, and forget it."""
        found = {point: torch.cat(parts) for point, parts in self.seen.items()}
        self.seen.clear()
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


class Layers:
    """The rounded matrices in `scratch`, read one by one."""

    def __init__(self, scratch: Path) -> None:
        self.notes: dict[str, dict[str, Any]] = {}
        self._files: dict[str, Path] = {}
        for path in sorted(scratch.glob("layer-*.safetensors")):
            notes = json.loads(path.with_suffix(".json").read_text())
            self.notes |= notes
            self._files |= dict.fromkeys(notes, path)

    def __contains__(self, module: str) -> bool:
        return module in self._files

    def parts(self, module: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return weight, weight_scale and weight_scale_2."""
        with safe_open(self._files[module], framework="pt") as f:
            weight, scale, scale_2 = (f.get_tensor(f"{module}.{part}") for part in PARTS)
        return weight, scale, scale_2


def _round_layer(
    work: Work, layer: int, wanted: Sequence[Pass[None]], quantized: Sequence[Pass[None]]
) -> None:
    points, flow, file = work.points(layer), work.flow, work.file(layer)
    done = file.exists()
    flow.quantized = False
    flow.watched = frozenset() if done else frozenset(p for p in points if p.expert is None)
    for run in wanted:
        run.go_on()
    unquantized, steps = flow.take(), flow.take_steps(points)
    flow.quantized = True
    tensors = load_file(file) if done else {}
    notes: dict[str, Any] = {}
    for step in steps:
        if not done:
            flow.watched = frozenset(step)
            for run in quantized:
                run.try_out()
            _round_step(work, step, unquantized, flow.take(), tensors, notes)
        for point in step:
            for matrix in work.places[point]:
                stored = nvfp4.dequantize(*(tensors[f"{matrix.module}.{p}"] for p in PARTS))
                _view(work.runner, point, matrix).copy_(stored)
    if not done:
        _save(file, tensors, notes)
    flow.watched = frozenset()
    for run in quantized:
        run.go_on()


def _round_step(
    work: Work,
    step: Sequence[Point],
    unquantized: Mapping[Point, Tensor],
    seen: Mapping[Point, Tensor],
    tensors: dict[str, Tensor],
    notes: dict[str, Any],
) -> None:
    """Add the packed matrices of one step to `tensors`, and what is worth knowing to `notes`."""
    hessians = _hessians(work, step, seen)
    entered: dict[str, Point] = {}
    moved: dict[str, Tensor] = {}
    for point in step:
        for matrix in work.places[point]:
            weight = _view(work.runner, point, matrix).float().clone()
            entered[matrix.module], moved[matrix.module], share = point, weight, 0.0
            if point.expert is None and point in seen:  # an expert may get other tokens than it did
                moved[matrix.module], share = corrected(weight, seen[point], unquantized[point])
            notes[matrix.module] = {"correction": round(share, 4)}
    for group in {id(work.groups[m]): work.groups[m] for m in moved}.values():
        members = [matrix.module for matrix in group]
        scale_2 = shared_scale([moved[module] for module in members])
        for module in members:
            point = entered[module]
            parts = (*gptq(moved[module], hessians[point], scale_2), scale_2)
            tensors |= {f"{module}.{n}": p.cpu().clone() for n, p in zip(PARTS, parts, strict=True)}
            norm = float(moved[module].norm())
            error = float((nvfp4.dequantize(*parts) - moved[module]).norm())
            notes[module]["relative_error"] = round(error / norm, 6) if norm else 0.0


def _hessians(
    work: Work, step: Sequence[Point], seen: Mapping[Point, Tensor]
) -> dict[Point, Tensor]:
    """Return H by point; an expert's is shrunk towards its layer's, which stands for one unseen."""
    result = {point: x.T @ x for point, x in seen.items()}
    experts = [point for point in step if point.expert is not None]
    if experts:
        width = work.places[experts[0]][0].shape[1]
        total = sum((result[p] for p in experts if p in result), torch.zeros(width, width))
        tokens = sum(len(seen[p]) for p in experts if p in seen)
        mean = total / tokens if tokens else torch.eye(width)
        for point in experts:
            result[point] = result.get(point, 0) + SHRINKAGE_TOKENS * mean
    return result


def _view(runner: Runner, point: Point, matrix: Matrix) -> Tensor:
    """Return the part of the model's parameter that is a matrix, [out, in].

    Projections that the model stacks, and the source does not, follow each other in its order.
    """
    whole: Tensor = runner.skeleton.model.get_parameter(point.parameter).data
    one = whole if point.expert is None else whole[point.expert]
    if one.shape == matrix.shape:
        return one
    if matrix.expert is not None:
        return (one.T if matrix.transposed else one)[matrix.outputs]
    stacked = one if one.shape[1] == matrix.shape[1] else one.T
    source = runner.read(matrix.tensor)[0].to(stacked)
    starts = range(0, len(stacked), matrix.shape[0])
    first = next(i for i in starts if torch.equal(stacked[i], source))
    return stacked[first : first + matrix.shape[0]]


def _save(path: Path, tensors: dict[str, Tensor], notes: Mapping[str, Any]) -> None:
    """Write the notes, then the tensors: a layer whose file is there is complete."""
    path.with_suffix(".json").write_text(json.dumps(notes))
    partial = path.with_suffix(".partial")
    save_file(dict(sorted(tensors.items())), partial)
    partial.rename(path)
