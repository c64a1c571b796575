"""How far each expert's output moves when it is rounded, on tokens that nothing was fitted on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from onboard.checkpoint import taps
from onboard.checkpoint.matrices import EXPERT, scale_groups
from onboard.checkpoint.models import open_reference

Inputs = Mapping[str, Tensor]  # [tokens, in] by expert


def compare(
    root: Path,
    adaptation: Mapping[str, Any],
    held_out: Sequence[Sequence[int]],
    ours: Path,
    rtn: Path,
    calibration_tokens: Mapping[str, int],
) -> list[dict[str, Any]]:
    """Return, by expert, the relative squared error of its outputs as `ours` and as RTN stores it.

    `ours` and `rtn` hold dequantized weights. An expert takes what the source's own router sends it
    of the held-out documents; one that gets nothing there is left out. `tokens` are those that
    calibration sent to it.
    """
    inputs = _inputs(root, adaptation, held_out)
    source = {name: value for file in root.glob("*.safetensors") for name, value in
              load_file(file).items()}  # fmt: skip
    rounded = {"ours": load_file(ours), "rtn": load_file(rtn)}
    rows = []
    for expert, x in sorted(inputs.items()):
        wanted = _output(source, expert, x)
        errors = {
            name: float((_output(weights, expert, x) - wanted).square().sum()
                        / wanted.square().sum())
            for name, weights in rounded.items()
        }  # fmt: skip
        tokens = calibration_tokens.get(f"{expert}.gate_proj", 0)
        rows.append({"expert": expert, "tokens": tokens, "held_out": len(x), **errors})
    return rows


def _inputs(
    root: Path, adaptation: Mapping[str, Any], documents: Sequence[Sequence[int]]
) -> Inputs:
    runner = open_reference(root, torch.float32, resident=True)
    matrices = [m for group in scale_groups(adaptation) for m in group if EXPERT.match(m.module)]
    first = [m for m in matrices if m.module.endswith("gate_proj")]
    places = taps.points(runner.skeleton, first)
    seen: dict[str, list[Tensor]] = defaultdict(list)

    def see(point: taps.Point, x: Tensor) -> None:
        expert = places[point][0].module.rpartition(".")[0]
        seen[expert].append(x.flatten(0, -2).float())

    taps.attach(runner.skeleton.model, places, see)
    with torch.inference_mode():
        for row in documents:
            runner.model(torch.tensor([list(row)]), use_cache=False, logits_to_keep=1)
    return {expert: torch.cat(rows) for expert, rows in seen.items()}


def _output(weights: Mapping[str, Tensor], expert: str, x: Tensor) -> Tensor:
    gate, up, down = (
        weights[f"{expert}.{name}_proj.weight"].float() for name in ("gate", "up", "down")
    )
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
