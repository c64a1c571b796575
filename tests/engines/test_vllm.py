"""Commands that can move, counters read from the Prometheus text, modes read from the log."""

import json
import os

import pytest

from onboard.engines import vllm
from onboard.engines.vllm import SpeculationCounters, fill, parse_metrics, speculation
from onboard.recipe import Smoke

METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 144.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.79e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 432.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 71.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 18.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 51.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 2.0
vllm:e2e_request_latency_seconds_bucket{le="+Inf",model_name="a \\"b\\""} 3.0
process_open_fds 31.0
"""


def test_counters() -> None:
    assert speculation(METRICS) == SpeculationCounters(144, 432, 71, (51, 18, 2))
    assert speculation("process_open_fds 31.0\n") == SpeculationCounters()


def test_counters_of_two_engines_add_up() -> None:
    both = METRICS + METRICS.replace('engine="0"', 'engine="1"')
    assert speculation(both) == SpeculationCounters(288, 864, 142, (102, 36, 4))


def test_a_difference_of_counters() -> None:
    now = SpeculationCounters(10, 30, 8, (5, 2, 1))
    assert now - SpeculationCounters(4, 12, 3, (2, 1, 0)) == SpeculationCounters(
        6, 18, 5, (3, 1, 1)
    )
    assert now - SpeculationCounters() == now


def test_labels_and_values() -> None:
    samples = parse_metrics(METRICS)
    assert ("process_open_fds", {}, 31.0) in samples
    _, labels, value = next(s for s in samples if s[0].endswith("_bucket"))
    assert (labels["le"], labels["model_name"], value) == ("+Inf", 'a \\"b\\"', 3.0)


def test_the_command_holds_no_path_of_this_machine() -> None:
    argv = vllm.command(Smoke(), "cpu", drafter="eagle3")
    assert [part for part in argv if part.startswith("/")] == []
    config = json.loads(argv[argv.index("--speculative-config") + 1])
    assert config == {
        "method": "eagle3",
        "model": "{bundle}/speculator/vllm",
        "num_speculative_tokens": 3,
        "parallel_drafting": False,
    }
    filled = fill(argv, python="/p", bundle="/b", port="1")
    assert filled[0] == "/p"
    assert filled[filled.index("--model") + 1] == "/b/checkpoint"
    assert json.loads(filled[filled.index("--speculative-config") + 1])["model"].startswith("/b/")


def test_the_models_own_layers_need_no_second_checkpoint() -> None:
    argv = vllm.command(Smoke(num_speculative_tokens=2), "cuda", drafter="mtp")
    config = json.loads(argv[argv.index("--speculative-config") + 1])
    assert config == {"method": "mtp", "num_speculative_tokens": 2}


@pytest.mark.parametrize("option", ["--enforce-eager", "--dtype", "--max-num-batched-tokens"])
def test_nothing_of_the_cpu_on_a_gpu(option: str) -> None:
    assert option in vllm.command(Smoke(), "cpu", drafter=None)
    assert option not in vllm.command(Smoke(), "cuda", drafter=None)
    environment = {**vllm.environment(Smoke(), "cuda", {}), **vllm.threading("cuda")}
    assert not [name for name in environment if "CPU" in name or "OMP" in name]


def test_parsers_and_further_arguments_of_the_recipe() -> None:
    params = Smoke(tool_call_parser="hermes", reasoning_parser="qwen3", serve_args=("--x", "1"))
    argv = vllm.command(params, "cuda", drafter=None)
    assert argv[-2:] == ["--x", "1"]
    assert argv[argv.index("--tool-call-parser") + 1] == "hermes"
    assert argv[argv.index("--reasoning-parser") + 1] == "qwen3"


def test_the_kv_cache_holds_every_sequence() -> None:
    smollm = {
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 576,
        "num_hidden_layers": 30,
    }
    assert vllm.kv_cache_gib(Smoke(), smollm) == 1  # 31 * 2 * 3 * 64 * 4 B * 8192 = 390 MB
    llama = {
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
    }
    # 33 * 2 * 8 * 128 * 4 B * 8192 = 2.2 GB
    assert vllm.kv_cache_gib(Smoke(), {"text_config": llama}) == 3


def test_modes_come_from_the_log() -> None:
    log = """
(Worker pid=1) INFO 11-29 [nvfp4_cpu.py:25] onboard NVFP4 mode: cpu-emulation, linear W4A4, float32
(Worker pid=2) INFO 11-29 [nvfp4_cpu.py:25] onboard NVFP4 mode: cpu-emulation, linear W4A4, float32
(Worker pid=1) INFO 11-29 [nvfp4_cpu.py:25] onboard NVFP4 mode: cpu-emulation, experts W4A4, float32
"""
    assert vllm.modes(log) == [
        "cpu-emulation, linear W4A4, float32",
        "cpu-emulation, experts W4A4, float32",
    ]
    assert vllm.modes("INFO all is well") == []
    native = "Using MarlinNvFp4LinearKernel for NVFP4 GEMM\nUsing 'MARLIN' NvFp4 MoE backend out of"
    assert vllm.modes(native) == ["native, MarlinNvFp4LinearKernel", "native, experts MARLIN"]


@pytest.mark.parametrize(
    ("device", "modes", "native"),
    [
        ("cuda", ["native, MarlinNvFp4LinearKernel"], True),
        ("cuda", [], True),
        ("cuda", ["native, EmulationNvFp4LinearKernel"], False),
        ("cpu", ["cpu-emulation, linear W4A4, float32"], False),
        ("cpu", [], False),
    ],
)
def test_whose_speed_counts(device: str, modes: list[str], native: bool) -> None:
    assert vllm.runs_natively(device, modes) == native


def test_at_least_one_thread_and_no_more_than_there_are_cores() -> None:
    threads = int(vllm.threading("cpu")["OMP_NUM_THREADS"])
    assert 1 <= threads <= len(os.sched_getaffinity(0))
