"""Which matrices become NVFP4, and which of them must share scales."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

EXPERT = re.compile(r"^(?P<experts>.*\.experts)\.(?P<number>\d+)\.(?P<projection>\w+)$")


@dataclass(frozen=True)
class Matrix:
    """One [out, in] matrix: a tensor of its own, or a slice of a fused expert tensor.

    `module` is the name it gets in the written checkpoint (without `.weight`).
    """

    module: str
    tensor: str
    shape: tuple[int, int]
    role: str
    expert: int | None = None  # first index of the fused [E, rows, in] tensor
    first_row: int = 0

    @property
    def parameters(self) -> int:
        return self.shape[0] * self.shape[1]


Group = tuple[Matrix, ...]


def scale_groups(adaptation: Mapping[str, Any]) -> list[Group]:
    """Return every matrix to quantize, once, in groups that share `weight_scale_2`.

    Engines fuse q/k/v and gate/up into one matrix with one scale (FACTS: the maximum of the
    global scales is taken and block scales are kept, so unequal ones are silent damage).
    """
    single: dict[str, Matrix] = {}
    groups: list[Group] = []
    for name, entry in adaptation["tensors"].items():
        if not entry["quantize"]:
            continue
        if len(entry["shape"]) == 3:
            groups += _split_fused(name, entry)
        else:
            module = name.removesuffix(".weight")
            single[module] = Matrix(module, name, tuple(entry["shape"]), entry["role"])
    for members in adaptation["groups"]:
        group = tuple(single.pop(module) for module in members if module in single)
        if group:
            groups.append(group)
    groups += [(matrix,) for matrix in single.values()]
    return sorted(groups, key=lambda group: _natural(group[0].module))


def range_groups(groups: Iterable[Group]) -> list[list[Matrix]]:
    """Return the matrices that share an `input_scale`: siblings, and a layer's experts alike."""
    shared: dict[Any, list[Matrix]] = defaultdict(list)
    for group in groups:
        expert = EXPERT.match(group[0].module)
        key: Any = group[0].module
        if expert:
            projections = sorted(matrix.module.rpartition(".")[2] for matrix in group)
            key = (expert["experts"], *projections)
        shared[key] += group
    return list(shared.values())


def _split_fused(name: str, entry: Mapping[str, Any]) -> list[Group]:
    """Split [E, 2I, H] `gate_up_proj` or [E, H, I] `down_proj` into groups of one expert each."""
    experts, _, projection = name.removesuffix(".weight").rpartition(".")
    count, rows, columns = entry["shape"]
    parts = projection.removesuffix("_proj").split("_")  # "gate_up_proj" -> gate, up
    height = rows // len(parts)
    return [
        tuple(
            Matrix(
                f"{experts}.{number}.{part}_proj",
                name,
                (height, columns),
                entry["role"],
                number,
                place * height,
            )
            for place, part in enumerate(parts)
        )
        for number in range(count)
    ]


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key: layer 2 before layer 10."""
    return [(int(part) if part.isdigit() else -1, part) for part in name.split(".")]
