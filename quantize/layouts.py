"""The names, shapes and scalars under which each format is stored, and which matrix gets which.

                 ModelOpt                        compressed-tensors
    NVFP4        weight, weight_scale,           weight_packed, weight_scale,
                 weight_scale_2, input_scale     weight_global_scale, input_global_scale
    FP8          weight, weight_scale,           -
                 input_scale
    BF16         as the source has it            as the source has it

compressed-tensors holds the reciprocals of the two scalars, as [1]. It could describe FP8 too, but
vLLM rounds fused FP8 weights of that dialect once more, through fp16: not what was measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from onboard.checkpoint.matrices import Group, Matrix
from onboard.checkpoint.nvfp4 import BLOCK
from onboard.checkpoint.writer import Spec
from onboard.errors import InputError
from onboard.tensorplan import expert_container

Format = Literal["nvfp4", "fp8", "bf16"]
FORMATS: tuple[Format, ...] = get_args(Format)


@dataclass(frozen=True)
class Layout:
    """How a dialect stores packed matrices."""

    weight: str
    scale_2: str
    input_scale: str
    shape: tuple[int, ...]  # of a scalar
    is_reciprocal: bool

    def scalar(self, value: Tensor) -> Tensor:
        """Return `weight_scale_2`, `input_scale` or FP8's `weight_scale` as it is stored."""
        stored = value.reciprocal() if self.is_reciprocal else value
        return stored.reshape(self.shape)

    def specs(self, matrix: Matrix, form: Format, quantizes_inputs: bool) -> list[Spec]:
        """Return the tensors of a matrix in the order they are written."""
        out, width = matrix.shape
        if form == "fp8":
            parts = [("weight", "F8_E4M3", (out, width)), ("weight_scale", "F32", self.shape)]
        else:
            parts = [
                (self.weight, "U8", (out, width // 2)),
                ("weight_scale", "F8_E4M3", (out, width // BLOCK)),
                (self.scale_2, "F32", self.shape),
            ]
        if quantizes_inputs:
            parts.append((self.input_scale, "F32", self.shape))
        return [Spec(f"{matrix.module}.{part}", dtype, shape) for part, dtype, shape in parts]


LAYOUTS = {
    "modelopt": Layout("weight", "weight_scale_2", "input_scale", (), is_reciprocal=False),
    "compressed-tensors": Layout(
        "weight_packed", "weight_global_scale", "input_global_scale", (1,), is_reciprocal=True
    ),
}


def format_of(group: Group, formats: Mapping[str, str]) -> Format:
    """Return a group's format; `formats` holds "fp8" or "bf16" by module, NVFP4 is not named."""
    found: Format = formats.get(group[0].module, "nvfp4")  # type: ignore[assignment]
    return found


def check_formats(groups: Iterable[Group], formats: Mapping[str, str], layout: str) -> None:
    """Raise InputError on formats that no engine reads: in this layout, or in one fused matrix."""
    if layout == "compressed-tensors" and "fp8" in formats.values():
        raise InputError(
            "vLLM rounds the FP8 weights of a compressed-tensors checkpoint once more",
            "--set quantize.layout=modelopt",
        )
    units: dict[str, tuple[str, str]] = {}
    for group in groups:
        for matrix in group:
            form = formats.get(matrix.module, "nvfp4")
            if form not in FORMATS:
                raise InputError(f"{matrix.module}: {form!r} is none of {', '.join(FORMATS)}")
            unit = expert_container(matrix.module) or group[0].module
            first, other = units.setdefault(unit, (matrix.module, form))
            if form != other:
                raise InputError(
                    f"an engine holds {first} and {matrix.module} as one, "
                    f"but they are to be {other} and {form}"
                )
