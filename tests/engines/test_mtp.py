"""A model's own MTP layers draft in vLLM from the checkpoint that we wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from onboard import adapt, source, twins
from onboard.quantize import calibrate, stage
from onboard.recipe import Adapt, Calibrate, Quantize, Source
from tests.engines.test_nvfp4_cpu import run_in_engine
from tests.families import config_of

pytestmark = [pytest.mark.engine, pytest.mark.slow]

FAINT = 1e-4  # what layers add is too little to change which token is likeliest


def knowing(twin: Path) -> None:
    """Make a twin whose next token follows from the last one alone, and whose MTP knows how.

    Its layers add next to nothing, and the projection before the MTP layer takes the token and
    leaves the hidden state.
    """
    for file in twin.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.mul_(FAINT)
            if name.endswith("eh_proj.weight"):
                width = tensor.shape[0]
                tensor.copy_(torch.cat([torch.eye(width), torch.zeros(width, width)], 1))
        save_file(tensors, file, metadata={"format": "pt"})


def quantized(bench: Any, twin: Path) -> Path:
    bench.run("source", source.run, Source(model=str(twin)))
    bench.run("adapt", adapt.run, Adapt())
    ids = [{"id": str(n), "ids": [(7 * n + k) % 500 for k in range(96)]} for n in range(8)]
    bench.put("data", calibration__jsonl=ids)
    bench.run("calibrate", calibrate.run, Calibrate())
    path: Path = bench.run("quantize", stage.run, Quantize(method="rtn")).path
    return path / "checkpoint"


@pytest.mark.parametrize(
    ("knows", "least", "most"), [(True, 3.9, 4.0), (False, 1.0, 1.5)], ids=["exact", "random"]
)
def test_the_engine_accepts_what_the_layer_knows(
    bench: Any, tmp_path: Path, knows: bool, least: float, most: float
) -> None:
    twin = twins.write(twins.shrink(config_of("glm4_moe"), vocab_size=512), tmp_path / "twin")
    if knows:
        knowing(twin)
    found, _ = run_in_engine("mtp_acceptance.py", str(quantized(bench, twin)))
    assert found["drafts"] > 0
    assert least <= 1 + found["accepted"] / found["drafts"] <= most
