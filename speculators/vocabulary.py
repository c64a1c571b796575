"""The draft's pruned vocabulary: the tokens that the target really generates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from onboard.errors import InputError


@dataclass(frozen=True)
class Vocabulary:
    """`kept` i64 [Vd]: the target id of every draft id, ascending."""

    kept: Tensor
    target_size: int

    def __len__(self) -> int:
        return len(self.kept)

    @property
    def d2t(self) -> Tensor:
        """Target id minus draft id, i64 [Vd]: the table of EAGLE-3 checkpoints."""
        return self.kept - torch.arange(len(self.kept), device=self.kept.device)

    @property
    def t2d(self) -> Tensor:
        """True where the draft knows the target's token, bool [V]."""
        known = torch.zeros(self.target_size, dtype=torch.bool, device=self.kept.device)
        known[self.kept] = True
        return known

    def to_target(self, draft_ids: Tensor) -> Tensor:
        return self.kept[draft_ids]

    def to(self, device: str) -> Vocabulary:
        return Vocabulary(self.kept.to(device), self.target_size)

    @classmethod
    def most_frequent(cls, counts: Tensor, size: int) -> Vocabulary:
        """Keep the `size` most frequent of `counts` i64 [V]; the lower id wins a tie."""
        ranked = torch.argsort(counts, descending=True, stable=True)
        return cls(ranked[:size].sort().values, len(counts))

    @classmethod
    def from_tables(cls, d2t: Tensor, t2d: Tensor) -> Vocabulary:
        """Read a checkpoint's tables; raise InputError where they disagree."""
        kept = d2t + torch.arange(len(d2t))
        if not torch.equal(kept, t2d.nonzero()[:, 0]):
            raise InputError("draft checkpoint: d2t and t2d name different tokens")
        return cls(kept, len(t2d))


def count(answers: Iterable[tuple[Tensor, Tensor]], vocab_size: int) -> Tensor:
    """Return how often each token occurs under the mask of (ids [T], mask [T]), i64 [V]."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for ids, mask in answers:
        counts += torch.bincount(ids[mask], minlength=vocab_size)
    return counts


def coverage(vocabulary: Vocabulary, counts: Tensor) -> float:
    """Return the share of the counted tokens that the draft can propose."""
    return float(counts[vocabulary.kept].sum() / counts.sum())
