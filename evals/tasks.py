"""HellaSwag through lm-eval, offline, on a model in memory; both models paired item by item."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from onboard.evals.bootstrap import mcnemar, paired_bootstrap

TASK = "onboard_hellaswag"
METRIC = "acc_norm"  # the choice with the highest log-likelihood per byte
TEMPLATE = Path(__file__).parent / "hellaswag.yaml"
BATCH_SIZE = 16

Item = dict[str, Any]  # {"doc_id", "acc", "acc_norm"}


def write_task(folder: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write the task and its items {"query", "choices", "gold"}; return the task's folder."""
    task = folder / "task"
    task.mkdir(parents=True, exist_ok=True)
    items = task / "items.jsonl"
    items.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = yaml.safe_load(TEMPLATE.read_text())
    config["dataset_kwargs"] = {
        "data_files": str(items.resolve()),
        "cache_dir": str((folder / "task-cache").resolve()),
    }
    (task / "hellaswag.yaml").write_text(yaml.safe_dump(config))
    return task


def evaluate(model: Any, tokenizer: Any, task: Path) -> list[Item]:
    """Return what lm-eval scored on each item, in order of `doc_id`."""
    import datasets
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    class Quiet(HFLM):  # type: ignore[misc]
        def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> Any:
            return super().loglikelihood(requests, disable_tqdm)

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    outcome = lm_eval.simple_evaluate(
        model=Quiet(pretrained=model, tokenizer=tokenizer, batch_size=BATCH_SIZE),
        tasks=[TASK],
        task_manager=TaskManager(include_path=str(task), include_defaults=False),
        num_fewshot=0,
        log_samples=True,
        bootstrap_iters=0,
    )
    items = [
        {"doc_id": s["doc_id"], "acc": s["acc"], "acc_norm": s["acc_norm"]}
        for s in outcome["samples"][TASK]
    ]
    return sorted(items, key=lambda item: int(item["doc_id"]))


def pair(source: list[Item], candidate: list[Item], resamples: int, seed: int) -> dict[str, Any]:
    """Compare two models on the same items: accuracies, the drop, and McNemar's test.

    With few items the test can only find large damage: a large `p` is not a pass.
    """
    first = [float(item[METRIC]) for item in source]
    second = [float(item[METRIC]) for item in candidate]
    assert [i["doc_id"] for i in source] == [i["doc_id"] for i in candidate]
    only_source = sum(a > b for a, b in zip(first, second, strict=True))
    only_candidate = sum(a < b for a, b in zip(first, second, strict=True))
    lo, hi = paired_bootstrap(first, second, resamples, seed)
    return {
        "task": "hellaswag",
        "metric": METRIC,
        "items": len(first),
        "source": {name: _mean(source, name) for name in ("acc", "acc_norm")},
        "candidate": {name: _mean(candidate, name) for name in ("acc", "acc_norm")},
        "drop": _mean(source, METRIC) - _mean(candidate, METRIC),
        "drop_lo": lo,
        "drop_hi": hi,
        "only_source": only_source,
        "only_candidate": only_candidate,
        "p": mcnemar(only_source, only_candidate),
        "pairs": [
            {"doc_id": item["doc_id"], "source": a, "candidate": b}
            for item, a, b in zip(source, first, second, strict=True)
        ],
    }


def _mean(items: list[Item], name: str) -> float:
    return sum(float(item[name]) for item in items) / len(items)
