"""What the target does after its last layer: final norm, output matrix, logit scale and softcap."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from onboard.errors import InputError
from onboard.speculators.capture import final_norm

FILE = "head.safetensors"


@dataclass(frozen=True)
class Settings:
    """Scalars of the head. `softcap` and `scale` act on the logits: softcap(scale * logits)."""

    eps: float
    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True)
class Head:
    """Embedding [V, H], output matrix [V, H] and final RMSNorm gain [H] of the target."""

    embedding: Tensor
    output: Tensor
    gain: Tensor
    settings: Settings

    def normalize(self, last: Tensor) -> Tensor:
        """Apply the final norm: [..., H] as it leaves the last layer -> f32 [..., H]."""
        return rms_norm(last.float(), self.gain.float(), self.settings.eps)

    def logits(self, last: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return f32 logits [..., V] of the states BEFORE the final norm, or of some `rows`."""
        output = self.output if rows is None else self.output[rows]
        logits = F.linear(self.normalize(last), output.float()) * self.settings.scale
        cap = self.settings.softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def to(self, device: str) -> Head:
        return Head(
            self.embedding.to(device), self.output.to(device), self.gain.to(device), self.settings
        )

    def save(self, directory: Path) -> None:
        """Write the tensors; `settings` go where the caller keeps its index."""
        tensors = {"embed_tokens.weight": self.embedding, "norm.weight": self.gain}
        if self.output is not self.embedding:
            tensors["lm_head.weight"] = self.output
        save_file({k: v.contiguous().cpu() for k, v in tensors.items()}, directory / FILE)

    @classmethod
    def load(cls, directory: Path, settings: dict[str, Any]) -> Head:
        tensors = load_file(directory / FILE)
        embedding = tensors["embed_tokens.weight"]
        output = tensors.get("lm_head.weight", embedding)
        return cls(embedding, output, tensors["norm.weight"], Settings(**settings))


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis (Zhang and Sennrich, 2019)."""
    normalized: Tensor = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain
    return normalized


def of_model(model: Any) -> Head:
    """Read the head off a transformers causal LM; weights in bf16, shared where they are tied."""
    config = model.config.get_text_config()
    norm, output = final_norm(model), model.get_output_embeddings()
    embedding = model.get_input_embeddings().weight
    if getattr(output, "bias", None) is not None:
        raise InputError("lm_head has a bias: EAGLE-3 drafts of the engines have none")
    eps = float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 1e-6)))
    tied = output.weight.data_ptr() == embedding.data_ptr()
    rows = embedding.to(torch.bfloat16)
    return Head(
        embedding=rows,
        output=rows if tied else output.weight.to(torch.bfloat16),
        gain=_gain(norm, config.hidden_size, eps),
        settings=Settings(eps, _scale(config), getattr(config, "final_logit_softcapping", None)),
    )


def _scale(config: Any) -> float:
    """Cohere multiplies its logits, Granite divides them."""
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        return 1.0 / float(divisor)
    return float(getattr(config, "logit_scale", None) or 1.0)


def _gain(norm: Any, width: int, eps: float) -> Tensor:
    """Return the gain [H] f32 of an RMSNorm, whether its parameter is w or 1 + w.

    Raises InputError where the module computes something else: drafts know no other norm.
    """
    weight: Tensor = norm.weight.float()
    probe = torch.linspace(-2, 3, width, device=weight.device)
    with torch.no_grad():
        got = norm(probe.to(norm.weight.dtype)[None]).float()[0]
    for gain in (weight, 1 + weight):
        if torch.allclose(got, rms_norm(probe, gain, eps), rtol=0.02, atol=0.02):
            return gain
    raise InputError(f"final norm {type(norm).__name__} is not an RMSNorm; EAGLE-3 drafts need one")
