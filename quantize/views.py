"""Where the model's parameters hold the source's matrices, whatever the class fuses or stacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from onboard.checkpoint.matrices import Matrix
from onboard.checkpoint.models import Runner
from onboard.checkpoint.taps import Point


@dataclass(frozen=True)
class Views:
    """Views of matrices in a model whose layer is loaded; writing to one changes the model."""

    parameter: Callable[[str], Tensor]
    read: Callable[[str], Tensor]
    offsets: dict[tuple[str, str], int] = field(default_factory=dict)

    @classmethod
    def of(cls, runner: Runner) -> Views:
        return cls(runner.skeleton.model.get_parameter, runner.read)

    def __call__(self, point: Point, matrix: Matrix) -> Tensor:
        """Return the part of the model's parameter that is a matrix, [out, in].

        Projections that the model stacks, and the source does not, follow each other in an order
        that one expert of a layer tells.
        """
        whole = self.parameter(point.parameter).data
        one = whole if point.expert is None else whole[point.expert]
        if matrix.expert is not None:  # a square one tells by its source alone how it lies
            return (one.T if matrix.transposed else one)[matrix.outputs]
        if one.shape == matrix.shape:
            return one
        stacked = one if one.shape[1] == matrix.shape[1] else one.T
        place = (point.parameter, matrix.module.rpartition(".")[2])
        if place not in self.offsets:
            source = self.read(matrix.tensor)[0].to(stacked)
            starts = range(0, len(stacked), matrix.shape[0])
            self.offsets[place] = next(i for i in starts if torch.equal(stacked[i], source))
        first = self.offsets[place]
        return stacked[first : first + matrix.shape[0]]
