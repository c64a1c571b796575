"""Train a Qwen3-MoE of about ten million parameters on text that ships with Python.

    python -m tests.quality.tiny_moe OUT [STEPS]

The checkpoint in OUT is as published ones are: bf16, a tensor per expert, a tokenizer with a chat
template. The load-balancing loss is weak, so that some experts see few tokens. Every twentieth
document is held out; `token_ids` gives documents of either side.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onboard.data import readers

VOCABULARY, CONTEXT, BATCH, STEPS = 4096, 256, 16, 240
BALANCE = 1e-2  # of the load-balancing loss
LEARNING_RATE, WARMUP = 3e-3, 50
HELD_OUT = 20  # every twentieth document
SEED = 0
END = "<|endoftext|>"
CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CONFIG: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 192,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 160,
    "intermediate_size": 512,
    "norm_topk_prob": True,
    "max_position_embeddings": 2048,
    "output_router_logits": True,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Trained:
    """What training gave: losses are cross-entropies in nats a token, on held-out documents.

    `routed` is the share of tokens per layer and expert (top-2 shares sum to 2), held out too.
    """

    parameters: int
    tokens: int
    seconds: float
    first_loss: float
    loss: float
    routed: list[list[float]]


def documents(held_out: bool) -> Iterator[str]:
    """Yield the standard library and the language reference: every twentieth text, or the rest."""
    texts = [t for read in (readers.python_stdlib, readers.prose) for t in read()]
    for i, text in enumerate(texts):
        if (i % HELD_OUT == 0) == held_out:
            yield str(text)


def make_tokenizer(texts: list[str]) -> Any:
    """Return a byte-level BPE of 4096 tokens trained on the texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, chat_template=CHAT, eos_token=END)


def encode(tokenizer: Any, texts: list[str]) -> Tensor:
    """Return all texts as rows of 256 tokens, i64 [rows, 256], each text ended by END."""
    rows = tokenizer(texts, add_special_tokens=False)["input_ids"]
    flat = [token for row in rows for token in (*row, tokenizer.eos_token_id)]
    return torch.tensor(flat[: len(flat) // CONTEXT * CONTEXT]).view(-1, CONTEXT)


def token_ids(folder: Path, count: int, held_out: bool) -> list[list[int]]:
    """Return `count` rows of 256 token ids, spread evenly over the documents of one side."""
    from transformers import AutoTokenizer

    rows = encode(AutoTokenizer.from_pretrained(folder), list(documents(held_out)))
    spread = torch.linspace(0, len(rows) - 1, count).long()
    ids: list[list[int]] = rows[spread].tolist()
    return ids


def learning_rate(step: int, steps: int) -> float:
    """Return the factor of a linear warm-up and a cosine down to a tenth."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - WARMUP) / max(1, steps - WARMUP)))


def optimizer(model: Any) -> torch.optim.Optimizer:
    """Return AdamW that decays matrices and leaves norms alone."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95))


@torch.no_grad()
def evaluate(model: Any, rows: Tensor) -> tuple[float, list[list[float]]]:
    """Return the mean cross-entropy and the share of tokens routed to each expert, per layer."""
    losses = []
    chosen = torch.zeros(CONFIG["num_hidden_layers"], CONFIG["num_experts"])
    for batch in torch.split(rows, BATCH):
        out = model(input_ids=batch)
        losses.append(next_token_loss(out.logits, batch))
        for layer, scores in enumerate(out.router_logits):
            top = scores.topk(CONFIG["num_experts_per_tok"], -1).indices.flatten()
            chosen[layer] += top.bincount(minlength=CONFIG["num_experts"])
    return float(torch.stack(losses).mean()), (chosen / rows.numel()).tolist()


def balance_loss(scores: Sequence[Tensor]) -> Tensor:
    """Return the mean over layers of E * sum(share of choices * mean probability), 1 if balanced.

    `scores` is one [tokens, E] of router logits a layer (Switch Transformer, eq. 4). transformers'
    own loss averages over layers before it multiplies, which lets every single layer collapse.
    """
    losses = []
    for layer in scores:
        experts = layer.shape[-1]
        top = layer.topk(CONFIG["num_experts_per_tok"], -1).indices.flatten()
        share = top.bincount(minlength=experts) / len(top)
        losses.append(experts * (share * layer.softmax(-1).mean(0)).sum())
    return torch.stack(losses).mean()


def next_token_loss(logits: Tensor, batch: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next token in nats."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def fit(model: Any, rows: Tensor, steps: int) -> None:
    """Train for `steps` batches drawn with a fixed seed; prints the loss every 25 steps."""
    adam = optimizer(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda s: learning_rate(s, steps))
    generator = torch.Generator().manual_seed(SEED)
    began = time.monotonic()
    for step in range(steps):
        batch = rows[torch.randint(len(rows), (BATCH,), generator=generator)]
        out = model(input_ids=batch)
        loss = next_token_loss(out.logits, batch)
        torch.autograd.backward(loss + BALANCE * balance_loss(out.router_logits))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        schedule.step()
        adam.zero_grad()
        if step % 25 == 0:
            seconds = time.monotonic() - began
            print(
                f"step {step} loss {loss.item():.3f} {seconds:.0f} s", file=sys.stderr, flush=True
            )


def train(out: Path, steps: int = STEPS) -> Trained:
    """Train from scratch, save to `out` and return the held-out losses before and after."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(SEED)
    texts = list(documents(held_out=False))
    tokenizer = make_tokenizer(texts)
    rows = encode(tokenizer, texts)
    held_out = encode(tokenizer, list(documents(held_out=True)))[: 4 * BATCH]
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**CONFIG, **ends))
    began = time.monotonic()
    before, _ = evaluate(model.eval(), held_out)
    fit(model.train(), rows, steps)
    after, routed = evaluate(model.eval(), held_out)
    model.config.output_router_logits = False
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    return Trained(
        parameters=sum(p.numel() for p in model.parameters()),
        tokens=steps * BATCH * CONTEXT,
        seconds=time.monotonic() - began,
        first_loss=before,
        loss=after,
        routed=routed,
    )


if __name__ == "__main__":
    trained = train(Path(sys.argv[1]), *map(int, sys.argv[2:3]))
    print(json.dumps(asdict(trained)))
