"""Stage quantize: stream the source into an NVFP4 checkpoint under its own tensor names."""

from __future__ import annotations

import os
import shutil

from onboard.pipeline import Job
from onboard.quantize import budget, written
from onboard.quantize.ladder import climb
from onboard.quantize.making import Formats, Maker
from onboard.recipe import Quantize
from onboard.store import write_json


def run(job: Job[Quantize]) -> None:
    """Write `checkpoint/`, `tensors.json`, and what was tried on the way to it.

    That is `allocation.json` under a budget, `ladder.json` where the method was chosen, and
    `distillation.json` where the checkpoint was trained.
    """
    maker = Maker.of(job)
    allocation = budget.allocate(maker)
    formats, method = allocation.formats, _choose(maker, allocation.formats)
    made = maker.make(method, formats)
    metrics = written.metrics(maker.adaptation, maker.groups, made.checkpoint, made.notes, formats)
    if method != maker.params.method or allocation.choice is not None:
        measured = maker.measure(method, formats)
        metrics["selection_kl"] = measured.kl
        if allocation.choice is not None:
            write_json(job.out / "allocation.json", allocation.describe(measured))
    trained = made.folder / "distilled" / "distillation.json"
    if trained.exists():
        shutil.copy(trained, job.out)
    shutil.copytree(made.checkpoint, job.out / "checkpoint", copy_function=os.link)
    job.known_digests.update({f"checkpoint/{n}": sha for n, sha in made.digests.items()})
    write_json(job.out / "tensors.json", made.notes)
    write_json(job.out / "metrics.json", metrics)


def _choose(maker: Maker, formats: Formats) -> str:
    """Return the recipe's method, or the best that `auto` found, with `ladder.json`."""
    if maker.params.method != "auto":
        return maker.params.method
    ladder = climb(maker, formats)
    write_json(maker.job.out / "ladder.json", ladder.describe())
    return ladder.best.method
