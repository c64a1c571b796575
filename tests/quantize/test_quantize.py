"""Calibrate and quantize on tiny twins: what is written is what was planned, to the byte."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from onboard import adapt, lookup, planning, source, twins
from onboard.checkpoint import nvfp4
from onboard.checkpoint.matrices import range_groups, scale_groups
from onboard.checkpoint.models import (
    Candidate,
    full_precision_activations,
    load_candidate,
    load_reference,
)
from onboard.checkpoint.reader import Reader
from onboard.errors import InputError
from onboard.quantize import calibrate, rounding, stage
from onboard.recipe import Adapt, Calibrate, Quantize, Source
from tests.families import config_of

LLAMA_MATRICES = 2 * 7


def documents(count: int = 12, length: int = 32) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 256, (count, length), generator=generator).tolist()
    return [{"id": str(i), "ids": row} for i, row in enumerate(ids)]


def planned(bench: Any, twin: Path, docs: Any = None, **adaptation: Any) -> Any:
    bench.run("source", source.run, Source(model=str(twin)))
    bench.run("adapt", adapt.run, Adapt(**adaptation))
    bench.put("data", calibration__jsonl=documents() if docs is None else docs)
    return bench


def quantized(bench: Any, twin: Path, docs: Any = None, **params: Any) -> Path:
    planned(bench, twin, docs)
    bench.run("calibrate", calibrate.run, Calibrate())
    return Path(bench.run("quantize", stage.run, Quantize(**params)).path)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for f in folder.glob("*.safetensors") for k, v in load_file(f).items()}


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_names_in_are_names_out_and_the_rest_is_copied(bench: Any, llama_twin: Path) -> None:
    out = tensors(quantized(bench, llama_twin) / "checkpoint")
    before = tensors(llama_twin)
    packed = {k.removesuffix(".weight_scale_2") for k in out if k.endswith(".weight_scale_2")}
    assert len(packed) == LLAMA_MATRICES
    extra = {f"{m}.{s}" for m in packed for s in ("weight_scale", "weight_scale_2", "input_scale")}
    assert set(out) == set(before) | extra
    for name, tensor in before.items():
        if name.removesuffix(".weight") not in packed:
            assert torch.equal(raw(out[name]), raw(tensor))


def test_fused_siblings_share_scales(bench: Any, llama_twin: Path) -> None:
    out = tensors(quantized(bench, llama_twin) / "checkpoint")
    for group in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        for kind in ("weight_scale_2", "input_scale"):
            for layer in "01":
                room = "self_attn" if "q_proj" in group else "mlp"
                names = [f"model.layers.{layer}.{room}.{p}.{kind}" for p in group]
                assert len({out[name].item() for name in names}) == 1


def test_metrics_are_read_back_from_the_files(bench: Any, llama_twin: Path) -> None:
    quantized(bench, llama_twin)
    metrics = bench.artifacts["quantize"].metrics
    assert metrics["weights_quantized_share"] == 1.0, "all linears of a tied Llama are quantized"
    assert metrics["tensors_lost"] == 0
    assert metrics["share_missing"] == 0
    assert 0.05 < metrics["relative_error_mean"] < 0.15


def test_the_sweep_never_loses_to_rounding_to_nearest() -> None:
    torch.manual_seed(0)
    weight, moment = torch.randn(32, 128) * 0.02, torch.rand(128) * 4
    errors = {}
    for method in ("rtn", "sweep"):
        scale_2 = rounding.shared_scale(weight.abs().amax(), method)
        packed = rounding.round_rows(weight, scale_2, method, moment)
        stored = nvfp4.dequantize(packed.weight, packed.weight_scale, scale_2)
        assert packed.error == pytest.approx(float((stored - weight).square().sum()), rel=1e-4)
        errors[method] = float(((stored - weight) ** 2 * moment).sum())
    assert errors["sweep"] < 0.9 * errors["rtn"]


def test_the_sweep_finds_what_an_exhaustive_search_finds() -> None:
    """Independent search over the seven targets, block by block."""
    torch.manual_seed(1)
    weight, moment = torch.randn(4, 32), torch.rand(32)
    scale_2 = rounding.shared_scale(weight.abs().amax(), "sweep")
    blocks = nvfp4.blocks(weight)
    found = rounding.sweep(blocks, nvfp4.block_amax(weight), scale_2, moment).float()
    for row in range(4):
        for block in range(2):
            cells = slice(16 * block, 16 * block + 16)
            w, m = weight[row, cells], moment[cells]
            costs = []
            for target in rounding.TARGETS:
                scale = (w.abs().max() / target / scale_2).to(torch.float8_e4m3fn).float() * scale_2
                grid = torch.tensor([*nvfp4.E2M1, *(-v for v in nvfp4.E2M1)])
                nearest = grid[(w[:, None] / scale - grid).abs().argmin(1)] * scale
                costs.append((float(((nearest - w) ** 2 * m).sum()), float(scale / scale_2)))
            best = min(cost for cost, _ in costs)
            mine = min(costs, key=lambda pair: abs(pair[1] - float(found[row, block])))[0]
            assert mine == pytest.approx(best, rel=1e-4)


def test_second_moments_and_ranges_are_those_of_the_inputs(bench: Any, llama_twin: Path) -> None:
    planned(bench, llama_twin, documents(4))
    bench.run("calibrate", calibrate.run, Calibrate(batch_size=3))
    found = load_file(bench.folder / "calibrate" / "activations.safetensors")
    model = load_reference(llama_twin, torch.float32)
    inputs: list[torch.Tensor] = []
    name = "model.layers.1.mlp.down_proj"
    model.get_submodule(name).register_forward_pre_hook(lambda m, a: inputs.append(a[0]))
    for row in documents(4):
        model(torch.tensor([row["ids"]]))
    x = torch.cat(inputs, 1)[0]
    assert torch.allclose(found[f"{name}.second_moment"], x.square().mean(0), rtol=1e-4)
    assert found[f"{name}.amax"].item() == pytest.approx(x.abs().max().item(), rel=1e-5)
    assert json.loads((bench.folder / "calibrate" / "tokens.json").read_text())[name] == 128


def test_documents_of_different_lengths_are_never_padded(bench: Any, llama_twin: Path) -> None:
    docs = documents(3, 32) + documents(3, 17)
    planned(bench, llama_twin, docs)
    bench.run("calibrate", calibrate.run, Calibrate(batch_size=4))
    tokens = json.loads((bench.folder / "calibrate" / "tokens.json").read_text())
    assert set(tokens.values()) == {3 * 32 + 3 * 17}


@pytest.mark.parametrize("activations", [True, False])
def test_the_candidate_is_the_bytes_on_disk(
    bench: Any, llama_twin: Path, activations: bool
) -> None:
    """Against a forward pass written out here: dequantized weights, quantized inputs."""
    folder = quantized(bench, llama_twin) / "checkpoint"
    adaptation = bench.artifacts["adapt"].json("adaptation.json")
    model = load_candidate(folder, adaptation, torch.float32)
    reader = Reader.open(folder)
    name = "model.layers.0.mlp.up_proj"
    assert torch.equal(model.get_submodule(name).weight, reader.weight(f"{name}.weight"))
    x = torch.randn(1, 3, 64)
    scale = reader.tensor(f"{name}.input_scale")
    seen = nvfp4.quantize_dequantize(x, scale) if activations else x
    want = seen @ reader.weight(f"{name}.weight").T
    with nullcontext() if activations else full_precision_activations():
        assert torch.allclose(model.get_submodule(name)(x), want, atol=1e-5)


def test_w4a16_has_no_input_scale_and_says_so(bench: Any, llama_twin: Path) -> None:
    folder = quantized(bench, llama_twin, activations="none") / "checkpoint"
    assert not [k for k in tensors(folder) if k.endswith("input_scale")]
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config["quant_algo"] == "W4A16_NVFP4"
    ids = torch.arange(16)[None]
    adaptation = bench.artifacts["adapt"].json("adaptation.json")
    weights_only = load_candidate(folder, adaptation, torch.float32)
    before = weights_only(ids).logits
    with full_precision_activations():
        assert torch.equal(before, weights_only(ids).logits)


def test_scales_of_an_fp8_cache_are_calibrated_and_declared(bench: Any, llama_twin: Path) -> None:
    planned(bench, llama_twin)
    bench.run("calibrate", calibrate.run, Calibrate(kv_cache="fp8"))
    folder = Path(bench.run("quantize", stage.run, Quantize()).path) / "checkpoint"
    out = tensors(folder)
    model = load_reference(llama_twin, torch.float32)
    values: list[torch.Tensor] = []
    name = "model.layers.1.self_attn.v_proj"
    model.get_submodule(name).register_forward_hook(lambda m, a, out: values.append(out))
    for row in documents():
        model(torch.tensor([row["ids"]]))
    amax = max(float(v.abs().max()) for v in values)
    assert out[f"{name}.v_scale"].item() == pytest.approx(amax / 448, rel=1e-5)
    assert {n.rpartition(".")[2] for n in out if n.endswith(("k_scale", "v_scale"))} == {
        "k_scale",
        "v_scale",
    }
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config["kv_cache_scheme"] == {"dynamic": False, "num_bits": 8, "type": "float"}
    sidecar = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]
    assert sidecar["kv_cache_quant_algo"] == "FP8"


def test_experts_are_quantized_and_share_ranges_in_a_layer(
    bench: Any, qwen3_moe_twin: Path
) -> None:
    out = tensors(quantized(bench, qwen3_moe_twin) / "checkpoint")
    for layer in "01":
        for kinds in (("gate_proj", "up_proj"), ("down_proj",)):
            stem = f"model.layers.{layer}.mlp.experts"
            scales = {
                out[f"{stem}.{e}.{kind}.input_scale"].item() for e in range(8) for kind in kinds
            }
            assert len(scales) == 1
    assert out["model.layers.0.mlp.gate.weight"].dtype == torch.bfloat16, "routers stay"
    assert bench.artifacts["quantize"].metrics["quantized_share_expert"] == 1.0


def test_an_expert_without_tokens_gets_its_layers_range(bench: Any, qwen3_moe_twin: Path) -> None:
    """Case 1: three tokens reach at most six of the eight experts of a layer."""
    out = tensors(quantized(bench, qwen3_moe_twin, documents(1, 3)) / "checkpoint")
    tokens = json.loads((bench.folder / "calibrate" / "tokens.json").read_text())
    unseen = [name for name, count in tokens.items() if count == 0]
    assert len(unseen) >= 2 * 2 * 3
    assert bench.artifacts["calibrate"].metrics["unseen_experts"] == len(unseen) / 3
    assert bench.artifacts["calibrate"].metrics["tensors_without_tokens"] == 0
    for name, value in out.items():
        if name.endswith(("input_scale", "weight_scale_2")):
            assert torch.isfinite(value), name
            assert value > 0, name


def test_unseen_experts_can_be_an_error(bench: Any, qwen3_moe_twin: Path) -> None:
    planned(bench, qwen3_moe_twin, documents(1, 2))  # two tokens reach at most four experts
    with pytest.raises(InputError, match="no calibration token was routed to"):
        bench.run("calibrate", calibrate.run, Calibrate(unseen_experts="error"))


def test_fused_experts_are_split_and_quantized(
    bench: Any, qwen3_moe_twin: Path, tmp_path: Path
) -> None:
    """Case 2: 3-D `gate_up_proj` must not stay behind; the result equals the per-expert source."""
    fused = fuse_experts(qwen3_moe_twin, tmp_path / "fused")
    out = tensors(quantized(bench, fused) / "checkpoint")
    assert bench.artifacts["quantize"].metrics["quantized_share_expert"] == 1.0
    assert not [name for name in out if "gate_up_proj" in name]
    other = type(bench)(tmp_path / "other")
    other.folder.mkdir()
    want = tensors(quantized(other, qwen3_moe_twin) / "checkpoint")
    assert set(out) == set(want)
    for name in want:
        assert torch.equal(raw(out[name]), raw(want[name])), name


def fuse_experts(twin: Path, folder: Path) -> Path:
    """Rewrite per-expert tensors as the 3-D ones that transformers 5 holds in memory."""
    shutil.copytree(twin, folder)
    state = load_file(folder / "model.safetensors")
    for layer in (0, 1):
        stem = f"model.layers.{layer}.mlp.experts"
        one = {
            kind: torch.stack([state.pop(f"{stem}.{e}.{kind}.weight") for e in range(8)])
            for kind in ("gate_proj", "up_proj", "down_proj")
        }
        state[f"{stem}.gate_up_proj"] = torch.cat((one["gate_proj"], one["up_proj"]), 1)
        state[f"{stem}.down_proj"] = one["down_proj"].contiguous()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_mtp_tensors_are_copied_byte_for_byte(bench: Any, llama_twin: Path, tmp_path: Path) -> None:
    """Case 4: a layer past the trunk."""
    twin = tmp_path / "mtp"
    shutil.copytree(llama_twin, twin)
    state = load_file(twin / "model.safetensors")
    mtp = {
        name.replace("layers.1.", "layers.2."): torch.randn_like(tensor.float()).to(tensor.dtype)
        for name, tensor in state.items()
        if "layers.1." in name
    }
    mtp["model.layers.2.eh_proj.weight"] = torch.randn(64, 128).to(torch.bfloat16)
    save_file({**state, **mtp}, twin / "model.safetensors", metadata={"format": "pt"})
    out = tensors(quantized(bench, twin) / "checkpoint")
    for name, tensor in mtp.items():
        assert torch.equal(raw(out[name]), raw(tensor)), name
    assert bench.artifacts["quantize"].metrics["tensors_lost"] == 0


def test_no_calibration_document_is_an_error_before_any_work(bench: Any, llama_twin: Path) -> None:
    """Case 7."""
    planned(bench, llama_twin, [])
    with pytest.raises(InputError, match="no calibration documents"):
        bench.run("calibrate", calibrate.run, Calibrate())


def test_an_all_zero_input_gets_a_finite_range_and_a_warning(
    bench: Any, llama_twin: Path, tmp_path: Path
) -> None:
    """Case 8: a norm of zeros silences the MLP of layer 1."""
    twin = tmp_path / "silent"
    shutil.copytree(llama_twin, twin)
    state = load_file(twin / "model.safetensors")
    state["model.layers.1.post_attention_layernorm.weight"].zero_()
    save_file(state, twin / "model.safetensors", metadata={"format": "pt"})
    out = tensors(quantized(bench, twin) / "checkpoint")
    scale = out["model.layers.1.mlp.gate_proj.input_scale"].item()
    assert scale == pytest.approx(calibrate.ZERO_INPUT_AMAX / 2688)
    assert any("model.layers.1.mlp.gate_proj" in warning for warning in bench.warnings)


def test_a_width_that_is_no_multiple_of_16_stays_in_high_precision(
    bench: Any, tmp_path: Path, make_llama: Any
) -> None:
    """Case 9."""
    twin = make_llama(tmp_path / "odd", intermediate_size=88)
    out = tensors(quantized(bench, twin) / "checkpoint")
    assert out["model.layers.0.mlp.down_proj.weight"].dtype == torch.bfloat16
    assert out["model.layers.0.mlp.up_proj.weight"].dtype == torch.uint8
    ignored = json.loads((bench.folder / "quantize/checkpoint/hf_quant_config.json").read_text())
    assert "model.layers.0.mlp.down_proj" in ignored["quantization"]["exclude_modules"]
    assert any("88" in warning for warning in bench.warnings)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_nan_in_a_shard_is_named(bench: Any, llama_twin: Path, tmp_path: Path, name: str) -> None:
    """Case 10, in a quantized and in a copied tensor."""
    planned(bench, llama_twin)
    bench.run("calibrate", calibrate.run, Calibrate())
    broken = tmp_path / "nan"
    shutil.copytree(llama_twin, broken)
    state = load_file(broken / "model.safetensors")
    state[name].view(-1)[7] = float("nan")
    save_file(state, broken / "model.safetensors", metadata={"format": "pt"})
    location = json.loads((bench.folder / "source/location.json").read_text())
    (bench.folder / "source/location.json").write_text(
        json.dumps({**location, "root": str(broken)})
    )
    with pytest.raises(InputError, match=name.replace(".", r"\.")):
        bench.run("quantize", stage.run, Quantize())


def test_every_matrix_is_in_one_scale_group(bench: Any, qwen3_moe_twin: Path) -> None:
    planned(bench, qwen3_moe_twin)
    groups = scale_groups(bench.artifacts["adapt"].json("adaptation.json"))
    names = [matrix.module for group in groups for matrix in group]
    assert len(names) == len(set(names)) == 2 * (4 + 8 * 3)
    shared = [sorted(m.module for m in members) for members in range_groups(groups)]
    assert sum(map(len, shared)) == len(names)
    assert max(map(len, shared)) == 16, "gate and up of eight experts"


@pytest.mark.parametrize("case", ["gpt_oss", "kimi_k3"])
def test_an_mxfp4_source_keeps_its_values(bench: Any, tmp_path: Path, case: str) -> None:
    """Interleaved [E, in, out] experts, and packed ones of their own: exact, not requantized."""
    twin = twins.write(twins.shrink(config_of(case), vocab_size=512), tmp_path / "twin")
    bench.run("source", source.run, Source(model=str(twin), allow_remote_code=True))
    adaptation = bench.run("adapt", adapt.run, Adapt()).json("adaptation.json")
    bench.put("data", calibration__jsonl=documents())
    bench.run("calibrate", calibrate.run, Calibrate())
    artifact = bench.run("quantize", stage.run, Quantize())
    assert artifact.metrics["relative_error_max"] == 0
    reader = Reader.open(twin)
    written = Candidate(artifact.path / "checkpoint", adaptation)
    assert {reader.weights[name].scheme for name in written.matrices} == {"mxfp4"}
    for name in written.matrices:
        assert torch.equal(written.weight(name), reader.weight(name)), name


def test_fp8_that_an_engine_reads_stays_and_is_declared_beside_nvfp4(
    bench: Any, tmp_path: Path
) -> None:
    """DeepSeek V4: experts become NVFP4, the rest keeps its bytes and its scales."""
    twin = twins.write(twins.shrink(config_of("deepseek_v4"), vocab_size=512), tmp_path / "twin")
    folder = quantized(bench, twin) / "checkpoint"
    before, after = Reader.open(twin), Reader.open(folder)
    name = next(n for n in before.weights if n.endswith("attn.wq_a.weight"))
    for part in before.weights[name].parts.values():
        assert torch.equal(raw(before.tensor(part.name)), raw(after.tensor(part.name)))
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "fp8"
    assert config["weight_block_size"] == [128, 128]
    assert config["quant_algo"] == "MIXED_PRECISION"
    assert config["quantized_layers"]["layers.0.ffn.experts"]["quant_algo"] == "NVFP4"


def test_a_quantized_source_that_becomes_nvfp4_is_declared_once(bench: Any, tmp_path: Path) -> None:
    twin = twins.write(twins.shrink(config_of("kimi_k3"), vocab_size=512), tmp_path / "twin")
    bench.run("source", source.run, Source(model=str(twin), allow_remote_code=True))
    bench.run("adapt", adapt.run, Adapt())
    bench.put("data", calibration__jsonl=documents())
    bench.run("calibrate", calibrate.run, Calibrate())
    folder = Path(bench.run("quantize", stage.run, Quantize()).path) / "checkpoint"
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config["text_config"]
    assert config["quantization_config"]["quant_algo"] == "W4A16_NVFP4"


def test_the_plan_foresees_the_bytes_that_are_written(bench: Any, qwen3_moe_twin: Path) -> None:
    quantized(bench, qwen3_moe_twin)
    written = bench.artifacts["quantize"].metrics["checkpoint_bytes"]
    planned = planning.plan(lookup.find(str(qwen3_moe_twin)))
    headers = written - planned["output"]["total_bytes"]  # JSON headers, and scalars
    assert 0 <= headers < 0.2 * written
