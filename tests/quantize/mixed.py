"""Writes a checkpoint of mixed formats, as the stage does with an allocation it has found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onboard import adapt, source
from onboard.checkpoint.matrices import Group, scale_groups
from onboard.checkpoint.reader import Reader
from onboard.checkpoint.writer import move_finished, write
from onboard.quantize import calibrate, config, written
from onboard.quantize.layers import Layers
from onboard.quantize.units import Activations, plan_units
from onboard.recipe import Adapt, Calibrate, Quantize, Source


@dataclass(frozen=True)
class Mixed:
    """What was written, and what it was written from."""

    source: Reader
    checkpoint: Path
    adaptation: dict[str, Any]
    groups: list[Group]
    metrics: dict[str, float]
    notes: dict[str, Any]


def calibrated(bench: Any, twin: Path, documents: int = 12, length: int = 32, **params: Any) -> Any:
    """Run the stages before quantize; return the bench."""
    bench.run("source", source.run, Source(model=str(twin)))
    bench.run("adapt", adapt.run, Adapt())
    ids = [[(7 * n + 13 * k * k) % 250 for k in range(length)] for n in range(documents)]
    rows = [{"id": str(n), "ids": row} for n, row in enumerate(ids)]
    bench.put("data", calibration__jsonl=rows)
    bench.run("calibrate", calibrate.run, Calibrate(**params))
    return bench


def write_mixed(
    bench: Any,
    formats: Mapping[str, str],
    name: str = "mixed",
    layers: Layers | None = None,
    **params: Any,
) -> Mixed:
    """Write `formats` ("fp8", "bf16" by module) into a folder of the bench."""
    section = Quantize(method="rtn", **params)
    reader = Reader.open(source.root(bench.artifacts["source"]))
    adaptation = bench.artifacts["adapt"].json("adaptation.json")
    groups = scale_groups(adaptation)
    ranges = Activations(bench.artifacts["calibrate"].path / "activations.safetensors")
    scratch, checkpoint = bench.folder / f"{name}.scratch", bench.folder / name
    scratch.mkdir()
    checkpoint.mkdir()
    units = plan_units(reader, adaptation, groups, ranges, section, layers, formats)
    done = write(units, scratch, section.shard_bytes)
    move_finished(done, scratch, checkpoint)
    config.write(
        reader.root, checkpoint, adaptation, section.activations,
        formats=formats, layout=section.layout,
    )  # fmt: skip
    metrics = written.metrics(adaptation, groups, checkpoint, done.notes, formats)
    return Mixed(reader, checkpoint, adaptation, groups, metrics, done.notes)


def formats_by(groups: list[Group], **chosen: str) -> dict[str, str]:
    """Return formats by the last parts of modules: `down_proj="fp8"`; `layer_1="bf16"` wins."""
    formats = {}
    for group in groups:
        for matrix in group:
            form = chosen.get(matrix.module.rpartition(".")[2], "nvfp4")
            number = matrix.module.split(".layers.")[1].split(".")[0]
            form = chosen.get(f"layer_{number}", form)
            if form != "nvfp4":
                formats[matrix.module] = form
    return formats
