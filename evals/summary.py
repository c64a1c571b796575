"""From per-token measurements to the figures and tables of the fidelity artifact."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onboard.evals.bootstrap import document_bootstrap

Values = NDArray[np.float64]

LOG10_KL = np.arange(-8, 2.01, 0.25)  # histogram edges; values outside fall into the outer bins
CONFIDENCE = (0.0, 0.25, 0.5, 0.75, 0.95, 1.0)
POSITIONS = (1, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576)


@dataclass(frozen=True)
class Measured:
    """Everything measured on the evaluation documents, token by token, documents in a row.

    `tokens` maps a name of `onboard.evals.kl.TokenStats`, or `kl_weights_only`, to [T] floats.
    `rows` are the documents and `counts` their numbers of predicted tokens.
    """

    rows: list[dict[str, Any]]
    counts: list[int]
    tokens: dict[str, Values]

    def per_document(self, name: str) -> Values:
        """Return each document's sum, [D]."""
        starts = np.cumsum([0, *self.counts[:-1]])
        return np.add.reduceat(self.tokens[name], starts)

    def of_domain(self, domain: str) -> Measured:
        """Return the part that a domain's documents make up."""
        chosen = [row["domain"] == domain for row in self.rows]
        mask = np.repeat(chosen, self.counts)
        return Measured(
            [row for row, keep in zip(self.rows, chosen, strict=True) if keep],
            [count for count, keep in zip(self.counts, chosen, strict=True) if keep],
            {name: values[mask] for name, values in self.tokens.items()},
        )


def metrics(measured: Measured, noise: Values, resamples: int, seed: int) -> dict[str, float]:
    """Return the gateable numbers. KL in nats; `_lo` and `_hi` bound 95% by document bootstrap."""
    tokens, counts = measured.tokens, measured.counts
    kl = tokens["kl"]
    lo, hi = document_bootstrap(measured.per_document("kl"), counts, resamples, seed)
    top1_lo, top1_hi = document_bootstrap(measured.per_document("agrees"), counts, resamples, seed)
    quantiles = np.quantile(kl, [0.5, 0.9, 0.99, 0.999])
    source, candidate = (_perplexity(tokens[f"nll_{side}"]) for side in ("reference", "candidate"))
    values = {
        "kl_mean": kl.mean(),
        "kl_mean_lo": lo,
        "kl_mean_hi": hi,
        **dict(zip(("kl_median", "kl_p90", "kl_p99", "kl_p999"), quantiles, strict=True)),
        "kl_max": kl.max(),
        "kl_mean_weights_only": tokens["kl_weights_only"].mean(),
        "kl_noise_floor": noise.mean(),
        "top1": tokens["agrees"].mean(),
        "top1_lo": top1_lo,
        "top1_hi": top1_hi,
        "ppl_source": source,
        "ppl_candidate": candidate,
        "ppl_ratio": candidate / source,
        "delta_p_mean": tokens["delta_p"].mean(),
        "delta_p_rms": np.sqrt((tokens["delta_p"] ** 2).mean()),
        "evaluation_tokens": kl.size,
        "evaluation_documents": len(measured.rows),
    }
    return {name: float(value) for name, value in values.items()}


def domains(measured: Measured, resamples: int, seed: int) -> list[dict[str, Any]]:
    names = sorted({row["domain"] for row in measured.rows})
    return [_domain(name, measured.of_domain(name), resamples, seed) for name in names]


def _domain(name: str, part: Measured, resamples: int, seed: int) -> dict[str, Any]:
    lo, hi = document_bootstrap(part.per_document("kl"), part.counts, resamples, seed)
    ratio = part.tokens["nll_candidate"].mean() - part.tokens["nll_reference"].mean()
    return {
        "domain": name,
        "documents": len(part.rows),
        "tokens": int(part.tokens["kl"].size),
        "kl_mean": float(part.tokens["kl"].mean()),
        "kl_mean_lo": lo,
        "kl_mean_hi": hi,
        "top1": float(part.tokens["agrees"].mean()),
        "ppl_ratio": float(np.exp(ratio)),
    }


def documents(measured: Measured) -> list[dict[str, Any]]:
    sums = zip(measured.per_document("kl"), measured.per_document("agrees"), strict=True)
    return [
        {
            "id": row["id"],
            "domain": row["domain"],
            "tokens": count,
            "kl_mean": float(kl / count),
            "top1": float(agrees / count),
        }
        for row, count, (kl, agrees) in zip(measured.rows, measured.counts, sums, strict=True)
    ]


def histogram(kl: Values) -> dict[str, list[float]]:
    """Return counts of tokens per bin of log10 KL; `edges` are exponents, [bins + 1]."""
    exponents = np.log10(np.clip(kl, 10 ** LOG10_KL[0], 10 ** LOG10_KL[-1]))
    counts, edges = np.histogram(exponents.clip(LOG10_KL[0], LOG10_KL[-1]), LOG10_KL)
    return {"edges": edges.tolist(), "counts": counts.tolist()}


def by_confidence(measured: Measured) -> list[dict[str, float]]:
    """Return KL by how sure the reference is: the probability of its first choice."""
    values = measured.tokens["confidence"]
    return [
        {"lo": lo, "hi": hi, "share": share, "kl_mean": mean}
        for lo, hi, share, mean in _binned(values, CONFIDENCE, measured.tokens["kl"])
    ]


def by_position(measured: Measured) -> list[dict[str, float]]:
    """Return KL by the place of the predicted token in its document, from 1."""
    places = np.concatenate([np.arange(1, count + 1) for count in measured.counts])
    return [
        {"lo": lo, "hi": hi, "kl_mean": mean}
        for lo, hi, _, mean in _binned(places, POSITIONS, measured.tokens["kl"])
    ]


def _binned(
    keys: NDArray[Any], edges: tuple[float, ...], values: Values
) -> Iterable[tuple[float, float, float, float]]:
    """Yield (lo, hi, share, mean) of each bin that holds something: [lo, hi), the last closed."""
    bins = np.digitize(keys, edges[1:-1])
    for number, (lo, hi) in enumerate(pairwise(edges)):
        inside = values[bins == number]
        if inside.size:
            yield lo, hi, inside.size / values.size, float(inside.mean())


def _perplexity(nll: Values) -> float:
    return float(np.exp(nll.mean()))
