"""Checkpoints of NVFP4, FP8 and BF16: the bytes, what is said of them, and what is computed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from onboard.checkpoint import fp8, nvfp4
from onboard.checkpoint.matrices import scale_groups
from onboard.checkpoint.models import Candidate, load_candidate
from onboard.checkpoint.reader import Reader
from onboard.errors import InputError
from onboard.quantize.layers import REPLACED, Layers, save_layer
from tests.quantize.mixed import Mixed, calibrated, formats_by, write_mixed
from tests.quantize.test_quantize import fuse_experts

PEERS = Path(__file__).parents[2] / ".venv-peers" / "bin" / "python"
QKV = ("q_proj", "k_proj", "v_proj")


@pytest.fixture
def llama(bench: Any, llama_twin: Path) -> Any:
    return calibrated(bench, llama_twin)


@pytest.fixture
def moe(bench: Any, qwen3_moe_twin: Path) -> Any:
    return calibrated(bench, qwen3_moe_twin)


def mix(bench: Any, **chosen: str) -> dict[str, str]:
    groups = scale_groups(bench.artifacts["adapt"].json("adaptation.json"))
    return formats_by(groups, **chosen)


def three(bench: Any) -> dict[str, str]:
    """Attention in FP8, gate and up in BF16, the rest in NVFP4."""
    return mix(bench, **dict.fromkeys(QKV, "fp8"), gate_proj="bf16", up_proj="bf16")


def quantization_config(mixed: Mixed) -> dict[str, Any]:
    config = json.loads((mixed.checkpoint / "config.json").read_text())
    return dict(config["quantization_config"])


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_each_group_is_stored_in_its_format(llama: Any) -> None:
    mixed = write_mixed(llama, three(llama))
    out = load_file(mixed.checkpoint / "model.safetensors")
    layer = "model.layers.1"
    weights = {p: mixed.source.weight(f"{layer}.self_attn.{p}.weight").float() for p in QKV}
    amax = torch.stack([w.abs().amax() for w in weights.values()]).amax()
    ranges = load_file(llama.artifacts["calibrate"].path / "activations.safetensors")
    for part, weight in weights.items():
        module = f"{layer}.self_attn.{part}"
        assert torch.equal(out[f"{module}.weight_scale"], amax / 448)
        assert torch.equal(raw(out[f"{module}.weight"]), raw(fp8.quantize(weight, amax / 448)))
        assert torch.equal(out[f"{module}.input_scale"], ranges[f"{module}.amax"] / 448)
        assert f"{module}.weight_scale_2" not in out
    for part in ("gate_proj", "up_proj"):
        name = f"{layer}.mlp.{part}.weight"
        assert torch.equal(raw(out[name]), raw(mixed.source.tensor(name)))
        assert not [n for n in out if n.startswith(name.removesuffix("weight")) and n != name]
    assert out[f"{layer}.mlp.down_proj.weight"].dtype == torch.uint8


def test_metrics_hold_the_files_against_the_plan(llama: Any) -> None:
    formats = three(llama)
    mixed = write_mixed(llama, formats)
    parameters = {m.module: m.parameters for group in mixed.groups for m in group}
    total = sum(parameters.values())
    share = dict.fromkeys(("nvfp4", "fp8", "bf16"), 0)
    for module, count in parameters.items():
        share[formats.get(module, "nvfp4")] += count
    found = mixed.metrics
    assert found["weights_fp8_share"] == share["fp8"] / total
    assert found["weights_nvfp4_share"] == share["nvfp4"] / total
    assert found["weights_quantized_share"] == 1 - share["bf16"] / total
    assert found["share_missing"] == found["tensors_lost"] == 0
    bits = (16 * share["bf16"] + 8 * share["fp8"] + 4.5 * share["nvfp4"]) / total
    scalars = 8 * (2 * 2 * 3 * 4 + 2 * 2 * 2 * 4) / total  # FP8: q, k, v; NVFP4: o, down
    assert found["effective_bits"] == pytest.approx(bits + scalars, abs=1e-9)
    assert {note["format"] for note in mixed.notes.values()} == {"nvfp4", "fp8", "bf16"}
    assert 0 < found["relative_error_mean"] < 0.12


def test_what_is_stored_in_another_format_than_planned_is_missing(llama: Any) -> None:
    from onboard.quantize import written

    mixed = write_mixed(llama, mix(llama, o_proj="bf16"))
    found = written.metrics(mixed.adaptation, mixed.groups, mixed.checkpoint, mixed.notes, {})
    assert found["tensors_lost"] == 2
    assert found["share_missing"] > 0


def test_the_candidate_is_the_bytes_on_disk(llama: Any) -> None:
    mixed = write_mixed(llama, three(llama))
    out = load_file(mixed.checkpoint / "model.safetensors")
    model = load_candidate(mixed.checkpoint, mixed.adaptation, torch.float32)
    module = "model.layers.0.self_attn.k_proj"
    weight = out[f"{module}.weight"].float() * out[f"{module}.weight_scale"]
    assert torch.equal(model.get_submodule(module).weight, weight)
    x = torch.randn(1, 3, 64) * 100
    scale = out[f"{module}.input_scale"]
    seen = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    assert torch.allclose(model.get_submodule(module)(x), seen @ weight.T, rtol=1e-4, atol=1e-4)
    module = "model.layers.0.mlp.up_proj"
    weight = mixed.source.tensor(f"{module}.weight").float()
    assert torch.equal(model.get_submodule(module)(x), x @ weight.T), "BF16: nothing is rounded"
    module = "model.layers.0.mlp.down_proj"
    x = torch.randn(1, 3, 96)
    seen = nvfp4.quantize_dequantize(x, out[f"{module}.input_scale"])
    weight = Reader.open(mixed.checkpoint).weight(f"{module}.weight")
    assert torch.allclose(model.get_submodule(module)(x), seen @ weight.T, atol=1e-4)


def test_w4a16_beside_fp8_still_quantizes_the_inputs_of_fp8(llama: Any) -> None:
    """VLLM has no weight-only FP8 in ModelOpt's dialect: without a scale it would invent one."""
    mixed = write_mixed(llama, three(llama), activations="none")
    scales = Reader.open(mixed.checkpoint).input_scales()
    assert {name.rpartition(".")[2] for name in scales} == set(QKV)
    layers = quantization_config(mixed)["quantized_layers"]
    assert layers["model.layers.0.mlp.down_proj"]["quant_algo"] == "W4A16_NVFP4"
    ids = torch.arange(16)[None]
    full = load_candidate(mixed.checkpoint, mixed.adaptation, torch.float32)
    assert torch.isfinite(full(ids).logits).all()


def test_the_config_is_modelopt_s_own_of_its_sidecar(llama: Any) -> None:
    from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format

    mixed = write_mixed(llama, three(llama))
    sidecar = json.loads((mixed.checkpoint / "hf_quant_config.json").read_text())
    assert sidecar["quantization"]["quant_algo"] == "MIXED_PRECISION"
    assert quantization_config(mixed) == convert_hf_quant_config_format(sidecar)
    layers = sidecar["quantization"]["quantized_layers"]
    assert layers["model.layers.1.self_attn.q_proj"] == {"quant_algo": "FP8"}
    assert layers["model.layers.1.mlp.down_proj"] == {"quant_algo": "NVFP4", "group_size": 16}
    assert "model.layers.1.mlp.gate_proj" not in layers
    ignored = sidecar["quantization"]["exclude_modules"]
    parts = ("gate_proj", "up_proj", "gate_up_proj")
    assert {f"model.layers.1.mlp.{part}" for part in parts} <= set(ignored)


def test_bf16_beside_nvfp4_is_a_longer_list_of_exceptions(llama: Any) -> None:
    said = quantization_config(write_mixed(llama, mix(llama, **dict.fromkeys(QKV, "bf16"))))
    assert said["quant_algo"] == "NVFP4"
    assert "quantized_layers" not in said
    assert "model.layers.0.self_attn.qkv_proj" in said["ignore"]


def test_formats_of_one_engine_unit_must_agree(moe: Any) -> None:
    for module in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.experts.3.down_proj"):
        with pytest.raises(InputError, match=r"holds .* as one"):
            write_mixed(moe, {module: "fp8"}, name=module)


def test_experts_in_two_formats_are_declared_by_their_container(moe: Any) -> None:
    mixed = write_mixed(moe, mix(moe, layer_1="fp8"))
    layers = quantization_config(mixed)["quantized_layers"]
    assert layers["model.layers.0.mlp.experts"]["quant_algo"] == "NVFP4"
    assert layers["model.layers.1.mlp.experts"] == {"quant_algo": "FP8"}
    out = load_file(mixed.checkpoint / "model.safetensors")
    stem = "model.layers.1.mlp.experts"
    for kinds in (("gate_proj", "up_proj"), ("down_proj",)):
        scales = [out[f"{stem}.{e}.{kind}.input_scale"] for e in range(8) for kind in kinds]
        assert len({scale.item() for scale in scales}) == 1
    assert len({out[f"{stem}.3.{kind}.weight_scale"].item() for kind in kinds}) == 1


def test_fused_experts_that_stay_are_copied_whole(
    bench: Any, qwen3_moe_twin: Path, tmp_path: Path
) -> None:
    calibrated(bench, fuse_experts(qwen3_moe_twin, tmp_path / "fused"))
    mixed = write_mixed(bench, mix(bench, layer_0="bf16", layer_1="fp8"))
    out = load_file(mixed.checkpoint / "model.safetensors")
    names = [name for name in out if "layers.0.mlp.experts" in name]
    assert sorted(names) == [
        f"model.layers.0.mlp.experts.{p}" for p in ("down_proj", "gate_up_proj")
    ]
    assert out["model.layers.1.mlp.experts.7.up_proj.weight"].dtype == torch.float8_e4m3fn
    candidate = Candidate(mixed.checkpoint, mixed.adaptation)
    for name in names:
        assert torch.equal(candidate.weight(name), mixed.source.tensor(name))
    fused = "model.layers.1.mlp.experts.gate_up_proj"
    up = out["model.layers.1.mlp.experts.2.up_proj.weight"].float()
    up *= out["model.layers.1.mlp.experts.2.up_proj.weight_scale"]
    assert torch.equal(candidate.weight(fused)[2, 32:], up)
    assert mixed.metrics["tensors_lost"] == 0
    assert mixed.metrics["share_missing"] == 0
    assert mixed.notes["model.layers.0.mlp.experts.5.up_proj"]["format"] == "bf16"


def test_rounded_matrices_and_trained_norms_take_the_source_s_place(
    llama: Any, tmp_path: Path
) -> None:
    formats = three(llama)
    layer = "model.layers.0"
    parts: dict[str, torch.Tensor] = {}
    for kind in QKV:
        parts[f"{layer}.self_attn.{kind}.weight"] = torch.ones(
            64 if kind == "q_proj" else 32, 64
        ).to(torch.float8_e4m3fn)
        parts[f"{layer}.self_attn.{kind}.weight_scale"] = torch.tensor(0.5)
    notes = {f"{layer}.self_attn.{kind}": {"relative_error": 0.25} for kind in QKV}
    folder = tmp_path / "layers"
    folder.mkdir()
    save_layer(folder / "layer-000.safetensors", parts, notes)
    norm = "model.layers.1.input_layernorm.weight"
    save_file({norm: torch.full((64,), 1.5)}, folder / REPLACED)
    mixed = write_mixed(llama, formats, layers=Layers(folder))
    reader = Reader.open(mixed.checkpoint)
    assert torch.equal(reader.weight(f"{layer}.self_attn.q_proj.weight"), torch.full((64, 64), 0.5))
    assert torch.equal(reader.tensor(norm), torch.full((64,), 1.5, dtype=torch.bfloat16))
    assert mixed.notes[f"{layer}.self_attn.q_proj"]["relative_error"] == 0.25


def test_both_layouts_hold_the_same_numbers(llama: Any) -> None:
    formats = mix(llama, **dict.fromkeys(QKV, "bf16"))
    one = write_mixed(llama, formats, name="modelopt")
    other = write_mixed(llama, formats, name="compressed", layout="compressed-tensors")
    ours, theirs = Reader.open(one.checkpoint), Reader.open(other.checkpoint)
    assert ours.weights.keys() == theirs.weights.keys()
    for name in ours.weights:
        assert torch.equal(ours.weight(name), theirs.weight(name)), name
    scales = theirs.input_scales()
    assert scales.keys() == ours.input_scales().keys()
    for module, scale in ours.input_scales().items():
        assert torch.equal(scale, scales[module]), module
    module = "model.layers.0.mlp.down_proj"
    assert theirs.headers[f"{module}.weight_global_scale"].shape == (1,)
    assert theirs.headers[f"{module}.input_global_scale"].shape == (1,)
    assert not (other.checkpoint / "hf_quant_config.json").exists()
    assert other.metrics["weights_quantized_share"] == one.metrics["weights_quantized_share"]


def test_compressed_tensors_is_refused_where_its_reader_would_round_again(llama: Any) -> None:
    with pytest.raises(InputError, match="once more"):
        write_mixed(llama, three(llama), layout="compressed-tensors")


DECOMPRESS = """
import sys
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file
import json
folder, out = sys.argv[1:]
config = json.load(open(f"{folder}/config.json"))["quantization_config"]
groups = QuantizationConfig.model_validate(config).config_groups
scheme = next(g for g in groups.values() if g.weights.num_bits == 4)
state, found = load_file(f"{folder}/model.safetensors"), {}
for name in [n for n in state if n.endswith(".weight_packed")]:
    module = name.removesuffix(".weight_packed")
    parts = {n.rpartition(".")[2]: t for n, t in state.items() if n.rpartition(".")[0] == module}
    weight = NVFP4PackedCompressor.decompress(parts, scheme)["weight"]
    found[f"{module}.weight"] = weight.contiguous()
save_file(found, out)
"""


def test_compressed_tensors_itself_reads_the_same_numbers(llama: Any, tmp_path: Path) -> None:
    if not PEERS.exists():
        pytest.skip("no .venv-peers: make bench-writer installs it")
    formats = mix(llama, **dict.fromkeys(QKV, "bf16"))
    mixed = write_mixed(llama, formats, layout="compressed-tensors")
    out = tmp_path / "decompressed.safetensors"
    subprocess.run([PEERS, "-c", DECOMPRESS, mixed.checkpoint, out], check=True)
    found, reader = load_file(out), Reader.open(mixed.checkpoint)
    assert len(found) == 2 * 4
    for name, weight in found.items():
        assert torch.equal(weight, reader.weight(name).to(weight.dtype)), name
