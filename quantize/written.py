"""What the written checkpoint holds, read back from its headers and held against the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from onboard.checkpoint.matrices import Group
from onboard.checkpoint.reader import Reader
from onboard.quantize.layouts import Format, format_of

SCHEMES: Mapping[Format, str] = {"nvfp4": "nvfp4", "fp8": "fp8_tensor"}


def metrics(
    adaptation: Mapping[str, Any],
    groups: Iterable[Group],
    checkpoint: Path,
    notes: Mapping[str, Mapping[str, Any]],
    formats: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, float]:
    """Return the metrics of the quantize stage.

    Shares are of the parameters of all linear layers, or of those of a role, and count a matrix
    only where it is stored in the format that `formats` ("fp8" or "bf16" by module, else NVFP4)
    gives it. `effective_bits` is the size of all weights that could be quantized, with their
    scales, over their parameters. Relative errors are those of quantized matrices.
    """
    reader = Reader.open(checkpoint)
    planned = {m: format_of(group, formats) for group in groups for m in group}
    stored: dict[str, Counter[str]] = {form: Counter() for form in ("nvfp4", "fp8", "bf16")}
    for matrix, form in planned.items():
        if form == "bf16" or reader.scheme(matrix.module) == SCHEMES[form]:
            stored[form][matrix.role] += matrix.parameters
    quantized = stored["nvfp4"] + stored["fp8"]
    total: Mapping[str, int] = adaptation["linear_parameters_by_role"]
    expected: Mapping[str, float] = adaptation["expected_share"]
    missing = {
        role: (round(share * total[role]) - stored["bf16"][role] - quantized[role]) / total[role]
        for role, share in expected.items()
    }
    parts = {m.tensor for m, form in planned.items() if form != "bf16"}
    lost = [name for name in adaptation["tensors"] if name not in parts | reader.weights.keys()]
    lost += [
        matrix.module
        for matrix, form in planned.items()
        if form != "bf16" and reader.scheme(matrix.module) != SCHEMES[form]
    ]
    every = max(1, adaptation["linear_parameters"])
    errors = torch.tensor(
        [n["relative_error"] for n in notes.values() if "relative_error" in n] or [0.0]
    )
    return {
        "weights_quantized_share": quantized.total() / every,
        **{f"quantized_share_{role}": quantized[role] / total[role] for role in expected},
        "weights_nvfp4_share": stored["nvfp4"].total() / every,
        "weights_fp8_share": stored["fp8"].total() / every,
        "effective_bits": _effective_bits(reader, planned),
        "share_missing": max((max(0.0, share) for share in missing.values()), default=0.0),
        "tensors_lost": len(lost),
        "tensors_written": len(reader.headers),
        "checkpoint_bytes": sum(p.stat().st_size for p in checkpoint.glob("*.safetensors")),
        "relative_error_max": float(errors.max()),
        "relative_error_mean": float(errors.mean()),
    }


def _effective_bits(reader: Reader, planned: Mapping[Any, Format]) -> float:
    """Return bits per weight over the matrices of the plan, scales included."""
    names = {f"{m.module}.weight" if form != "bf16" else m.tensor for m, form in planned.items()}
    held = [reader.weights[name] for name in names if name in reader.weights]
    return 8 * sum(w.bytes for w in held) / max(1, sum(w.parameters for w in held))
