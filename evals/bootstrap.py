"""How sure a mean over documents is, and whether two models differ on the same items."""

from __future__ import annotations

from math import comb

import numpy as np
from numpy.typing import ArrayLike, NDArray

LEVEL = 0.95
CELLS = 4_000_000  # resampled counts held at once


def document_bootstrap(
    sums: ArrayLike, counts: ArrayLike, resamples: int, seed: int
) -> tuple[float, float]:
    """Return the 95% percentile interval of `sum(sums) / sum(counts)`.

    `sums` [D] and `counts` [D] are a document's total and its number of tokens. Documents are
    drawn with replacement: tokens of one text are not independent, and an interval over tokens
    comes out about three times too narrow (Efron & Tibshirani 1993, ch. 8, the cluster
    bootstrap).
    """
    total, size = np.asarray(sums, float), np.asarray(counts, float)
    assert total.shape == size.shape
    assert total.size, "no documents"
    means = [(drawn @ total) / (drawn @ size) for drawn in _draws(total.size, resamples, seed)]
    return _interval(np.concatenate(means))


def paired_bootstrap(
    first: ArrayLike, second: ArrayLike, resamples: int, seed: int
) -> tuple[float, float]:
    """Return the 95% interval of `mean(first) - mean(second)` over the same items [N]."""
    difference = np.asarray(first, float) - np.asarray(second, float)
    return document_bootstrap(difference, np.ones_like(difference), resamples, seed)


def paired_ratio_bootstrap(
    first: tuple[ArrayLike, ArrayLike],
    second: tuple[ArrayLike, ArrayLike],
    resamples: int,
    seed: int,
) -> tuple[float, float]:
    """Return the 95% interval of `sum(sums) / sum(counts)` of the first minus that of the second.

    Each is (sums [D], counts [D]) of the same documents, which are drawn together.
    """
    (sums, counts), (others, sizes) = (
        (np.asarray(a, float), np.asarray(b, float)) for a, b in (first, second)
    )
    assert sums.size == others.size > 0
    return _interval(
        np.concatenate([
            (drawn @ sums) / (drawn @ counts) - (drawn @ others) / (drawn @ sizes)
            for drawn in _draws(sums.size, resamples, seed)
        ])
    )  # fmt: skip


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the exact two-sided p-value of McNemar's test.

    Of the items where just one model is right, `only_first` and `only_second` are how often it
    was that one; under the null hypothesis both are equally likely (McNemar 1947).
    """
    n, k = only_first + only_second, min(only_first, only_second)
    return min(1.0, float(2 * sum(comb(n, i) for i in range(k + 1)) / 2**n))


def _draws(items: int, resamples: int, seed: int) -> list[NDArray[np.int64]]:
    """Return how often each item is drawn, in blocks of [resamples, items] counts."""
    random = np.random.default_rng(seed)
    even = np.full(items, 1 / items)
    block = max(1, CELLS // items)
    sizes = [min(block, resamples - start) for start in range(0, resamples, block)]
    return [random.multinomial(items, even, size) for size in sizes]


def _interval(values: NDArray[np.float64]) -> tuple[float, float]:
    lo, hi = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(lo), float(hi)
