"""The EAGLE-3 draft: one Llama layer over (next token, fused hidden states) of the target.

Reads x_{t+1} and g_t = three hidden states of the target at t, and predicts x_{t+2}. Training-time
test (TTT) feeds the draft's own output back as the hidden state of the next step, as drafting
does. Source: Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test", 2025. Parameter names are those of the engines' loaders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onboard.errors import InputError
from onboard.speculators.head import Head, rms_norm
from onboard.speculators.vocabulary import Vocabulary

AUX = 3  # hidden states that the draft fuses
ROPE_THETA = 10000.0  # where the target has no rotary positions of its own
HEAD_DIM = 128  # where the target's attention is latent and its head_dim means something else


@dataclass(frozen=True)
class DraftConfig:
    """Shape of the draft; `bos`, `eos` and `pad` ids travel to the engines unchanged."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_id: int | list[int] | None
    pad_token_id: int | None

    @classmethod
    def of_target(cls, config: Mapping[str, Any], draft_vocab_size: int) -> DraftConfig:
        """Take the shape from a target's `config.json`, whatever its own attention is.

        A target with latent attention (`kv_lora_rank`) or without the number of heads gets heads
        of 128 (or of its whole width, where that is no multiple), a quarter of them for keys and
        values. Raises InputError where the hidden or vocabulary size is absent.
        """
        text = config.get("text_config") or config
        for key in ("hidden_size", "vocab_size"):
            if key not in text:
                raise InputError(f"config.json: no {key!r}; EAGLE-3 takes its width from it")
        width = int(text["hidden_size"])
        heads, kv_heads, head_dim = _heads(text, width)
        return cls(
            hidden_size=width,
            intermediate_size=int(text.get("intermediate_size") or 3 * width),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=int(text["vocab_size"]),
            draft_vocab_size=min(draft_vocab_size, int(text["vocab_size"])),
            rope_theta=_rope_theta(text),
            rms_norm_eps=float(text.get("rms_norm_eps") or 1e-6),
            max_position_embeddings=int(text.get("max_position_embeddings") or 8192),
            bos_token_id=text.get("bos_token_id", config.get("bos_token_id")),
            eos_token_id=text.get("eos_token_id", config.get("eos_token_id")),
            pad_token_id=text.get("pad_token_id", config.get("pad_token_id")),
        )


def _heads(text: Mapping[str, Any], width: int) -> tuple[int, int, int]:
    """Return (query heads, key-value heads, head_dim)."""
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


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x.float(), self.weight.float(), self.eps).to(x.dtype)


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Apply rotary positions (halves, as Llama): x [B, n, T, d], positions [B, T]."""
    half = x.shape[-1] // 2
    exponents = torch.arange(half, device=x.device, dtype=torch.float32) / half
    angles = positions[:, None, :, None].float() * theta**-exponents
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Attention(nn.Module):
    def __init__(self, c: DraftConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            c.num_attention_heads,
            c.num_key_value_heads,
            c.head_dim,
        )
        self.theta = c.rope_theta
        wide = 2 * c.hidden_size
        self.q_proj = nn.Linear(wide, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(wide, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(wide, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, c.hidden_size, bias=False)

    def query(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B, T, 2H] -> rotated q [B, heads, T, d], scaled by d^-1/2."""
        q = self._split(self.q_proj(x), self.heads)
        return rotate(q, positions, self.theta) * float(self.head_dim**-0.5)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, 2H] -> rotated k and v, repeated to every query head: [B, heads, T, d]."""
        k = self._split(self.k_proj(x), self.kv_heads)
        v = self._split(self.v_proj(x), self.kv_heads)
        groups = self.heads // self.kv_heads
        k = rotate(k, positions, self.theta).repeat_interleave(groups, 1)
        return k, v.repeat_interleave(groups, 1)

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:-1], heads, self.head_dim).transpose(1, 2)


class MLP(nn.Module):
    def __init__(self, c: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class Layer(nn.Module):
    """A Llama layer whose attention reads [embedding, hidden]; the residual is the hidden state."""

    def __init__(self, c: DraftConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c)

    def join(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Return what attention reads: [B, T, H] twice -> [B, T, 2H]."""
        return torch.cat((self.input_layernorm(embedded), self.hidden_norm(hidden)), -1)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """hidden [B, T, H], attended [B, heads, T, d] -> the layer's output [B, T, H]."""
        hidden = hidden + self.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Eagle3(nn.Module):
    """The draft. Embedding [V, H] and output rows [Vd, H] are the target's own, frozen."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.fc = nn.Linear(AUX * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([Layer(config)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        for frozen in (self.embed_tokens, self.lm_head):
            frozen.requires_grad_(False)

    @property
    def layer(self) -> Layer:
        layer = self.layers[0]
        assert isinstance(layer, Layer)
        return layer

    @classmethod
    def initial(cls, config: DraftConfig, head: Head, vocabulary: Vocabulary, seed: int) -> Eagle3:
        """Start from the target: its embedding, output rows and final norm, and its deepest aux
        state passed through, so that training begins near the target's own logit lens.
        """
        with torch.device("meta"):
            draft = cls(config)
        draft.to_empty(device="cpu")
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in draft.parameters():
                if parameter.ndim == 1:
                    parameter.fill_(1.0)
                elif parameter.requires_grad:
                    parameter.normal_(std=0.02, generator=generator)
            draft.fc.weight.mul_(0.25)
            draft.fc.weight[:, -config.hidden_size :] += torch.eye(config.hidden_size)
            draft.norm.weight.copy_(head.gain)
            draft.embed_tokens.weight.copy_(head.embedding)
            draft.lm_head.weight.copy_(head.output[vocabulary.kept])
        return draft

    def logits(self, hidden: Tensor) -> Tensor:
        """Return draft logits of the layer's output: [..., H] -> [..., Vd]."""
        out: Tensor = self.lm_head(self.norm(hidden))
        return out

    def unroll(
        self, ids: Tensor, aux: Tensor, steps: int, starts: Tensor | None = None
    ) -> Iterator[Tensor]:
        """Yield the layer's output [B, Q, H] of each TTT step, over right-padded documents.

        `ids` i64 [B, T] hold x_{t+1} and `aux` [B, T, 3, H] g_t of one document per row; `starts`
        i64 [B, Q] are the t to draft from (all by default). Step k reads the teacher's x_{t+1+k}
        with the output of step k-1. Start t sees the step-0 keys s <= t, and of every later step
        only the key at its own t: exactly what a draft that started at t has in its cache.
        Outputs whose teacher lies past the end are meaningless.
        """
        batch, length = ids.shape
        places = torch.arange(length, device=ids.device).expand(batch, length)
        if starts is None:
            starts = places
        future = places[:, None, None] > starts[:, None, :, None]  # [B, 1, Q, T]
        attention = self.layer.self_attn
        fused: Tensor = self.fc(aux.flatten(2))
        joined = self.layer.join(self.embed_tokens(ids), fused)
        first = attention.keys_values(joined, places + 1)
        hidden, x = _rows(fused, starts), _rows(joined, starts)
        own: list[tuple[Tensor, Tensor]] = []
        for step in range(steps):
            positions = starts + 1 + step
            if step:
                teacher = ids.gather(1, (starts + step).clamp(max=length - 1))
                x = self.layer.join(self.embed_tokens(teacher), hidden)
                own.append(attention.keys_values(x, positions))
            q = attention.query(x, positions)
            hidden = self.layer.finish(hidden, _attend(q, first, own, future))
            yield hidden


def _rows(x: Tensor, at: Tensor) -> Tensor:
    """x [B, T, H], at [B, Q] -> [B, Q, H]."""
    return x[torch.arange(len(x), device=x.device)[:, None], at]


def _attend(
    q: Tensor, first: tuple[Tensor, Tensor], own: list[tuple[Tensor, Tensor]], future: Tensor
) -> Tensor:
    """Attend to the step-0 keys up to each start, and to its own key of every later step."""
    past = (q @ first[0].transpose(-1, -2)).masked_fill(future, float("-inf"))
    diagonal = [(q * k).sum(-1, keepdim=True) for k, _ in own]
    weights = torch.cat([past, *diagonal], -1).softmax(-1, dtype=torch.float32).to(q.dtype)
    length = future.shape[-1]
    out: Tensor = weights[..., :length] @ first[1]
    for i, (_, v) in enumerate(own):
        out = out + weights[..., length + i, None] * v
    return out


@torch.inference_mode()
def draft_sequentially(draft: Eagle3, ids: Tensor, aux: Tensor, forced: Tensor) -> list[Tensor]:
    """Return the logits [Vd] of 1 + len(forced) draft steps from the end of one context.

    What an engine does, written with a growing key-value cache instead of the training masks:
    `ids` i64 [T] hold x_1 .. x_T, `aux` [T, 3, H] g_0 .. g_{T-1}, and `forced` i64 [k] the target
    tokens that the later steps read.
    """
    attention = draft.layer.self_attn
    positions = torch.arange(1, len(ids) + 1, device=ids.device)[None]
    hidden = draft.fc(aux.flatten(1))[None]
    x = draft.layer.join(draft.embed_tokens(ids)[None], hidden)
    keys, values = attention.keys_values(x, positions)
    q = attention.query(x, positions)
    attended = F.scaled_dot_product_attention(q, keys, values, is_causal=True, scale=1.0)
    hidden = draft.layer.finish(hidden, attended)[:, -1:]
    logits = [draft.logits(hidden)[0, 0]]
    for i, token in enumerate(forced):
        x = draft.layer.join(draft.embed_tokens(token[None, None]), hidden)
        k, v = attention.keys_values(x, positions[:, -1:] + 1 + i)
        q = attention.query(x, positions[:, -1:] + 1 + i)
        keys, values = torch.cat((keys, k), 2), torch.cat((values, v), 2)
        attended = F.scaled_dot_product_attention(q, keys, values, scale=1.0)
        hidden = draft.layer.finish(hidden, attended)
        logits.append(draft.logits(hidden)[0, 0])
    return logits
