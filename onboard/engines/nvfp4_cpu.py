"""A vLLM plugin that serves NVFP4 and mixed checkpoints on the CPU, which stock vLLM refuses.

Weights are dequantized once, after loading, from the very tensors and scales that a GPU kernel
would read; activations are quantized and dequantized before every linear layer and every expert,
as a W4A4 kernel does, or for FP8 a W8A8 kernel with static scales. No file of vLLM is changed:
`register` is called through the entry point `vllm.general_plugins` in every process of the engine,
and does nothing off the CPU platform.

Matrices are multiplied in fp64 and the result is rounded once. The last bits of an fp32 product
depend on how many rows are multiplied together; where activations are rounded to 4 bits such a bit
can decide a whole step, and greedy outputs would differ by batch shape alone.

A pass on the CPU proves names, scales, fusion, template and loading; it does not prove GPU kernels.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# Under vLLM's own logger, so that the line reaches the server's log.
LOGGER = logging.getLogger("vllm.onboard.nvfp4_cpu")
MODE = "onboard NVFP4 mode: "  # what follows on the line is a mode, see `onboard.engines.vllm`


@cache
def report_mode(mode: str) -> None:
    """Write `mode` into the engine's log, once per process."""
    LOGGER.info("%s%s", MODE, mode)


@cache
def register() -> None:
    """Offer NVFP4 and FP8 linear and expert layers to vLLM, where its platform is the CPU."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _allow_float32()
        _register_linear()
        _register_fp8_linear()
        _register_experts()
        _register_fp8_experts()
        _register_compressed_experts()


@cache
def _rounding() -> Callable[[Tensor, Tensor], Tensor]:
    """Return `quantize_dequantize`, compiled where there is a C++ compiler.

    Compiled and eager results are bit-identical (a test holds them together); on a prompt of 512
    tokens the compiled one is ten times faster.
    """
    import torch

    from onboard.checkpoint.nvfp4 import quantize_dequantize

    if shutil.which(os.environ.get("CXX", "g++")) is None:
        return quantize_dequantize
    return torch.compile(quantize_dequantize, dynamic=True)


def _allow_float32() -> None:
    """Let NVFP4 models run in fp32, where greedy decoding has the fewest ties."""
    import torch
    from vllm.model_executor.layers.quantization import modelopt

    dtypes = [torch.bfloat16, torch.half, torch.float32]
    for config in (modelopt.ModelOptNvFp4Config, modelopt.ModelOptMixedPrecisionConfig):
        config.get_supported_act_dtypes = lambda self: dtypes


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [tokens, in] times weight f64 [out, in], summed in fp64, in the dtype of `x`."""
    from torch.nn.functional import linear

    product = linear(x.double(), weight, None if bias is None else bias.double())
    return product.to(x.dtype)


def _register_linear() -> None:
    import torch
    import vllm.model_executor.kernels.linear as kernels
    from vllm.platforms import PlatformEnum

    from onboard.checkpoint.nvfp4 import dequantize

    rounded = _rounding()

    class CpuNvFp4LinearKernel(kernels.NvFp4LinearKernel):  # type: ignore[misc]
        """W4A4: weights dequantized after loading, activations rounded to NVFP4 in each call."""

        mode = "cpu-emulation, linear W4A4"

        def __init__(self, config: kernels.NvFp4LinearLayerConfig) -> None:
            super().__init__(config)
            self.dtype = torch.get_default_dtype()  # vLLM builds a model under its own dtype
            report_mode(f"{self.mode}, {str(self.dtype).removeprefix('torch.')}")

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

        @classmethod
        def can_implement(cls, config: kernels.NvFp4LinearLayerConfig) -> tuple[bool, str | None]:
            return True, None

        def process_weights_after_loading(self, layer: Any) -> None:
            weight = dequantize(
                layer.weight.data.view(torch.uint8),
                layer.weight_scale.data,
                layer.weight_global_scale.data,
            )
            layer.weight = torch.nn.Parameter(weight.double(), requires_grad=False)

        def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
            return _multiply(rounded(x, layer.input_global_scale), layer.weight, bias)

    class CpuNvFp4W4A16LinearKernel(CpuNvFp4LinearKernel):
        """Weight-only checkpoints: activations stay as they are."""

        mode = "cpu-emulation, linear W4A16"

        def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
            return _multiply(x, layer.weight, bias)

    kernels.register_linear_kernel(CpuNvFp4LinearKernel, PlatformEnum.CPU, "nvfp4")
    # Weight-only layers take this name without asking the registry.
    kernels.MarlinNvFp4LinearKernel = CpuNvFp4W4A16LinearKernel


def _register_fp8_linear() -> None:
    import torch
    import vllm.model_executor.kernels.linear as kernels
    from vllm.platforms import PlatformEnum

    from onboard.checkpoint.fp8 import dequantize, quantize_dequantize

    class CpuFp8LinearKernel(kernels.FP8ScaledMMLinearKernel):  # type: ignore[misc]
        """W8A8 with one static scale for the weight and one for the input."""

        def __init__(self, config: Any, layer_param_names: Any) -> None:
            super().__init__(config, layer_param_names)
            report_mode(f"cpu-emulation, linear FP8 W8A8, {_dtype_name()}")

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

        @classmethod
        def can_implement(cls, config: Any) -> tuple[bool, str | None]:
            keys = (config.weight_quant_key, config.activation_quant_key)
            static = all(k.scale.static and k.scale.group_shape.is_per_tensor() for k in keys)
            return static, None if static else "requires static scales per tensor"

        def process_weights_after_loading(self, layer: Any) -> None:
            weight = dequantize(layer.weight.data.t(), layer.weight_scale.data)  # [in, out] in vLLM
            layer.weight = torch.nn.Parameter(weight.double(), requires_grad=False)

        def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
            return _multiply(quantize_dequantize(x, layer.input_scale), layer.weight, bias)

        def apply_scaled_mm(self, **arguments: Any) -> Tensor:
            raise NotImplementedError("apply_weights does all")

    # Its registration function appends, and vLLM's own, which sum in bf16 or fp32, would go first.
    kernels._POSSIBLE_FP8_KERNELS[PlatformEnum.CPU].insert(0, CpuFp8LinearKernel)


def _dtype_name() -> str:
    """Return the dtype under which vLLM is building a model, as "float32"."""
    import torch

    return str(torch.get_default_dtype()).removeprefix("torch.")


def _check_activation(moe_config: Any) -> None:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    if moe_config.activation != MoEActivation.SILU or moe_config.swiglu_limit is not None:
        raise NotImplementedError(
            "the CPU emulation of quantized experts computes plain SwiGLU, "
            f"not {moe_config.activation} with limit {moe_config.swiglu_limit}"
        )


def _routed_sum(
    layer: Any,
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    rounded: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Return the routed experts' sum, [tokens, hidden], for x [tokens, hidden].

    `rounded` gives the input of a matrix as a kernel sees it, from that input and its scale.
    """
    import torch
    from torch.nn.functional import silu

    assert layer.expert_map is None, "expert parallelism needs more than one CPU rank"
    on_input = layer.apply_router_weight_on_input
    out = torch.zeros_like(x)
    for expert in torch.unique(topk_ids).tolist():
        tokens, slot = (topk_ids == expert).nonzero(as_tuple=True)
        share = topk_weights[tokens, slot, None].to(x.dtype)
        h = x[tokens] * share if on_input else x[tokens]
        h = _multiply(rounded(h, layer.w13_input_scale), layer.w13_weight[expert])
        gate, up = h.chunk(2, -1)
        h = silu(gate) * up
        h = _multiply(rounded(h, layer.w2_input_scale), layer.w2_weight[expert])
        out.index_add_(0, tokens, h if on_input else h * share)
    return out


def _dequantized(packed: Any, scale: Any, scale_2: Any) -> Any:
    """Return the weights of a layer's experts, a parameter f64 [expert, out, in]."""
    import torch

    from onboard.checkpoint.nvfp4 import dequantize

    experts = zip(packed.data, scale.data, scale_2.data, strict=True)
    weight = torch.stack([dequantize(*expert).double() for expert in experts])
    return torch.nn.Parameter(weight, requires_grad=False)


def _register_experts() -> None:
    import vllm.model_executor.layers.quantization.modelopt as modelopt
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

    rounded = _rounding()

    # vLLM's weight loader looks for ModelOpt in the name of the class.
    class ModelOptNvFp4CpuFusedMoE(modelopt.ModelOptNvFp4FusedMoE):  # type: ignore[misc]
        """Experts in W4A4 (or W4A16): the checkpoint's parameters, one plain loop over experts.

        As in vLLM's backends, gate and up share gate's weight_scale_2, and the layer's largest
        input scale stands for all its experts.
        """

        def __init__(self, quant_config: Any, moe_config: Any) -> None:
            _check_activation(moe_config)
            FusedMoEMethodBase.__init__(self, moe_config)
            self.quant_config = quant_config
            self.use_a16 = quant_config.quant_method == "W4A16_NVFP4"
            self.use_global_sf = False
            precision = "W4A16" if self.use_a16 else "W4A4"
            report_mode(f"cpu-emulation, experts {precision}, {_dtype_name()}")

        def process_weights_after_loading(self, layer: Any) -> None:
            layer.w13_weight = _dequantized(
                layer.w13_weight, layer.w13_weight_scale, layer.w13_weight_scale_2[:, 0]
            )
            layer.w2_weight = _dequantized(
                layer.w2_weight, layer.w2_weight_scale, layer.w2_weight_scale_2
            )
            if not self.use_a16:
                layer.w13_input_scale.data = layer.w13_input_scale.data.max()
                layer.w2_input_scale.data = layer.w2_input_scale.data.max()

        def get_fused_moe_quant_config(self, layer: Any) -> None:
            """No modular kernel is built, so there is nothing to tell one."""

        def apply(
            self,
            layer: Any,
            x: Tensor,
            topk_weights: Tensor,
            topk_ids: Tensor,
            shared_experts: object,
            shared_experts_input: Tensor | None,
        ) -> Tensor:
            return _routed_sum(layer, x, topk_weights, topk_ids, self._rounded)

        def _rounded(self, x: Tensor, input_scale: Tensor) -> Tensor:
            return x if self.use_a16 else rounded(x, input_scale)

    # The NVFP4 config takes the first, the mixed-precision config the second.
    modelopt.ModelOptNvFp4Config.FusedMoEMethodCls = ModelOptNvFp4CpuFusedMoE
    modelopt.ModelOptNvFp4FusedMoE = ModelOptNvFp4CpuFusedMoE


def _register_fp8_experts() -> None:
    import torch
    import vllm.model_executor.layers.quantization.modelopt as modelopt
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

    from onboard.checkpoint.fp8 import dequantize, quantize_dequantize

    # vLLM's weight loader looks for ModelOpt in the name of the class.
    class ModelOptFp8CpuMoEMethod(modelopt.ModelOptFp8MoEMethod):  # type: ignore[misc]
        """Experts in W8A8: the layer's largest input scale stands for all its experts."""

        def __init__(self, quant_config: Any, moe_config: Any) -> None:
            _check_activation(moe_config)
            FusedMoEMethodBase.__init__(self, moe_config)
            self.quant_config = quant_config
            report_mode(f"cpu-emulation, experts FP8 W8A8, {_dtype_name()}")

        def process_weights_after_loading(self, layer: Any) -> None:
            for name in ("w13", "w2"):
                codes = getattr(layer, f"{name}_weight").data
                scale = getattr(layer, f"{name}_weight_scale").data
                parts = codes.unflatten(1, (scale[0].numel(), -1))  # gate and up have their own
                weight = dequantize(parts, scale.reshape(*parts.shape[:2], 1, 1)).flatten(1, 2)
                weight = torch.nn.Parameter(weight.double(), requires_grad=False)
                setattr(layer, f"{name}_weight", weight)
                input_scale = getattr(layer, f"{name}_input_scale")
                input_scale.data = input_scale.data.max()

        def get_fused_moe_quant_config(self, layer: Any) -> None:
            """No modular kernel is built, so there is nothing to tell one."""

        def apply(
            self,
            layer: Any,
            x: Tensor,
            topk_weights: Tensor,
            topk_ids: Tensor,
            shared_experts: object,
            shared_experts_input: Tensor | None,
        ) -> Tensor:
            """Return the routed experts' sum, [tokens, hidden], for x [tokens, hidden]."""
            return _routed_sum(layer, x, topk_weights, topk_ids, quantize_dequantize)

    modelopt.ModelOptFp8Config.FusedMoEMethodCls = ModelOptFp8CpuMoEMethod
    modelopt.ModelOptFp8MoEMethod = ModelOptFp8CpuMoEMethod


def _register_compressed_experts() -> None:
    import torch
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w4a4_nvfp4 as compressed,
    )

    rounded = _rounding()

    theirs: Any = compressed.CompressedTensorsW4A4Nvfp4MoEMethod

    class CompressedTensorsNvfp4CpuMoEMethod(theirs):  # type: ignore[misc]
        """Experts in W4A4 (or W4A16) of the layout that stores the reciprocals of scales."""

        def __init__(self, moe: Any, layer_name: str | None = None, use_a16: bool = False) -> None:
            _check_activation(moe)
            FusedMoEMethodBase.__init__(self, moe)
            self.group_size, self.use_a16, self.use_global_sf = 16, use_a16, False
            precision = "W4A16" if use_a16 else "W4A4"
            report_mode(f"cpu-emulation, experts {precision}, {_dtype_name()}")

        def process_weights_after_loading(self, layer: Any) -> None:
            layer.w13_weight = _dequantized(
                layer.w13_weight_packed,
                layer.w13_weight_scale,
                layer.w13_weight_global_scale[:, 0].reciprocal(),
            )
            layer.w2_weight = _dequantized(
                layer.w2_weight_packed,
                layer.w2_weight_scale,
                layer.w2_weight_global_scale.reciprocal(),
            )
            del layer.w13_weight_packed, layer.w2_weight_packed
            if not self.use_a16:
                layer.w13_input_scale = layer.w13_input_global_scale.data.reciprocal().max()
                layer.w2_input_scale = layer.w2_input_global_scale.data.reciprocal().max()
            else:
                layer.w13_input_scale = layer.w2_input_scale = torch.ones(())

        def get_fused_moe_quant_config(self, layer: Any) -> None:
            """No modular kernel is built, so there is nothing to tell one."""

        def apply(
            self,
            layer: Any,
            x: Tensor,
            topk_weights: Tensor,
            topk_ids: Tensor,
            shared_experts: object,
            shared_experts_input: Tensor | None,
        ) -> Tensor:
            """Return the routed experts' sum, [tokens, hidden], for x [tokens, hidden]."""
            return _routed_sum(layer, x, topk_weights, topk_ids, self._rounded)

        def _rounded(self, x: Tensor, input_scale: Tensor) -> Tensor:
            return x if self.use_a16 else rounded(x, input_scale)

    compressed.CompressedTensorsW4A4Nvfp4MoEMethod = CompressedTensorsNvfp4CpuMoEMethod
