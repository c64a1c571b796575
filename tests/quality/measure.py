"""KL divergence of candidate weights from a reference model, document by document.

    Reference(folder, ids).measure(Candidate(Path("weights.safetensors"))).kl

The reference is loaded once, in f32, and its last hidden states are kept instead of its log
probabilities (2.3 KB a token instead of 197 for SmolLM2); a candidate's tensors replace the
model's in place and the source's come back after it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from onboard.checkpoint import fp8, nvfp4

Quantizer = Callable[[Tensor], Tensor]
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


@dataclass(frozen=True)
class Candidate:
    """Weights by parameter name in a safetensors file, and what inputs are quantized with.

    `input_scales` are those of the modules whose inputs an engine quantizes: of all in W4A4, of the
    FP8 ones, which `fp8` names, otherwise.
    """

    weights: Path
    input_scales: Mapping[str, float] = field(default_factory=dict)
    fp8: frozenset[str] = frozenset()

    @property
    def quantizers(self) -> dict[str, Quantizer]:
        """Return what quantizes and dequantizes the inputs of each of those modules."""
        made = {}
        for module, scale in self.input_scales.items():
            form = fp8 if module in self.fp8 else nvfp4
            made[module] = partial(form.quantize_dequantize, input_scale=torch.tensor(scale))
        return made


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
    def quantized_inputs(self, quantizers: Mapping[str, Quantizer]) -> Iterator[None]:
        """Quantize the inputs of these modules, and dequantize them, as an engine does."""

        def hook(quantizer: Quantizer) -> Any:
            return lambda module, args: (quantizer(args[0]), *args[1:])

        modules = dict(self.model.named_modules())
        handles = [modules[name].register_forward_pre_hook(hook(quantizer))
                   for name, quantizer in quantizers.items()]  # fmt: skip
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
            self.quantized_inputs(candidate.quantizers),
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
