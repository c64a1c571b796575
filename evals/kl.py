"""KL divergence between two language models over the full vocabulary, token by token."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

CHUNK = 128  # tokens whose logits exist at once


@dataclass(frozen=True)
class Head:
    """What a model does after its final norm: hidden states [T, H] -> logits [T, vocabulary].

    `vocabulary` rows of `weight` are real tokens; the rest is padding and takes no part.
    """

    weight: Tensor  # f32 [>= vocabulary, H]
    vocabulary: int
    bias: Tensor | None = None
    scale: float = 1.0  # logits are multiplied by it
    softcap: float | None = None  # logits become softcap * tanh(logits / softcap)

    @classmethod
    def of(cls, model: Any, vocabulary: int) -> Head:
        """Read the output layer of a transformers model and its config's logit settings."""
        linear, config = model.get_output_embeddings(), model.config.get_text_config()
        bias = getattr(linear, "bias", None)
        return cls(
            linear.weight.detach().float(),
            min(vocabulary, linear.weight.shape[0]),
            None if bias is None else bias.detach().float(),
            _logit_scale(config),
            getattr(config, "final_logit_softcapping", None),
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Return f32 logits [T, vocabulary] of hidden states [T, H] of any float dtype."""
        bias = None if self.bias is None else self.bias[: self.vocabulary]
        logits = torch.nn.functional.linear(hidden.float(), self.weight[: self.vocabulary], bias)
        logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def _logit_scale(config: Any) -> float:
    """Return the factor on the logits: Cohere and Falcon-H1 multiply, Granite divides."""
    for name in ("logit_scale", "lm_head_multiplier"):
        if (factor := getattr(config, name, None)) is not None:
            return float(factor)
    return 1.0 / float(getattr(config, "logits_scaling", None) or 1.0)


@dataclass(frozen=True)
class TokenStats:
    """Per predicted token, f32 [T] on the CPU; nats where it is a log."""

    kl: Tensor  # KL(reference || candidate)
    agrees: Tensor  # 1 where both rank the same token first
    delta_p: Tensor  # candidate's minus reference's probability of the true token
    nll_reference: Tensor  # of the true token
    nll_candidate: Tensor
    confidence: Tensor  # the reference's largest probability


def compare(
    reference: tuple[Tensor, Head],
    candidate: tuple[Tensor, Head],
    targets: Tensor,
    chunk: int = CHUNK,
) -> TokenStats:
    """Compare what two models predict for `targets` i64 [T].

    Each side is its last hidden states [T, H], after the final norm, and its head. Logits exist
    for `chunk` tokens at a time.
    """
    device = reference[1].weight.device
    parts = [
        _compare(reference[1].logits(r.to(device)), candidate[1].logits(c.to(device)), t.to(device))
        for r, c, t in zip(
            *(torch.split(x, chunk) for x in (reference[0], candidate[0], targets)), strict=True
        )
    ]
    return TokenStats(
        **{f.name: torch.cat([getattr(p, f.name) for p in parts]) for f in fields(TokenStats)}
    )


def kl_divergence(reference_logits: Tensor, candidate_logits: Tensor) -> Tensor:
    """Return KL(reference || candidate) per row in nats: f32 [T, V] twice -> [T].

    sum_v p_v (log p_v - log q_v); what fp32 rounding leaves below zero is zero.
    """
    return _kl(reference_logits.log_softmax(-1), candidate_logits.log_softmax(-1))


def top_tokens(hidden: Tensor, head: Head, k: int) -> tuple[Tensor, Tensor]:
    """Return the `k` likeliest ids and their probabilities, [T, k] each, of hidden [T, H]."""
    probabilities, ids = head.logits(hidden).softmax(-1).topk(k)
    return ids, probabilities


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(-1).clamp_min(0)


def _compare(reference: Tensor, candidate: Tensor, targets: Tensor) -> TokenStats:
    log_p, log_q = reference.log_softmax(-1), candidate.log_softmax(-1)
    true_p, true_q = (x.gather(-1, targets[:, None])[:, 0] for x in (log_p, log_q))
    best, first = log_p.max(-1)
    stats = {
        "kl": _kl(log_p, log_q),
        "agrees": (first == log_q.argmax(-1)).float(),
        "delta_p": true_q.exp() - true_p.exp(),
        "nll_reference": -true_p,
        "nll_candidate": -true_q,
        "confidence": best.exp(),
    }
    return TokenStats(**{name: value.cpu() for name, value in stats.items()})
