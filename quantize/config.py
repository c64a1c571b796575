"""What the checkpoint tells an engine about its format: the files ModelOpt writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from onboard.checkpoint.nvfp4 import BLOCK
from onboard.store import write_json
from onboard.tensorplan import expert_container


def write(
    source: Path,
    checkpoint: Path,
    adaptation: Mapping[str, Any],
    activations: str,
    fp8_cache: bool = False,
) -> None:
    """Write `config.json` (the source's, with `quantization_config`) and `hf_quant_config.json`.

    `activations` is "nvfp4" (W4A4) or "none" (W4A16); `fp8_cache` says that the checkpoint holds
    scales for an FP8 KV cache. `producer` names the dialect, by which
    TensorRT-LLM recognises the file.
    """
    algorithm = "NVFP4" if activations == "nvfp4" else "W4A16_NVFP4"
    producer = {"name": "modelopt", "version": metadata.version("nvidia-modelopt")}
    fp4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": BLOCK}
    group: dict[str, Any] = {"weights": fp4, "targets": ["Linear"]}
    if activations == "nvfp4":
        group["input_activations"] = fp4
    config = json.loads((source / "config.json").read_text())
    described: dict[str, Any] = {"quant_algo": algorithm, "ignore": list(adaptation["ignore"])}
    if adaptation["keeps_source_format"]:
        described |= _mixed(adaptation, algorithm)
    mark = {
        "quant_method": "modelopt",
        "config_groups": {"group_0": group},
        **described,
        "producer": producer,
    }
    if fp8_cache:
        mark["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    for inner in config.values():  # such as text_config; it describes the source's format
        if isinstance(inner, dict):
            inner.pop("quantization_config", None)
    kept = config.get("quantization_config", {}) if adaptation["keeps_source_format"] else {}
    config["quantization_config"] = {**mark, **kept}
    write_json(checkpoint / "config.json", config)
    ignored = described.pop("ignore")
    write_json(
        checkpoint / "hf_quant_config.json",
        {
            "producer": producer,
            "quantization": {
                "kv_cache_quant_algo": "FP8" if fp8_cache else None,
                "group_size": BLOCK,
                "exclude_modules": ignored,
                **described,
            },
        },
    )


def _mixed(adaptation: Mapping[str, Any], algorithm: str) -> dict[str, Any]:
    """Describe NVFP4 experts among weights in the source's own format.

    The engine goes by the source's `quant_method` and takes the experts named here for NVFP4; so
    does the published NVFP4 of DeepSeek V4.
    """
    layer = {"quant_algo": algorithm, "group_size": BLOCK}
    quantized = [name for name, tensor in adaptation["tensors"].items() if tensor["quantize"]]
    modules = {expert_container(n) or n.removesuffix(".weight") for n in quantized}
    return {
        "quant_algo": "MIXED_PRECISION",
        "moe_quant_algo": algorithm,
        "group_size": BLOCK,
        "quantized_layers": dict.fromkeys(sorted(modules), layer),
    }
