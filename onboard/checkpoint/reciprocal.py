"""Tensor scales that survive being stored as their reciprocals.

The compressed-tensors layout stores 1/s where ModelOpt's stores s; an engine multiplies by the
reciprocal of what it finds, or divides by it. In fp32 all three agree only for some s.
"""

from __future__ import annotations

import torch
from torch import Tensor

NEIGHBOURS = 2**12  # fp32 numbers looked at on each side
_SIGNIFICANDS = torch.arange(8, 16)  # of E4M3 numbers; powers of two change no rounding


def invertible(scale: Tensor) -> Tensor:
    """Return the number nearest to `scale`, both f32 [] and positive, whose reciprocal is as good.

    For the result s, with r = fl(1/s), and every E4M3 number c: fl(1/r) = s and fl(c/r) = fl(c s).
    It differs from `scale` by 4e-5 of it at most; a scale that is invertible stays as it is.
    """
    steps = torch.arange(2 * NEIGHBOURS + 1, device=scale.device)
    steps = (steps + 1) // 2 * torch.where(steps % 2 == 0, 1, -1)  # 0, -1, 1, -2, 2, ...
    near = (scale.float().view(torch.int32) + steps.int()).view(torch.float32)
    inverse = near.reciprocal()[:, None]
    codes = _SIGNIFICANDS.to(scale.device)
    same = (codes / inverse == codes * near[:, None]).all(-1)
    assert same.any(), f"no invertible number near {scale.item()}"
    return near[same.int().argmax()]
