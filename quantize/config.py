"""What the checkpoint tells an engine about its format: the files of its dialect."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

from onboard.adapt import ignored_beside
from onboard.checkpoint.matrices import scale_groups
from onboard.checkpoint.nvfp4 import BLOCK
from onboard.errors import InputError
from onboard.quantize.layouts import format_of
from onboard.store import write_json
from onboard.tensorplan import expert_container

FP4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": BLOCK}
FP8 = {"dynamic": False, "num_bits": 8, "type": "float"}


def write(
    source: Path,
    checkpoint: Path,
    adaptation: Mapping[str, Any],
    activations: str,
    fp8_cache: bool = False,
    formats: Mapping[str, str] = MappingProxyType({}),
    layout: str = "modelopt",
) -> None:
    """Write `config.json`, the source's with `quantization_config`, and its dialect's other files.

    `activations` is "nvfp4" (W4A4) or "none" (W4A16); `fp8_cache` says that the checkpoint holds
    scales for an FP8 KV cache. `formats` and `layout` are those that the files were written with.
    ModelOpt's dialect has a second file, `hf_quant_config.json`.
    """
    ignore = ignored_beside(adaptation, formats)
    if layout == "compressed-tensors":
        if adaptation["keeps_source_format"]:
            raise InputError(
                "compressed-tensors describes no NVFP4 experts among a source's own FP8",
                "--set quantize.layout=modelopt",
            )
        assert "fp8" not in formats.values()
        mark = _compressed_tensors(activations, ignore)
    else:
        sidecar = _modelopt(adaptation, activations, formats, ignore)
        sidecar["kv_cache_quant_algo"] = "FP8" if fp8_cache else None
        producer = {"name": "modelopt", "version": metadata.version("nvidia-modelopt")}
        described = {"producer": producer, "quantization": sidecar}
        write_json(checkpoint / "hf_quant_config.json", described)
        mark = _in_config(sidecar, producer)
    if fp8_cache:
        mark["kv_cache_scheme"] = {**FP8, **_strategy(layout)}
    config = json.loads((source / "config.json").read_text())
    for inner in config.values():  # such as text_config; it describes the source's format
        if isinstance(inner, dict):
            inner.pop("quantization_config", None)
    kept = config.get("quantization_config", {}) if adaptation["keeps_source_format"] else {}
    config["quantization_config"] = {**mark, **kept}
    write_json(checkpoint / "config.json", config)


def _modelopt(
    adaptation: Mapping[str, Any],
    activations: str,
    formats: Mapping[str, str],
    ignore: list[str],
) -> dict[str, Any]:
    """Return the content of `hf_quant_config.json`, but what it says of the KV cache."""
    algorithm = "NVFP4" if activations == "nvfp4" else "W4A16_NVFP4"
    described: dict[str, Any] = {"quant_algo": algorithm, "group_size": BLOCK}
    if adaptation["keeps_source_format"]:
        described = _beside_source(adaptation, algorithm, formats)
    elif "fp8" in formats.values():
        layers = _quantized_layers(adaptation, algorithm, formats)
        described = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    return {**described, "exclude_modules": ignore}


def _quantized_layers(
    adaptation: Mapping[str, Any], algorithm: str, formats: Mapping[str, str]
) -> dict[str, Any]:
    """Return what each module is; the experts of a layer are one module, as engines see them."""
    layers: dict[str, Any] = {}
    for group in scale_groups(adaptation):
        form = format_of(group, formats)
        for matrix in group:
            if form != "bf16":
                name = expert_container(matrix.module) or matrix.module
                layers[name] = _algorithm("FP8" if form == "fp8" else algorithm)
    return layers


def _algorithm(name: str) -> dict[str, Any]:
    return {"quant_algo": name} if name == "FP8" else {"quant_algo": name, "group_size": BLOCK}


def _beside_source(
    adaptation: Mapping[str, Any], algorithm: str, formats: Mapping[str, str]
) -> dict[str, Any]:
    """Describe NVFP4 experts among weights in the source's own format.

    The engine goes by the source's `quant_method` and takes the experts named here for NVFP4; so
    does the published NVFP4 of DeepSeek V4.
    """
    layers = _quantized_layers(adaptation, algorithm, formats)
    return {
        "quant_algo": "MIXED_PRECISION",
        "moe_quant_algo": algorithm,
        "group_size": BLOCK,
        "quantized_layers": dict(sorted(layers.items())),
    }


def _in_config(sidecar: Mapping[str, Any], producer: Mapping[str, str]) -> dict[str, Any]:
    """Return ModelOpt's `quantization_config`, which says the same as its sidecar.

    `producer` names the dialect, by which TensorRT-LLM recognises the file.
    """
    described = {k: v for k, v in sidecar.items() if k not in ("group_size", "kv_cache_quant_algo")}
    if "moe_quant_algo" in sidecar:
        described["group_size"] = sidecar["group_size"]
        groups = {"group_0": {**_modelopt_group(sidecar["moe_quant_algo"]), "targets": ["Linear"]}}
    elif layers := sidecar.get("quantized_layers"):
        groups = {}
        for number, name in enumerate(dict.fromkeys(one["quant_algo"] for one in layers.values())):
            targets = sorted(layer for layer, one in layers.items() if one["quant_algo"] == name)
            groups[f"group_{number}"] = {**_modelopt_group(name), "targets": targets}
    else:
        groups = {"group_0": {**_modelopt_group(sidecar["quant_algo"]), "targets": ["Linear"]}}
    return {
        "quant_method": "modelopt",
        "config_groups": groups,
        "ignore": described.pop("exclude_modules"),
        **described,
        "producer": dict(producer),
    }


def _modelopt_group(algorithm: str) -> dict[str, Any]:
    if algorithm == "W4A16_NVFP4":
        return {"weights": FP4}
    form = FP8 if algorithm == "FP8" else FP4
    return {"weights": form, "input_activations": form}


def _compressed_tensors(activations: str, ignore: list[str]) -> dict[str, Any]:
    """Return the `quantization_config` that llm-compressor writes."""
    weights = {**FP4, "strategy": "tensor_group", "symmetric": True}
    weights["scale_dtype"] = "torch.float8_e4m3fn"
    group: dict[str, Any] = {"targets": ["Linear"], "weights": weights}
    if activations == "nvfp4":
        group["input_activations"] = {**weights, "dynamic": "local"}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": {**group, "format": "nvfp4-pack-quantized"}},
        "ignore": [_pattern(name) for name in ignore],
        "kv_cache_scheme": None,
    }


def _pattern(name: str) -> str:
    """Return a module as compressed-tensors matches it: containers and wildcards as expressions.

    An expression is matched against the engine's own names, which may have another root.
    """
    if not (name.endswith(".experts") or "*" in name):
        return name
    _, found, inside = name.partition(".layers.")
    path = re.escape(f"layers.{inside}" if found else name).replace(r"\*", ".*")
    below = "" if "*" in name else r"(\..*)?"
    return rf"re:(.*\.)?{path}{below}$"


def _strategy(layout: str) -> dict[str, Any]:
    return {"strategy": "tensor", "symmetric": True} if layout == "compressed-tensors" else {}
