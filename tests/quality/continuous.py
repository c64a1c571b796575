"""A copy of a model whose linear weights are continuous, from one whose weights came from Q4_1.

    python -m tests.quality.continuous MODEL OUT

A Q4_1 file holds 32 consecutive weights of a row as q*d + m, q in 0..15, so that a rounding
method can profit from values that sit on few levels. Here every weight moves by a uniform draw
from its own cell, (-d/2, d/2), which keeps each block's range and spreads its values.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.quality import written

CELL_BLOCK = 32  # weights that share d and m in Q4_1
LEVELS = 16
STEPS = 8  # bf16 must resolve a cell in this many values
RESOLVED = 0.99  # ... in this share of the weights
SEED = 0


def cell_widths(weight: Tensor) -> Tensor:
    """Return d f32 [out, in/32], the distance of two levels of a block, or 0 where it has one.

    The smallest gap between distinct values tells how many levels the block's range spans, and
    the range over that number is d, which the rounding of the values themselves disturbs less.
    Raises ValueError where a block has more than 16 values: it is no Q4_1.
    """
    ordered = weight.float().reshape(weight.shape[0], -1, CELL_BLOCK).sort(-1).values
    gaps = ordered.diff(dim=-1)
    if int((gaps > 0).sum(-1).max()) >= LEVELS:
        raise ValueError(f"a block of {CELL_BLOCK} weights has more than {LEVELS} values: not Q4_1")
    smallest = torch.where(gaps > 0, gaps, torch.inf).amin(-1)
    span = ordered[..., -1] - ordered[..., 0]
    return torch.where(span > 0, span / (span / smallest).round().clamp(1, LEVELS - 1), 0.0)


def dither(weight: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return f32 weights [out, in], each moved inside its cell, and d of each weight [out, in]."""
    widths = cell_widths(weight).repeat_interleave(CELL_BLOCK, -1)
    draws = torch.rand(weight.shape, generator=generator) - 0.5
    return weight.float() + draws * widths, widths


def resolved_share(values: Tensor, widths: Tensor) -> float:
    """Return the share of weights whose cell holds at least 8 bf16 numbers.

    bf16 keeps 8 significant bits, so its spacing is 2^-7 of the power of two below a value.
    """
    power = (values.abs().view(torch.int32) & 0x7F800000).view(torch.float32)
    return float((power * 2.0**-7 <= widths / STEPS).float().mean())


def write(source: Path, out: Path) -> dict[str, float | str]:
    """Write the copy to `out` and return its dtype and the share of weights bf16 resolves.

    The copy is bf16, as published checkpoints are, where bf16 still resolves the cells: 8 values
    a cell in 99% of the weights; otherwise f32. Names, other tensors and files are the source's.
    """
    tensors = written.tensors(source)
    generator = torch.Generator().manual_seed(SEED)
    moved = {}
    shares = []
    for module in sorted(written.linears(tensors)):
        name = f"{module}.weight"
        moved[name], widths = dither(tensors[name], generator)
        shares.append(resolved_share(moved[name], widths) * widths.numel())
    share = sum(shares) / sum(t.numel() for t in moved.values())
    dtype = torch.bfloat16 if share >= RESOLVED else torch.float32
    if dtype == torch.bfloat16:
        moved = {name: value.to(dtype) for name, value in moved.items()}
        tensors = {name: value.to(dtype) for name, value in tensors.items()}
    out.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.suffix != ".safetensors" and not path.name.endswith(".index.json"):
            shutil.copy(path, out)
    save_file({**tensors, **moved}, out / "model.safetensors", metadata={"format": "pt"})
    name = str(dtype).removeprefix("torch.")
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "dtype": name}, indent=2))
    return {"dtype": name, "resolved_by_bf16": share}


if __name__ == "__main__":
    print(json.dumps(write(Path(sys.argv[1]), Path(sys.argv[2]))))
