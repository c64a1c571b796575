"""Stage `speculate`: train an EAGLE-3 draft on the features and write it for each engine."""

from __future__ import annotations

import json
from typing import Any

from onboard.pipeline import Job
from onboard.recipe import Speculate
from onboard.speculators import export
from onboard.speculators.acceptance import replay
from onboard.speculators.eagle3 import DraftConfig, Eagle3
from onboard.speculators.head import Head
from onboard.speculators.shards import places, split
from onboard.speculators.training import train
from onboard.speculators.vocabulary import Vocabulary, count, coverage
from onboard.store import write_json


def run(job: Job[Speculate]) -> None:
    """Write `vllm/`, `sglang/`, `training.jsonl` and `metrics.json`.

    `offline_acceptance_length` is an estimate on held-out prompts, taken with the bf16 weights as
    they were written; the engine measures the real one.
    """
    features, params = job.inputs["features"], job.params
    index = features.json("index.json")
    target = json.loads((job.inputs["quantize"].path / "checkpoint" / "config.json").read_text())
    head = Head.load(features.path, index["head"])
    trained, held_out = split(places(features))
    counts = count((d.read_tokens() for d in trained), len(head.output))
    config = DraftConfig.of_target(target, params.draft_vocab_size)
    vocabulary = Vocabulary.most_frequent(counts, config.draft_vocab_size)
    draft = Eagle3.initial(config, head, vocabulary, params.seed)
    log = train(
        draft,
        head,
        vocabulary,
        trained,
        params,
        job.scratch,
        lambda done, total: job.progress("training", done, total, "steps"),
    )
    for engine in export.LAYER_PREFIX:
        export.write(
            job.out / engine,
            engine,
            draft,
            vocabulary,
            tuple(index["aux_layers"]),
            target.get("architectures") or [],
            params.ttt_steps,
        )
        export.read(job.out / engine, engine)
    with (job.out / "training.jsonl").open("w") as f:
        f.writelines(json.dumps(row) + "\n" for row in log)
    written = export.read(job.out / "vllm", "vllm")
    estimate = replay(written.draft(), written.vocabulary, held_out, params.ttt_steps)
    last_epoch = log[-(len(log) // params.epochs) :]
    metrics: dict[str, Any] = {
        "offline_acceptance_length": estimate.length,
        "draft_parameters": sum(p.numel() for p in draft.parameters() if p.requires_grad),
        "draft_vocab_coverage": coverage(
            vocabulary, count((d.read_tokens() for d in held_out), len(head.output))
        ),
        "training_tokens": log[-1]["tokens"],
        "training_loss": sum(row["loss"] for row in last_epoch) / len(last_epoch),
    }
    write_json(job.out / "metrics.json", metrics)
