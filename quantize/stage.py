"""Stage quantize: stream the source into an NVFP4 checkpoint under its own tensor names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from onboard.checkpoint.matrices import Group, scale_groups
from onboard.checkpoint.models import compute_dtype, open_reference
from onboard.checkpoint.reader import Reader
from onboard.checkpoint.writer import move_finished, write
from onboard.hardware import cores
from onboard.pipeline import Job
from onboard.quantize import config
from onboard.quantize.calibrate import document_batches
from onboard.quantize.layers import Layers
from onboard.quantize.sequential import compensate
from onboard.quantize.units import Activations, plan_units
from onboard.recipe import Quantize
from onboard.source import root
from onboard.store import write_json


def run(job: Job[Quantize]) -> None:
    """Write `checkpoint/` and `tensors.json`; shards that a killed run finished are kept."""
    source = Reader.open(root(job.inputs["source"]))
    adaptation = job.inputs["adapt"].json("adaptation.json")
    groups = scale_groups(adaptation)
    params = job.params
    if adaptation["architecture"] is None:  # calibrate ran no forward pass, and said so
        params = params.model_copy(update={"activations": "none"})
    ranges = Activations(job.inputs["calibrate"].path / "activations.safetensors")
    layers = None
    if params.method == "sequential" and adaptation["architecture"] is not None:
        layers = _compensate(job, source, groups, ranges)
    units = plan_units(source, adaptation, groups, ranges, params, layers)
    written = write(
        units,
        job.scratch,
        job.params.shard_bytes,
        lambda done, total: job.progress("writing", done >> 20, total >> 20, "MiB"),
        workers=job.params.workers or cores(),
    )
    checkpoint = job.out / "checkpoint"
    checkpoint.mkdir()
    move_finished(written, job.scratch, checkpoint)
    config.write(
        source.root, checkpoint, adaptation, params.activations, bool(ranges.cache_scales())
    )
    job.known_digests.update({f"checkpoint/{n}": sha for n, sha in written.digests.items()})
    write_json(job.out / "tensors.json", written.notes)
    write_json(job.out / "metrics.json", metrics(adaptation, groups, checkpoint, written.notes))


def _compensate(
    job: Job[Quantize], source: Reader, groups: Iterable[Group], ranges: Activations
) -> Layers:
    """Round layer after layer on the calibration documents; what MXFP4 holds exactly stays."""
    folder = job.scratch / "layers"
    folder.mkdir(exist_ok=True)
    rows = job.inputs["data"].lines("calibration.jsonl")[: job.params.documents]
    documents = [row["ids"] for row in rows]
    inexact = [g for g in groups if {source.weights[m.tensor].scheme for m in g} != {"mxfp4"}]
    compensate(
        open_reference(source.root, compute_dtype(), resident=False),
        inexact,
        document_batches(documents, job.params.batch_size),
        ranges.input_scale if job.params.activations == "nvfp4" else None,
        folder,
        lambda done, total: job.progress("rounding", done, total, "layers"),
    )
    return Layers(folder)


def metrics(
    adaptation: Mapping[str, Any],
    groups: Iterable[Group],
    checkpoint: Path,
    notes: Mapping[str, Mapping[str, Any]],
) -> dict[str, float]:
    """Return what the written files hold, read back from their headers."""
    reader = Reader.open(checkpoint)
    stored: dict[str, int] = defaultdict(int)
    for module, note in notes.items():
        if reader.is_nvfp4(module) and reader.headers[f"{module}.weight"].dtype == "U8":
            stored[note["role"]] += 2 * reader.headers[f"{module}.weight"].parameters
    expected: Mapping[str, float] = adaptation["expected_share"]
    total: Mapping[str, int] = adaptation["linear_parameters_by_role"]
    shares = {role: stored[role] / total[role] for role in expected}
    packed = {matrix.tensor for group in groups for matrix in group}
    lost = [n for n in adaptation["tensors"] if n not in packed and n not in reader.headers]
    lost += [m.module for g in groups for m in g if not reader.is_nvfp4(m.module)]
    errors = torch.tensor([note["relative_error"] for note in notes.values()] or [0.0])
    return {
        "weights_quantized_share": sum(stored.values()) / adaptation["linear_parameters"],
        **{f"quantized_share_{role}": share for role, share in shares.items()},
        "share_missing": max(
            (max(0.0, share - shares[role]) for role, share in expected.items()), default=0.0
        ),
        "tensors_lost": len(lost),
        "tensors_written": len(reader.headers),
        "checkpoint_bytes": sum(p.stat().st_size for p in checkpoint.glob("*.safetensors")),
        "relative_error_max": float(errors.max()),
        "relative_error_mean": float(errors.mean()),
    }
