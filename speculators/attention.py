"""What a draft's token may attend to while it is trained, and attention that keeps to it.

Training-time test drafts from every position at once. A draft that started at t has in its cache
the keys of its document up to t, and its own key of every later step: so the mask of step k is
causal over the first T keys and diagonal over the Q of each later step. Flex attention computes
one such mask in one kernel on a GPU; a CPU computes the two parts apart, with the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

KeysValues = tuple[Tensor, Tensor]  # [B, kv_heads, T or Q, d] each


@dataclass(frozen=True)
class Sight:
    """What drafts see of rows that hold one document or several.

    `starts` i64 [B, Q] are the positions t to draft from; `documents` i64 [B, T] numbers the
    document of each position within its row. A token sees the last `window` ones up to its own.
    """

    starts: Tensor
    documents: Tensor
    window: int | None

    def past(self, step: int) -> Tensor:
        """Return which first keys the drafts of a step see, bool [B, Q, T]."""
        keys = torch.arange(self.documents.shape[1], device=self.starts.device)
        starts = self.starts[..., None]
        seen = keys <= starts
        if self.window is not None:
            seen &= starts + step - keys < self.window
        own = self.documents.gather(1, self.starts)[..., None]
        return seen & (self.documents[:, None] == own)

    def sees_own(self, step: int, earlier: int) -> bool:
        """Return whether a draft's step sees its key of the `earlier` one."""
        return self.window is None or step - earlier < self.window


def attend(q: Tensor, first: KeysValues, own: Sequence[KeysValues], sight: Sight) -> Tensor:
    """Return attention of the drafts' queries, [B, heads, Q, d], which are scaled already.

    `first` are the keys and values of all positions, `own` those of the steps after the first up
    to this one.
    """
    return (fused if q.is_cuda else in_parts)(q, first, own, sight)


def in_parts(q: Tensor, first: KeysValues, own: Sequence[KeysValues], sight: Sight) -> Tensor:
    """Attend with plain products: one over the first keys, one per later step."""
    groups, step = q.shape[1] // first[0].shape[1], len(own)
    keys, values = _repeated(first, groups)
    visible = [
        _repeated(pair, groups)
        for number, pair in enumerate(own, 1)
        if sight.sees_own(step, number)
    ]
    scores = (q @ keys.transpose(-1, -2)).masked_fill(~sight.past(step).unsqueeze(1), float("-inf"))
    diagonal = [(q * k).sum(-1, keepdim=True) for k, _ in visible]
    weights = torch.cat([scores, *diagonal], -1).softmax(-1, dtype=torch.float32).to(q.dtype)
    length = keys.shape[2]
    out: Tensor = weights[..., :length] @ values
    for number, (_, v) in enumerate(visible):
        out = out + weights[..., length + number, None] * v
    return out


def _repeated(pair: KeysValues, groups: int) -> KeysValues:
    """Give every query head its keys and values."""
    return pair[0].repeat_interleave(groups, 1), pair[1].repeat_interleave(groups, 1)


def fused(q: Tensor, first: KeysValues, own: Sequence[KeysValues], sight: Sight) -> Tensor:
    """Attend with flex attention and one mask for the step."""
    keys = torch.cat([first[0], *(k for k, _ in own)], 2)
    values = torch.cat([first[1], *(v for _, v in own)], 2)
    mask = create_block_mask(
        _visible(sight, len(own)), len(q), None, q.shape[2], keys.shape[2], q.device
    )
    out: Tensor = _flex(q.is_cuda)(
        q, keys, values, block_mask=mask, scale=1.0, enable_gqa=q.shape[1] != keys.shape[1]
    )
    return out


@cache
def _flex(compiled: bool) -> Callable[..., Any]:
    """Return the kernel; the CPU's is the reference implementation."""
    kernel: Callable[..., Any] = flex_attention
    return torch.compile(kernel, dynamic=True) if compiled else kernel


def _visible(sight: Sight, step: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return flex attention's mask of a step: (row, head, query, key) -> whether it is seen."""
    starts, documents = sight.starts, sight.documents
    length, drafts = documents.shape[1], starts.shape[1]
    window = sight.window or length + step + 1

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        start = starts[row, query]
        at = key.clamp(max=length - 1)
        near = start + step - at < window
        past = (at <= start) & (documents[row, at] == documents[row, start]) & near
        later = key - length
        earlier = later // drafts + 1
        own = (later % drafts == query) & (step - earlier < window)
        return torch.where(key < length, past, own)

    return visible
