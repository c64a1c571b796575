"""KL divergence of candidate weights from a reference model, document by document.

    divergences(reference, {"rtn": Path("weights.safetensors")}, ids)

The reference is loaded once, in f32, and its last hidden states are kept instead of its log
probabilities (2.3 KB a token instead of 197 for SmolLM2); a candidate's tensors replace the
model's in place and the source's come back after it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from onboard.checkpoint.nvfp4 import quantize_dequantize

EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


@dataclass(frozen=True)
class Candidate:
    """Weights by parameter name in a safetensors file; `input_scales` by module make it W4A4."""

    weights: Path
    input_scales: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Measured:
    """Per document: mean KL(reference || candidate) in nats a token, and the candidate's share of
    next tokens guessed right (its most likely token is the document's)."""

    kl: list[float]
    accuracy: list[float]


class Reference:
    """A model in f32 and its hidden states [tokens, hidden] of each evaluation document."""

    def __init__(self, folder: Path, ids: Sequence[Sequence[int]]) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.ids = [torch.tensor([list(row)]) for row in ids]
        self.parameters: dict[str, Tensor] = {n: p.data for n, p in self.model.named_parameters()}
        with torch.inference_mode():
            self.hidden = [self._hidden(row) for row in self.ids]

    def _hidden(self, row: Tensor) -> Tensor:
        hidden: Tensor = self.model.model(input_ids=row, use_cache=False).last_hidden_state[0]
        return hidden

    def _log_probs(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.model.lm_head(hidden)
        return logits.float().log_softmax(-1)

    def slot(self, name: str) -> Tensor:
        """Return the part of the model's parameters that a checkpoint's tensor name stands for.

        transformers fuses experts: `experts.3.up_proj.weight` is the lower half of row 3 of
        `experts.gate_up_proj`. Raises KeyError for an unknown name, and ValueError for the
        embedding and the head, which the reference's own log probabilities need.
        """
        if "embed_tokens" in name or "lm_head" in name:
            raise ValueError(f"{name}: candidates keep embeddings and head")
        expert = EXPERT.fullmatch(name)
        if name in self.parameters or not expert:
            return self.parameters[name]
        stem, index, kind = expert[1], int(expert[2]), expert[3]
        if kind == "down":
            return self.parameters[f"{stem}.down_proj"][index]
        half = self.parameters[f"{stem}.gate_up_proj"][index].chunk(2)
        return half[kind == "up"]

    @contextmanager
    def swapped(self, weights: Path) -> Iterator[None]:
        """Compute with the tensors of a safetensors file instead of the model's own."""
        saved: dict[str, Tensor] = {}
        try:
            with safe_open(weights, "pt") as file:
                for name in file.keys():  # noqa: SIM118
                    slot = self.slot(name)
                    saved[name] = slot.clone()
                    slot.copy_(file.get_tensor(name).reshape(slot.shape))
            yield
        finally:
            for name, value in saved.items():
                self.slot(name).copy_(value)

    @contextmanager
    def quantized_inputs(self, scales: Mapping[str, float]) -> Iterator[None]:
        """Quantize the inputs of these linears to NVFP4 and back, as a W4A4 engine does."""

        def hook(scale: Tensor) -> Any:
            return lambda module, args: (quantize_dequantize(args[0], scale), *args[1:])

        modules = dict(self.model.named_modules())
        handles = [modules[n].register_forward_pre_hook(hook(torch.tensor(s)))
                   for n, s in scales.items()]  # fmt: skip
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def measure(self, candidate: Candidate) -> Measured:
        """Return KL (full vocabulary, f32) and next-token accuracy of each document."""
        with (
            torch.inference_mode(),
            self.swapped(candidate.weights),
            self.quantized_inputs(candidate.input_scales or {}),
        ):
            rows = [self._compare(*pair) for pair in zip(self.ids, self.hidden, strict=True)]
        return Measured([kl for kl, _ in rows], [accuracy for _, accuracy in rows])

    def _compare(self, row: Tensor, hidden: Tensor) -> tuple[float, float]:
        reference, candidate = self._log_probs(hidden), self._log_probs(self._hidden(row))
        per_token = torch.nn.functional.kl_div(
            candidate, reference, reduction="none", log_target=True
        ).sum(-1)
        right = candidate[:-1].argmax(-1) == row[0, 1:]
        return float(per_token.mean()), float(right.float().mean())


def divergences(
    reference: Path,
    candidates: Mapping[str, Path | Candidate],
    ids: Sequence[Sequence[int]],
) -> dict[str, list[float]]:
    """Return {name: [KL per document]} of every candidate against the model of `reference`.

    KL is over the full vocabulary in f32, per token, averaged within a document, in nats.
    """
    against = Reference(reference, ids)
    as_candidates = {n: c if isinstance(c, Candidate) else Candidate(c)
                     for n, c in candidates.items()}  # fmt: skip
    return {name: against.measure(candidate).kl for name, candidate in as_candidates.items()}
