"""Make the quantized checkpoint by a method, in a folder of the stage's scratch.

A method is tried by writing its checkpoint: so what is measured of it is what would ship. A folder
that an earlier run finished is used again; an unfinished one goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from onboard.checkpoint.matrices import Group, scale_groups
from onboard.checkpoint.models import compute_dtype, open_reference
from onboard.checkpoint.reader import Reader
from onboard.checkpoint.writer import move_finished, write
from onboard.errors import InputError
from onboard.evals.hidden import vocabulary
from onboard.hardware import cores
from onboard.pipeline import Job
from onboard.quantize import config
from onboard.quantize.calibrate import document_batches
from onboard.quantize.distillation import distill
from onboard.quantize.layers import Layers
from onboard.quantize.layouts import format_of
from onboard.quantize.selection import Measured, Selection
from onboard.quantize.sequential import compensate
from onboard.quantize.units import Activations, plan_units
from onboard.recipe import Quantize
from onboard.source import root
from onboard.store import write_json

METHODS = ("rtn", "sweep", "gptq", "sequential", "qad")  # each one takes longer than those before

Formats = Mapping[str, str]  # "fp8" or "bf16" by module; all others become NVFP4


@dataclass(frozen=True)
class Made:
    """A written checkpoint, notes by module, and the sha256 of its files, in a folder."""

    folder: Path

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    @property
    def record(self) -> Path:
        """The file that is there once everything else is."""
        return self.folder / "made.json"

    @cached_property
    def _said(self) -> dict[str, Any]:
        return dict(json.loads(self.record.read_text()))

    @property
    def notes(self) -> dict[str, dict[str, Any]]:
        return dict(self._said["notes"])

    @property
    def digests(self) -> dict[str, str]:
        return dict(self._said["digests"])

    @property
    def bytes(self) -> int:
        """The size of all shards."""
        return int(self._said["bytes"])

    def drop(self) -> None:
        """Free the disk; what was measured of the checkpoint stays."""
        shutil.rmtree(self.checkpoint, ignore_errors=True)


@dataclass(frozen=True)
class Maker:
    """A source, what calibrate measured of it, and how the recipe wants it quantized."""

    job: Job[Quantize]
    source: Reader
    adaptation: Mapping[str, Any]
    groups: list[Group]
    ranges: Activations
    params: Quantize

    @classmethod
    def of(cls, job: Job[Quantize]) -> Maker:
        adaptation = job.inputs["adapt"].json("adaptation.json")
        params = job.params
        if adaptation["architecture"] is None:  # calibrate ran no forward pass, and said so
            _refuse_without_forward(params, adaptation["model_type"])
            method = "rtn" if params.method == "rtn" else "sweep"
            params = params.model_copy(update={"activations": "none", "method": method})
        return cls(
            job,
            Reader.open(root(job.inputs["source"])),
            adaptation,
            scale_groups(adaptation),
            Activations(job.inputs["calibrate"].path / "activations.safetensors"),
            params,
        )

    def make(self, method: str, formats: Formats) -> Made:
        """Write the checkpoint of a method, unless it is there.

        `formats` are those of `plan_units`.
        """
        made = self.made(method, formats)
        made.folder.mkdir(exist_ok=True)
        if not (made.record.exists() and made.checkpoint.exists()):
            self._write(made, self._layers(method, formats, made.folder), method, formats)
        return made

    def made(self, method: str, formats: Formats) -> Made:
        """Return where the checkpoint of a method is, or will be."""
        return Made(self.job.scratch / _name(method, formats))

    def measure(self, method: str, formats: Formats) -> Measured:
        """Return the KL of a method's checkpoint on the selection documents.

        What was measured once is known, whether or not the checkpoint is still there.
        """
        checkpoint = self.made(method, formats).checkpoint
        if (found := self.selection.known(checkpoint)) is None:
            found = self.selection.measure(self.make(method, formats).checkpoint)
        return found

    def ids(self, name: str) -> list[list[int]]:
        """Return the documents of a data set."""
        return [row["ids"] for row in self.job.inputs["data"].lines(f"{name}.jsonl")]

    @property
    def calibration(self) -> list[list[int]]:
        return self.ids("calibration")[: self.params.documents]

    @cached_property
    def selection(self) -> Selection:
        rows = self.job.inputs["data"].lines("selection.jsonl")
        if not rows:
            raise InputError(
                "quantize: no selection documents to choose by",
                "--set data.selection_documents=24",
            )
        return Selection(
            self.source.root,
            self.adaptation,
            rows,
            self.job.scratch,
            self.job.progress,
        )

    def input_scale(self, module: str, formats: Formats) -> Tensor | None:
        """Return the `input_scale` that is written for a module; None leaves its inputs alone."""
        if formats.get(module) == "fp8":
            return self.ranges.fp8_input_scale(module)
        return self.ranges.input_scale(module) if self.params.activations == "nvfp4" else None

    def _write(self, made: Made, layers: Layers | None, method: str, formats: Formats) -> None:
        params = self.params.model_copy(update={"method": method})
        arguments = (self.source, self.adaptation, self.groups, self.ranges, params)
        shards = made.folder / "shards"
        shards.mkdir(exist_ok=True)
        written = write(
            plan_units(*arguments, layers, formats),
            shards,
            params.shard_bytes,
            lambda done, total: self.job.progress("writing", done >> 20, total >> 20, "MiB"),
            workers=params.workers or cores(),
        )
        made.checkpoint.mkdir(exist_ok=True)
        move_finished(written, shards, made.checkpoint)
        has_cache = bool(self.ranges.cache_scales())
        config.write(
            self.source.root,
            made.checkpoint,
            self.adaptation,
            params.activations,
            has_cache,
            formats=formats,
            layout=params.layout,
        )
        partial = made.record.with_suffix(".partial")
        said = {"notes": written.notes, "digests": written.digests, "bytes": written.bytes}
        write_json(partial, said)
        partial.rename(made.record)

    def _layers(self, method: str, formats: Formats, folder: Path) -> Layers | None:
        """Return the matrices that a method rounds before anything is written."""
        if method in ("rtn", "sweep"):
            return None
        if method == "qad":
            return self._distilled(formats, folder)
        layers = folder / "layers"
        layers.mkdir(exist_ok=True)
        self._compensate(layers, formats, propagate=method == "sequential")
        return Layers(layers)

    def _compensate(self, folder: Path, formats: Formats, propagate: bool) -> None:
        compensate(
            open_reference(self.source.root, compute_dtype(), resident=False),
            self._inexact(formats),
            document_batches(self.calibration, self.params.batch_size),
            lambda module: self.input_scale(module, formats),
            folder,
            lambda done, total: self.job.progress("rounding", done, total, "layers"),
            formats,
            propagate,
        )

    def _distilled(self, formats: Formats, folder: Path) -> Layers:
        documents = self.ids("distillation")
        if not documents:
            raise InputError(
                "quantize.method=qad: no documents to distil on",
                "--set data.distillation_documents=256",
            )
        start = self._layers("sequential", formats, self.make("sequential", formats).folder)
        assert start is not None
        outcome = distill(
            self.source.root,
            start,
            self._inexact(formats),
            lambda module: self.input_scale(module, formats),
            documents,
            self.ids("selection"),
            self.params.distill,
            folder,
            self.job.progress,
            vocabulary(self.source.root),
        )
        return Layers(outcome.folder)

    def _inexact(self, formats: Formats) -> list[Group]:
        """Return the groups that lose by being rounded: what MXFP4 holds exactly stays."""
        return [
            group
            for group in self.groups
            if format_of(group, formats) != "bf16"
            and {self.source.weights[m.tensor].scheme for m in group} != {"mxfp4"}
        ]


def _name(method: str, formats: Formats) -> str:
    """Return the name of a folder: the method's, and a digest of formats where there are any."""
    if not formats:
        return method
    text = json.dumps(dict(sorted(formats.items())))
    return f"{method}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _refuse_without_forward(params: Quantize, model_type: str) -> None:
    if params.budget.limit or params.method in ("qad", "auto"):
        raise InputError(
            f"quantize: transformers has no class for {model_type}, so nothing can be measured",
            "--set quantize.method=sweep, without a budget",
        )
