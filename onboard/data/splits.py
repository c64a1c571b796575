"""Deals documents into sets that share nothing, in the order of their hashes."""

from __future__ import annotations

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


@dataclass
class Dealer:
    """Hands out each document once, at most to one set, and no near-copy of it to another.

    Held-out sets are dealt first: they get the lowest hashes, so that asking for more training
    data, or adding a corpus, leaves them as they are.
    """

    pools: Sequence[Sequence[Document]]  # one per corpus, in dealing order
    weights: Sequence[float]
    admit: Callable[[Document, Kind], Row | None]
    duplicates: NearDuplicates = field(default_factory=NearDuplicates)
    used: set[str] = field(default_factory=set)

    def deal(self, need: Need) -> list[tuple[Document, Row]]:
        """Return up to `count` documents of the set with their rows, mixed over the corpora.

        A corpus that runs dry is replaced by others of its domain, then by any.
        """
        streams = [self._eligible(pool, need) for pool in self.pools]
        taken: list[tuple[Document, Row]] = []
        short: list[int] = []
        for number, quota in enumerate(largest_remainder(self.weights, need.count)):
            got = self._take(streams[number], quota)
            taken += got
            short += [number] * (quota - len(got))
        for number in short:
            spare = (self._take(stream, 1) for stream in self._donors(streams, number))
            taken += next(filter(None, spare), [])
        return sorted(taken, key=lambda pair: str(pair[1]["id"]))

    def _donors(self, streams: list[Iterator[Any]], number: int) -> list[Iterator[Any]]:
        domain = self._domain(number)
        others = sorted(range(len(streams)), key=lambda i: (self._domain(i) != domain, i))
        return [streams[i] for i in others]

    def _domain(self, number: int) -> str:
        pool = self.pools[number]
        return pool[0].domain if pool else ""

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
