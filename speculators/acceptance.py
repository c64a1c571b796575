"""Acceptance estimated off-line: greedy drafting replayed over answers the target has given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onboard.hardware import device_kind
from onboard.speculators.batches import Batch
from onboard.speculators.eagle3 import Eagle3
from onboard.speculators.shards import Document, Place
from onboard.speculators.vocabulary import Vocabulary


@dataclass(frozen=True)
class Acceptance:
    """`rounds` of drafting, and of these how many accepted the token at each position."""

    rounds: int
    accepted: list[int]

    @property
    def length(self) -> float:
        """Tokens per round: the target's own one and the accepted ones."""
        return 1 + sum(self.accepted) / self.rounds if self.rounds else 1.0


@torch.inference_mode()
def replay(
    draft: Eagle3, vocabulary: Vocabulary, places: Sequence[Place], steps: int
) -> Acceptance:
    """Walk through each answer as an engine would: propose, keep the matching head, go on.

    An estimate: the answers are the target's greedy ones under transformers, not an engine's.
    Within them it is exact, since TTT outputs equal those of sequential drafting up to the first
    mismatch.
    """
    draft, vocabulary = draft.to(device_kind()).eval(), vocabulary.to(device_kind())
    rounds, accepted = 0, [0] * steps
    for place in places:
        document = place.read()
        for count in walk(hits(draft, vocabulary, document, steps)):
            rounds += 1
            for position in range(count):
                accepted[position] += 1
    return Acceptance(rounds, accepted)


def hits(draft: Eagle3, vocabulary: Vocabulary, document: Document, steps: int) -> Tensor:
    """Return whether step k from the i-th answer token proposes the text's (i+1+k)-th.

    bool [answer length, steps]; what lies past the end of the text is no hit.
    """
    batch = Batch.of([document], device_kind())
    starts, _ = batch.starts()
    answer = batch.ids[batch.mask]
    found = torch.zeros(len(answer), steps, dtype=torch.bool)
    for step, hidden in enumerate(draft.unroll(batch.ids, batch.aux, steps, starts)):
        proposed = vocabulary.to_target(draft.logits(hidden[0]).argmax(-1))
        text = answer[1 + step :]
        found[: len(text), step] = (proposed[: len(text)] == text).cpu()
    return found


def walk(found: Tensor) -> list[int]:
    """Return the accepted tokens of each round over an answer's `hits`."""
    runs = found.long().cumprod(-1).sum(-1).tolist()
    counts, start = [], 0
    while start < len(runs) - 1:  # the last start has no text left to propose
        counts.append(runs[start])
        start += runs[start] + 1
    return counts
