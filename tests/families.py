"""`make families`: every family's twin through adapt, calibrate, quantize and the engine's loader.

    python -m tests.families [CASE ...]        all cases, or the named ones; renews README's table
    python -m tests.families --one CASE        one case, its row as JSON on the last line

A twin is made from the model's real config: those that aiconfigurator-core bundles, and for the
others the files in tests/architectures/configs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
BEGIN, END = "<!-- families -->", "<!-- /families -->"
WORKERS = 2
LARGEST_ERROR = 0.12  # relative Frobenius error of a bell-shaped weight rounded to nearest: 0.095

# model_type -> config file: <owner>--<name>
CASES = {
    "llama": "meta-llama--Meta-Llama-3.1-8B",
    "qwen3": "Qwen--Qwen3-8B",
    "qwen3_moe": "Qwen--Qwen3-235B-A22B",
    "qwen3_next": "Qwen--Qwen3-Next-80B-A3B-Instruct",
    "qwen3_5_moe": "Qwen--Qwen3.5-397B-A17B",
    "deepseek_v3": "deepseek-ai--DeepSeek-V3",
    "deepseek_v32": "deepseek-ai--DeepSeek-V3.2",
    "deepseek_v4": "deepseek-ai--DeepSeek-V4-Pro",
    "glm4_moe": "zai-org--GLM-4.5-Air",
    "glm_moe_dsa": "zai-org--GLM-5.2",
    "kimi_k2": "moonshotai--Kimi-K2-Instruct",
    "kimi_k25": "moonshotai--Kimi-K2.5",
    "kimi_linear": "moonshotai--Kimi-Linear-48B-A3B-Instruct",
    "kimi_k3": "moonshotai--Kimi-K3",
    "minimax_m2": "MiniMaxAI--MiniMax-M2.5",
    "minimax_m3": "MiniMaxAI--MiniMax-M3",
    "minimax_m3_vl": "nvidia--MiniMax-M3-NVFP4",
    "gpt_oss": "openai--gpt-oss-120b",
    "llama4": "meta-llama--Llama-4-Scout-17B-16E-Instruct",
    "nemotron_h": "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "mimo_v2_flash": "XiaomiMiMo--MiMo-V2-Flash",
    "longcat_flash": "meituan-longcat--LongCat-Flash-Chat",
    "ernie4_5_moe": "baidu--ERNIE-4.5-21B-A3B-PT",
    "hunyuan_v1_moe": "tencent--Hunyuan-A13B-Instruct",
    "gemma3": "google--gemma-3-27b-it",
    "gemma4": "google--gemma-4-26B-A4B",
    "step3p7": "stepfun-ai--Step-3.7-Flash",
}
FAST = ("llama", "qwen3_moe", "qwen3_5_moe", "deepseek_v3", "gpt_oss", "kimi_k3")  # `make test`


@dataclass(frozen=True)
class Row:
    """What was seen of one family. `engine` is "yes" or the engine's own reason."""

    case: str
    source: str  # formats of the stored weights
    forward: str
    share: dict[str, tuple[float, float]]  # role -> expected and measured NVFP4 share
    names: str  # "equal", or what is missing or too many
    mtp: tuple[int, int]
    largest_error: float
    engine: str


def config_of(case: str) -> dict[str, Any]:
    """Return the real config.json of a case, without a mark that it was quantized to NVFP4."""
    own = HERE / "architectures" / "configs" / f"{CASES[case]}.json"
    path = own if own.exists() else bundled() / f"{CASES[case]}_config.json"
    config: dict[str, Any] = json.loads(path.read_text())
    if CASES[case].startswith("nvidia--"):
        config.pop("quantization_config", None)
    return config


def bundled() -> Path:
    """Return the folder of configs in the installed package, without importing it."""
    spec = find_spec("aiconfigurator_core")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("aiconfigurator-core is not installed: make install")
    return Path(spec.submodule_search_locations[0]) / "model_configs"


def examine(case: str, folder: Path, engine: bool = True) -> Row:
    """Take a case's twin to an NVFP4 checkpoint (round to nearest) and look at what was written."""
    from onboard import adapt, source, twins
    from onboard.quantize import calibrate, stage
    from onboard.recipe import Adapt, Calibrate, Quantize, Source
    from tests.conftest import Bench

    twin = twins.write(twins.shrink(config_of(case), vocab_size=512), folder / "twin")
    bench = Bench(folder)
    bench.run("source", source.run, Source(model=str(twin), allow_remote_code=True))
    planned = bench.run("adapt", adapt.run, Adapt()).json("adaptation.json")
    ids = [{"id": str(n), "ids": [(7 * n + k) % 500 for k in range(96)]} for n in range(8)]
    bench.put("data", calibration__jsonl=ids)
    bench.run("calibrate", calibrate.run, Calibrate())
    quantized = bench.run("quantize", stage.run, Quantize(method="rtn"))
    checkpoint = quantized.path / "checkpoint"
    return Row(
        case,
        source_formats(planned),
        forward(twin, checkpoint, planned),
        {
            r: (s, quantized.metrics[f"quantized_share_{r}"])
            for r, s in planned["expected_share"].items()
        },
        names(twin, checkpoint, planned),
        mtp_tensors(twin, checkpoint, planned),
        round(largest_error(twin, checkpoint, planned), 4),
        load_in_engine(case, checkpoint) if engine else "not tried",
    )


def source_formats(planned: Mapping[str, Any]) -> str:
    schemes = {t["scheme"] for t in planned["tensors"].values()}
    return " + ".join(sorted(schemes)).replace("plain", "bf16")


def forward(twin: Path, checkpoint: Path, planned: Mapping[str, Any]) -> str:
    """Run the twin and what was written of it; finite logits on both sides are "ok"."""
    import torch

    from onboard.checkpoint.models import load_candidate, load_reference

    if planned["architecture"] is None:
        return "not run: no transformers class"
    ids = torch.arange(5, 69)[None]
    for model in (
        load_reference(twin, torch.float32),
        load_candidate(checkpoint, planned, torch.float32),
    ):
        with torch.inference_mode():
            logits = model(ids, use_cache=False).logits
        if not torch.isfinite(logits).all():
            return "not finite"
    return "ok"


def names(twin: Path, checkpoint: Path, planned: Mapping[str, Any]) -> str:
    """Compare the names written with the source's, up to the declared packing."""
    from onboard.checkpoint.matrices import scale_groups
    from onboard.checkpoint.reader import Reader

    matrices = [matrix for group in scale_groups(planned) for matrix in group]
    packed = {matrix.tensor for matrix in matrices}
    weights = Reader.open(twin).weights
    expected = {f"{matrix.module}.weight" for matrix in matrices}
    expected |= {name for name in weights if name not in packed}
    found = set(Reader.open(checkpoint).weights)
    if lost := sorted(expected - found):
        return f"lost {len(lost)}: {lost[0]}"
    if extra := sorted(found - expected):
        return f"extra {len(extra)}: {extra[0]}"
    return "equal"


def mtp_tensors(twin: Path, checkpoint: Path, planned: Mapping[str, Any]) -> tuple[int, int]:
    from onboard.checkpoint.reader import Reader

    names = [n for n, t in planned["tensors"].items() if t["role"] == "mtp"]
    written = Reader.open(checkpoint).weights
    return len(names), sum(name in written for name in names)


def largest_error(twin: Path, checkpoint: Path, planned: Mapping[str, Any]) -> float:
    """Return the largest |W - Q(W)| / |W| of a quantized tensor, both read from their files."""
    from onboard.checkpoint.models import Candidate
    from onboard.checkpoint.reader import Reader

    source, written = Reader.open(twin), Candidate(checkpoint, planned)
    errors = [0.0]
    for name in written.matrices:
        exact = source.weight(name).float()
        errors.append(float((written.weight(name) - exact).norm() / exact.norm()))
    return max(errors)


def load_in_engine(case: str, checkpoint: Path) -> str:
    """Load in vLLM's own process; return "yes", or the reason it gives for not doing so."""
    from onboard.architectures import by_model_type, families
    from onboard.engines.environment import find
    from onboard.engines.server import environment

    variables = {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    for dtype in ("float32", "bfloat16"):
        done = subprocess.run(
            [find().python, HERE / "engines" / "load_model.py", checkpoint, dtype],
            env=environment(os.environ, variables),
            capture_output=True,
            text=True,
            timeout=600,
        )
        if done.returncode == 0:
            return "yes"
    declared = families()[by_model_type()[case]].engine.cpu
    return reason(done.stdout + done.stderr, declared or "it says no more")


def reason(log: str, declared: str) -> str:
    """Return the last error that an engine's log names; `declared` explains one without words."""
    lines = [re.sub(r"^\[rank\d\]: ", "", line).strip() for line in log.splitlines()]
    if absent := re.search(r"ModuleNotFoundError: .*", log):
        return absent[0]
    if refused := next((line for line in lines if line.startswith("Value error, ")), None):
        return refused.removeprefix("Value error, ").partition(" [type=")[0][:160]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    said = [error for error in errors if "See root cause" not in error][-1:] or [declared]
    return (said[0] if ":" in said[0] else f"{said[0]}: {declared}")[:160]


def table(rows: Iterable[Row]) -> str:
    """Return the README's table."""
    lines = [
        "| model_type | source | forward | NVFP4 share, expected = measured | names "
        "| MTP in = out | largest error | loads in vLLM on a CPU |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        share = ", ".join(
            f"{role} {want:.0%}" + ("" if want == got else f" (**measured {got:.0%}**)")
            for role, (want, got) in row.share.items()
        )
        mtp = "-" if row.mtp == (0, 0) else f"{row.mtp[0]} = {row.mtp[1]}"
        cells = [f"`{row.case}`", row.source, row.forward, share, row.names, mtp]
        cells += [f"{row.largest_error:.3f}", row.engine.replace("|", "/")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def faults(row: Row) -> list[str]:
    """Return what must not be: skipped weights, lost names, lost MTP layers, large errors."""
    found = [f"share of {role}" for role, (want, got) in row.share.items() if want != got]
    found += [] if row.names == "equal" else [row.names]
    found += [] if row.mtp[0] == row.mtp[1] else ["MTP"]
    found += [] if row.largest_error <= LARGEST_ERROR else ["error"]
    found += [] if row.forward in ("ok", "not run: no transformers class") else [row.forward]
    return found


def _in_own_process(case: str) -> Row | str:
    done = subprocess.run(
        [sys.executable, "-m", "tests.families", "--one", case],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    print(f"{case}: {'seen' if done.returncode == 0 else 'FAILED'}", flush=True)
    if done.returncode:
        return f"{case}: {done.stderr.strip().splitlines()[-1]}"
    return row_of(json.loads(done.stdout.splitlines()[-1]))


def row_of(data: dict[str, Any]) -> Row:
    share = {role: (want, got) for role, (want, got) in data.pop("share").items()}
    mtp = data.pop("mtp")
    return Row(**data, share=share, mtp=(mtp[0], mtp[1]))


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--one"]:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(asdict(examine(arguments[1], Path(folder)))))
        return 0
    with ThreadPoolExecutor(WORKERS) as pool:
        found = list(pool.map(_in_own_process, arguments or CASES))
    rows = [row for row in found if isinstance(row, Row)]
    wrong = [row for row in found if isinstance(row, str)]
    wrong += [f"{row.case}: {', '.join(faults(row))}" for row in rows if faults(row)]
    text = table(rows)
    print(text)
    if not arguments and not wrong:
        before, _, rest = README.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        README.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")
    print("\n".join(wrong) or "every family is as expected")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
