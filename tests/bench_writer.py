"""`make bench-writer`: write a checkpoint larger than memory should hold, beside the peers.

    python -m tests.bench_writer [GIGABYTES [PATTERN]]    all writers, or those that match

The input is a synthetic Qwen3-MoE, 12 GB of bf16 by default, whose first layer holds one fused
expert tensor of 4 GB. Every writer runs in a process of its own, pinned to one core and, ours, to
all; peak memory is that process's.
"""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PEERS = HERE.parent / ".venv-peers" / "bin" / "python"
HIDDEN, EXPERT, DENSE, VOCABULARY = 4096, 2048, 12288, 32000
EXPERTS_PER_GB = 128 / 12  # 4 GB of gate_up in 12 GB


def config(gigabytes: float) -> dict[str, Any]:
    """Return a Qwen3-MoE of about this size: one layer of experts, the others dense."""
    experts = max(8, round(EXPERTS_PER_GB * gigabytes))
    fused = 2 * experts * 3 * EXPERT * HIDDEN
    dense = 2 * (3 * DENSE * HIDDEN + 2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN // 4)
    layers = 1 + max(1, round((gigabytes * 1e9 - fused - 4 * VOCABULARY * HIDDEN) / dense))
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": DENSE,
        "moe_intermediate_size": EXPERT,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "mlp_only_layers": list(range(1, layers)),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def make(folder: Path, gigabytes: float) -> None:
    """Write the input as a stream: the experts of a layer in one tensor, 1 GB shards."""
    import torch

    from onboard.architectures import families
    from onboard.architectures.table import Tensor, generate
    from onboard.checkpoint.writer import Spec, Unit, move_finished, write

    settings = config(gigabytes)
    random = (torch.randn(2**24) * 0.02).to(torch.bfloat16).view(torch.uint8).numpy().data

    def unit(tensor: Tensor) -> Unit:
        spec = Spec(tensor.name, "BF16", tensor.shape)

        def chunks() -> Iterable[Any]:
            left = spec.bytes
            while left:
                part = random[: min(left, len(random))]
                left -= len(part)
                yield part

        return Unit((spec,), lambda notes: [iter(chunks())])

    tensors = [t for t in generate(families()["qwen3_moe"], "qwen3_moe", settings)
               if ".experts." not in t.name]  # fmt: skip
    experts = settings["num_experts"]
    stem = "model.layers.0.mlp.experts"
    tensors.append(Tensor("expert", f"{stem}.gate_up_proj", (experts, 2 * EXPERT, HIDDEN)))
    tensors.append(Tensor("expert", f"{stem}.down_proj", (experts, HIDDEN, EXPERT)))
    tensors.sort(key=lambda t: [int(p) if p.isdigit() else -1 for p in t.name.split(".")[:3]])
    folder.mkdir(parents=True)
    scratch = folder / "scratch"
    scratch.mkdir()
    move_finished(write([unit(t) for t in tensors], scratch, 10**9), scratch, folder)
    shutil.rmtree(scratch)
    (folder / "config.json").write_text(json.dumps(settings))


# --- the writers; each prints the seconds that it took as the last line


def ours(source: Path, out: Path, rounding: str, workers: int) -> None:
    import torch

    from onboard import adapt
    from onboard.checkpoint.formats import weights
    from onboard.checkpoint.headers import read_headers
    from onboard.checkpoint.matrices import scale_groups
    from onboard.checkpoint.reader import Reader
    from onboard.checkpoint.writer import write
    from onboard.modelconfig import read_config
    from onboard.quantize.units import Activations, plan_units
    from onboard.recipe import Adapt, Quantize
    from onboard.tensorplan import plan

    if workers == 1:
        torch.set_num_threads(1)
    facts = read_config(source)
    table = adapt.describe(facts, plan(facts, weights(read_headers(source), facts.raw), Adapt()))
    table = json.loads(json.dumps(table))
    groups = scale_groups(table)
    measured = out / "activations.safetensors"
    _measurements(measured, [m for group in groups for m in group])
    params = Quantize(method="rtn" if rounding == "rtn" else "sweep", shard_bytes=2**29)
    units = plan_units(Reader.open(source), table, groups, Activations(measured), params)
    began = time.monotonic()
    write(units, out, params.shard_bytes, workers=workers)
    print(time.monotonic() - began)


def _measurements(path: Path, matrices: Iterable[Any]) -> None:
    import torch
    from safetensors.torch import save_file

    moments = {f"{m.module}.second_moment": torch.rand(m.shape[1]) + 0.1 for m in matrices}
    save_file({**moments, **{k.replace("second_moment", "range"): torch.tensor(8.0)
                             for k in moments}}, path)  # fmt: skip


def modelopt(source: Path, out: Path, offload: bool) -> None:
    """Time export_hf_checkpoint alone; loading and calibrating come before."""
    import modelopt.torch.quantization as mtq
    import torch
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    placing: dict[str, Any] = {"device_map": "cpu"}
    if offload:
        placing = {
            "device_map": "auto",
            "max_memory": {"cpu": "4GiB"},
            "offload_folder": str(out / "offload"),
        }
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, **placing)
    ids = torch.arange(32)[None]
    mtq.quantize(model, mtq.NVFP4_DEFAULT_CFG, lambda m: m(ids))
    began = time.monotonic()
    export_hf_checkpoint(model, export_dir=out)
    print(time.monotonic() - began)


def llmcompressor(source: Path, out: Path) -> None:
    import torch
    from llmcompressor import model_free_ptq

    torch.set_num_threads(1)
    began = time.monotonic()
    ignore = ["lm_head", "re:.*mlp.gate$", "model.embed_tokens"]
    model_free_ptq(str(source), str(out), "NVFP4A16", ignore=ignore, device="cpu")
    print(time.monotonic() - began)


WRITERS: dict[str, Callable[[Path, Path], None]] = {
    "onboard, round to nearest": lambda s, o: ours(s, o, "rtn", 1),
    "onboard, weighted sweep": lambda s, o: ours(s, o, "sweep", 1),
    "onboard, round to nearest, all cores": lambda s, o: ours(
        s, o, "rtn", len(os.sched_getaffinity(0))
    ),
    "ModelOpt export": lambda s, o: modelopt(s, o, offload=False),
    "ModelOpt export, offloaded to disk": lambda s, o: modelopt(s, o, offload=True),
    "llm-compressor, model-free": llmcompressor,
}


@dataclass(frozen=True)
class Measured:
    writer: str
    seconds: float | None
    peak: int
    written: int
    said: str = ""


def measure(writer: str, source: Path, folder: Path) -> Measured:
    """Run one writer in a process of its own, on one core but for "all cores"."""
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    python = PEERS if writer.startswith("llm-compressor") else Path(sys.executable)
    if not python.exists():
        return Measured(writer, None, 0, 0, "not installed")
    log = folder / "log"
    pid = os.fork()
    if pid == 0:
        if "all cores" not in writer:
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        descriptor = os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        command = [python, HERE / "bench_writer.py", writer, source, out]
        os.execve(python, [str(part) for part in command], {**os.environ, "TQDM_DISABLE": "1"})
    _, status, usage = os.wait4(pid, 0)
    lines = log.read_text().strip().splitlines() or [""]
    written = sum(p.stat().st_size for p in out.rglob("*.safetensors") if p.name[0] != "a")
    if status:
        return Measured(writer, None, usage.ru_maxrss * 1024, written, f"{status}: {lines[-1]}")
    return Measured(writer, float(lines[-1]), usage.ru_maxrss * 1024, written)


def main(gigabytes: float, named: str = "*") -> None:
    with tempfile.TemporaryDirectory(dir=os.environ.get("ONBOARD_BENCH")) as name:
        folder, source = Path(name), Path(name) / "source"
        make(source, gigabytes)
        size = sum(p.stat().st_size for p in source.glob("*.safetensors"))
        copying = disk_rate(source)
        print(f"source {size / 1e9:.1f} GB; reading and writing it takes {copying:.0f} MB/s\n")
        print(
            "| writer | seconds | MB/s of bf16 | of the disk's rate "
            "| peak memory | written |\n|---|---|---|---|---|---|"
        )
        for writer in fnmatch.filter(WRITERS, named):
            row = measure(writer, source, folder)
            rate = f"{size / 1e6 / row.seconds:.0f}" if row.seconds else row.said[:90]
            took = f"{row.seconds:.0f}" if row.seconds else "-"
            sizes = f"{row.peak / 1e9:.2f} GB | {row.written / 1e9:.2f} GB"
            alone = (size + row.written) / 2e6 / copying
            share = f"{alone / row.seconds:.0%}" if row.seconds else "-"
            print(f"| {row.writer} | {took} | {rate} | {share} | {sizes} |", flush=True)


def disk_rate(source: Path) -> float:
    """Return the MB/s at which this machine copies the source's first shards and syncs them."""
    copied, began = 0, time.monotonic()
    for path in sorted(source.glob("*.safetensors"))[:3]:
        target = source.parent / "copy"
        with path.open("rb") as read, target.open("wb") as write:
            shutil.copyfileobj(read, write, 2**24)
            os.fsync(write.fileno())
        copied += path.stat().st_size
        target.unlink()
    return copied / 1e6 / (time.monotonic() - began)


if __name__ == "__main__":
    if len(sys.argv) > 3:
        WRITERS[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        main(float(sys.argv[1]) if sys.argv[1:] else 12, *sys.argv[2:3])
