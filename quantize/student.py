"""The student of a distillation: the source's model, computing with what was stored of it.

Its parameters hold dequantized weights, and taps round what enters matrices where engines will.
What is trained are weights behind their rounding; or norms, and the scales that fused matrices
share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn

from onboard.checkpoint import fp8, nvfp4, taps
from onboard.checkpoint.matrices import Group, Matrix
from onboard.checkpoint.reader import Reader
from onboard.checkpoint.skeleton import Skeleton, decoder_of
from onboard.checkpoint.taps import Point
from onboard.hardware import device_kind
from onboard.quantize.layers import Layers
from onboard.quantize.straight_through import (
    Norm,
    RoundedMatrix,
    SharedScale,
    Trained,
    passed_through,
)
from onboard.quantize.views import Place, find_places

Parts = Mapping[str, Tensor]  # weight, weight_scale and, in NVFP4, weight_scale_2


class Student(nn.Module):
    """Token ids [B, T] and their mask give states after the final norm [B, T, H].

    `trained` is in an order that every run repeats.
    """

    def __init__(self, text: nn.Module, trained: Sequence[Trained]) -> None:
        super().__init__()
        self.text, self.trained = text, list(trained)
        scales = [one.latent for one in trained if isinstance(one, SharedScale)]
        self.scales = nn.ParameterList(scales)  # here, so that processes share their gradients

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        decoder = decoder_of(self.text)
        output = decoder(input_ids=ids, attention_mask=mask, use_cache=False)
        hidden: Tensor = output.last_hidden_state
        return hidden

    def show(self) -> None:
        """Compute with what would be stored now."""
        for one in self.trained:
            one.show()

    def take_gradients(self) -> None:
        """Hand the gradients of the model's parameters on to what is trained."""
        for one in self.trained:
            one.take_gradient()
        self.text.zero_grad(set_to_none=True)

    def stored(self) -> dict[str, Parts]:
        """Return the parts of written matrices that training changes, by module."""
        changed: dict[str, Parts] = {}
        for one in self.trained:
            if isinstance(one, RoundedMatrix):
                changed[one.module] = one.stored()
            elif isinstance(one, SharedScale):
                changed |= dict.fromkeys(one.parts, one.stored())
        return changed

    def replaced(self) -> dict[str, Tensor]:
        """Return the trained norms as they are written, by the source's name."""
        return {one.name: one.stored() for one in self.trained if isinstance(one, Norm)}


@dataclass(frozen=True)
class Beginning:
    """What a student is made of: a model with the source's weights, and what was stored of it."""

    skeleton: Skeleton
    source: Reader
    start: Layers
    groups: Sequence[Group]
    input_scale: Callable[[str], Tensor | None] | None

    @cached_property
    def matrices(self) -> dict[str, Matrix]:
        """Every matrix of the groups, by module."""
        return {matrix.module: matrix for group in self.groups for matrix in group}

    def read(self, matrix: Matrix) -> Tensor:
        """Return the source's values of a matrix, f32 [out, in]."""
        rows = self.source.rows(matrix.tensor, matrix.expert, matrix.outputs, matrix.transposed)
        return rows.float()

    def parts(self, matrix: Matrix) -> dict[str, Tensor]:
        """Return what is stored of a matrix, on the device."""
        parts = self.start.parts(matrix.module)
        return {name: part.to(device_kind()) for name, part in parts.items()}

    def parameter(self, place: Place) -> nn.Parameter:
        found = self.skeleton.model.get_parameter(place.parameter)
        assert isinstance(found, nn.Parameter)
        return found


def begin(beginning: Beginning, train: Literal["weights", "norms"], inset: float) -> Student:
    """Turn the source's model into the student, in place; see `latents` for `inset`."""
    skeleton = beginning.skeleton
    every = list(beginning.matrices.values())
    places = find_places(skeleton, every, beginning.source.weight)
    norms = list(_norms(beginning))
    assert beginning.start.replaced.keys() <= {norm.name for norm in norms}
    trained: list[Trained] = [*norms]
    inputs, fixed = Inputs(), set[str]()
    points = {m.module: p for p, held in taps.points(skeleton, every).items() for m in held}
    for group in beginning.groups:
        parts = {m.module: beginning.parts(m) for m in group if m.module in beginning.start}
        in_nvfp4 = [m for m in group if "weight_scale_2" in parts.get(m.module, {})]
        for module in parts.keys() - {m.module for m in in_nvfp4}:
            fixed.add(module)
            _show_fp8(beginning, places[module], parts[module])
        if train == "weights":
            trained += [
                _rounded(beginning, m, places[m.module], parts[m.module], inset) for m in in_nvfp4
            ]
        elif in_nvfp4:
            scale = _shared_scale(beginning, in_nvfp4, places, parts)
            trained.append(scale)
            inputs.scales |= {points[m.module]: scale for m in in_nvfp4}
    if beginning.input_scale is not None:
        for module, point in points.items():
            if (input_scale := beginning.input_scale(module)) is not None:
                inputs.add(point, module in fixed, input_scale)
    taps.attach(skeleton.model, dict.fromkeys(points.values()), inputs)
    student = Student(skeleton.text, trained)
    student.show()
    return student


def _show_fp8(beginning: Beginning, place: Place, parts: Parts) -> None:
    target = place.of(beginning.parameter(place).data)
    target.copy_(fp8.dequantize(parts["weight"], parts["weight_scale"]))


def _rounded(
    beginning: Beginning, matrix: Matrix, place: Place, parts: Parts, inset: float
) -> RoundedMatrix:
    parameter = beginning.parameter(place)
    parameter.requires_grad_(True)
    source = beginning.read(matrix).to(device_kind())
    return RoundedMatrix.of(matrix.module, place, parameter, source, parts, inset)


def _shared_scale(
    beginning: Beginning,
    members: Sequence[Matrix],
    places: Mapping[str, Place],
    parts: Mapping[str, Parts],
) -> SharedScale:
    own = {m.module: places[m.module] for m in members}
    return SharedScale(
        {module: parts[module] for module in own},
        {module: place.of(beginning.parameter(place).data) for module, place in own.items()},
        nn.Parameter(torch.zeros((), device=device_kind())),
    )


def _norms(beginning: Beginning) -> Iterator[Norm]:
    """Yield the language model's norms, those that it holds as the source has them."""
    skeleton = beginning.skeleton
    parameters = dict(skeleton.model.named_parameters())
    inside = [name for names in skeleton.inside_layers() for name in names]
    for name in [*inside, *skeleton.outside_layers()]:
        target = skeleton.targets[name]
        parameter = parameters.get(target)
        owner = skeleton.model.get_submodule(target.rpartition(".")[0])
        if parameter is None or parameter.ndim != 1 or "Norm" not in type(owner).__name__:
            continue
        stored = beginning.source.weight(name)
        if torch.equal(stored.to(parameter), parameter):
            parameter.requires_grad_(True)
            value = beginning.start.replaced.get(name, stored)
            yield Norm.of(name, parameter, value, stored.dtype)


class Inputs:
    """What the taps make of what enters: rounded as engines do it, with the scales' gradients."""

    def __init__(self) -> None:
        self.scales: dict[Point, SharedScale] = {}
        self._rounding: dict[Point, Rounding] = {}
        self._last: tuple[Tensor, Rounding, Tensor] | None = None  # input, how, result

    def add(self, point: Point, is_fp8: bool, scale: Tensor) -> None:
        """Round what enters at `point` with an `input_scale` f32 []."""
        self._rounding[point] = Rounding(is_fp8, float(scale))

    def __call__(self, point: Point, x: Tensor) -> Tensor:
        found = x
        if point in self._rounding:
            found = passed_through(x, self._rounded(self._rounding[point], x))
        if point in self.scales and torch.is_grad_enabled():
            found = self.scales[point].entering(found)
        return found

    @torch.no_grad()
    def _rounded(self, rounding: Rounding, x: Tensor) -> Tensor:
        """Round once what q/k/v, or gate/up, read alike."""
        if self._last is None or self._last[0] is not x or self._last[1] != rounding:
            self._last = (x, rounding, rounding(x))
        return self._last[2]


@dataclass(frozen=True)
class Rounding:
    """A format and its scale."""

    is_fp8: bool
    scale: float

    def __call__(self, x: Tensor) -> Tensor:
        round_trip = fp8.quantize_dequantize if self.is_fp8 else nvfp4.quantize_dequantize
        return round_trip(x, torch.tensor(self.scale, device=x.device))
