"""vLLM: its server's command line for a bundle, its log, and its counters.

Commands are written for a bundle that can move: `{python}`, `{bundle}` and `{port}` stand for the
engine's interpreter, the bundle's directory and the port.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onboard.engines.nvfp4_cpu import MODE
from onboard.engines.server import HOST
from onboard.recipe import Smoke

MODEL = "model"  # the name it is served under
CHECKPOINT = "{bundle}/checkpoint"
SPECULATOR = "{bundle}/speculator/vllm"
MTP = "mtp"
UNQUANTIZED = "no NVFP4 layer"

_KV_BYTES_PER_VALUE = 4  # float32, the CPU's dtype below
_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(\{(?P<labels>.*)\})? (?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def command(params: Smoke, device: str, drafter: str | None) -> list[str]:
    """Return the argv that serves a bundle on a device kind ("cuda" or "cpu").

    `drafter` is what drafts: a trained speculator by its family, "eagle3" or "peagle"; "mtp", the
    model's own layers; None: nothing.
    """
    argv = [
        *("{python}", "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", CHECKPOINT, "--served-model-name", MODEL),
        *("--host", HOST, "--port", "{port}"),
        *("--max-model-len", str(params.max_model_len)),
        *("--max-num-seqs", str(params.max_num_seqs)),
    ]
    if device == "cpu":
        # float32 has the fewest ties between tokens, so that greedy outputs can be compared.
        argv += ["--enforce-eager", "--dtype", "float32"]
        argv += ["--max-num-batched-tokens", str(params.max_model_len)]
        # A small model under a grammar that allows blanks may never stop writing them.
        compact = {"backend": "xgrammar", "disable_any_whitespace": True}
        argv += ["--structured-outputs-config", json.dumps(compact)]
    if params.tool_call_parser:
        argv += ["--enable-auto-tool-choice", "--tool-call-parser", params.tool_call_parser]
    if params.reasoning_parser:
        argv += ["--reasoning-parser", params.reasoning_parser]
    if drafter is not None:
        config = {**_method(drafter), "num_speculative_tokens": params.num_speculative_tokens}
        argv += ["--speculative-config", json.dumps(config)]
        argv += ["--per-request-spec-decode-metrics", "summary"]
    return [*argv, *params.serve_args]


def _method(drafter: str) -> dict[str, Any]:
    """Return the part of the speculative config that says what drafts."""
    if drafter == MTP:  # in the checkpoint itself; the engine knows its family's layers
        return {"method": "mtp"}
    return {"method": "eagle3", "model": SPECULATOR, "parallel_drafting": drafter == "peagle"}


def environment(params: Smoke, device: str, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that ship with the command; `config` is `config.json`'s content."""
    common = {"VLLM_NO_USAGE_STATS": "1"}
    if device != "cpu":
        return common
    return {
        **common,
        "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib(params, config)),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # two engines bound to one core would stall
    }


def threading(device: str) -> dict[str, str]:
    """Return the variables that fit the engine to this machine as it is now.

    A thread that waits for another's core stops the whole engine: with one busy neighbour, two
    threads on two cores are several times slower than one, and spinning makes it worse.
    """
    if device != "cpu":
        return {}
    return {"OMP_NUM_THREADS": str(max(1, round(idle_cores()))), "OMP_WAIT_POLICY": "PASSIVE"}


def idle_cores(seconds: float = 0.5) -> float:
    """Return how many of the cores this process may use have nothing to do, over a moment."""
    cores = len(os.sched_getaffinity(0))
    before = _processor_times()
    time.sleep(seconds)
    spent = [now - then for now, then in zip(_processor_times(), before, strict=True)]
    return cores * (spent[3] + spent[4]) / max(1, sum(spent[:8]))


def _processor_times() -> list[int]:
    """Return ticks of all processors: user, nice, system, idle, iowait, ... (proc(5))."""
    return [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]


def kv_cache_gib(params: Smoke, config: Mapping[str, Any]) -> int:
    """Return the GiB (whole, as vLLM wants it) that hold every sequence at its full length."""
    text = config.get("text_config", config)
    heads = text["num_attention_heads"]
    kv_heads = text.get("num_key_value_heads") or heads
    head_dim = text.get("head_dim") or text["hidden_size"] // heads
    layers = text["num_hidden_layers"] + 1  # a speculator's
    per_token = 2 * int(layers * kv_heads * head_dim) * _KV_BYTES_PER_VALUE
    return 1 + per_token * params.max_model_len * params.max_num_seqs // 2**30


def fill(argv: Sequence[str], **values: str) -> list[str]:
    """Replace `{python}`, `{bundle}`, ... by the values given; other braces are JSON's."""
    for name, value in values.items():
        argv = [part.replace(f"{{{name}}}", value) for part in argv]
    return list(argv)


def modes(log: str) -> list[str]:
    """Return how NVFP4 layers ran, by the engine's log: the CPU plugin, or vLLM's kernels."""
    emulated = re.findall(rf"{re.escape(MODE)}(.*)", log)
    kernels = re.findall(r"Using (\w+) for NVFP4 GEMM|Using '(\w+)' NvFp4 MoE backend", log)
    native = [f"native, {linear or f'experts {experts}'}" for linear, experts in kernels]
    return list(dict.fromkeys(line.strip() for line in emulated or native))


def runs_natively(device: str, modes: Sequence[str]) -> bool:
    """Whether speed on this device kind tells of deployment: a GPU, and no emulation in `modes`."""
    return device != "cpu" and not any("emulation" in mode.lower() for mode in modes)


@dataclass(frozen=True)
class SpeculationCounters:
    """What speculative decoding has done since the engine started."""

    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    accepted_at: tuple[int, ...] = ()  # per position in the draft

    def __sub__(self, earlier: SpeculationCounters) -> SpeculationCounters:
        before = earlier.accepted_at or (0,) * len(self.accepted_at)
        return SpeculationCounters(
            self.drafts - earlier.drafts,
            self.drafted_tokens - earlier.drafted_tokens,
            self.accepted_tokens - earlier.accepted_tokens,
            tuple(now - then for now, then in zip(self.accepted_at, before, strict=True)),
        )


def speculation(metrics: str) -> SpeculationCounters:
    """Read the counters from the text of `/metrics`, summed over engines."""
    total: dict[tuple[str, int], int] = {}
    for name, labels, value in parse_metrics(metrics):
        short = name.removeprefix("vllm:spec_decode_num_").removesuffix("_total")
        key = (short, int(labels.get("position", -1)))
        if name.startswith("vllm:spec_decode_num_") and name.endswith("_total"):
            total[key] = total.get(key, 0) + int(value)
    positions = sorted(p for short, p in total if short == "accepted_tokens_per_pos")
    return SpeculationCounters(
        total.get(("drafts", -1), 0),
        total.get(("draft_tokens", -1), 0),
        total.get(("accepted_tokens", -1), 0),
        tuple(total["accepted_tokens_per_pos", p] for p in positions),
    )


def parse_metrics(text: str) -> list[tuple[str, dict[str, str], float]]:
    """Parse the Prometheus text format into (name, labels, value)."""
    samples = []
    for line in text.splitlines():
        if match := _SAMPLE.match(line):
            labels = dict(_LABEL.findall(match["labels"] or ""))
            samples.append((match["name"], labels, float(match["value"])))
    return samples
