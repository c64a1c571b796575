"""The numbers that a format can store, as the compensated rounding asks for them.

A batch holds B matrices of one shape, [B, out, in], each with a scale of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from onboard.checkpoint import fp8, nvfp4
from onboard.quantize.rounding import CHUNK, TARGETS

Packed = dict[str, Tensor]  # `weight`, `weight_scale` and, in NVFP4, `weight_scale_2`


class Grid(Protocol):
    """Numbers at multiples of a step, which 16 inputs of an output share."""

    def repeat(self, times: int) -> Grid:
        """Return the grid of a batch that is repeated."""

    def step(self, weights: Tensor, importance: Tensor) -> Tensor:
        """Return the step f32 [B, out] of a block: weights [B, 16, out], importance [B, 16]."""

    def nearest(self, multiples: Tensor) -> Tensor:
        """Return the nearest multiple of the step that can be stored, as f32."""

    def pack(self, values: Tensor, steps: Sequence[Tensor], matrix: int) -> Packed:
        """Return one matrix of the batch as it is stored, from values [B, out, in] on the grid."""


@dataclass(frozen=True)
class NvFp4:
    """E2M1 numbers times an E4M3 scale per block, which is searched, times `scale_2` f32 [B]."""

    scale_2: Tensor

    def repeat(self, times: int) -> NvFp4:
        return NvFp4(self.scale_2.repeat(times))

    def step(self, weights: Tensor, importance: Tensor) -> Tensor:
        """The step with the least squared error, each input weighted by its importance."""
        batch, block, outputs = weights.shape
        width = max(1, CHUNK // (len(TARGETS) * batch * block))
        parts = torch.split(weights, outputs if weights.is_cuda else width, -1)
        return torch.cat([self._step(part, importance[..., None]) for part in parts], -1)

    def _step(self, weights: Tensor, importance: Tensor) -> Tensor:
        """Try all targets at once."""
        scale_2 = self.scale_2[:, None]
        targets = torch.tensor(TARGETS, device=weights.device)[:, None, None]
        scale = nvfp4.block_scale(weights.abs().amax(1) * (nvfp4.E2M1_MAX / targets), scale_2)
        steps = scale.float() * scale_2  # [targets, B, out]
        each = steps[:, :, None]
        error = self.nearest(weights / each).mul_(each).sub_(weights).square_().mul_(importance)
        best = error.sum(2).argmin(0, keepdim=True)
        return steps.gather(0, best)[0]

    def nearest(self, multiples: Tensor) -> Tensor:
        return nvfp4.round_to_e2m1(multiples)

    def pack(self, values: Tensor, steps: Sequence[Tensor], matrix: int) -> Packed:
        scale_2 = self.scale_2[matrix]
        scale = torch.stack([step[matrix] for step in steps], 1) / scale_2  # within an ulp of E4M3
        scale = scale.to(torch.float8_e4m3fn)
        weight = nvfp4.quantize(values[matrix], scale, scale_2)
        return {"weight": weight, "weight_scale": scale, "weight_scale_2": scale_2}


@dataclass(frozen=True)
class Fp8:
    """E4M3 numbers times `scale` f32 [B]."""

    scale: Tensor

    def repeat(self, times: int) -> Fp8:
        return Fp8(self.scale.repeat(times))

    def step(self, weights: Tensor, importance: Tensor) -> Tensor:
        return self.scale[:, None].expand(-1, weights.shape[-1])

    def nearest(self, multiples: Tensor) -> Tensor:
        return fp8.to_e4m3(multiples).float()

    def pack(self, values: Tensor, steps: Sequence[Tensor], matrix: int) -> Packed:
        scale = self.scale[matrix]
        return {"weight": fp8.quantize(values[matrix], scale), "weight_scale": scale}


def dequantize(parts: Mapping[str, Tensor]) -> Tensor:
    """Return the weights that an engine computes with, f32 [out, in]."""
    if "weight_scale_2" in parts:
        return nvfp4.dequantize(parts["weight"], parts["weight_scale"], parts["weight_scale_2"])
    return fp8.dequantize(parts["weight"], parts["weight_scale"])
