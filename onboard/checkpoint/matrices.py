"""The matrices that become NVFP4, taken out of the tensors that hold them, and what they share."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# Step calls the module of a layer's experts `moe`.
EXPERT = re.compile(r"^(?P<experts>.*\.(?:experts|moe))\.(?P<number>\d+)\.(?P<projection>\w+)$")


@dataclass(frozen=True)
class Matrix:
    """One [out, in] matrix: a tensor of its own, or a part of a fused expert tensor.

    `module` is its name in the written checkpoint (without `.weight`), `tensor` the source's. In a
    fused tensor it is entry `expert` of the first axis and there every `step`-th output from
    `first`; `transposed` tensors hold [in, out].
    """

    module: str
    tensor: str
    shape: tuple[int, int]
    role: str
    expert: int | None = None
    first: int = 0
    step: int = 1
    transposed: bool = False

    @property
    def parameters(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def outputs(self) -> slice:
        """The matrix's outputs among those of its tensor."""
        return slice(self.first, self.first + self.shape[0] * self.step, self.step)


Group = tuple[Matrix, ...]


def scale_groups(adaptation: Mapping[str, Any]) -> list[Group]:
    """Return every matrix to quantize, once, in groups that share `weight_scale_2`.

    Engines fuse q/k/v and gate/up into one matrix with one scale (the maximum of the global scales
    is taken and block scales are kept, so unequal ones are silent damage).
    """
    single: dict[str, Matrix] = {}
    groups: list[Group] = []
    for name, entry in adaptation["tensors"].items():
        if not entry["quantize"]:
            continue
        if len(entry["shape"]) == 3:
            groups += _split_fused(name, entry, adaptation["experts"]["fused"])
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


def _split_fused(
    name: str, entry: Mapping[str, Any], layouts: Mapping[str, Mapping[str, Any]]
) -> list[Group]:
    """Split a fused expert tensor into groups of one expert's parts each."""
    experts, _, last = name.removesuffix(".weight").rpartition(".")
    layout = layouts[last]
    count, *sizes = entry["shape"]
    transposed = layout["axes"] == "eio"
    outputs, inputs = reversed(sizes) if transposed else sizes
    parts, height = layout["parts"], outputs // len(layout["parts"])
    interleaved = layout["interleaved"]
    return [
        tuple(
            Matrix(
                f"{experts}.{number}.{part}",
                name,
                (height, inputs),
                entry["role"],
                expert=number,
                first=place if interleaved else place * height,
                step=len(parts) if interleaved else 1,
                transposed=transposed,
            )
            for place, part in enumerate(parts)
        )
        for number in range(count)
    ]


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key: layer 2 before layer 10."""
    return [(int(part) if part.isdigit() else -1, part) for part in name.split(".")]
