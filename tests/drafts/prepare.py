"""What every draft of the comparison is trained on: a quantized target and its own answers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onboard import adapt, source
from onboard.data import stage as data
from onboard.quantize import calibrate
from onboard.quantize import stage as quantize
from onboard.recipe import Adapt, Calibrate, Features, Quantize, Recipe, resolve
from onboard.speculators import features
from onboard.store import Artifact
from tests.conftest import Bench

SETTINGS = (
    "data.calibration_documents=32",
    "data.training_prompts=1200",
    "data.evaluation_prompts=60",
)


@dataclass(frozen=True)
class Stand:
    """A model taken as far as its features; what is there is used again."""

    folder: Path
    bench: Bench
    recipe: Recipe

    @classmethod
    def of(cls, model: str, folder: Path) -> Stand:
        folder.mkdir(parents=True, exist_ok=True)
        stand = cls(folder, Bench(folder), resolve(model, list(SETTINGS)))
        stand._stage("source", source.run, stand.recipe.source)
        stand._stage("adapt", adapt.run, Adapt())
        stand._stage("data", data.run, stand.recipe.data)
        stand._stage("calibrate", calibrate.run, Calibrate())
        stand._stage("quantize", quantize.run, Quantize(method="sweep"))
        answers = Features(max_new_tokens=96, batch_size=80)
        stand._stage("features", features.run, answers)
        return stand

    def _stage(self, name: str, function: Any, section: Any) -> None:
        began = time.monotonic()
        self.bench.once(name, function, section)
        print(f"{name:12} {time.monotonic() - began:6.0f} s", flush=True)

    @property
    def features(self) -> Artifact:
        return self.bench.artifacts["features"]

    @property
    def checkpoint(self) -> Path:
        return self.bench.artifacts["quantize"].path / "checkpoint"

    @property
    def prompts(self) -> list[dict[str, Any]]:
        """Held-out prompts of all domains."""
        return list(self.bench.artifacts["data"].lines("evaluation_prompts.jsonl"))
