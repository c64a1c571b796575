"""Runs in the engine's interpreter: our kernels against vLLM's own emulation, printed as JSON."""

import json
from types import SimpleNamespace

import torch
import vllm.model_executor.kernels.linear as kernels
import vllm.model_executor.layers.quantization.modelopt as modelopt
from torch.nn.functional import silu
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.kernels.linear import EmulationNvFp4LinearKernel, NvFp4LinearLayerConfig
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import (
    dequantize_to_dtype,
    ref_nvfp4_quant_dequant,
    run_nvfp4_emulations,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    GroupShape,
    kFp8StaticTensorSym,
)
from vllm.platforms import PlatformEnum, current_platform

from onboard.checkpoint import fp8, nvfp4
from onboard.engines.nvfp4_cpu import _rounding, register

assert current_platform.is_cpu()
register()
OURS = kernels._POSSIBLE_NVFP4_KERNELS[PlatformEnum.CPU][-1]
WEIGHT_ONLY = kernels.MarlinNvFp4LinearKernel
OUT, IN, TOKENS, EXPERTS, WIDTH = 96, 128, 37, 4, 64


def parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)


def packed(*shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weight = torch.randn(*shape)
    scale_2 = nvfp4.tensor_scale(weight.abs().amax())
    scale = nvfp4.block_scale(nvfp4.block_amax(weight), scale_2)
    return nvfp4.quantize(weight, scale, scale_2), scale, scale_2


def linear_layer() -> SimpleNamespace:
    weight, scale, scale_2 = packed(OUT, IN)
    input_scale = torch.tensor(4.0 / 2688)
    return SimpleNamespace(
        weight=parameter(weight),
        weight_scale=parameter(scale),
        weight_global_scale=parameter(scale_2),
        input_global_scale=parameter(input_scale),
        input_global_scale_inv=parameter(1 / input_scale),
    )


def linear_difference(x: torch.Tensor) -> float:
    """Largest difference between our W4A4 layer and vLLM's EmulationNvFp4LinearKernel, relative."""
    layer = linear_layer()
    bias = torch.randn(OUT)
    oracle = EmulationNvFp4LinearKernel(NvFp4LinearLayerConfig())
    expected = oracle.apply_weights(layer, x, bias)
    ours = OURS(NvFp4LinearLayerConfig())
    ours.process_weights_after_loading(layer)
    return relative(ours.apply_weights(layer, x, bias), expected)


def rows_depend_on_nothing_else(x: torch.Tensor) -> bool:
    """Whether a row's result is the same to the bit alone, among a few, and among all."""
    layer = linear_layer()
    ours = OURS(NvFp4LinearLayerConfig())
    ours.process_weights_after_loading(layer)
    together = ours.apply_weights(layer, x)
    return all(
        torch.equal(ours.apply_weights(layer, x[:count]), together[:count])
        for count in range(1, len(x))
    )


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def weight_only_difference(x: torch.Tensor) -> float:
    layer = linear_layer()
    weight = dequantize_to_dtype(
        layer.weight.data, layer.weight_scale, layer.weight_global_scale, x.dtype, swizzle=False
    )
    kernel = WEIGHT_ONLY(NvFp4LinearLayerConfig())
    kernel.process_weights_after_loading(layer)
    return relative(kernel.apply_weights(layer, x), x @ weight.T)


def expert_difference(x: torch.Tensor) -> float:
    """Largest difference between our W4A4 experts and the same sum from vLLM's emulation."""
    w13 = [packed(2 * WIDTH, IN) for _ in range(EXPERTS)]
    w2 = [packed(IN, WIDTH) for _ in range(EXPERTS)]
    scales = {"w13": torch.linspace(1, 2, 2 * EXPERTS).view(EXPERTS, 2) / 2688}
    scales["w2"] = torch.linspace(1, 3, EXPERTS) / 2688
    layer = SimpleNamespace(expert_map=None, apply_router_weight_on_input=False)
    for name, experts in (("w13", w13), ("w2", w2)):
        weight, scale, scale_2 = (torch.stack(part) for part in zip(*experts, strict=True))
        setattr(layer, f"{name}_weight", parameter(weight))
        setattr(layer, f"{name}_weight_scale", parameter(scale))
        layer_scale_2 = scale_2[:, None].repeat(1, 2) if name == "w13" else scale_2
        setattr(layer, f"{name}_weight_scale_2", parameter(layer_scale_2))
        setattr(layer, f"{name}_input_scale", parameter(scales[name].clone()))
    method = modelopt.ModelOptNvFp4Config.FusedMoEMethodCls(
        SimpleNamespace(quant_method="NVFP4"),
        SimpleNamespace(activation=MoEActivation.SILU, swiglu_limit=None),
    )
    method.process_weights_after_loading(layer)
    shares, ids = torch.rand(TOKENS, EXPERTS).topk(2)
    ids[ids == 3] = 0  # the router never picks one expert
    ids[:, 1] = torch.where(ids[:, 0] == ids[:, 1], 1 + ids[:, 1] % 2, ids[:, 1])
    ours = method.apply(layer, x, shares, ids, None, None)

    def gemm(h: torch.Tensor, weight: tuple[torch.Tensor, ...], largest: torch.Tensor):
        return run_nvfp4_emulations(h, 1 / largest, weight[0], weight[1], weight[2], swizzle=False)

    expected = torch.zeros_like(x)
    for token in range(TOKENS):
        for share, expert in zip(shares[token], ids[token].tolist(), strict=True):
            h = gemm(x[token : token + 1], w13[expert], scales["w13"].max())
            h = silu(h[:, :WIDTH]) * h[:, WIDTH:]
            expected[token] += share * gemm(h, w2[expert], scales["w2"].max())[0]
    return relative(ours, expected)


def rounding_is_bit_equal() -> bool:
    """Eager, compiled and vLLM's own activation rounding, over twelve orders of magnitude."""
    equal = True
    for tokens in (1, 5, 64):
        x = torch.randn(tokens, IN) * 10 ** torch.linspace(-6, 6, IN)
        x[:, :16] = 0
        for scale in (1e-4, 1.0):
            scale_t = torch.tensor(scale)
            eager = nvfp4.quantize_dequantize(x, scale_t)
            compiled = _rounding()(x, scale_t)
            theirs = ref_nvfp4_quant_dequant(x, 1 / scale_t, 16)
            equal &= torch.equal(eager, compiled) and torch.equal(eager, theirs)
    return equal


def fp8_rounding_is_bit_equal() -> bool:
    """FP8 activations against vLLM's own static quantization, saturated values included."""
    equal = True
    with set_current_vllm_config(VllmConfig()):
        theirs = QuantFP8(static=True, group_shape=GroupShape.PER_TENSOR)
    for scale in (torch.tensor(1e-3), torch.tensor(0.37), torch.tensor(2.0)):
        x = torch.randn(TOKENS, IN) * 10 ** torch.linspace(-6, 4, IN)
        codes, _ = theirs.forward_native(x, scale)
        equal &= torch.equal(codes.float() * scale, fp8.quantize_dequantize(x, scale))
    return equal


def fp8_differences(x: torch.Tensor) -> dict[str, float]:
    """Largest differences of an FP8 layer and of FP8 experts from products written out here."""
    weight = torch.randn(EXPERTS, 2 * WIDTH, IN)
    scale = weight.abs().amax((1, 2)) / 448
    codes = fp8.quantize(weight, scale[:, None, None])
    input_scale = torch.tensor(3.0 / 448)
    layer = SimpleNamespace(
        weight=parameter(codes[0].t()),
        weight_scale=parameter(scale[0]),
        input_scale=parameter(input_scale),
    )
    config = SimpleNamespace(
        weight_quant_key=kFp8StaticTensorSym, activation_quant_key=kFp8StaticTensorSym
    )
    with set_current_vllm_config(VllmConfig()):
        kernel = kernels._POSSIBLE_FP8_KERNELS[PlatformEnum.CPU][0](config, ["weight"] * 4)
    kernel.process_weights_after_loading(layer)
    seen = (x / input_scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * input_scale
    values = codes.float() * scale[:, None, None]
    linear = relative(kernel.apply_weights(layer, x), seen @ values[0].T)

    down = torch.randn(EXPERTS, IN, WIDTH)
    down_scale = down.abs().amax((1, 2)) / 448
    layer = SimpleNamespace(
        expert_map=None,
        apply_router_weight_on_input=False,
        w13_weight=parameter(codes),
        w13_weight_scale=parameter(scale[:, None].repeat(1, 2)),
        w13_input_scale=parameter(input_scale.repeat(EXPERTS)),
        w2_weight=parameter(fp8.quantize(down, down_scale[:, None, None])),
        w2_weight_scale=parameter(down_scale),
        w2_input_scale=parameter(torch.linspace(0.05, 0.1, EXPERTS)),
    )
    down = layer.w2_weight.float() * down_scale[:, None, None]
    method = modelopt.ModelOptFp8Config.FusedMoEMethodCls(
        SimpleNamespace(), SimpleNamespace(activation=MoEActivation.SILU, swiglu_limit=None)
    )
    method.process_weights_after_loading(layer)
    ids = torch.arange(TOKENS)[:, None] % EXPERTS
    ours = method.apply(layer, x, torch.ones(TOKENS, 1), ids, None, None)
    h = torch.einsum("ti,toi->to", seen, values[ids[:, 0]])
    h = silu(h[:, :WIDTH]) * h[:, WIDTH:]
    h = fp8.quantize_dequantize(h, torch.tensor(0.1))
    expected = torch.einsum("ti,toi->to", h, down[ids[:, 0]])
    return {"fp8_linear": linear, "fp8_experts": relative(ours, expected)}


torch.manual_seed(0)
inputs = torch.randn(TOKENS, IN)
print(
    json.dumps(
        {
            "linear": linear_difference(inputs),
            "row_by_row": rows_depend_on_nothing_else(inputs),
            "weight_only": weight_only_difference(inputs),
            "experts": expert_difference(inputs),
            "rounding": rounding_is_bit_equal(),
            "fp8_rounding": fp8_rounding_is_bit_equal(),
            **fp8_differences(inputs),
        }
    )
)
