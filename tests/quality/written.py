"""What a peer wrote, read back: weights as an engine computes with them, formats and bytes.

Reads the two dialects of the peers, ModelOpt's and compressed-tensors'. Runs in every peer's
environment, so it needs torch and safetensors only and shares no code with what it judges.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BLOCK = 16
SCALES = ("weight_scale", "weight_scale_2", "weight_global_scale", "pre_quant_scale",
          "input_scale", "input_global_scale")  # fmt: skip


@dataclass(frozen=True)
class Written:
    """A checkpoint that a peer wrote, beside the source it came from.

    `weights` holds f32 by parameter name: every quantized linear, dequantized, and every other
    tensor whose values differ from the source's (AWQ moves scales into norms). `formats` names
    each linear `nvfp4`, `fp8` or `bf16`; `bytes` counts all linears with their scales, an
    unquantized one at the source's own width, and `nvfp4_share` is that of their weights which are
    NVFP4. `input_scales` are of the modules whose inputs an engine quantizes.
    """

    weights: dict[str, Tensor]
    formats: dict[str, str]
    bytes: int
    nvfp4_share: float
    input_scales: dict[str, float]


def tensors(folder: Path) -> dict[str, Tensor]:
    """Return every tensor of a checkpoint folder, whatever the number of its shards."""
    return dict(_stream(folder))


def _stream(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)


def linears(source: dict[str, Tensor]) -> list[str]:
    """Return the modules of the matrices, without embeddings, heads and routers."""
    kept = ("embed_tokens", "lm_head", "gate")
    names = [n.removesuffix(".weight") for n, t in source.items() if t.ndim == 2]
    return [n for n in names if n.rsplit(".", 1)[-1] not in kept]


def fp4_values(packed: Tensor) -> Tensor:
    """Return the E2M1 values f32 [..., in] of u8 [..., in/2], the low nibble first."""
    table = torch.tensor([*E2M1, *(-v for v in E2M1)])
    codes = torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2)
    return table[codes.int()]


def nvfp4(packed: Tensor, scale: Tensor, step: Tensor) -> Tensor:
    """Return weights f32 [out, in]: value * (block scale * `step`), a product in f32."""
    block_step = (scale.float() * step.float()).repeat_interleave(BLOCK, -1)
    return fp4_values(packed) * block_step


def dequantize(part: dict[str, Tensor]) -> tuple[Tensor, str]:
    """Return the f32 weights of one linear from its tensors, and the name of its format.

    A `pre_quant_scale` [in] multiplies the linear's input, hence its columns. Raises ValueError
    for a format that is neither NVFP4 nor per-tensor FP8 nor plain.
    """
    if "weight_packed" in part:
        step = 1.0 / part["weight_global_scale"].float()
        return nvfp4(part["weight_packed"], part["weight_scale"], step), "nvfp4"
    weight, scale = part["weight"], part.get("weight_scale")
    if scale is None:
        return weight.float(), "bf16"
    if weight.dtype == torch.uint8:
        values, name = nvfp4(weight, scale, part["weight_scale_2"]), "nvfp4"
    elif weight.dtype == torch.float8_e4m3fn and scale.numel() == 1:
        values, name = weight.float() * scale.float(), "fp8"
    else:
        raise ValueError(f"a weight of {weight.dtype} with scales {tuple(scale.shape)}")
    return values * part.get("pre_quant_scale", torch.ones(1)).float(), name


def _input_scale(part: dict[str, Tensor]) -> float | None:
    if "input_scale" in part:
        return float(part["input_scale"])
    return 1.0 / float(part["input_global_scale"]) if "input_global_scale" in part else None


def read(folder: Path, source: Path) -> Written:
    """Return what the peer wrote to `folder`, quantized from `source`.

    Raises ValueError where a linear of the source is missing, or where one scales its inputs before
    it quantizes them, which `input_scales` cannot say.
    """
    ours, theirs = tensors(source), tensors(folder)
    weights: dict[str, Tensor] = {}
    formats: dict[str, str] = {}
    input_scales: dict[str, float] = {}
    size = 0
    modules = linears(ours)
    for module in modules:
        part = {n.removeprefix(f"{module}."): t for n, t in theirs.items()
                if n.rpartition(".")[0] == module}  # fmt: skip
        if not part:
            raise ValueError(f"{module} is not in the checkpoint of {folder}")
        value, formats[module] = dequantize(part)
        original = ours[f"{module}.weight"]
        plain = formats[module] == "bf16"
        size += original.nbytes if plain else sum(
            t.nbytes for n, t in part.items() if n in ("weight", "weight_packed", *SCALES)
        )  # fmt: skip
        if not plain or not torch.equal(value, original.float()):
            weights[f"{module}.weight"] = value
        scale = _input_scale(part)
        if scale is not None and not plain:
            if "pre_quant_scale" in part:
                raise ValueError(f"{module} scales its inputs before quantizing them")
            input_scales[module] = scale
    rest = set(ours) - {f"{m}.weight" for m in modules}
    for name in sorted(rest & set(theirs)):
        if not torch.equal(theirs[name].float(), ours[name].float()):
            weights[name] = theirs[name].float()
    return Written(weights, formats, size, _nvfp4_share(ours, formats), input_scales)


def _nvfp4_share(source: dict[str, Tensor], formats: dict[str, str]) -> float:
    numbers = {module: source[f"{module}.weight"].numel() for module in formats}
    return sum(n for m, n in numbers.items() if formats[m] == "nvfp4") / sum(numbers.values())


def describe(written: Written) -> dict[str, object]:
    """Return what meta.json says about it."""
    return {
        "formats": written.formats,
        "bytes": written.bytes,
        "nvfp4_share": written.nvfp4_share,
        "input_scales": written.input_scales,
    }


def read_ids(path: Path) -> list[list[int]]:
    """Return token ids, one list a document, of a JSON file."""
    rows: list[list[int]] = json.loads(path.read_text())
    return rows
