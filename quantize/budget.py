"""Which format each unit gets under the recipe's budget, by measurement.

Sensitivities, measured on calibration documents, give the front; a joint KL on the selection
documents confirms a choice, and swaps on it refine the choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from onboard.checkpoint.models import compute_dtype, open_reference
from onboard.quantize import allocation, interaction, sensitivity
from onboard.quantize.allocation import Choice, Limit, Problem, Swap
from onboard.quantize.calibrate import document_batches
from onboard.quantize.interaction import Interactions
from onboard.quantize.making import Maker
from onboard.quantize.selection import Measured

PROXY = "sweep"  # the method by whose joint KL swaps are judged: quick, and alike in its ranking


@dataclass(frozen=True)
class Allocation:
    """Formats by module ("fp8" or "bf16"; all others NVFP4) and how they were found."""

    formats: dict[str, str] = field(default_factory=dict)
    limit: Limit | None = None
    choice: Choice | None = None
    swaps: tuple[Swap, ...] = ()
    interactions: Mapping[str, Any] = field(default_factory=dict)

    def describe(self, measured: Measured) -> dict[str, Any]:
        """Return `allocation.json`; `measured` is the checkpoint that ships."""
        assert self.choice is not None
        formats = self.choice.point.formats
        choice = Choice(
            self.choice.problem,
            self.choice.front,
            self.choice.point,
            {**self.choice.measured, formats: measured.kl},
        )
        intervals = {formats: measured.interval}
        return allocation.describe(choice, self.limit, self.swaps, self.interactions, intervals)


def allocate(maker: Maker) -> Allocation:
    """Return the allocation; without a budget all is NVFP4."""
    given = maker.params.budget.limit
    if given is None:
        return Allocation()
    limit, found = Limit(*given), measure(maker)
    pairs = interaction.estimate(found.gram.numpy(), found.units, seed=maker.params.budget.seed)
    kl = {name: value.tolist() for name, value in found.kl.items()}
    alone = Problem(found.units, kl)
    method = PROXY if maker.params.method == "auto" else maker.params.method
    choice = allocation.choose(alone, limit, lambda formats: _joint(maker, formats, method))
    said: dict[str, Any] = dict(pairs.describe())
    if pairs.used and maker.params.budget.swaps:
        choice, said["won"] = _with_pairs(maker, choice, limit, pairs, method)
    choice, swaps = allocation.refine(
        choice, limit, lambda formats: _joint(maker, formats), maker.params.budget.swaps
    )
    confirmed = {} if limit.name != "kl_max" else choice.measured
    choice = Choice(choice.problem, choice.front, choice.point, confirmed)
    return Allocation(choice.modules, limit, choice, swaps, said)


def measure(maker: Maker) -> sensitivity.Sensitivities:
    """Return the sensitivities of the recipe's source; kept in scratch once they are there."""
    path = maker.job.scratch / "sensitivities.safetensors"
    if not path.exists():
        budget, experts = maker.params.budget, maker.adaptation["experts"]
        found = sensitivity.measure(
            open_reference(maker.source.root, compute_dtype()),
            maker.groups,
            sensitivity.units_of(maker.groups, experts and experts["per_token"]),
            document_batches(maker.calibration[: budget.documents], maker.params.batch_size),
            maker.ranges.second_moment,
            lambda module, format: maker.input_scale(module, {module: format}),
            maker.job.scratch,
            seed=budget.seed,
            progress=lambda done, total: maker.job.progress("sensitivity", done, total, "layers"),
        )
        found.save(path)
    return sensitivity.Sensitivities.load(path)


def _joint(maker: Maker, formats: Mapping[str, str], method: str = PROXY) -> float:
    """Return a joint KL; the checkpoint that it took is not kept."""
    found = maker.measure(method, formats)
    maker.made(method, formats).drop()
    return found.kl


def _with_pairs(
    maker: Maker, alone: Choice, limit: Limit, pairs: Interactions, method: str
) -> tuple[Choice, bool]:
    """Choose with pair terms too; they stay only where the measured joint KL is lower."""
    problem = Problem(alone.problem.units, alone.problem.kl, pairs.pairs)
    together = allocation.choose(problem, limit, lambda formats: _joint(maker, formats, method))
    first, second = (_joint(maker, choice.modules) for choice in (alone, together))
    return (together, True) if second < first else (alone, False)
