"""How far a draft's next-token distribution is from its target's, differentiably.

Every loss takes natural-log probabilities f32 [N, Vd] of the target p and the draft q over the
draft's vocabulary and returns one value per row, f32 [N]. p is renormalized over that vocabulary:
where the target would say a token that the draft has no word for, the draft still learns the
target's order of the words it has, since the next positions are drafted on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Loss = Callable[[Tensor, Tensor], Tensor]
HYBRID = 3.0  # how soon the hybrid leaves KL: the paper's best


def forward_kl(target: Tensor, draft: Tensor) -> Tensor:
    """Return KL(p || q) in nats: the draft covers all that the target may say."""
    return (target.exp() * (target - draft)).sum(-1)


def reverse_kl(target: Tensor, draft: Tensor) -> Tensor:
    """Return KL(q || p) in nats: the draft keeps to what the target surely says."""
    return (draft.exp() * (draft - target)).sum(-1)


def lk(target: Tensor, draft: Tensor) -> Tensor:
    """Return -log(overlap) in nats: of the probability that a sampled draft is accepted.

    Source: Samarin et al., "LK Losses: Direct Acceptance Rate Optimization for Speculative
    Decoding", 2026, arXiv:2602.23881. In logarithms the gradient does not vanish where p and q
    share little.
    """
    return -_log_overlap(target, draft)


def lk_hybrid(target: Tensor, draft: Tensor) -> Tensor:
    """Return w KL(p || q) + (1 - w) (1 - overlap) with w = exp(-3 overlap), not differentiated.

    KL pulls where the two share little, the acceptance itself where they share much; same source.
    """
    overlap = _log_overlap(target, draft).exp()
    weight = torch.exp(-HYBRID * overlap.detach())
    return weight * forward_kl(target, draft) + (1 - weight) * (1 - overlap)


def _log_overlap(target: Tensor, draft: Tensor) -> Tensor:
    """Return log sum(min(p, q)): of the probability that a draft sampled from q is accepted.

    Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023,
    corollary 3.6.
    """
    return torch.minimum(target, draft).logsumexp(-1)


LOSSES: Mapping[str, Loss] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "lk": lk,
    "lk_hybrid": lk_hybrid,
}
