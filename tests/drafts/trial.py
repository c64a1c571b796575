"""Drafts trained and tried in the engine, one after the other, their rows kept in a file."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from onboard.recipe import Draft, Speculate
from onboard.speculators import fit
from onboard.speculators.fit import Work
from tests.drafts import engine, verdict
from tests.drafts.prepare import Stand


class Results:
    """The results so far, kept in `out/name` after every draft: a run that was stopped goes on."""

    def __init__(self, out: Path, name: str) -> None:
        self.out, self.file = out, out / name
        out.mkdir(parents=True, exist_ok=True)
        self.content: dict[str, Any] = {"drafts": {}}
        if self.file.exists():
            self.content = json.loads(self.file.read_text())

    @property
    def drafts(self) -> dict[str, Any]:
        drafts: dict[str, Any] = self.content["drafts"]
        return drafts

    def keep(self, name: str, row: dict[str, Any]) -> None:
        self.drafts[name] = row
        partial = self.file.with_suffix(".partial")
        partial.write_text(json.dumps(self.content, indent=1))
        partial.rename(self.file)
        if "failed" in row:
            print(f"{name:12} {row['failed']}", flush=True)
            return
        found, lo, hi = verdict.length(row["prompts"])
        print(f"{name:12} {row['seconds']:6.0f} s {row['tokens_per_s']:6.0f} tokens/s  acceptance "
              f"{found:.3f} [{lo:.3f}, {hi:.3f}]", flush=True)  # fmt: skip


def trial(
    results: Results,
    stand: Stand,
    name: str,
    features: Path,
    params: Speculate,
    measure: Callable[[Stand, Path], dict[str, Any]] = engine.accepted,
) -> None:
    """Train a draft of ours on a folder of features and let the engine use it, unless it did."""
    if name in results.drafts:
        return
    folder = results.out / name
    work = Work(features, stand.checkpoint / "config.json", params, Draft(), folder / "fit")
    began = time.monotonic()
    fit.fit(work, lambda done, total: None)
    seconds = time.monotonic() - began
    log = [json.loads(line) for line in (work.folder / fit.LOG).read_text().splitlines()]
    results.keep(name, {
        "seconds": seconds,
        "tokens": log[-1]["tokens"],
        "tokens_per_s": log[-1]["tokens"] / seconds,
        "parameters": work.metrics["draft_parameters"],
        "curve": [row for row in log if "held_out_length" in row],
        **measure(stand, work.folder),
    })  # fmt: skip
