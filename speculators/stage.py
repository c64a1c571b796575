"""Stage `speculate`: train an EAGLE-3 draft on the features and write it for each engine."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial

from onboard.checkpoint.clone import clone
from onboard.pipeline import Job
from onboard.recipe import Draft, Speculate
from onboard.source import root
from onboard.speculators import fit
from onboard.speculators.fit import Work
from onboard.speculators.online import Target
from onboard.store import write_json


def run(job: Job[Speculate]) -> None:
    """Write `vllm/`, where it can load the draft `sglang/`, `training.jsonl` and `metrics.json`.

    Of a sweep the draft with the longest estimated acceptance is written; `sweep.json` has all.
    `offline_acceptance_length` is an estimate on held-out prompts, taken with the bf16 weights as
    they were written; the engine measures the real one.
    """
    features, params = job.inputs["features"].path, job.params
    target = job.inputs["quantize"].path / "checkpoint" / "config.json"
    model = _model(job)
    trained: list[Work] = []
    shapes = variants(params)
    for number, shape in enumerate(shapes):
        what = "training" + (f" draft {number + 1} of {len(shapes)}" if len(shapes) > 1 else "")
        work = Work(features, target, params, shape, job.scratch / f"draft-{number}", model)
        fit.fit(work, partial(job.progress, what, unit="steps"))
        trained.append(work)
    best = max(trained, key=lambda work: work.metrics["offline_acceptance_length"])
    for file in sorted(best.folder.rglob("*")):
        if file.is_file() and (file.parent != best.folder or file.name in (fit.LOG, fit.METRICS)):
            clone(file, job.out / file.relative_to(best.folder))
    if not (job.out / "sglang").exists():
        job.warn("SGLang has no loader for such a draft (speculate.draft): written for vLLM alone")
    write_json(job.out / "sweep.json", _table(trained, best))


def _model(job: Job[Speculate]) -> Target:
    """Return the target that the features are of."""
    if job.inputs["features"].json("index.json")["target"] == "source":
        return Target(root(job.inputs["source"]))
    checkpoint = job.inputs["quantize"].path / "checkpoint"
    return Target(checkpoint, job.inputs["adapt"].path / "adaptation.json")


def variants(params: Speculate) -> list[Draft]:
    """Return the shapes to train: the recipe's, or all combinations of its sweep's values."""
    fields = params.draft.model_dump()
    combinations = itertools.product(*params.sweep.values())
    return [Draft(**{**fields, **dict(zip(params.sweep, c, strict=True))}) for c in combinations]


def _table(trained: Sequence[Work], best: Work) -> list[dict[str, object]]:
    return [
        {"draft": work.shape.model_dump(), **work.metrics, "chosen": work is best}
        for work in trained
    ]
