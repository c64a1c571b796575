"""Whether the speculator ships with the bundle: a decision on measurements, not a gate.

A head that does not help is no reason to hold the model back: the bundle then ships without it
and says why. A model's own MTP layers are judged by the same limits, and where both help, one of
them drafts by default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from onboard.recipe import Smoke


@dataclass(frozen=True)
class Criterion:
    """A limit of `smoke.ship` held against a metric; `met` is None where it was not judged."""

    metric: str
    measured: float | None
    limit: float | None
    met: bool | None
    says: str


def decide(params: Smoke, measured: Mapping[str, float], native: bool) -> dict[str, Any]:
    """Return the content of `ship.json`: `ships`, the `reasons` why not, and all `criteria`.

    `measured` are the metrics of the smoke stage. Speed is judged only where the engine ran the
    checkpoint `native`ly: what an emulation takes says nothing about a GPU.
    """
    return _decision([_acceptance(params, measured), _speed(params, measured, native)])


def decide_mtp(
    params: Smoke, measured: Mapping[str, float], native: bool, failed: str | None
) -> dict[str, Any]:
    """Return the same for the model's MTP layers, which `failed` or have `measured` numbers.

    No gate compares their greedy answers with the target's, so that this is a criterion here.
    """
    if failed is not None:
        return {
            "ships": False,
            "reasons": [f"the engine does not run it: {failed}"],
            "criteria": [],
        }
    found = measured["divergences"]
    says = f"{found:g} of its greedy answers are not the target's"
    lossless = Criterion("divergences", found, 0, found == 0, says)
    criteria = [lossless, _acceptance(params, measured), _speed(params, measured, native)]
    return _decision(criteria)


def prefer(
    params: Smoke, decision: Mapping[str, Any], measured: Mapping[str, float], native: bool
) -> dict[str, str]:
    """Return what drafts by default (`use`, the name of a phase) and `why`.

    Of two that ship it is the one with more tokens per second where the engine ran natively, and
    the one with the longer greedy acceptance where it did not.
    """
    helps = {"speculative": decision["ships"], "mtp": decision.get("mtp", {}).get("ships", False)}
    usable = [name for name, ships in helps.items() if ships]
    if len(usable) < 2:
        use = usable[0] if usable else "plain"
        return {"use": use, "why": "nothing else ships" if usable else "no drafter ships"}
    metric = f"speedup_{params.judged_concurrency}" if native else "acceptance_length"
    head, mtp = measured[metric], measured[f"mtp_{metric}"]
    use = "speculative" if head >= mtp else "mtp"
    what = "speed-up" if native else "acceptance length"
    return {"use": use, "why": f"{what} {head:.4g} with the trained head, {mtp:.4g} with MTP"}


def _decision(criteria: Sequence[Criterion]) -> dict[str, Any]:
    reasons = [c.says for c in criteria if c.met is False]
    return {"ships": not reasons, "reasons": reasons, "criteria": [asdict(c) for c in criteria]}


def _acceptance(params: Smoke, measured: Mapping[str, float]) -> Criterion:
    name, limit = "acceptance_length_lo", params.ship.acceptance_length_lo
    found = measured.get(name)
    if limit is None:
        return Criterion(name, found, None, None, "the recipe asks for no acceptance length")
    if found is None:
        says = "every greedy answer loops, so that it has no acceptance length"
        return Criterion(name, None, limit, False, says)
    met = found > limit
    says = (
        f"the lower 95% bound of its acceptance length is {found:.4g}, "
        f"{'above' if met else 'not above'} {limit:g}"
    )
    return Criterion(name, found, limit, met, says)


def _speed(params: Smoke, measured: Mapping[str, float], native: bool) -> Criterion:
    width, limit = params.judged_concurrency, params.ship.speedup
    name = f"speedup_{width}"
    found = measured[name]
    if limit is None:
        return Criterion(name, found, None, None, "the recipe asks for no speed-up")
    if not native:
        says = "speed was not judged: the engine emulated the checkpoint, or ran on a CPU"
        return Criterion(name, found, limit, None, says)
    met = found >= limit
    says = (
        f"with it the engine makes {found:.4g} times the tokens per second at concurrency "
        f"{width}, {'at least' if met else 'less than'} {limit:g}"
    )
    return Criterion(name, found, limit, met, says)
