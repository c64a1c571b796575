"""`make study-features`: should a draft learn from the source's states, or the quantized target's?

    python -m tests.drafts.study [OUT]

The same answers, those of the NVFP4 checkpoint, are read by the source and by the checkpoint; a
draft is trained on either's states, as long as on the other's, with each of three seeds, and the
engine tries all six on the checkpoint. OUT (.onboard/drafts) gets study.json; a run that was
stopped goes on. The last line says by how much acceptance is longer with the source's states, and
the 95% interval over prompts and seeds.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onboard.checkpoint.models import Runner, compute_dtype, open_reference
from onboard.recipe import Speculate
from onboard.source import root
from onboard.speculators import head
from onboard.speculators.capture import prefill
from onboard.speculators.shards import Document, places_of, write_shard
from tests.drafts import verdict
from tests.drafts.prepare import Stand
from tests.drafts.trial import Results, trial

SEEDS = (0, 1, 2)
EPOCHS = 8  # about eight minutes on two cores
PARAMS = Speculate(epochs=EPOCHS, batch_size=8, learning_rate=2e-3, warmup_steps=20)
SOURCES = ("source", "quantize")
RESAMPLES = 4000


def of_source(stand: Stand, folder: Path) -> Path:
    """Write the features of the same answers as the source has them; return their folder."""
    if folder.exists():
        return folder
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    source = root(stand.bench.artifacts["source"])
    runner = open_reference(source, compute_dtype())
    index = stand.features.json("index.json")
    for shard in index["shards"]:
        places = places_of(stand.features.path / shard["file"], shard["ids"])
        documents = [reread(runner, place.read()) for place in places]
        write_shard(partial / shard["file"], documents, index["storage"])
    head.of_model(runner.model).save(partial)
    (partial / "index.json").write_text(json.dumps(index | {"target": "source"}))
    partial.rename(folder)
    return folder


def reread(runner: Runner, document: Document) -> Document:
    """Return a document with its tokens as they are and the states that the runner has of them."""
    states = next(iter(prefill(runner, [document.ids])))
    return Document(document.ids, states[:, :-1], states[:, -1], document.mask)


def longer(drafts: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return how much longer acceptance is with the source's states: the mean over seeds.

    The interval resamples seeds and prompts; a prompt that loops with any draft is left out.
    """
    rows = [[drafts[f"{name}-{seed}"]["prompts"] for seed in SEEDS] for name in SOURCES]
    whole = [i for i in range(len(rows[0][0])) if not any(r[i]["looped"] for s in rows for r in s)]
    counts = np.array([[[sum(r[i]["histogram"]) for i in whole] for r in s] for s in rows], float)
    accepted = np.array(
        [[[sum(j * n for j, n in enumerate(r[i]["histogram"])) for i in whole] for r in s]
         for s in rows], float)  # fmt: skip

    def difference(seeds: Any, prompts: Any) -> float:
        drawn = [v[:, seeds][:, :, prompts].sum(2) for v in (accepted, counts)]
        lengths = (drawn[0] / drawn[1]).mean(1)
        return float(lengths[0] - lengths[1])

    random = np.random.default_rng(0)
    size = len(whole)
    found = [
        difference(random.integers(len(SEEDS), size=len(SEEDS)), random.integers(size, size=size))
        for _ in range(RESAMPLES)
    ]
    lo, hi = np.quantile(found, (0.025, 0.975))
    return difference(np.arange(len(SEEDS)), np.arange(size)), float(lo), float(hi)


def main(out: Path) -> None:
    results = Results(out, "study.json")
    stand = Stand.of("smollm2-135m", out / "stand")
    folders = {"source": of_source(stand, out / "features-source"),
               "quantize": stand.features.path}  # fmt: skip
    for seed in SEEDS:
        for name in SOURCES:
            params = PARAMS.model_copy(update={"seed": seed})
            trial(results, stand, f"{name}-{seed}", folders[name], params)
    for name in SOURCES:
        rows = [verdict.length(results.drafts[f"{name}-{seed}"]["prompts"]) for seed in SEEDS]
        print(f"{name:9} " + "  ".join(f"{v:.3f} [{lo:.3f}, {hi:.3f}]" for v, lo, hi in rows))
    value, lo, hi = longer(results.drafts)
    print(f"acceptance with the source's states is {value:+.3f} [{lo:+.3f}, {hi:+.3f}] longer")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else ".onboard/drafts"))
