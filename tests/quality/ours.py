"""Our half of the comparison: the quantize stage's own code, a checkpoint per method or budget."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from onboard import adapt, source
from onboard.checkpoint.reader import Reader
from onboard.data import stage as data
from onboard.quantize import budget, calibrate, written
from onboard.quantize.making import Maker
from onboard.recipe import Adapt, Calibrate, Quantize, Recipe, resolve
from tests.conftest import Bench
from tests.quality.measure import Candidate

DOCUMENTS = {
    "calibration_documents": 64,
    "selection_documents": 24,
    "evaluation_documents": 24,
    "distillation_documents": 256,
    "training_prompts": 1,
    "evaluation_prompts": 1,
}


@dataclass(frozen=True)
class Point:
    """A checkpoint as it is measured, its size, and what it took to make."""

    candidate: Candidate
    seconds: float
    select_seconds: float | None
    bytes: int
    nvfp4_share: float


@dataclass(frozen=True)
class Workshop:
    """A model with its documents, calibrated; `make` quantizes it as a recipe would."""

    folder: Path
    bench: Bench
    recipe: Recipe

    @classmethod
    def of(cls, model: str, folder: Path) -> Workshop:
        """Prepare `model`, any recipe or checkpoint folder; what is there is used again."""
        folder.mkdir(parents=True, exist_ok=True)
        settings = [f"data.{name}={count}" for name, count in DOCUMENTS.items()]
        shop = cls(folder, Bench(folder), resolve(model, settings))
        shop.bench.once("source", source.run, shop.recipe.source)
        shop.bench.once("adapt", adapt.run, Adapt())
        shop.bench.once("data", data.run, shop.recipe.data)
        shop.bench.once("calibrate", calibrate.run, Calibrate())
        return shop

    @property
    def model(self) -> Path:
        return source.root(self.bench.artifacts["source"])

    def rows(self, name: str) -> list[dict[str, Any]]:
        return list(self.bench.artifacts["data"].lines(f"{name}.jsonl"))

    def ids(self, name: str) -> list[list[int]]:
        return [row["ids"] for row in self.rows(name)]

    def make(self, name: str, method: str, beside: str | None = None, **params: Any) -> Point:
        """Quantize by a method; `params` are those of the section.

        What another point, `beside`, made on the way is used again, and its time not counted. All
        budgets share one measurement of sensitivities, whose time counts for each of them.
        """
        section = Quantize(method=method, batch_size=8, **params)  # type: ignore[arg-type]
        self.bench.folder = self.folder / (beside or name)
        self.bench.folder.mkdir(exist_ok=True)
        maker = Maker.of(self.bench.job("quantize", section, again=True))
        measuring = self._sensitivities(maker) if section.budget.limit else 0.0
        begun = time.monotonic()
        formats = budget.allocate(maker).formats
        selection = time.monotonic() - begun + measuring if section.budget.limit else None
        made = maker.make(method, formats)
        seconds = time.monotonic() - begun + measuring
        found = written.metrics(
            maker.adaptation, maker.groups, made.checkpoint, made.notes, formats
        )
        parameters = sum(matrix.parameters for group in maker.groups for matrix in group)
        reader = Reader.open(made.checkpoint)
        weights = {
            f"{matrix.module}.weight": reader.weight(f"{matrix.module}.weight").float()
            for group in maker.groups
            for matrix in group
        }
        norms = {n: reader.weight(n).float() for n in reader.weights if "norm" in n}  # of qad
        path = self.folder / f"{name}.safetensors"
        save_file({**weights, **norms}, path)
        scales = {module: float(scale) for module, scale in reader.input_scales().items()}
        in_fp8 = frozenset(module for module, format in formats.items() if format == "fp8")
        return Point(
            Candidate(path, scales, in_fp8),
            seconds,
            selection,
            round(found["effective_bits"] * parameters / 8),
            found["weights_nvfp4_share"],
        )

    def _sensitivities(self, maker: Maker) -> float:
        """Put the sensitivities into the scratch; return the seconds that measuring them took."""
        own = maker.job.scratch / "sensitivities.safetensors"
        kept, note = self.folder / own.name, self.folder / "sensitivities.json"
        if not kept.exists():
            begun = time.monotonic()
            budget.measure(maker)
            note.write_text(json.dumps(time.monotonic() - begun))
            shutil.copy(own, kept)
        else:
            shutil.copy(kept, own)
        return float(json.loads(note.read_text()))


def calibration_file(shop: Workshop) -> Path:
    """Write the ids that all peers calibrate on: ours."""
    path = shop.folder / "calibration.json"
    path.write_text(json.dumps([i for i in shop.ids("calibration") if len(i) == 256]))
    return path


def code_rows(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return which documents are code."""
    return [n for n, row in enumerate(rows) if row["domain"] == "code"]
