"""What a run will cost and what serves its result, said before any work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from onboard import display, planning
from onboard.architectures import by_model_type
from onboard.errors import InputError
from onboard.gpus import GPUS, Decode, Gpu, Node, acceptance_length, smallest
from onboard.inventory import nvfp4_bytes
from onboard.lookup import PUBLISHED, find
from onboard.planning import Machine, Work, plan
from onboard.recipe import names
from onboard.stages import STAGES
from tests.shards import write_model
from tests.test_inspect import QWEN3_MOE, shapes_of

GPU = {gpu.name: gpu for gpu in GPUS}


@pytest.fixture
def moe(tmp_path: Path) -> Path:
    return write_model(tmp_path / "moe", shapes_of(QWEN3_MOE), QWEN3_MOE)


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


# Arithmetic with the figures of FACTS 7


def test_a_model_of_2_8_trillion_parameters() -> None:
    size = nvfp4_bytes(2_800_000_000_000)
    assert size == 1_575_000_000_000  # 1.4 TB of nibbles and a scale per 16
    assert Node(GPU["GB300"], 8).fits(size, 0)
    assert not Node(GPU["B200"], 8).fits(size, 0)
    assert not Node(GPU["B200"], 8).usable_bytes > 8 * 180e9


def test_the_smallest_node() -> None:
    card = Gpu("test", 1, 1, 1, 100, 1, "native")
    assert smallest(card, 85e9, 5e9) == Node(card, 1)  # 90% of 100 GB
    assert smallest(card, 85e9, 5.1e9) == Node(card, 2)
    assert smallest(card, 1441e9, 0) is None


def test_rates_are_the_published_ones() -> None:
    rows = {g.name: (g.bf16, g.fp8, g.fp4, g.memory, g.bandwidth, g.native_nvfp4) for g in GPUS}
    assert rows == {
        "H100": (989, 1979, None, 80, 3.35, False),
        "H200": (989, 1979, None, 141, 4.8, False),
        "B200": (2250, 4500, 9000, 180, 8, True),
        "B300": (2250, 4500, 13500, 268, 8, True),
        "GB300": (2500, 5000, 15000, 288, 8, True),
        "MI355X": (2516, 5033, 10066, 288, 8, False),
        "RTX PRO 6000": (468, 936, 1871, 96, 1.79, True),
    }


def test_a_step_reads_the_experts_that_its_tokens_choose() -> None:
    step = Decode(dense_bytes=10, expert_bytes=800, used=2, of=8, cache_bytes_per_token=0.5)
    assert step.step_bytes(1, 0) == 10 + 800 * 2 / 8
    assert step.step_bytes(2, 4) == pytest.approx(10 + 800 * (1 - 0.75**2) + 2 * 4 * 0.5)
    assert step.step_bytes(1, 0, drafted=3) == pytest.approx(10 + 800 * (1 - 0.75**4))
    assert step.step_bytes(1000, 0) == pytest.approx(810)
    dense = Decode(10, 0, 0, 0, 0)
    assert dense.step_bytes(64, 1000) == 10


def test_a_ceiling_is_bandwidth_over_bytes() -> None:
    node = Node(Gpu("test", 1, 1, 1, 100, 2.0, "native"), 4)
    step = Decode(dense_bytes=4e9, expert_bytes=0, used=0, of=0, cache_bytes_per_token=1000)
    assert step.ceiling(node, 1, 0) == 2000
    assert step.ceiling(node, 8, 500_000) == pytest.approx(8 * 8e12 / (4e9 + 8 * 5e8))
    assert step.ceiling(node, 1, 0, drafted=3, accepted=0.5) == 2000 * 1.875
    assert acceptance_length(0.5, 3) == 1 + 0.5 + 0.25 + 0.125
    assert (acceptance_length(0, 3), acceptance_length(1, 3)) == (1, 4)


def test_reading_overlaps_with_computing_and_packing_with_writing() -> None:
    machine = Machine("test", flops=1e12, packing=1e9, bandwidth=2e9)
    work = Work(
        "s", 1, 0, read_bytes=3 * planning.DISK, memory_bytes=0, disk_bytes=0, flops=2e12,
        packed_bytes=5e9, fetched_bytes=planning.NETWORK, decode_bytes=1e9,
    )  # fmt: skip
    assert work.seconds(machine) == 3 + 5 + 1 + 1 / planning.DECODE_EFFICIENCY / 2
    assert Work("s", 0, 0, 0, 0, 4 * planning.DISK).seconds(machine) == 4


# A plan


def test_every_stage_is_planned_with_the_reads_of_streamed_layers(moe: Path) -> None:
    facts = plan(find(str(moe)))
    assert [row["stage"] for row in facts["stages"]] == [stage.name for stage in STAGES]
    reads = {r["stage"]: (r["source_reads"], r["candidate_reads"]) for r in facts["stages"]}
    assert reads["calibrate"] == (1, 0)
    assert reads["quantize"] == (2, 0), "rounded a layer at a time, then written"
    assert reads["fidelity"] == (1, 1)
    assert reads["features"] == (0, 2)
    rows = {row["stage"]: row for row in facts["stages"]}
    out = facts["output"]
    assert rows["fidelity"]["read_bytes"] == out["source_bytes"] + out["total_bytes"]
    assert rows["quantize"]["disk_bytes"] == 2 * out["total_bytes"]
    assert rows["features"]["disk_bytes"] == facts["features"]["bytes"]
    assert facts["features"]["bytes_per_token"] == (3 + 1) * 64 * 2


def test_what_is_too_much_for_the_disk_is_taken_while_training(moe: Path) -> None:
    stored, online = (
        plan(find(str(moe), settings)) for settings in ([], ["features.gigabytes=1e-6"])
    )
    assert online["features"]["bytes"] == 0
    rows, before = ({row["stage"]: row for row in facts["stages"]} for facts in (online, stored))
    assert rows["features"]["disk_bytes"] == 0
    assert rows["speculate"]["memory_bytes"] > before["speculate"]["memory_bytes"]
    assert "tokens, taken while training" in display.plan(online)
    assert before["speculate"]["read_bytes"] == 0


@pytest.mark.parametrize(
    ("buffer", "reads"),
    [(1000, 3 * 48), (47_999, 4), (48_000, 1)],
    ids=["many buffers an epoch", "nearly all", "all: the epochs share one"],
)
def test_training_reads_the_target_once_a_buffer(moe: Path, buffer: int, reads: int) -> None:
    """Of 100 prompts of 320 tokens, answered with 160."""
    settings = ["features.storage=online", "speculate.epochs=3", "data.training_prompts=100",
                "data.tokens_per_prompt=320", "features.max_new_tokens=160"]  # fmt: skip
    facts = plan(find(str(moe), [*settings, f"speculate.buffer_tokens={buffer}"]))
    [row] = [row for row in facts["stages"] if row["stage"] == "speculate"]
    assert (row["source_reads"], row["candidate_reads"]) == (0, reads)
    assert row["read_bytes"] == reads * facts["output"]["total_bytes"]


def test_fp8_features_take_half_the_disk_and_a_scale_per_state(moe: Path) -> None:
    facts = plan(find(str(moe), ["features.storage=fp8"]))
    assert facts["features"]["bytes_per_token"] == (3 + 1) * (64 + 4)
    recipe = find(str(moe)).recipe
    tokens = recipe.data.training_prompts * (
        recipe.data.tokens_per_prompt + recipe.features.max_new_tokens
    )
    assert facts["features"]["bytes"] == tokens * 4 * 68
    rows = {row["stage"]: row for row in facts["stages"]}
    assert rows["features"]["disk_bytes"] == facts["features"]["bytes"]
    assert f"272 bytes for each of {tokens:,} tokens, in FP8" in display.plan(facts)


def test_states_of_a_servers_answers_are_taken_by_the_part(moe: Path) -> None:
    settings = ["features.answers=http://there:8000", "features.prefill_tokens=10000"]
    facts = plan(find(str(moe), settings))
    rows = {row["stage"]: row for row in facts["stages"]}
    assert rows["features"]["candidate_reads"] == -(-facts["features"]["tokens"] // 10000)


def test_a_feature_reads_the_target_that_the_recipe_names(moe: Path) -> None:
    facts = plan(find(str(moe), ["features.target=source"]))
    rows = {row["stage"]: row for row in facts["stages"]}
    assert (rows["features"]["source_reads"], rows["features"]["candidate_reads"]) == (2, 0)


def test_the_recipe_chooses_else_the_family(moe: Path) -> None:
    assert plan(find(str(moe)))["quantize"]["roles"] == ["attention", "expert", "mlp"]
    experts = plan(find(str(moe), ["adapt.quantize=[expert]"]))
    assert experts["quantize"]["roles"] == ["expert"]
    assert experts["roles"]["attention"]["nvfp4_parameters"] == 0
    kept = plan(find(str(moe), ["adapt.quantize=[expert]", "adapt.keep=['*layers.1.*']"]))
    expert = 8 * 3 * 48 * 64
    assert kept["roles"]["expert"]["nvfp4_parameters"] == expert
    assert kept["kept"]["kept by the pattern *layers.1.*"] >= expert
    none = plan(find(str(moe), ["adapt.quantize=[]"]))
    assert none["output"]["total_bytes"] == none["output"]["source_bytes"]


def test_a_width_that_cannot_be_packed_is_named(tmp_path: Path) -> None:
    config = {**QWEN3_MOE, "moe_intermediate_size": 24}
    facts = plan(find(str(write_model(tmp_path / "narrow", shapes_of(config), config))))
    assert "input width 24 is not a multiple of 16" in facts["kept"]
    assert "input width 24 is not a multiple of 16" in display.plan(facts)
    assert facts["roles"]["expert"]["nvfp4_parameters"] == 0, "an engine fuses the experts"


def test_a_tensor_without_a_role_would_stop_the_run(tmp_path: Path) -> None:
    shapes = {**shapes_of(QWEN3_MOE), "model.surprise.weight": (8, 8)}
    facts = plan(find(str(write_model(tmp_path / "odd", shapes, QWEN3_MOE))))
    assert facts["unknown_tensors"] == ["model.surprise.weight"]
    assert "will not run" in display.plan(facts)


def test_an_unknown_model_type_is_an_error(tmp_path: Path) -> None:
    config = {**QWEN3_MOE, "model_type": "brandnew"}
    with pytest.raises(InputError, match="no architecture file for model_type 'brandnew'"):
        plan(find(str(write_model(tmp_path / "new", shapes_of(QWEN3_MOE), config))))


@pytest.mark.parametrize("recipe", names())
def test_every_recipe_has_a_plan(unreachable: None, recipe: str) -> None:
    found = find(recipe)
    if found.config["model_type"] not in by_model_type():
        pytest.skip("no architecture file yet")
    facts = plan(found)
    assert facts["recipe"] == recipe
    assert facts["unknown_tensors"] == []
    assert facts["output"]["nvfp4_parameters"] > 0
    assert [n["node"] for n in facts["decode_ceilings"]]
    text = display.plan(facts)
    assert all(len(line) <= display.WIDTH for line in text.splitlines())
    assert "CEILING" in text
    assert "estimates rest on" in text
    json.dumps(facts)


def of(recipe: str) -> dict[str, Any]:
    found = find(recipe)
    if found.config["model_type"] not in by_model_type():
        pytest.skip("no architecture file yet")
    return plan(found)


def fits(facts: Mapping[str, Any], gpu: str) -> Mapping[str, bool]:
    table: Mapping[str, bool] = next(r["fits"] for r in facts["nodes"] if r["gpu"] == gpu)
    return table


def test_kimi_k3(unreachable: None) -> None:
    facts = of("kimi-k3")
    assert facts["output"]["if_all_were_nvfp4"] / 1e12 == pytest.approx(1.575, rel=0.01)
    assert fits(facts, "GB300")["8"]
    assert not fits(facts, "B200")["8"]
    assert facts["engine"]["cpu"]


def test_glm_5_2(unreachable: None) -> None:
    facts = of("glm-5.2")
    assert facts["output"]["bytes"] / 1e9 == pytest.approx(444.7, abs=0.25)
    assert facts["output"]["mtp_bytes"] / 1e9 == pytest.approx(19.9, abs=0.05)
    assert facts["features"] | {"tokens": 0} == {
        "bytes_per_token": 0, "storage": "online", "tokens": 0, "bytes": 0,
    }  # fmt: skip
    assert facts["kv_cache"]["budget_bytes"] == 32 * 32768 * 53_940
    assert fits(facts, "H200") == {"1": False, "2": False, "4": False, "8": True, "16": True}
    assert facts["engine"]["minimum"] == "0.23.0"
    assert facts["quantize"]["roles"] == ["expert"]


def test_the_command_prints_a_plan_and_writes_nothing(tmp_path: Path, moe: Path) -> None:
    config = PUBLISHED / "meta-llama--Llama-3.1-8B-Instruct.json"
    empty = tmp_path / "empty"
    empty.mkdir()
    before = sorted(moe.iterdir())
    for model in (str(moe), str(config)):
        for extra in ((), ("--json",)):
            done = subprocess.run(
                [sys.executable, "-m", "onboard", "plan", model, *extra],
                capture_output=True,
                text=True,
                cwd=empty,
                env={**os.environ, "ONBOARD_HOME": str(empty / "home"), "HF_HOME": str(empty)},
                check=False,
            )
            assert done.returncode == 0, done.stderr
            assert done.stderr == ""
            if extra:
                assert json.loads(done.stdout)["output"]["total_bytes"] > 0
    assert list(empty.iterdir()) == []
    assert sorted(moe.iterdir()) == before
