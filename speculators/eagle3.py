"""The EAGLE-3 draft: Llama layers over (next token, fused hidden states) of the target.

Reads x_{t+1} and g_t = three hidden states of the target at t, and predicts x_{t+2}. Training-time
test (TTT) feeds the draft's own output back as the hidden state of the next step, as drafting
does. Source: Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test", 2025. A P-EAGLE draft reads the same mask at every later step, so that an
engine runs them all in one pass; Source: Hui et al., "P-EAGLE: Parallel-Drafting EAGLE with
Scalable Training", 2026. Parameter names are those of the engines' loaders.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onboard.speculators.attention import KeysValues, Sight, attend
from onboard.speculators.head import Head, rms_norm
from onboard.speculators.shape import DraftConfig
from onboard.speculators.vocabulary import Vocabulary

AUX = 3  # hidden states that the draft fuses


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
    def __init__(self, c: DraftConfig, width: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            c.num_attention_heads,
            c.num_key_value_heads,
            c.head_dim,
        )
        self.theta = c.rope_theta
        self.q_proj = nn.Linear(width, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, c.hidden_size, bias=False)

    def query(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B, T, width] -> rotated q [B, heads, T, d], scaled by d^-1/2."""
        q = self._split(self.q_proj(x), self.heads)
        return rotate(q, positions, self.theta) * float(self.head_dim**-0.5)

    def keys_values(self, x: Tensor, positions: Tensor) -> KeysValues:
        """x [B, T, width] -> rotated k, and v: [B, kv_heads, T, d]."""
        k, v = (self._split(linear(x), self.kv_heads) for linear in (self.k_proj, self.v_proj))
        return rotate(k, positions, self.theta), v

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
    """A Llama layer. The first one's attention reads [embedding, hidden], twice as wide."""

    def __init__(self, c: DraftConfig, is_first: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        if is_first:
            self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c, 2 * c.hidden_size if is_first else c.hidden_size)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c)
        self.is_first, self.norm_before_residual = is_first, c.norm_before_residual

    def entering(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return (what attention reads, the residual) of [B, T, H] twice.

        `norm_before_residual` takes the normed hidden state as the residual.
        """
        if not self.is_first:
            return self.input_layernorm(hidden), hidden
        normed = self.hidden_norm(hidden)
        joined = torch.cat((self.input_layernorm(embedded), normed), -1)
        return joined, normed if self.norm_before_residual else hidden

    def leaving(self, residual: Tensor, attended: Tensor) -> Tensor:
        """residual [B, T, H], attended [B, heads, T, d] -> the layer's output [B, T, H]."""
        hidden = residual + self.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


@dataclass
class Cache:
    """A layer's keys and values: of the row's positions, and of every later step's drafts."""

    first: KeysValues
    own: list[KeysValues]


class Eagle3(nn.Module):
    """The draft. Embedding [V, H] and output rows [Vd, H] are the target's own, frozen.

    EAGLE-3.1's switches: `fc_norm` norms each of the target's states before they are fused,
    `norm_before_residual` takes the normed state as the first layer's residual, and `norm_output`
    hands the normed output to the next step. Where the config has a `mask_token_id` the later steps
    read that token and the trained `mask_hidden`, as if the target had given it.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.fc = nn.Linear(AUX * config.hidden_size, config.hidden_size, bias=False)
        if config.fc_norm:
            norms = [RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(AUX)]
            self.fc_norm = nn.ModuleList(norms)
        self.layers = nn.ModuleList(
            [Layer(config, number == 0) for number in range(config.num_hidden_layers)]
        )
        if config.mask_token_id is not None:
            self.mask_hidden = nn.Parameter(torch.zeros(1, 1, AUX * config.hidden_size))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        for frozen in (self.embed_tokens, self.lm_head):
            frozen.requires_grad_(False)

    @property
    def blocks(self) -> Sequence[Layer]:
        return [layer for layer in self.layers if isinstance(layer, Layer)]

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

    def fuse(self, aux: Tensor) -> Tensor:
        """Return the first step's hidden states of the target's: [..., 3, H] -> [..., H]."""
        if self.config.fc_norm:
            aux = torch.stack([norm(aux[..., i, :]) for i, norm in enumerate(self.fc_norm)], -2)
        fused: Tensor = self.fc(aux.flatten(-2))
        return fused

    def logits(self, hidden: Tensor) -> Tensor:
        """Return draft logits of the last layer's output: [..., H] -> [..., Vd]."""
        out: Tensor = self.lm_head(self.norm(hidden))
        return out

    def following(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return what a later step reads, (embedded, hidden) [B, Q, H] each.

        `tokens` i64 [B, Q] are those drafted before, `hidden` the last layer's output there.
        """
        mask = self.config.mask_token_id
        if mask is None:
            return self.embed_tokens(tokens), self.norm(
                hidden
            ) if self.config.norm_output else hidden
        masked = self.fuse(self.mask_hidden.view(1, 1, AUX, -1))
        return self.embed_tokens(torch.full_like(tokens, mask)), masked.expand_as(hidden)

    def unroll(
        self,
        ids: Tensor,
        aux: Tensor,
        steps: int,
        starts: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Iterator[Tensor]:
        """Yield the last layer's output [B, Q, H] of each TTT step.

        A row of `ids` i64 [B, T], x_{t+1}, and `aux` [B, T, 3, H], g_t, holds one document,
        right-padded, or several after each other, numbered by `documents` i64 [B, T]. `starts`
        i64 [B, Q] are the t to draft from, all by default. Step k reads the teacher's x_{t+1+k}
        with the output of step k-1, and sees what a draft that started at t has in its cache
        (`attention`). Outputs whose teacher lies past the document's end are meaningless.
        """
        batch, length = ids.shape
        every = torch.arange(length, device=ids.device).expand(batch, length)
        starts = every if starts is None else starts
        documents = torch.zeros_like(ids) if documents is None else documents
        window = self.config.sliding_window
        sight, whole = Sight(starts, documents, window), Sight(every, documents, window)
        places = within(documents) + 1
        hidden, embedded, caches = self.fuse(aux), self.embed_tokens(ids), list[Cache]()
        for layer in self.blocks:
            x, residual = layer.entering(embedded, hidden)
            first = layer.self_attn.keys_values(x, places)
            caches.append(Cache(first, []))
            # Only the last layer may leave out positions: the others make its keys.
            seen = sight if len(caches) == len(self.layers) else whole
            q = layer.self_attn.query(_rows(x, seen.starts), places.gather(1, seen.starts))
            hidden = layer.leaving(_rows(residual, seen.starts), attend(q, first, [], seen))
        yield hidden
        for step in range(1, steps):
            positions = places.gather(1, starts) + step
            teacher = ids.gather(1, (starts + step).clamp(max=length - 1))
            embedded, hidden = self.following(teacher, hidden)
            for layer, cache in zip(self.blocks, caches, strict=True):
                x, residual = layer.entering(embedded, hidden)
                cache.own.append(layer.self_attn.keys_values(x, positions))
                q = layer.self_attn.query(x, positions)
                hidden = layer.leaving(residual, attend(q, cache.first, cache.own, sight))
            yield hidden


def within(documents: Tensor) -> Tensor:
    """Return each position's place in its document, i64 [B, T]: rows number their documents."""
    places = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return places - (places * begins).cummax(1).values


def _rows(x: Tensor, at: Tensor) -> Tensor:
    """x [B, T, H], at [B, Q] -> [B, Q, H]."""
    return x[torch.arange(len(x), device=x.device)[:, None], at]


@torch.inference_mode()
def draft_sequentially(draft: Eagle3, ids: Tensor, aux: Tensor, forced: Tensor) -> list[Tensor]:
    """Return the logits [Vd] of 1 + len(forced) draft steps from the end of one context.

    What an engine does, written with a growing key-value cache instead of the training masks:
    `ids` i64 [T] hold x_1 .. x_T, `aux` [T, 3, H] g_0 .. g_{T-1}, and `forced` i64 [k] the target
    tokens that the later steps read.
    """
    positions = torch.arange(1, len(ids) + 1, device=ids.device)[None]
    embedded, hidden = draft.embed_tokens(ids)[None], draft.fuse(aux)[None]
    caches, logits = list[KeysValues](), []
    for step in range(1 + len(forced)):
        if step:
            positions = positions[:, -1:] + 1
            embedded, hidden = draft.following(forced[None, step - 1 : step], hidden[:, -1:])
        hidden = _layers(draft, embedded, hidden, positions, caches)
        logits.append(draft.logits(hidden)[0, -1])
    return logits


def _layers(
    draft: Eagle3, embedded: Tensor, hidden: Tensor, positions: Tensor, caches: list[KeysValues]
) -> Tensor:
    """Return the output [1, T, H] of the layers at consecutive positions; grow the caches."""
    for number, layer in enumerate(draft.blocks):
        x, residual = layer.entering(embedded, hidden)
        new = layer.self_attn.keys_values(x, positions)
        if number == len(caches):
            caches.append(new)
        else:
            old = caches[number]
            caches[number] = torch.cat((old[0], new[0]), 2), torch.cat((old[1], new[1]), 2)
        keys, values = caches[number]
        distance = positions[0, :, None] - torch.arange(1, keys.shape[2] + 1, device=x.device)
        seen = (distance >= 0) & (distance < (draft.config.sliding_window or keys.shape[2] + 1))
        attended = F.scaled_dot_product_attention(
            layer.self_attn.query(x, positions), keys, values, attn_mask=seen, scale=1.0,
            enable_gqa=True,
        )  # fmt: skip
        hidden = layer.leaving(residual, attended)
    return hidden
