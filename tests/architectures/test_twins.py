"""Twins of every family: the table's names are those that the model class loads, all of them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from onboard import twins
from onboard.adapt import ignored
from onboard.architectures import by_model_type, families
from onboard.checkpoint.models import load_reference
from onboard.checkpoint.reader import Reader
from onboard.modelconfig import read_config
from onboard.recipe import Adapt
from onboard.tensorplan import plan
from tests.families import CASES, FAST, config_of, examine, faults

pytestmark = pytest.mark.skipif(
    find_spec("aiconfigurator_core") is None, reason="aiconfigurator-core is not installed"
)

WITH_A_CLASS = [c for c in CASES if families()[by_model_type()[c]].model_types[c] is not None]


def test_every_family_has_a_case() -> None:
    assert {by_model_type()[case] for case in CASES} == set(families())


@pytest.mark.parametrize("case", WITH_A_CLASS)
def test_the_class_loads_every_name_of_the_table_and_misses_none(case: str, tmp_path: Path) -> None:
    twin = twins.write(twins.shrink(config_of(case), vocab_size=512), tmp_path)
    model = load_reference(twin, torch.float32)
    assert not [name for name, p in model.named_parameters() if p.is_meta]


@pytest.mark.parametrize("case", FAST)
def test_no_weight_is_skipped_on_the_way_to_nvfp4(case: str, tmp_path: Path) -> None:
    """`make families` does this for every family, and loads the result in the engine."""
    assert faults(examine(case, tmp_path, engine=False)) == []


def test_what_vllm_fuses_under_another_name_is_ignored_under_it_too(tmp_path: Path) -> None:
    """LongCat's class there maps no fused_qkv_a_proj back to q_a_proj: it took bf16 for NVFP4."""
    twin = twins.write(twins.shrink(config_of("longcat_flash"), vocab_size=512), tmp_path)
    config = read_config(twin)
    tensors = plan(config, Reader.open(twin).weights, Adapt())
    assert "model.layers.0.self_attn.1.fused_qkv_a_proj" in ignored(config, tensors)
