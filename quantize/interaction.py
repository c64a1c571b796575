"""Whether the errors of two units add, cancel or ignore each other, and whether that can be known.

The Gram matrix of the units' effects on the predictions gives a term for every pair. With few
documents most of such terms are noise, and a choice that is optimised over noise gets worse. So
the documents are split in random halves: what the halves agree on is signal, the terms of each kind
of pair are shrunk by it, and kinds where it is little are not used at all.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onboard.quantize.allocation import Unit

RELIABLE = 0.5  # share of signal in the variance of the terms, from which on they are used
_LAYER = re.compile(r"\.(\d+)\.")

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Kind:
    """Pairs of one kind: the cosines of their effects, and how far halves of documents agree.

    `agreement` is the split-half correlation about zero, Σxy / √(Σx² Σy²) of the pairs' cosines;
    `correlation` the usual one about the means. `reliability` is what the agreement comes to with
    all documents: 2r / (1 + r) (Spearman 1910, Brown 1910).
    """

    name: str
    pairs: int
    cosine_mean: float
    cosine_sd: float
    correlation: float
    agreement: float
    reliability: float
    used: bool


@dataclass(frozen=True)
class Interactions:
    """`pairs` f64 [U, U], in nats a token: what two units in NVFP4 cost beyond their sum, shrunk.

    Zero for the kinds of pairs that are not used.
    """

    pairs: Array
    kinds: tuple[Kind, ...]
    halves: int

    @property
    def used(self) -> bool:
        return any(kind.used for kind in self.kinds)

    def describe(self) -> dict[str, Any]:
        """Return what allocation.json says."""
        return {
            "used": self.used,
            "halves": self.halves,
            "reliable_from": RELIABLE,
            "kinds": [asdict(kind) for kind in self.kinds],
        }


def kind_of(a: Unit, b: Unit) -> str:
    """Return what two units are to each other."""
    places = [_LAYER.search(unit.name) for unit in (a, b)]
    layers = [int(place[1]) for place in places if place]
    if len(layers) < 2 or abs(layers[0] - layers[1]) > 1:
        return "distant layers"
    if layers[0] != layers[1]:
        return "adjacent layers"
    if "expert" in (a.role, b.role):
        return "experts and their layer"
    blocks = {unit.name.rpartition(".")[0] for unit in (a, b)}
    return f"same block, {a.role}" if len(blocks) == 1 else "same layer"


def estimate(gram: Array, units: Sequence[Unit], halves: int = 20, seed: int = 0) -> Interactions:
    """Return the pair terms of `gram` f64 [documents, U, U], nats a token, kind by kind.

    A document's G gives its joint KL as 1/2 1ᵀG1, so that two units add G_uv to their sum.
    """
    mean = gram.mean(0)
    scale = np.sqrt(np.outer(mean.diagonal(), mean.diagonal()))
    scale[scale == 0] = np.inf
    splits = [(a / scale, b / scale) for a, b in _halves(gram, halves, seed)]
    terms, kinds = np.zeros_like(mean), []
    for name, (rows, columns) in _pairs_by_kind(units).items():
        kind = _judge(name, (mean / scale)[rows, columns], splits, rows, columns)
        kinds.append(kind)
        if kind.used:
            terms[rows, columns] = terms[columns, rows] = kind.reliability * mean[rows, columns]
    return Interactions(terms, tuple(kinds), halves)


Places = tuple[NDArray[np.int64], NDArray[np.int64]]


def _pairs_by_kind(units: Sequence[Unit]) -> dict[str, Places]:
    found: Mapping[str, list[tuple[int, int]]] = defaultdict(list)
    for a in range(len(units)):
        for b in range(a + 1, len(units)):
            found[kind_of(units[a], units[b])].append((a, b))
    places = {name: np.array(pairs).T for name, pairs in sorted(found.items())}
    return {name: (rows, columns) for name, (rows, columns) in places.items()}


def _halves(gram: Array, halves: int, seed: int) -> list[tuple[Array, Array]]:
    """Return the means over random halves of the documents."""
    random, documents = np.random.default_rng(seed), len(gram)
    if documents < 2:
        return []
    orders = [random.permutation(documents) for _ in range(halves)]
    cut = documents // 2
    return [(gram[order[:cut]].mean(0), gram[order[cut : 2 * cut]].mean(0)) for order in orders]


def _judge(
    name: str,
    cosines: Array,
    splits: Sequence[tuple[Array, Array]],
    rows: NDArray[np.int64],
    columns: NDArray[np.int64],
) -> Kind:
    sides = [(a[rows, columns], b[rows, columns]) for a, b in splits]
    agreement = _mean([_about(x, y, 0.0, 0.0) for x, y in sides])
    correlation = _mean([_about(x, y, float(x.mean()), float(y.mean())) for x, y in sides])
    share = max(0.0, agreement)
    reliability = 2 * share / (1 + share)
    return Kind(
        name,
        len(cosines),
        float(cosines.mean()),
        float(cosines.std()),
        correlation,
        agreement,
        reliability,
        reliability >= RELIABLE,
    )


def _about(x: Array, y: Array, x_centre: float, y_centre: float) -> float:
    x, y = x - x_centre, y - y_centre
    norm = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / norm if norm > 0 else 0.0


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0
