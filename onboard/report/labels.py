"""What a reviewer calls the metrics; a metric without a name here is shown by its identifier."""

from __future__ import annotations

LABELS = {
    "unknown_tensors": "Tensors without a known role",
    "overlapping_documents": "Documents in more than one set",
    "domains_missing": "Domains without documents",
    "tensors_without_tokens": "Tensors that saw no calibration token",
    "weights_quantized_share": "Share of linear weights in NVFP4",
    "share_missing": "Share expected in NVFP4 but missing",
    "tensors_lost": "Tensors lost",
    "relative_error_max": "Relative error, largest tensor",
    "kl_mean": "KL divergence, mean (nats)",
    "kl_mean_hi": "KL divergence, mean, upper 95% bound",
    "kl_p99": "KL divergence, 99th percentile",
    "kl_mean_weights_only": "KL divergence, weights only",
    "kv_cache_fp8": "Measured with an FP8 KV cache",
    "top1": "Top-1 agreement",
    "ppl_ratio": "Perplexity ratio",
    "hellaswag_drop": "HellaSwag, drop",
    "zero_features": "All-zero features",
    "trained_token_share": "Share of tokens trained on",
    "answers_reproduced": "Share of a server's answers that the target gives too",
    "batch_invariance_error": "Error between batch shapes",
    "stored_state_error": "Error of stored states, 4-bit activations",
    "offline_acceptance_length": "Acceptance length, offline estimate",
    "probes_failed": "Engine probes failed",
    "looped_share": "Share of looped answers",
    "divergences": "Answers changed by speculation",
    "near_tie_share": "Share of answers changed by near-ties, beyond the engine's own",
    "acceptance_length": "Acceptance length in the engine",
    "acceptance_length_lo": "Acceptance length, lower 95% bound",
    "sampling_p_value": "Sampled tokens unchanged by speculation, p-value",
}


def label(metric: str) -> str:
    return LABELS.get(metric, metric.replace("_", " "))
