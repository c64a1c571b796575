"""Weights that train while the model computes with exactly what would be stored of them.

The model's own parameters hold the rounded weights, so a forward pass is that of the checkpoint,
and the gradient that autograd leaves on them is the straight-through estimate (Bengio et al. 2013,
arXiv:1308.3432) for the latent, unrounded values behind them. A latent weight is counted in steps
of its block, W / (weight_scale * weight_scale_2): on E2M1's grid, where the scales, that stay,
make all matrices alike and one learning rate fits them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from onboard.checkpoint import nvfp4
from onboard.checkpoint.reciprocal import invertible
from onboard.quantize.views import Place

CHUNK = 2**17  # weights that a CPU rounds at a time: about what its cache holds
LOW = (0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # where the cell of each magnitude begins
HIGH = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0)  # and ends; above 6 as far as below it
REACH = HIGH[-1]  # a latent weight goes no further, so that it can come back
TINY = 2.0**-20  # least magnitude of a latent weight at the start: zeros have a sign


def latents(quotients: Tensor, values: Tensor, inset: float) -> Tensor:
    """Move W / step into the cells of what was stored, f32 of any shape.

    `values` are E2M1, signed zeros included, and the results round to them. `inset` is the share of
    the way from a cell's bound to its value that is kept free: 1 leaves the values themselves.
    """
    magnitude = values.abs()
    code = nvfp4.codes(magnitude).int()
    low, high = (torch.tensor(bounds, device=values.device)[code] for bounds in (LOW, HIGH))
    low = torch.lerp(low, magnitude, inset).clamp_(min=TINY)
    high = torch.lerp(high, magnitude, inset).clamp_(min=TINY)
    signed = torch.where(values.signbit(), -quotients, quotients)
    return torch.clamp(signed, low, high).copysign_(values)


class Trained(Protocol):
    """Something that is trained: `latent` is what the optimizer moves."""

    @property
    def latent(self) -> nn.Parameter: ...

    def take_gradient(self) -> None:
        """Set the latent's gradient from that of the model's parameter."""

    def show(self) -> None:
        """Let the model compute with what would be stored now."""


@dataclass(frozen=True)
class RoundedMatrix:
    """A matrix whose codes are trained: `latent` f32 [out, in/16, 16], in steps of each block.

    `step` f32 [out, in/16, 1] is weight_scale * weight_scale_2.
    """

    module: str
    place: Place
    parameter: nn.Parameter
    latent: nn.Parameter
    step: Tensor

    @classmethod
    def of(
        cls,
        module: str,
        place: Place,
        parameter: nn.Parameter,
        source: Tensor,
        stored: Mapping[str, Tensor],
        inset: float,
    ) -> RoundedMatrix:
        """Begin where the matrix was stored, as near to its `source` [out, in] as that allows."""
        step = (stored["weight_scale"].float() * stored["weight_scale_2"]).unsqueeze(-1)
        values = nvfp4.blocks(nvfp4.unpack(stored["weight"]))
        latent = latents(nvfp4.blocks(source.float()) / step, values, inset)
        return cls(module, place, parameter, nn.Parameter(latent), step)

    def take_gradient(self) -> None:
        if self.parameter.grad is None:
            return
        if self.latent.grad is None:
            self.latent.grad = torch.empty_like(self.latent)
        gradient = nvfp4.blocks(self.place.of(self.parameter.grad))
        torch.mul(gradient, self.step, out=self.latent.grad)

    @torch.no_grad()
    def show(self) -> None:
        target = self.place.of(self.parameter.data)
        for rows, values in self._rounded():
            target[rows] = values.mul_(self.step[rows]).flatten(-2)

    @torch.no_grad()
    def stored(self) -> dict[str, Tensor]:
        """Return the part of the written matrix that has changed: `weight` u8 [out, in/2]."""
        codes = [nvfp4.codes(values).flatten(-2) for _, values in self._rounded()]
        return {"weight": nvfp4.pack(torch.cat(codes))}

    def _rounded(self) -> Iterator[tuple[slice, Tensor]]:
        latent = self.latent.data.clamp_(-REACH, REACH)
        height = len(latent) if latent.is_cuda else max(1, CHUNK // latent[0].numel())
        for first in range(0, len(latent), height):
            rows = slice(first, first + height)
            yield rows, nvfp4.round_to_e2m1(latent[rows])


@dataclass(frozen=True)
class SharedScale:
    """The `weight_scale_2` of a scale group: `latent` f32 [] is the logarithm of its change.

    The gradient comes through the inputs of the matrices, see `entering`.
    """

    parts: Mapping[str, Mapping[str, Tensor]]  # by module, as they were stored
    targets: Mapping[str, Tensor]  # by module, the views [out, in] of the model's parameters
    latent: nn.Parameter

    def take_gradient(self) -> None:
        pass

    @torch.no_grad()
    def show(self) -> None:
        scale_2 = self.stored()["weight_scale_2"]
        for module, target in self.targets.items():
            part = self.parts[module]
            target.copy_(nvfp4.dequantize(part["weight"], part["weight_scale"], scale_2))

    @torch.no_grad()
    def stored(self) -> dict[str, Tensor]:
        """Return the part of the written matrices that has changed: `weight_scale_2` f32 []."""
        first = next(iter(self.parts.values()))["weight_scale_2"]
        return {"weight_scale_2": invertible((first * self.latent.exp()).reshape(()))}

    def entering(self, x: Tensor) -> Tensor:
        """Return `x` as it is, bit for bit, with the scale's share in the gradient."""
        return x * (self.latent - self.latent.detach()).exp()


@dataclass(frozen=True)
class Norm:
    """The weight of a normalization, each element in units of about its own size: `latent` f32.

    Elements differ by orders of magnitude: those that hold massive activations down are tiny, and
    must not move by what is little for the others. It is rounded to the dtype of the source.
    """

    name: str  # the source's
    parameter: nn.Parameter
    latent: nn.Parameter
    unit: Tensor  # powers of two, so that the quotients are exact
    dtype: torch.dtype

    @classmethod
    def of(cls, name: str, parameter: nn.Parameter, value: Tensor, dtype: torch.dtype) -> Norm:
        """Begin at `value`, which is the source's, or what an earlier training made of it."""
        exact = value.to(parameter)
        unit = torch.exp2(exact.abs().clamp_min(TINY).log2().round())
        return cls(name, parameter, nn.Parameter(exact / unit), unit, dtype)

    def take_gradient(self) -> None:
        if self.parameter.grad is not None:
            self.latent.grad = self.parameter.grad * self.unit

    @torch.no_grad()
    def show(self) -> None:
        self.parameter.copy_(self.stored())

    @torch.no_grad()
    def stored(self) -> Tensor:
        """Return the weight as it is written."""
        return (self.latent * self.unit).to(self.dtype)


class _Through(torch.autograd.Function):
    """The rounded input forwards; its gradient goes to the input itself."""

    @staticmethod
    def forward(ctx: object, x: Tensor, rounded: Tensor) -> Tensor:
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def passed_through(x: Tensor, rounded: Tensor) -> Tensor:
    """Return `rounded`, with a gradient as if it were `x`."""
    through: Tensor = _Through.apply(x, rounded)  # type: ignore[no-untyped-call]
    return through
