"""Stage quantize: stream the source into an NVFP4 checkpoint under its own tensor names."""

from __future__ import annotations

import os
import shutil

from onboard.pipeline import Job
from onboard.quantize import budget, written
from onboard.quantize.ladder import climb
from onboard.quantize.making import Maker
from onboard.recipe import Quantize
from onboard.store import write_json


def run(job: Job[Quantize]) -> None:
    """Write `checkpoint/`, `tensors.json`, and what was tried on the way to it.

    That is `allocation.json` under a budget, `ladder.json` where the method was chosen, and
    `distillation.json` where the checkpoint was trained.
    """
    maker, metrics = Maker.of(job), {}
    allocation = budget.allocate(maker)
    formats = allocation.formats
    if maker.params.method == "auto":
        ladder = climb(maker, formats)
        made = ladder.best.made
        write_json(job.out / "ladder.json", ladder.describe())
        metrics["selection_kl"] = ladder.best.measured.kl
    else:
        made = maker.make(maker.params.method, formats)
    if allocation.choice is not None:
        measured = maker.selection.measure(made.checkpoint)
        write_json(job.out / "allocation.json", allocation.describe(measured))
        metrics["selection_kl"] = measured.kl
    trained = made.folder / "distilled" / "distillation.json"
    if trained.exists():
        shutil.copy(trained, job.out)
    shutil.copytree(made.checkpoint, job.out / "checkpoint", copy_function=os.link)
    job.known_digests.update({f"checkpoint/{n}": sha for n, sha in made.digests.items()})
    write_json(job.out / "tensors.json", made.notes)
    metrics |= written.metrics(
        maker.adaptation, maker.groups, job.out / "checkpoint", made.notes, formats
    )
    write_json(job.out / "metrics.json", metrics)
