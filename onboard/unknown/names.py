"""Tensor names as templates with numbered places: which number is the layer, what the others are.

A checkpoint's names fall into few templates, `model.layers.#.mlp.experts.#.up_proj.weight`. The
layer is the number that runs over all layers of the config; any other one names a bank of modules.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from onboard.architectures.table import canonical

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Place:
    """One tensor of a template: its layer (None outside layers), its other numbers, its shape."""

    layer: int | None
    others: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Template:
    """Tensors whose names differ in numbers alone. `words` are the name's parts, `#` a number."""

    words: tuple[str, ...]
    layer_at: int | None  # index in `words` of the layer's number
    places: tuple[Place, ...]

    @property
    def name(self) -> str:
        return ".".join(self.words)

    @property
    def others_at(self) -> tuple[int, ...]:
        """Indexes in `words` of the numbers that are no layer."""
        return tuple(i for i, w in enumerate(self.words) if w == "#" and i != self.layer_at)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first tensor; that of all where layers do not differ."""
        return self.places[0].shape


def templates(shapes: Shapes, num_layers: int | None) -> list[Template]:
    """Return the templates of a checkpoint, in the order of their first tensors."""
    trunk = trunk_prefix(shapes, num_layers)
    grouped: dict[str, list[str]] = defaultdict(list)
    for name in shapes:
        grouped[canonical(name)].append(name)
    found = []
    for template, names in grouped.items():
        words = tuple(template.split("."))
        layer_at = _layer_at(words, trunk)
        places = tuple(_place(name, words, layer_at, shapes[name]) for name in names)
        found.append(Template(words, layer_at, places))
    return found


def trunk_prefix(names: Iterable[str], num_layers: int | None) -> str | None:
    """Return the start of a name that comes before the layer's number, such as `model.layers`.

    It is the one with the most tensors of those that run over `num_layers` numbers or more, of
    those with the most numbers where the config does not tell.
    """
    numbers: dict[str, set[int]] = defaultdict(set)
    tensors: dict[str, int] = defaultdict(int)
    for name in names:
        if match := re.match(r"(.*?\w)\.(\d+)(?:\.|$)", name):
            numbers[match[1]].add(int(match[2]))
            tensors[match[1]] += 1
    if num_layers is not None:
        whole = {p for p, held in numbers.items() if held >= set(range(num_layers))}
        return max(whole, key=lambda p: tensors[p], default=None)
    return max(numbers, key=lambda p: (len(numbers[p]), tensors[p]), default=None)


def _layer_at(words: tuple[str, ...], trunk: str | None) -> int | None:
    before = tuple(trunk.split(".")) if trunk else ()
    is_layer = bool(before) and words[: len(before) + 1] == (*before, "#")
    return len(before) if is_layer else None


def _place(
    name: str, words: tuple[str, ...], layer_at: int | None, shape: tuple[int, ...]
) -> Place:
    parts = name.split(".")
    numbers = {i: int(parts[i]) for i, word in enumerate(words) if word == "#"}
    layer = numbers.pop(layer_at) if layer_at is not None else None
    return Place(layer, tuple(numbers.values()), shape)
