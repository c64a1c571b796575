"""Last hidden states of evaluation documents, in batches that never change shape."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onboard.checkpoint.cache import Passing
from onboard.checkpoint.skeleton import decoder_of
from onboard.errors import InputError
from onboard.evals.kl import Head

AGREEMENT = 1e-3  # how far recomputed logits may be from the model's, relative to their range


def vocabulary(root: Path) -> int:
    """Return how many rows of the output layer stand for a token; the rest is padding."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(root, local_files_only=True, trust_remote_code=False)
    return int(max(tokenizer.get_vocab().values())) + 1


@dataclass(frozen=True)
class Batch:
    """Documents that go through the model together."""

    number: int
    rows: tuple[dict[str, Any], ...]

    @property
    def ids(self) -> list[list[int]]:
        return [row["ids"] for row in self.rows]

    @property
    def targets(self) -> Tensor:
        """The tokens to predict, i64 [T]: every document's from its second token on."""
        return torch.tensor([token for ids in self.ids for token in ids[1:]])


def batches(rows: list[dict[str, Any]], size: int) -> list[Batch]:
    """Group documents of similar length; the same rows always fall into the same batches."""
    ordered = sorted(rows, key=lambda row: (len(row["ids"]), row["id"]))
    starts = range(0, len(ordered), size)
    return [Batch(n, tuple(ordered[i : i + size])) for n, i in enumerate(starts)]


@torch.inference_mode()
def last_hidden(model: Any, documents: list[list[int]], cache: Passing | None = None) -> Tensor:
    """Return the states that predict each document's second to last token, [T, H] on the CPU.

    States are those after the final norm. Documents are padded on the right, where a causal
    model does not look. Keys and values go through `cache`, which serves this one pass.
    """
    longest = max(map(len, documents))
    ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids in documents])
    mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in documents])
    hidden = decoder_of(model)(
        input_ids=ids.to(model.device),
        attention_mask=mask.to(model.device),
        use_cache=cache is not None,
        **({} if cache is None else {"cache": cache}),
    ).last_hidden_state
    kept = [states[: len(ids) - 1] for states, ids in zip(hidden, documents, strict=True)]
    return torch.cat(kept).float().cpu()


@torch.inference_mode()
def check_head(model: Any, head: Head, ids: list[int]) -> None:
    """Raise InputError where `head` does not give the model's own logits (softcap, scale, ...)."""
    tokens = torch.tensor([ids[:16]], device=model.device)
    states: list[Tensor] = []
    hook = decoder_of(model).register_forward_hook(
        lambda module, args, output: states.append(output.last_hidden_state)
    )
    own = model(input_ids=tokens, use_cache=False).logits[0, :, : head.vocabulary].float()
    hook.remove()
    ours = head.logits(states[0][0])
    error = (own - ours).abs().max() / own.abs().max().clamp_min(1e-6)
    tolerance = AGREEMENT if model.dtype == torch.float32 else 20 * AGREEMENT
    if not error < tolerance:
        raise InputError(
            f"{type(model).__name__}: logits recomputed from the last hidden state differ from the "
            f"model's by {error:.2g} of their range, expected below {tolerance:g}",
            "teach Head.of in evals/kl.py what this model applies after its output layer",
        )


_noisy: ContextVar[bool] = ContextVar("bf16 noise", default=False)


def prepare_noise(model: nn.Module) -> None:
    """Let `bf16_noise` reach what every module with weights returns."""

    def rounded(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        is_float = isinstance(output, Tensor) and output.is_floating_point()
        if not (_noisy.get() and is_float):
            return output
        return output.to(torch.bfloat16).to(output.dtype)

    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.register_forward_hook(rounded)


@contextmanager
def bf16_noise() -> Iterator[None]:
    """Round the outputs of a prepared model's modules to bfloat16: the noise of serving in bf16."""
    token = _noisy.set(True)
    try:
        yield
    finally:
        _noisy.reset(token)
