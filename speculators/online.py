"""Hidden states taken from the target while training reads them, where no disk is to hold them all.

The target reads as many of the documents that come next as fill a buffer, each in a pass of its
own: what a document's states are does not depend on its neighbours, so that a training that was
cut short ends in the same bytes. A target that does not fit in memory is gone through once a
buffer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from onboard.checkpoint.models import Runner, compute_dtype, open_candidate, open_reference
from onboard.speculators.capture import prefill
from onboard.speculators.served import groups
from onboard.speculators.shards import Document, Place, places_of, write_shard


@dataclass(frozen=True)
class Target:
    """A checkpoint's folder: the source's, or a candidate's with its `adaptation.json`."""

    root: Path
    adaptation: Path | None = None

    def open(self) -> Runner:
        if self.adaptation is None:
            return open_reference(self.root, compute_dtype())
        adaptation = json.loads(self.adaptation.read_text())
        return open_candidate(self.root, adaptation, compute_dtype())


def read(runner: Runner, places: Sequence[Place]) -> list[Document]:
    """Return documents whose shards hold tokens alone, with the states that the target has."""
    tokens = [place.read_tokens() for place in places]
    states = prefill(runner, [ids for ids, _ in tokens])
    return [
        Document(ids, seen[:, :-1], seen[:, -1], mask)
        for (ids, mask), seen in zip(tokens, states, strict=True)
    ]


def feed(runner: Runner, order: Iterable[Sequence[Place]], tokens: int) -> Iterator[list[Document]]:
    """Yield the documents of each batch; those of `tokens` tokens are held at once, or one batch's.

    A document that comes twice within a buffer is read once.
    """
    for batches in buffered(order, tokens):
        distinct = {place.id: place for batch in batches for place in batch}
        held = dict(zip(distinct, read(runner, list(distinct.values())), strict=True))
        for batch in batches:
            yield [held[place.id] for place in batch]


def buffered(order: Iterable[Sequence[Place]], tokens: int) -> Iterator[list[Sequence[Place]]]:
    """Yield stretches of batches whose distinct documents have up to `tokens` tokens together."""
    batches: list[Sequence[Place]] = []
    held: dict[str, int] = {}
    for batch in order:
        more = {place.id: len(place) for place in batch}
        if batches and sum((held | more).values()) > tokens:
            yield batches
            batches, held = [], {}
        batches.append(batch)
        held |= more
    if batches:
        yield batches


def store(runner: Runner, places: Sequence[Place], folder: Path, tokens: int) -> list[Place]:
    """Write the documents with their states, a buffer a shard; return where they are now.

    For what is read again and again: the documents that are held out.
    """
    stored: list[Place] = []
    for number, group in enumerate(groups([len(place) for place in places], tokens)):
        file = folder / f"held-out-{number:05d}.safetensors"
        if not file.exists():
            write_shard(file, read(runner, places[group]))
        stored += places_of(file, [place.id for place in places[group]])
    return stored
