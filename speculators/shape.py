"""The draft's shape: from its target's config, and what a recipe wants otherwise.

The draft's attention is its own: a target with latent or linear attention gets a draft with plain
grouped heads, and a long-context target one with a sliding window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onboard.errors import InputError
from onboard.recipe import Draft

ROPE_THETA = 10000.0  # where the target has no rotary positions of its own
HEAD_DIM = 128  # where the target's attention is latent and its head_dim means something else


@dataclass(frozen=True)
class DraftConfig:
    """Shape of the draft; `bos`, `eos` and `pad` ids travel to the engines unchanged.

    `sliding_window` counts the tokens that a token attends to, its own among them; None is all.
    The last three fields are EAGLE-3.1's switches, see `Eagle3`. A draft of the family P-EAGLE
    reads `mask_token_id` where the others read the token drafted before; they have None.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    sliding_window: int | None
    vocab_size: int
    draft_vocab_size: int
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_id: int | list[int] | None
    pad_token_id: int | None
    mask_token_id: int | None
    norm_before_residual: bool
    norm_output: bool
    fc_norm: bool

    @classmethod
    def of_target(
        cls, config: Mapping[str, Any], draft_vocab_size: int, draft: Draft | None = None
    ) -> DraftConfig:
        """Take the shape from a target's `config.json`, whatever its own attention is.

        A target with latent attention (`kv_lora_rank`) or without the number of heads gets heads
        of 128 (or of its whole width, where that is no multiple), a quarter of them for keys and
        values. What `draft` states goes before that. Raises InputError where the hidden or
        vocabulary size is absent, or heads do not fit each other.
        """
        text, wanted = config.get("text_config") or config, draft or Draft()
        for key in ("hidden_size", "vocab_size"):
            if key not in text:
                raise InputError(f"config.json: no {key!r}; EAGLE-3 takes its width from it")
        width = int(text["hidden_size"])
        heads, kv_heads, head_dim = _heads(text, width, wanted)
        bos, eos, pad = (
            text.get(f"{name}_token_id", config.get(f"{name}_token_id"))
            for name in ("bos", "eos", "pad")
        )
        return cls(
            hidden_size=width,
            intermediate_size=wanted.intermediate_size
            or int(text.get("intermediate_size") or 3 * width),
            num_hidden_layers=wanted.layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            sliding_window=wanted.window,
            vocab_size=int(text["vocab_size"]),
            draft_vocab_size=min(draft_vocab_size, int(text["vocab_size"])),
            rope_theta=_rope_theta(text),
            rms_norm_eps=float(text.get("rms_norm_eps") or 1e-6),
            max_position_embeddings=int(text.get("max_position_embeddings") or 8192),
            bos_token_id=bos,
            eos_token_id=eos,
            pad_token_id=pad,
            mask_token_id=_mask(pad, eos) if wanted.family == "peagle" else None,
            norm_before_residual=wanted.norm_before_residual,
            norm_output=wanted.norm_output,
            fc_norm=wanted.fc_norm,
        )


def _mask(pad: int | None, eos: int | list[int] | None) -> int:
    """Return a token that no text has inside: the padding, or else the end."""
    ends = eos if isinstance(eos, list) else [eos]
    return next((token for token in (pad, *ends) if token is not None), 0)


def _heads(text: Mapping[str, Any], width: int, wanted: Draft) -> tuple[int, int, int]:
    """Return (query heads, key-value heads, head_dim)."""
    heads, kv_heads, head_dim = _heads_of_target(text, width)
    if wanted.head_dim or wanted.heads:
        head_dim = wanted.head_dim or head_dim
        heads = wanted.heads or max(1, width // head_dim)
        kv_heads = heads // 4 if heads % 4 == 0 else heads
    kv_heads = wanted.kv_heads or kv_heads
    if heads % kv_heads:
        raise InputError(
            f"speculate.draft: {heads} heads are no multiple of {kv_heads} key-value heads",
            f"set draft.kv_heads to a divisor of {heads}",
        )
    return heads, kv_heads, head_dim


def _heads_of_target(text: Mapping[str, Any], width: int) -> tuple[int, int, int]:
    heads = text.get("num_attention_heads")
    if heads and not text.get("kv_lora_rank"):
        head_dim = int(text.get("head_dim") or width // heads)
        return int(heads), int(text.get("num_key_value_heads") or heads), head_dim
    head_dim = HEAD_DIM if width % HEAD_DIM == 0 else width
    heads = width // head_dim
    return heads, heads // 4 if heads % 4 == 0 else heads, head_dim


def _rope_theta(text: Mapping[str, Any]) -> float:
    """Find theta flat, in `rope_parameters`, or nested there by layer type (full attention)."""
    parameters = text.get("rope_parameters") or {}
    nested = parameters.get("full_attention") or {}
    for place in (parameters, nested, text):
        if place.get("rope_theta") is not None:
            return float(place["rope_theta"])
    return ROPE_THETA
