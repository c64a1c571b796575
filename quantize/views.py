"""Where the model's parameters hold the source's matrices, whatever the class fuses or stacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from onboard.checkpoint import taps
from onboard.checkpoint.matrices import Matrix
from onboard.checkpoint.models import Runner
from onboard.checkpoint.skeleton import Skeleton
from onboard.checkpoint.taps import Point

Read = Callable[[str], Tensor]  # a source tensor by its name


@dataclass(frozen=True)
class Place:
    """Where the model holds a matrix: rows of a parameter, or of one expert's part of it."""

    parameter: str
    rows: slice
    expert: int | None = None
    transposed: bool = False

    def of(self, whole: Tensor) -> Tensor:
        """View the matrix [out, in] in the parameter, or in its gradient."""
        one = whole if self.expert is None else whole[self.expert]
        return (one.T if self.transposed else one)[self.rows]


@dataclass(frozen=True)
class Views:
    """Finds matrices in the parameters of a loaded layer, which must hold the source's weights.

    How the class stacks or transposes what the source does not, one expert of a layer tells.
    """

    parameter: Callable[[str], Tensor]
    read: Read
    layouts: dict[tuple[str, str], tuple[int, bool]] = field(default_factory=dict)

    @classmethod
    def of(cls, runner: Runner) -> Views:
        return cls(runner.skeleton.model.get_parameter, runner.read)

    def __call__(self, point: Point, matrix: Matrix) -> Tensor:
        """Return the view of a matrix, [out, in]; writing to it changes the model."""
        return self.place(point, matrix).of(self.parameter(point.parameter).data)

    def place(self, point: Point, matrix: Matrix) -> Place:
        """Return where a matrix is; what was found once is not looked for again."""
        whole = self.parameter(point.parameter)
        rows, transposed = matrix.outputs, matrix.transposed
        if matrix.expert is None and (whole.ndim == 3 or whole.shape != matrix.shape):
            key = (point.parameter, matrix.module.rpartition(".")[2])
            if key not in self.layouts:
                one = whole if point.expert is None else whole[point.expert]
                self.layouts[key] = _layout(one.data, self.read(matrix.tensor).to(one))
            first, transposed = self.layouts[key]
            rows = slice(first, first + matrix.shape[0])
        return Place(point.parameter, rows, point.expert, transposed)


def find_places(skeleton: Skeleton, matrices: Iterable[Matrix], read: Read) -> dict[str, Place]:
    """Return each matrix's place by module, in a model that is loaded."""
    views = Views(skeleton.model.get_parameter, read)
    held = taps.points(skeleton, matrices)
    return {m.module: views.place(point, m) for point, here in held.items() for m in here}


def _layout(whole: Tensor, matrix: Tensor) -> tuple[int, bool]:
    """Return at which row of `whole`, or of its transpose, the matrix [out, in] begins."""
    height, width = matrix.shape
    return next(
        (first, transposed)
        for transposed, rows in ((False, whole), (True, whole.T))
        for first in range(0, len(rows), height)
        if rows.shape[1] == width and torch.equal(rows[first : first + height], matrix)
    )
