"""Deals documents into sets that share nothing, in the order of their hashes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

from onboard.data.documents import Document, NearDuplicates, plain

Row = dict[str, Any]
Kind = Literal["document", "prompt"]


@dataclass(frozen=True)
class Need:
    """A set to fill."""

    name: str
    count: int
    kind: Kind


@dataclass(frozen=True)
class Mix:
    """What a set is dealt from: `pools` of documents in dealing order, with domain and weight."""

    pools: Sequence[Sequence[Document]]
    domains: Sequence[str]
    weights: Sequence[float]

    def quotas(self, count: int) -> dict[str, int]:
        """Return how many of `count` documents each domain is to give."""
        wanted: Counter[str] = Counter()
        for number, quota in enumerate(largest_remainder(self.weights, count)):
            wanted[self.domains[number]] += quota
        return dict(wanted)


@dataclass
class Dealer:
    """Hands out each document once, at most to one set, and no near-copy of it to another.

    Held-out sets are dealt first: they get the lowest hashes, so that asking for more training
    data, or adding a corpus, leaves them as they are.
    """

    admit: Callable[[Document, Kind], Row | None]
    duplicates: NearDuplicates = field(default_factory=NearDuplicates)
    used: set[str] = field(default_factory=set)

    def deal(self, need: Need, mix: Mix) -> list[tuple[Document, Row]]:
        """Return up to `count` documents of the set with their rows, mixed by weight.

        A pool that runs dry is replaced by others of its domain, then by any.
        """
        streams = [self._eligible(pool, need) for pool in mix.pools]
        taken: list[tuple[Document, Row]] = []
        short: list[int] = []
        for number, quota in enumerate(largest_remainder(mix.weights, need.count)):
            got = self._take(streams[number], quota)
            taken += got
            short += [number] * (quota - len(got))
        for number in short:
            spare = (self._take(stream, 1) for stream in _donors(streams, mix, number))
            taken += next(filter(None, spare), [])
        return sorted(taken, key=lambda pair: str(pair[1]["id"]))

    def _eligible(self, pool: Sequence[Document], need: Need) -> Iterator[tuple[Document, Row]]:
        """Yield what the set may hold, marking each as used when it is asked for."""
        for document in pool:
            if document.id in self.used:
                continue
            row = self.admit(document, need.kind)
            if row is None:
                continue
            text = compared(document, row)
            if self.duplicates.clashes(text, need.name):
                continue
            self.used.add(document.id)
            self.duplicates.add(text, need.name)
            yield document, row

    @staticmethod
    def _take(stream: Iterator[tuple[Document, Row]], count: int) -> list[tuple[Document, Row]]:
        return list(islice(stream, count))


def _donors(streams: list[Iterator[Any]], mix: Mix, number: int) -> list[Iterator[Any]]:
    domain = mix.domains[number]
    others = sorted(range(len(streams)), key=lambda i: (mix.domains[i] != domain, i))
    return [streams[i] for i in others]


def compared(document: Document, row: Row) -> str:
    """Return the text by which near-copies are found: all of a conversation, or what was kept."""
    if isinstance(document.content, str):
        return str(row.get("text") or plain(row["messages"]))
    return plain(document.content)


def largest_remainder(weights: Sequence[float], count: int) -> list[int]:
    """Share `count` in proportion to the weights, in whole numbers that add up to it."""
    exact = [weight * count / sum(weights) for weight in weights]
    shares = [int(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (shares[i] - exact[i], i))
    for i in by_remainder[: count - sum(shares)]:
        shares[i] += 1
    return shares
