"""Time the hot paths: `make bench`. Medians of a few runs, beside a peer where there is one."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from onboard.checkpoint import nvfp4
from onboard.checkpoint.reader import Reader
from onboard.checkpoint.writer import Spec, Unit, copy_bytes, write
from onboard.evals.kl import Head, compare
from onboard.quantize import rounding

RUNS = 5
ROWS, WIDTH = 4096, 2048


def main() -> None:
    """Print one line per figure."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    report("onboard --help", seconds(start_up), "s")
    weight = torch.randn(ROWS, WIDTH).to(torch.bfloat16)
    moment = torch.rand(WIDTH)
    megabytes = weight.nbytes / 1e6
    ours = seconds(lambda: pack(weight, "rtn", moment))
    peer = seconds(lambda: pack_with_modelopt(weight))
    report("pack, round to nearest", megabytes / ours, "MB/s of bf16", peer / ours)
    swept = seconds(lambda: pack(weight, "sweep", moment))
    report("pack, weighted sweep", megabytes / swept, "MB/s of bf16")
    report("copy untouched tensors", megabytes / seconds(lambda: copy(weight)), "MB/s")
    x, scale = torch.randn(1024, WIDTH), torch.tensor(1e-3)
    quantized = seconds(lambda: nvfp4.quantize_dequantize(x, scale))
    report("quantize activations", x.numel() / quantized / 1e6, "M values/s")
    report("KL, vocabulary 49152", 512 / seconds(divergence()), "tokens/s")


def report(what: str, value: float, unit: str, against: float | None = None) -> None:
    peer = f"   {against:.1f}x ModelOpt's NVFP4QTensor.quantize" if against else ""
    print(f"{what:<26} {value:10.2f} {unit}{peer}", flush=True)


def seconds(call: Callable[[], Any]) -> float:
    """Return the median over `RUNS` timed calls, after one that is not counted."""
    call()
    times = []
    for _ in range(RUNS):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def start_up() -> None:
    subprocess.run([sys.executable, "-m", "onboard", "--help"], capture_output=True, check=True)


def pack(weight: torch.Tensor, method: str, moment: torch.Tensor) -> None:
    scale_2 = rounding.shared_scale(weight.abs().amax(), method)
    rounding.round_rows(weight, scale_2, method, moment)


def pack_with_modelopt(weight: torch.Tensor) -> None:
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    NVFP4QTensor.quantize(weight, nvfp4.BLOCK)


def copy(weight: torch.Tensor) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root, out = Path(folder), Path(folder) / "out"
        out.mkdir()
        save_file({"w": weight}, root / "model.safetensors")
        header = Reader.open(root).headers["w"]
        write(
            [Unit((Spec("w", "BF16", header.shape),), lambda _: [copy_bytes(root, header)])],
            out,
            1 << 40,
        )


def divergence() -> Callable[[], Any]:
    head = Head(torch.randn(49152, 576) / 24, 49152)
    hidden = torch.randn(512, 576)
    other, targets = hidden + 0.1 * torch.randn_like(hidden), torch.zeros(512, dtype=torch.long)
    return lambda: compare((hidden, head), (other, head), targets)


if __name__ == "__main__":
    main()
