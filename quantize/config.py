"""What the checkpoint tells an engine about its format: the files ModelOpt writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from onboard.checkpoint.nvfp4 import BLOCK
from onboard.store import write_json


def write(source: Path, checkpoint: Path, adaptation: Mapping[str, Any], activations: str) -> None:
    """Write `config.json` (the source's, with `quantization_config`) and `hf_quant_config.json`.

    `activations` is "nvfp4" (W4A4) or "none" (W4A16). `producer` names the dialect, by which
    TensorRT-LLM recognises the file.
    """
    algorithm = "NVFP4" if activations == "nvfp4" else "W4A16_NVFP4"
    ignore = list(adaptation["ignore"])
    producer = {"name": "modelopt", "version": metadata.version("nvidia-modelopt")}
    fp4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": BLOCK}
    group: dict[str, Any] = {"weights": fp4, "targets": ["Linear"]}
    if activations == "nvfp4":
        group["input_activations"] = fp4
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "config_groups": {"group_0": group},
        "ignore": ignore,
        "producer": producer,
    }
    write_json(checkpoint / "config.json", config)
    write_json(
        checkpoint / "hf_quant_config.json",
        {
            "producer": producer,
            "quantization": {
                "quant_algo": algorithm,
                "kv_cache_quant_algo": None,
                "group_size": BLOCK,
                "exclude_modules": ignore,
            },
        },
    )
