"""One peer, one method, one process: the half of a peer's script that they all share.

    python -m tests.quality.peer_LIBRARY MODEL IDS METHOD OUT

MODEL is a checkpoint folder, IDS a JSON list of token id lists, METHOD a name that the script
knows, OUT a folder that gets `weights.safetensors` and `meta.json`. A method that fails says so
in `meta.json` under "failed" and the process ends with 1. Nothing here imports onboard: the
script runs in the peer's own environment.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.quality import written

SEED = 0
BATCH = 4  # documents a forward pass


@dataclass(frozen=True)
class Task:
    """What one process is asked to do; `notes` goes to meta.json as it is."""

    model: Path
    ids: list[list[int]]
    method: str
    out: Path
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def export(self) -> Path:
        """The folder the peer writes its own checkpoint to, removed once it is read."""
        return self.out / "export"

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds spent inside to `notes[name]`, and those of the CPU beside it."""
        began, cpu_began = time.monotonic(), time.process_time()
        yield
        self.notes[name] = self.notes.get(name, 0.0) + time.monotonic() - began
        cpu = f"{name.removesuffix('seconds')}cpu_seconds"
        self.notes[cpu] = self.notes.get(cpu, 0.0) + time.process_time() - cpu_began

    def batches(self, size: int = BATCH) -> list[Tensor]:
        """Return the ids as [size, tokens] batches; documents have one length."""
        lengths = {len(row) for row in self.ids}
        if len(lengths) != 1:
            raise ValueError(
                f"calibration documents of {sorted(lengths)} tokens, not of one length"
            )
        return list(torch.split(torch.tensor(self.ids), size))


def seed() -> None:
    """Fix every generator that a peer may draw from."""
    random.seed(SEED)
    torch.manual_seed(SEED)


def load(folder: Path) -> Any:
    """Return the model in f32: the values of the source exactly, and the faster type on a CPU."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def finish(task: Task) -> None:
    """Turn the peer's checkpoint into weights.safetensors and the facts of meta.json."""
    result = written.read(task.export, task.model)
    save_file({n: t.contiguous() for n, t in result.weights.items()},
              task.out / "weights.safetensors")  # fmt: skip
    task.notes.update(written.describe(result))
    shutil.rmtree(task.export)


def versions(packages: Sequence[str]) -> dict[str, str]:
    return {name: metadata.version(name) for name in ("torch", "transformers", *packages)}


def main(quantize: Callable[[Task], None], packages: Sequence[str]) -> None:
    """Run `quantize`, which writes the peer's checkpoint to `task.export`, and read it back."""
    model, ids, method, out = sys.argv[1:5]
    task = Task(Path(model), written.read_ids(Path(ids)), method, Path(out))
    task.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    seed()
    began, cpu_began = time.monotonic(), time.process_time()
    try:
        quantize(task)
        finish(task)
    except Exception as e:
        traceback.print_exc()
        task.notes["failed"] = f"{type(e).__name__}: {e}".strip()[:1000]
    task.notes.update(
        method=method,
        versions=versions(packages),
        threads=torch.get_num_threads(),
        process_seconds=time.monotonic() - began,
        process_cpu_seconds=time.process_time() - cpu_began,
    )
    (task.out / "meta.json").write_text(json.dumps(task.notes, indent=1))
    sys.exit(1 if "failed" in task.notes else 0)
