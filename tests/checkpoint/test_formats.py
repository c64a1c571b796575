"""Source formats: literals worked out by hand, parity with transformers' own dequantization."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from onboard import twins
from onboard.checkpoint import encode, formats, mxfp4, nvfp4
from onboard.checkpoint.headers import Header
from onboard.checkpoint.reader import Reader
from onboard.errors import InputError

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
BLOCK_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
KIMI_INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "group_size": 32, "strategy": "group"},
        }
    },
    "ignore": ["lm_head", "re:.*self_attn.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
}
KIMI_MXFP4 = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "config_groups": {
        "group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 32}},
    },
}


def store(
    folder: Path, *shards: Mapping[str, Tensor], quantization: Mapping[str, Any] | None = None
) -> Reader:
    """Write shards and a config.json; return the reader of the folder."""
    index = {}
    for number, tensors in enumerate(shards):
        name = f"model-{number}.safetensors" if len(shards) > 1 else "model.safetensors"
        save_file({k: t.contiguous() for k, t in tensors.items()}, folder / name)
        index |= dict.fromkeys(tensors, name)
    if len(shards) > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    config = {"quantization_config": quantization} if quantization else {}
    (folder / "config.json").write_text(json.dumps(config))
    return Reader.open(folder)


def codes(*values: float) -> Tensor:
    return torch.tensor(values).to(E4M3)


ALL = slice(None)


def test_block_fp8_with_partial_edge_blocks_by_hand(tmp_path: Path) -> None:
    """130 x 129 has blocks of 128 x 128, 128 x 1, 2 x 128 and 2 x 1; its scales differ."""
    weight = torch.full((130, 129), 1.5).to(E4M3)
    scale = torch.tensor([[2.0, 4.0], [8.0, 0.5]])
    reader = store(
        tmp_path, {"a.weight": weight, "a.weight_scale_inv": scale}, quantization=BLOCK_FP8
    )
    held = reader.weights["a.weight"]
    assert (held.scheme, held.shape, held.block) == ("fp8_block", (130, 129), (128, 128))
    found = reader.rows("a.weight", None, ALL)
    assert found.dtype == torch.float32
    assert found[0, 0] == found[127, 127] == 3.0
    assert found[0, 128] == found[127, 128] == 6.0
    assert found[128, 0] == found[129, 127] == 12.0
    assert found[129, 128] == 0.75
    assert torch.equal(reader.rows("a.weight", None, slice(127, 130)), found[127:130])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, E8M0])
def test_the_scales_of_a_block_may_be_in_another_shard_and_of_any_dtype(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    reader = store(
        tmp_path,
        {"a.weight": torch.full((4, 4), 3.0).to(E4M3)},
        {"a.weight_scale_inv": torch.tensor([[0.25]]).to(dtype)},
        quantization=BLOCK_FP8,
    )
    assert reader.headers["a.weight"].shard != reader.headers["a.weight_scale_inv"].shard
    assert torch.equal(reader.weight("a.weight"), torch.full((4, 4), 0.75))
    assert list(reader.weights) == ["a.weight"]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_fp8_by_tensor_and_its_input_scale_is_consumed(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    reader = store(
        tmp_path,
        {
            "a.weight": codes(1, -2, 448, 0.5).reshape(2, 2),
            "a.weight_scale": torch.full(shape, 0.5),
            "a.input_scale": torch.tensor(1.0),
        },
        quantization={"quant_algo": "FP8", "producer": {"name": "modelopt"}},
    )
    assert reader.weights["a.weight"].scheme == "fp8_tensor"
    assert reader.weight("a.weight").tolist() == [[0.5, -1.0], [224.0, 0.25]]
    assert list(reader.weights["a.weight"].parts) == ["weight", "scale", "input_scale"]


@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_fp8_by_channel(tmp_path: Path, shape: tuple[int, ...]) -> None:
    scale = torch.tensor([0.5, 2.0], dtype=torch.bfloat16).reshape(shape)
    tensors = {"a.weight": codes(1, 2, 3, 1, 2, 3).reshape(2, 3), "a.weight_scale": scale}
    reader = store(tmp_path, tensors)
    assert reader.weights["a.weight"].scheme == "fp8_channel"
    assert reader.rows("a.weight", None, slice(1, 2)).tolist() == [[2.0, 4.0, 6.0]]


def test_int4_by_hand(tmp_path: Path) -> None:
    """Eight values a word, the first in the lowest bits, stored plus 8: 0x8 is 0, 0xF is 7."""
    words = torch.tensor([[0x7654321F, -0x77777778, 0, -1]], dtype=torch.int32)
    tensors = {
        "a.weight_packed": words,
        "a.weight_scale": torch.tensor([[0.5]], dtype=torch.bfloat16),
        "a.weight_shape": torch.tensor([1, 32]),
    }
    reader = store(tmp_path, tensors, quantization=KIMI_INT4)
    held = reader.weights["a.weight"]
    assert (held.scheme, held.shape, held.block, held.dtype) == (
        ("int4_group", (1, 32), (1, 32), "I32")
    )
    found = reader.weight("a.weight")[0]
    assert found[:8].tolist() == [3.5, -3.5, -3.0, -2.5, -2.0, -1.5, -1.0, -0.5]
    assert found[8:16].tolist() == [0.0] * 8, "0x88888888"
    assert found[16:24].tolist() == [-4.0] * 8
    assert found[24:].tolist() == [3.5] * 8


def test_a_weight_shape_that_contradicts_the_codes_is_an_error(tmp_path: Path) -> None:
    packed, scale = encode.quantize_int4(torch.randn(4, 64), 32)
    shape = torch.tensor([4, 60])
    tensors = {"a.weight_packed": packed, "a.weight_scale": scale, "a.weight_shape": shape}
    reader = store(tmp_path, tensors, quantization=KIMI_INT4)
    with pytest.raises(InputError, match=r"a\.weight_shape says \[4, 60\].* hold \[4, 64\]"):
        reader.weight("a.weight")


def test_gpt_oss_blocks_by_hand(tmp_path: Path) -> None:
    """Low nibble first; 2^(exponent - 127); the model holds [expert, in, out]."""
    blocks = torch.zeros(1, 2, 1, 16, dtype=torch.uint8)
    blocks[0, 0, 0, 0], blocks[0, 1, 0, 15] = 0x71, 0xF0  # 0.5 then 6; last of row 1: -6
    scales = torch.tensor([[[127], [129]]], dtype=torch.uint8)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    reader = store(tmp_path, {f"{name}_blocks": blocks, f"{name}_scales": scales})
    held = reader.weights[name]
    assert (held.scheme, held.shape, held.transposed) == ("mxfp4", (1, 32, 2), True)
    gate = reader.rows(name, 0, slice(0, None, 2), transposed=True)
    up = reader.rows(name, 0, slice(1, None, 2), transposed=True)
    assert gate.shape == up.shape == (1, 32)
    assert gate[0, :3].tolist() == [0.5, 6.0, 0.0]
    assert up[0, 31] == -24.0
    assert torch.equal(reader.weight(name), torch.stack([gate[0], up[0]], 1)[None])


@pytest.mark.parametrize("dialect", ["deepseek_v4", "kimi_k3"])
def test_mxfp4_of_single_matrices_by_hand(tmp_path: Path, dialect: str) -> None:
    packed = torch.zeros(1, 32, dtype=torch.uint8)
    packed[0, 0], packed[0, 16] = 0x2B, 0x07  # -1.5 then 1; second block: 6 then 0
    exponents = torch.tensor([[126, 130]], dtype=torch.uint8)
    stored = {
        "kimi_k3": {"a.w1.weight_packed": packed, "a.w1.weight_scale": exponents},
        "deepseek_v4": {
            "a.w1.weight": packed.view(torch.int8),
            "a.w1.scale": exponents.view(E8M0),
        },
    }
    reader = store(tmp_path, stored[dialect])
    assert reader.weights["a.w1.weight"].scheme == "mxfp4"
    found = reader.rows("a.w1.weight", None, ALL)[0]
    assert found[:2].tolist() == [-0.75, 0.5]
    assert found[32:34].tolist() == [48.0, 0.0]
    held, scale = reader.mxfp4("a.w1.weight", None, ALL)
    assert torch.equal(held, packed)
    assert torch.equal(scale, exponents)


def test_plain_weights_keep_dtype_and_order_and_may_be_called_scale(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.ones(2, 2, dtype=torch.bfloat16), "a.scale": torch.ones(2)}
    reader = store(tmp_path, tensors)
    assert {w.scheme for w in reader.weights.values()} == {"plain"}
    assert list(reader.weights) == list(reader.headers)
    assert reader.weight("a.weight").dtype == torch.bfloat16


# Parity


def test_block_fp8_is_what_transformers_dequantizes(tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    torch.manual_seed(0)
    weight = torch.randn(256, 384).to(E4M3)
    scale = torch.rand(2, 3)
    tensors = {"a.weight": weight, "a.weight_scale_inv": scale}
    reader = store(tmp_path, tensors, quantization=BLOCK_FP8)
    theirs = Fp8Dequantize(None)._dequantize_one(weight, scale, torch.float32)
    assert torch.equal(reader.weight("a.weight"), theirs)


def test_packed_experts_of_deepseek_v4_are_what_transformers_dequantizes(tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(-128, 128, (8, 48), generator=generator, dtype=torch.int8)
    scale = torch.randint(100, 140, (8, 3), generator=generator).to(torch.uint8).view(E8M0)
    reader = store(tmp_path, {"a.weight": packed, "a.scale": scale})
    theirs = Fp8Dequantize(None)._dequantize_one(packed, scale, torch.float32)
    assert torch.equal(reader.weight("a.weight"), theirs)


def test_gpt_oss_blocks_are_what_transformers_dequantizes(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 6, 2, 16), generator=generator).to(torch.uint8)
    scales = torch.randint(90, 150, (3, 6, 2), generator=generator).to(torch.uint8)
    tensors = {"experts.down_proj_blocks": blocks, "experts.down_proj_scales": scales}
    reader = store(tmp_path, tensors)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(reader.weight("experts.down_proj"), theirs)


DENSE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "mxfp4"},
}


@pytest.mark.parametrize("family", ["gpt_oss", "llama"])
def test_transformers_itself_loads_a_twin_to_the_same_weights(tmp_path: Path, family: str) -> None:
    """The names, shapes and codes that `encode` writes are those its peer reads."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

    if family == "gpt_oss":
        config, how = GPT_OSS, Mxfp4Config(dequantize=True)
    else:
        quantization = {**BLOCK_FP8, "weight_block_size": [32, 32]}
        config = {**DENSE, "quantization_config": quantization}
        how = FineGrainedFP8Config(weight_block_size=(32, 32), dequantize=True)
    reader = Reader.open(twins.write(config, tmp_path / "twin"))
    model = AutoModelForCausalLM.from_pretrained(
        reader.root, quantization_config=how, dtype=torch.float32
    )
    theirs = model.state_dict()
    assert theirs.keys() == reader.weights.keys()
    assert {w.scheme for w in reader.weights.values()} != {"plain"}
    for name, tensor in theirs.items():
        assert torch.equal(tensor, reader.weight(name).float()), name


# What does not belong together


def meta(name: str, dtype: str, *shape: int) -> Header:
    return Header(name, dtype, shape, "model-7.safetensors", 0, 0)


def grouped(*headers: Header, **quantization: Any) -> dict[str, formats.Weight]:
    table = {h.name: h for h in headers}
    return formats.weights(table, {"quantization_config": quantization} if quantization else {})


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        (
            [meta("a.weight", "F8_E4M3", 256, 256), meta("a.weight_scale_inv", "F32", 2, 1)],
            r"model-7.*a\.weight_scale_inv.*a\.weight F8.*\[2, 2\] \(fp8_block\).*F32 \[2, 1\]",
        ),
        ([meta("a.weight", "F8_E4M3", 4, 4)], r"a\.weight is F8_E4M3: expected its scales"),
        ([meta("a.weight_packed", "I32", 4, 4)], r"a\.weight_packed is I32: expected its scales"),
        ([meta("e.x_proj_blocks", "U8", 1, 4, 1, 16)], "expected its scales.*x_proj_scales"),
        ([meta("a.weight_scale_inv", "F32", 2, 2)], r"expected a\.weight as .*, found none"),
        ([meta("a.scale", "F8_E8M0", 2, 2)], r"a\.scale F8_E8M0.*expected a\.weight as"),
        (
            [meta("a.weight", "BF16", 4, 4), meta("a.weight_scale", "F32")],
            "expected a.weight as .*, found it as BF16",
        ),
        (
            [meta("a.weight", "I8", 4, 32), meta("a.weight_scale", "F32", 4, 1)],
            "expected F8_E8M0 or U8, found F32",
        ),
        (
            [meta("a.weight", "I8", 4, 32), meta("a.scale", "F8_E8M0", 4, 1)],
            r"a scale per 32 of \[4, 64\]",
        ),
        (
            [
                meta("a.weight_packed", "I32", 4, 8),
                meta("a.weight_scale", "BF16", 4, 2),
                meta("a.weight_zero_point", "I32", 1, 2),
            ],
            "a.weight_zero_point: onboard reads symmetric INT4",
        ),
        (
            [meta("a.weight_packed", "I32", 4, 8), meta("a.weight_scale", "BF16", 4, 3)],
            r"a scale per group of \[4, 64\], found BF16 \[4, 3\]",
        ),
        (
            [
                meta("e.x_proj", "BF16", 1, 32, 4),
                meta("e.x_proj_blocks", "U8", 1, 4, 1, 16),
                meta("e.x_proj_scales", "U8", 1, 4, 1),
            ],
            "both hold e.x_proj",
        ),
    ],
)
def test_parts_that_do_not_belong_together_are_named(headers: list[Header], message: str) -> None:
    with pytest.raises(InputError, match=message):
        grouped(*headers)


def test_a_declared_block_size_is_binding() -> None:
    headers = meta("a.weight", "F8_E4M3", 256, 256), meta("a.weight_scale_inv", "F32")
    with pytest.raises(InputError, match=r"expected \[2, 2\] \(fp8_block\), found F32 \[\]"):
        grouped(*headers, **BLOCK_FP8)


def test_eight_bit_integers_are_an_error() -> None:
    weights = {"weights": {"num_bits": 8, "type": "int", "group_size": 32}}
    headers = meta("a.weight_packed", "I32", 4, 16), meta("a.weight_scale", "BF16", 4, 2)
    with pytest.raises(InputError, match="integer weights of 8 bits"):
        grouped(*headers, config_groups={"group_0": weights})


NAMES = ("a.weight", "a.weight_packed", "a.weight_scale", "a.weight_scale_inv", "a.scale",
         "a.weight_scale_2", "a.weight_shape", "a.input_scale", "a.x_proj_blocks",
         "a.x_proj_scales", "a.bias")  # fmt: skip
SIZES = st.lists(st.sampled_from([0, 1, 2, 16, 64]), max_size=4)


@given(st.dictionaries(st.sampled_from(NAMES), st.tuples(st.sampled_from(
    ["BF16", "F32", "F8_E4M3", "F8_E8M0", "U8", "I8", "I32"]), SIZES)))  # fmt: skip
def test_every_stored_tensor_belongs_to_one_weight_or_is_an_error(
    stored: dict[str, tuple[str, list[int]]],
) -> None:
    headers = [meta(name, dtype, *shape) for name, (dtype, shape) in stored.items()]
    try:
        found = grouped(*headers)
    except InputError:
        return
    parts = [part.name for weight in found.values() for part in weight.parts.values()]
    assert sorted(parts) == sorted(stored)


# NaN and Inf


def poisoned(kind: str) -> dict[str, Tensor]:
    weight, scale = torch.ones(4, 64).to(E4M3), torch.ones(1, 1)
    if kind == "weight":
        weight[2, 3] = math.nan
    else:
        scale[0, 0] = {"scale": math.nan, "infinite scale": math.inf}[kind]
    return {"a.weight": weight, "a.weight_scale_inv": scale}


@pytest.mark.parametrize("kind", ["weight", "scale", "infinite scale"])
def test_nan_and_inf_in_an_fp8_source_name_the_tensor_at_fault(tmp_path: Path, kind: str) -> None:
    reader = store(tmp_path, poisoned(kind), quantization=BLOCK_FP8)
    culprit = "a.weight" if kind == "weight" else "a.weight_scale_inv"
    with pytest.raises(InputError, match=rf"model\.safetensors: tensor {culprit} holds NaN"):
        reader.rows("a.weight", None, ALL)


def test_nan_in_an_exponent_and_in_a_plain_weight(tmp_path: Path) -> None:
    plain = torch.ones(2, 2)
    plain[1, 1] = math.nan
    tensors = {
        "a.weight": torch.zeros(1, 16, dtype=torch.int8),
        "a.scale": torch.tensor([[255]], dtype=torch.uint8).view(E8M0),
        "b.weight": plain,
    }
    reader = store(tmp_path, tensors)
    for read in (reader.rows, reader.mxfp4):
        with pytest.raises(InputError, match=r"tensor a\.scale holds NaN"):
            read("a.weight", None, ALL)
    with pytest.raises(InputError, match=r"tensor b\.weight holds NaN"):
        reader.rows("b.weight", None, ALL)
    assert reader.rows("b.weight", None, slice(0, 1)).tolist() == [[1.0, 1.0]]


# Slices


def fp8_experts(weight: Tensor) -> dict[str, Tensor]:
    codes, scale = encode.quantize_fp8(weight, (128, 128))
    return {"e.x_proj": codes, "e.x_proj_scale_inv": scale}


def int4_experts(weight: Tensor) -> dict[str, Tensor]:
    packed, scale = encode.quantize_int4(weight, 32)
    return {"e.x_proj_packed": packed, "e.x_proj_scale": scale}


def mxfp4_experts(weight: Tensor) -> dict[str, Tensor]:
    packed, scale = mxfp4.quantize(weight)
    return {"e.x_proj_packed": packed, "e.x_proj_scale": scale}


def gpt_oss_experts(weight: Tensor) -> dict[str, Tensor]:
    packed, scale = mxfp4.quantize(weight)
    blocks = packed.unflatten(-1, (-1, 16))
    return {"e.x_proj_blocks": blocks, "e.x_proj_scales": scale}


@pytest.mark.parametrize("layout", [fp8_experts, int4_experts, mxfp4_experts, gpt_oss_experts])
def test_any_slice_is_the_slice_of_the_whole(
    tmp_path: Path, layout: Callable[[Tensor], dict[str, Tensor]]
) -> None:
    weight = torch.randn(3, 300, 96, generator=torch.Generator().manual_seed(0))
    reader = store(tmp_path, layout(weight))
    transposed = reader.weights["e.x_proj"].transposed
    whole = reader.weight("e.x_proj")
    whole = whole.transpose(1, 2) if transposed else whole
    assert (whole - weight).abs().max() < 1.0, "it is this weight, rounded"
    slices = (
        ALL,
        slice(0, 1),
        slice(127, 129),
        slice(200, 300),
        slice(0, 300, 2),
        slice(1, 300, 2),
    )
    for expert in range(3):
        for rows in slices:
            found = reader.rows("e.x_proj", expert, rows, transposed)
            assert torch.equal(found, whole[expert, rows])


def test_plain_experts_in_both_orders_of_axes(tmp_path: Path) -> None:
    stored = torch.randn(2, 6, 4)
    reader = store(tmp_path, {"e.gate_up_proj": stored})
    assert torch.equal(reader.rows("e.gate_up_proj", 1, slice(3, 6)), stored[1, 3:])
    assert torch.equal(reader.rows("e.gate_up_proj", 1, slice(1, 4, 2)), stored[1, 1:4:2])
    found = reader.rows("e.gate_up_proj", 1, slice(0, 2), transposed=True)
    assert torch.equal(found, stored[1].T[:2])


def test_a_fused_tensor_of_4_gb_is_read_an_expert_at_a_time(tmp_path: Path) -> None:
    """In a process of its own: the peak of its memory grows by a few experts of 64 MB."""
    shape = [64, 4096, 8192]
    table = {"experts.x_proj": {"dtype": "BF16", "shape": shape,
                                "data_offsets": [0, 2 * math.prod(shape)]}}  # fmt: skip
    header = json.dumps(table).encode()
    with (tmp_path / "model.safetensors").open("wb") as f:  # a hole: takes no disk
        f.write(len(header).to_bytes(8, "little") + header)
        f.truncate(8 + len(header) + 2 * math.prod(shape))
    script = f"""
import resource
from pathlib import Path
from onboard.checkpoint.reader import Reader
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
reader, before = Reader.open(Path({str(tmp_path)!r})), peak()
for expert in (0, 1, 62, 63):
    assert reader.rows("experts.x_proj", expert, slice(None)).shape == (4096, 8192)
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 400, "MB"


# MXFP4 to NVFP4


def converted(*siblings: tuple[Tensor, Tensor]) -> tuple[mxfp4.Converted, list[Tensor]]:
    found = mxfp4.to_nvfp4(siblings)
    back = [
        nvfp4.dequantize(weight, scale, found.weight_scale_2)
        for weight, scale in zip(found.weights, found.weight_scales, strict=True)
    ]
    return found, back


def test_mxfp4_becomes_nvfp4_by_hand() -> None:
    """The top exponent 130 (2^3) maps to 256: weight_scale_2 = 2^-5, and 2^1 becomes 64."""
    codes = torch.full((1, 32), 0x21, dtype=torch.uint8)  # 0.5, 1, 0.5, 1, ...
    exponents = torch.tensor([[130, 128]], dtype=torch.uint8)
    found, (back,) = converted((codes, exponents))
    assert found.weight_scale_2.item() == 2.0**-5
    assert found.weight_scales[0].float().tolist() == [[256.0, 256.0, 64.0, 64.0]]
    assert torch.equal(found.weights[0], codes)
    assert back[0, :2].tolist() == [4.0, 8.0]
    assert back[0, -2:].tolist() == [1.0, 2.0]
    assert found.rounded_blocks == 0


def test_siblings_share_the_scale_of_the_largest() -> None:
    codes = torch.full((2, 16), 0x77, dtype=torch.uint8)
    gate = codes, torch.full((2, 1), 120, dtype=torch.uint8)
    up = codes, torch.full((2, 1), 125, dtype=torch.uint8)
    found, (first, second) = converted(gate, up)
    assert found.weight_scale_2.item() == 2.0 ** (125 - 127 - 8)
    assert torch.equal(first, mxfp4.dequantize(*gate))
    assert torch.equal(second, mxfp4.dequantize(*up))


def test_blocks_below_e4m3_are_counted_and_rounded_and_zeros_are_not() -> None:
    codes = torch.full((1, 64), 0x77, dtype=torch.uint8)
    codes[0, 48:] = 0x80  # zeros of both signs under a tiny exponent
    exponents = torch.tensor([[150, 133, 132, 1]], dtype=torch.uint8)
    found, (back,) = converted((codes, exponents))
    assert found.rounded_blocks == 1, "150 - 17 is the smallest that fits"
    want = mxfp4.dequantize(codes, exponents)
    assert torch.equal(back[0, :64], want[0, :64])
    assert torch.equal(back[0, 96:], want[0, 96:])
    step = 2.0**-9 * found.weight_scale_2.item()
    assert (back[0, 64:96] - want[0, 64:96]).abs().max() <= step / 2
    assert not torch.equal(found.weights[0][0, 32:48], codes[0, 32:48])


def test_weights_that_are_all_zero_get_finite_scales() -> None:
    codes = torch.zeros(2, 16, dtype=torch.uint8)
    found, (back,) = converted((codes, torch.zeros(2, 1, dtype=torch.uint8)))
    assert found.weight_scale_2 > 0
    assert torch.equal(back, torch.zeros(2, 32))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(20, 230), st.integers(0, 17))
def test_any_mxfp4_within_18_exponents_converts_without_loss(
    seed: int, low: int, spread: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    siblings = [
        (
            torch.randint(0, 256, (rows, 48), generator=generator).to(torch.uint8),
            torch.randint(low, low + spread + 1, (rows, 3), generator=generator).to(torch.uint8),
        )
        for rows in (2, 5)
    ]
    found, back = converted(*siblings)
    assert found.rounded_blocks == 0
    for sibling, values in zip(siblings, back, strict=True):
        assert torch.equal(values, mxfp4.dequantize(*sibling))


# Encoding


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(1e-4, 1e3))
def test_encoding_decoded_values_again_changes_nothing(seed: int, spread: float) -> None:
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed)) * spread
    once = mxfp4.dequantize(*mxfp4.quantize(weight))
    assert torch.equal(mxfp4.dequantize(*mxfp4.quantize(once)), once)
    codes, scale = encode.quantize_fp8(weight, (3, 50), powers=True)
    tall = scale.repeat_interleave(3, 0)[:4].repeat_interleave(50, 1)[:, :64]
    back = codes.float() * tall
    again, scale_again = encode.quantize_fp8(back, (3, 50), powers=True)
    tall = scale_again.repeat_interleave(3, 0)[:4].repeat_interleave(50, 1)[:, :64]
    assert torch.equal(again.float() * tall, back)
    assert ((back - weight).abs() <= tall * 16 + 1e-30).all(), "half a step at 448"


MOE = {
    **DENSE,
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "head_dim": 16,
}
LINEAR = "model.layers.1.mlp.down_proj.weight"
EXPERT = "model.layers.1.mlp.experts.3.down_proj.weight"


@pytest.mark.parametrize(
    ("config", "quantization", "name", "scheme"),
    [
        (DENSE, BLOCK_FP8, LINEAR, "fp8_block"),
        (DENSE, {"quant_method": "fp8", "activation_scheme": "static"}, LINEAR, "fp8_tensor"),
        (DENSE, {"quant_method": "fbgemm_fp8"}, LINEAR, "fp8_channel"),
        (DENSE, {"quant_algo": "FP8", "ignore": ["lm_head"]}, LINEAR, "fp8_tensor"),
        (MOE, KIMI_INT4, EXPERT, "int4_group"),
        (MOE, KIMI_MXFP4, EXPERT, "mxfp4"),
    ],
)
def test_a_twin_is_written_in_the_format_of_its_config(
    tmp_path: Path,
    config: dict[str, Any],
    quantization: dict[str, Any],
    name: str,
    scheme: str,
) -> None:
    plain = Reader.open(twins.write(config, tmp_path / "plain"))
    twin = twins.write({**config, "quantization_config": quantization}, tmp_path / "twin")
    stored = Reader.open(twin)
    assert stored.weights[name].scheme == scheme
    assert {n: w.shape for n, w in stored.weights.items()} == {
        n: w.shape for n, w in plain.weights.items()
    }
    for kept in ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"):
        assert torch.equal(stored.weight(kept), plain.weight(kept))
    error = (stored.weight(name) - plain.weight(name).float()).norm()
    assert 0 < error / plain.weight(name).float().norm() < 0.2


def test_exceptions_are_followed_as_published() -> None:
    globs = ["model.layers.*.self_attn", "lm_head"]
    assert encode.is_ignored("model.layers.3.self_attn.q_proj", globs)
    assert not encode.is_ignored("model.layers.3.mlp.experts.0.up_proj", globs)
    assert encode.is_ignored("model.layers.3.block_sparse_moe.gate", ["gate"])
    assert not encode.is_ignored("model.layers.3.mlp.gate_proj", ["gate"])
    kimi = KIMI_INT4["ignore"]
    assert encode.is_ignored("language_model.model.layers.0.mlp.gate_proj", kimi)
    assert not encode.is_ignored("language_model.model.layers.1.mlp.experts.0.gate_proj", kimi)
    config = {"quantization_config": BLOCK_FP8}
    assert encode.is_encoded("a.up_proj.weight", (64, 64), config)
    assert not encode.is_encoded("a.shared_expert_gate.weight", (1, 64), config)
    assert not encode.is_encoded("a.conv1d.weight", (64, 1, 4), config)


def test_a_text_configs_quantization_leaves_other_towers_alone() -> None:
    config = {"model_type": "kimi_k25", "text_config": {"quantization_config": KIMI_INT4}}
    expert = "language_model.model.layers.1.mlp.experts.0.up_proj.weight"
    state = {n: torch.ones(32, 64) for n in (expert, "vision_tower.blocks.0.mlp.up.weight")}
    stored = encode.encode(state, config)
    assert set(stored) == {
        "vision_tower.blocks.0.mlp.up.weight",
        *(f"{expert}_{part}" for part in ("packed", "scale", "shape")),
    }


def test_deepseek_v4_stores_fp4_experts_beside_fp8_with_exponents_as_scales() -> None:
    quantization = {**BLOCK_FP8, "scale_fmt": "ue8m0"}
    config = {"model_type": "deepseek_v4", "quantization_config": quantization}
    state = {
        "layers.0.attn.wq_a.weight": torch.randn(130, 64),
        "layers.0.ffn.experts.0.w1.weight": torch.randn(64, 64),
        "layers.0.ffn.gate.weight": torch.randn(8, 64),
        "layers.0.attn.compressor.wkv.weight": torch.randn(8, 64),
    }
    stored = encode.encode(state, config)
    assert stored["layers.0.attn.wq_a.weight"].dtype == E4M3
    assert stored["layers.0.attn.wq_a.scale"].dtype == E8M0
    assert stored["layers.0.attn.wq_a.scale"].shape == (2, 1)
    assert stored["layers.0.ffn.experts.0.w1.weight"].dtype == torch.int8
    assert stored["layers.0.ffn.experts.0.w1.scale"].shape == (64, 2)
    assert len(stored) == 6


def test_gpt_oss_is_encoded_from_the_models_own_axes(tmp_path: Path) -> None:
    config = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    name = "model.layers.0.mlp.experts.gate_up_proj"
    weight = mxfp4.dequantize(*mxfp4.quantize(torch.randn(2, 6, 64))).transpose(1, 2)
    state = {name: weight, f"{name}_bias": torch.zeros(2, 6), "model.q.weight": torch.ones(4, 64)}
    stored = encode.encode(state, config)
    assert stored[f"{name}_blocks"].shape == (2, 6, 2, 16)
    assert torch.equal(store(tmp_path, stored).weight(name), weight)
    assert {f"{name}_bias", "model.q.weight"} <= set(stored)


def test_an_unknown_method_is_named_with_the_known_ones() -> None:
    config = {"quantization_config": {"quant_method": "awq"}}
    with pytest.raises(InputError, match=r"quant_method 'awq'.*compressed-tensors, .*mxfp4"):
        formats.check_method(config)
