"""How far each unit moves the model's predictions when it alone is rounded.

To second order, a change dz of the logits costs KL = 1/2 dzᵀ F dz nats, with F = diag(p) - p pᵀ the
Fisher information of the reference's prediction p. F = E[v vᵀ] for v = √p∘ε - p (√p·ε) with random
signs ε, and v·dz = Σ_t <g_t, d_t>: d_t is what rounding changes in the unit's own output at token
t, g_t the gradient of v·z there. So one way forward and one back through the reference serve all
units, and nothing behind a unit is run again. Each layer is loaded twice. Memory: a layer and one
unit's rounded weights, what enters every layer, and what leaves the units of one.

A document's sum over t, squared, is right on average but a single number; single tokens' squares
are many, but miss that a unit's errors at neighbouring tokens add up in what attention makes of
them (they come out 15% low). Sums over `WINDOW` tokens are between: of windows of 1 to 256, those
of 8 came closest to the KL of 28 units of SmolLM2 rounded one by one.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from onboard.checkpoint.matrices import EXPERT, Group, Matrix
from onboard.checkpoint.models import Runner
from onboard.quantize.allocation import Unit
from onboard.quantize.effects import LOWER, Effects, InputScale

WINDOW = 8  # tokens whose effects are summed before they are squared


@dataclass(frozen=True)
class Sensitivities:
    """What rounding costs, in nats a token: `kl` f64 [U] by format, a unit alone.

    `gram` f64 [documents, U, U] are, in NVFP4, the products of the units' effects on a document's
    predictions: its joint KL is 1/2 1ᵀG1 to second order. `tokens` are predicted, by document.
    """

    units: tuple[Unit, ...]
    kl: Mapping[str, Tensor]
    gram: Tensor
    tokens: tuple[int, ...]

    def save(self, path: Path) -> None:
        """Write a safetensors file whose metadata hold the units."""
        tensors = {f"kl.{format}": value for format, value in self.kl.items()}
        units = json.dumps([asdict(unit) for unit in self.units])
        tensors |= {"gram": self.gram, "tokens": torch.tensor(self.tokens)}
        save_file(tensors, path, {"units": units})

    @classmethod
    def load(cls, path: Path) -> Sensitivities:
        with safe_open(path, framework="pt") as f:
            units = json.loads(f.metadata()["units"])
        tensors = load_file(path)
        return cls(
            tuple(Unit(**{**unit, "modules": tuple(unit["modules"])}) for unit in units),
            {format: tensors[f"kl.{format}"] for format in LOWER},
            tensors["gram"],
            tuple(tensors["tokens"].tolist()),
        )


def units_of(groups: Iterable[Group], experts_per_token: int | None = None) -> list[Unit]:
    """Return what an engine gives one format: a scale group, or all routed experts of a layer."""
    members: dict[str, list[Matrix]] = defaultdict(list)
    experts: dict[str, set[str]] = defaultdict(set)
    for group in groups:
        expert = EXPERT.match(group[0].module)
        name = expert["experts"] if expert else group[0].module
        members[name] += group
        if expert:
            experts[name].add(expert["number"])
    return [
        Unit(
            name,
            tuple(matrix.module for matrix in held),
            sum(matrix.parameters for matrix in held),
            held[0].role,
            min(1.0, experts_per_token / len(experts[name]))
            if experts_per_token and name in experts
            else 1.0,
        )
        for name, held in members.items()
    ]


def measure(
    runner: Runner,
    groups: Sequence[Group],
    units: Sequence[Unit],
    batches: Sequence[Tensor],
    second_moment: Callable[[Matrix], Tensor],
    input_scale: InputScale,
    scratch: Path,
    draws: int = 2,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Sensitivities:
    """Estimate the KL of rounding each unit alone; `batches` are ids [documents, tokens].

    Weights are rounded by the weighted sweep, or to E4M3. Inputs are quantized as an engine will
    in the unit's format, with the `input_scale` of a module in it, or not where that is None.
    `scratch` keeps the finished layers of a run that was killed.
    """
    effects = Effects(runner, groups, units, second_moment, input_scale).measure(
        batches, draws, seed, scratch / "sensitivities.part", progress
    )
    return _summed_up(tuple(units), effects)


def _summed_up(units: tuple[Unit, ...], effects: Mapping[str, Sequence[Tensor]]) -> Sensitivities:
    """Square the effects [draws, documents, tokens, U] of each batch, summed over windows."""
    grams = {format: torch.cat([_gram(e) for e in effects[format]]) for format in LOWER}
    shapes = [e.shape for e in effects[LOWER[0]]]
    tokens = tuple(shape[2] - 1 for shape in shapes for _ in range(shape[1]))
    weight = torch.tensor(tokens).double() / sum(tokens)
    kl = {
        format: (gram.diagonal(dim1=1, dim2=2) * weight[:, None]).sum(0) / 2
        for format, gram in grams.items()
    }
    return Sensitivities(units, kl, grams["nvfp4"], tokens)


def _gram(effects: Tensor) -> Tensor:
    """Return f64 [documents, U, U] a predicted token, of effects [draws, documents, tokens, U]."""
    draws, documents, tokens, units = effects.shape
    padded = nn.functional.pad(effects.double(), (0, 0, 0, -tokens % WINDOW))
    windows = padded.reshape(draws, documents, -1, WINDOW, units).sum(3)
    rows = windows.transpose(0, 1).reshape(documents, -1, units)
    products: Tensor = rows.transpose(1, 2) @ rows
    return products / (draws * (tokens - 1))
