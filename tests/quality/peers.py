"""Run the peers, each method in a process of its own and in its library's environment.

    python -m tests.quality.peers MODEL IDS OUT [PATTERN]

MODEL is a checkpoint folder, IDS a JSON list of token id lists that every peer calibrates on.
`OUT/LIBRARY/METHOD/` gets `weights.safetensors`, `meta.json` and `log`; a peer that fails or runs
out of time has "failed" in its meta.json, with the reason. A finished method is not run again.
"""

from __future__ import annotations

import fnmatch
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PYTHON = {
    "modelopt": ROOT / ".venv/bin/python",
    "llmcompressor": ROOT / ".venv-peers/bin/python",
    "autoround": ROOT / ".venv-autoround/bin/python",
}


@dataclass(frozen=True)
class Peer:
    """A method of a library, what the table calls it, and the seconds it may take."""

    library: str
    method: str
    title: str
    timeout: float = 600
    slow: bool = False  # beyond the budget of `make bench-quality`

    @property
    def name(self) -> str:
        return f"{self.library}/{self.method}"


@dataclass(frozen=True)
class Outcome:
    """What a peer left: `weights` is None where it failed, and then `meta["failed"]` says why."""

    peer: Peer
    weights: Path | None
    meta: Mapping[str, Any]

    @property
    def seconds(self) -> float:
        """Quantization alone, without loading, exporting and reading back."""
        return float(self.meta.get("seconds", 0.0))

    @property
    def select_seconds(self) -> float | None:
        """Scoring and search of an allocation; None where the method selects nothing."""
        found = self.meta.get("select_seconds")
        return None if found is None else float(found)

    @property
    def bytes(self) -> int:
        """All linears with their scales: 4.5 bits a weight in NVFP4, 8 in FP8, 16 in BF16."""
        return int(self.meta.get("bytes", 0))

    @property
    def nvfp4_share(self) -> float:
        """The share of all linears' weights that are in NVFP4."""
        return float(self.meta.get("nvfp4_share", 0.0))

    @property
    def input_scales(self) -> Mapping[str, float]:
        """The input scale of each module whose inputs an engine quantizes."""
        return dict(self.meta.get("input_scales", {}))

    @property
    def fp8(self) -> frozenset[str]:
        """The modules that are FP8."""
        return frozenset(m for m, f in self.meta.get("formats", {}).items() if f == "fp8")


def autoquantize(method: str, bits: int, timeout: float) -> Peer:
    title = f"ModelOpt AutoQuantize {method}, {bits} bits"
    return Peer("modelopt", f"autoquantize-{method}-{bits}", title, timeout)


PEERS = (
    Peer("modelopt", "w4a4", "ModelOpt NVFP4_DEFAULT_CFG"),
    Peer("modelopt", "w4a16", "ModelOpt W4A16_NVFP4_CFG"),
    Peer("modelopt", "awq_lite", "ModelOpt NVFP4_AWQ_LITE_CFG", 1200),
    Peer("modelopt", "local_hessian", "ModelOpt local Hessian"),
    Peer("modelopt", "gptq", "ModelOpt GPTQ recipe, layer after layer"),
    Peer("modelopt", "gptq_at_once", "ModelOpt GPTQ, all layers at once"),
    *(autoquantize("gradient", bits, 600) for bits in (5, 6, 8)),
    *(autoquantize("kl_div", bits, 1200) for bits in (5, 6, 8)),
    Peer("llmcompressor", "rtn", "llm-compressor RTN"),
    Peer("llmcompressor", "gptq", "llm-compressor GPTQ"),
    Peer("llmcompressor", "awq", "llm-compressor AWQ", 1200),
    Peer("autoround", "iters-0", "AutoRound, 0 iterations", 1200),
    Peer("autoround", "iters-50", "AutoRound, 50 iterations", 3600, slow=True),
)
CONTINUOUS = ("modelopt/w4a16", "modelopt/local_hessian", "llmcompressor/gptq")  # RTN, best two


def selected(patterns: Sequence[str] = ()) -> list[Peer]:
    """Return the peers whose names match a pattern; without patterns all but the slow ones."""
    if not patterns:
        return [peer for peer in PEERS if not peer.slow]
    return [p for p in PEERS if any(fnmatch.fnmatch(p.name, pattern) for pattern in patterns)]


def run(peer: Peer, source: Path, ids: Path, out: Path, threads: int) -> Outcome:
    """Run one peer in `out`, unless it is finished there, and return what it left.

    `seconds` in meta.json are of `threads` threads on whatever else the machine was doing;
    `cpu_seconds` beside them are not.
    """
    folder = out / peer.library / peer.method
    if not (folder / "weights.safetensors").exists():
        folder.mkdir(parents=True, exist_ok=True)
        reason = _failure(peer, [source, ids, peer.method, folder], folder, threads)
        if reason is not None:
            _fail(folder, reason)
    meta = json.loads((folder / "meta.json").read_text())
    done = "failed" not in meta
    return Outcome(peer, folder / "weights.safetensors" if done else None, meta)


def _failure(peer: Peer, arguments: list[Any], folder: Path, threads: int) -> str | None:
    """Run the process; return why it has no meta.json of its own, or None."""
    python = PYTHON[peer.library]
    if not python.exists():
        return f"not installed: make {python.parts[-3]}/installed"
    (folder / "meta.json").unlink(missing_ok=True)
    command = [python, "-m", f"tests.quality.peer_{peer.library}", *arguments]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TQDM_DISABLE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    with (folder / "log").open("w") as log:
        try:
            done = subprocess.run(
                [str(part) for part in command],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=peer.timeout,
            )
        except subprocess.TimeoutExpired:
            return f"not finished in {peer.timeout:.0f} s"
    if (folder / "meta.json").exists():
        return None
    lines = (folder / "log").read_text().strip().splitlines() or ["no output"]
    return f"ended with {done.returncode}: {lines[-1][:500]}"


def _fail(folder: Path, reason: str) -> None:
    (folder / "meta.json").write_text(json.dumps({"failed": reason}))


def run_all(
    source: Path, ids: Path, out: Path, patterns: Sequence[str] = (), threads: int = 2
) -> Iterator[Outcome]:
    """Run the selected peers one after another, absolute paths or not."""
    for peer in selected(patterns):
        yield run(peer, source.absolute(), ids.absolute(), out.absolute(), threads)


if __name__ == "__main__":
    model, calibration, results = (Path(a) for a in sys.argv[1:4])
    cores = len(os.sched_getaffinity(0))
    for outcome in run_all(model, calibration, results, sys.argv[4:], cores):
        said = outcome.meta.get("failed", f"{outcome.bytes / 1e6:.1f} MB")
        print(f"{outcome.peer.title:40} {outcome.seconds:6.0f} s  {said}", flush=True)
