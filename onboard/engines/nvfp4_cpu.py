"""A vLLM plugin that serves NVFP4 checkpoints on the CPU, which stock vLLM refuses.

Weights are dequantized once, after loading, from the very tensors and scales that a GPU kernel
would read; activations are quantized and dequantized before every linear layer and every expert,
as a W4A4 kernel does. No file of vLLM is changed: `register` is called through the entry point
`vllm.general_plugins` in every process of the engine, and does nothing off the CPU platform.

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
    """Offer NVFP4 linear and expert layers to vLLM, where its platform is the CPU."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _allow_float32()
        _register_linear()
        _register_experts()


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


def _register_experts() -> None:
    import torch
    import vllm.model_executor.layers.quantization.modelopt as modelopt
    from torch.nn.functional import silu
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

    from onboard.checkpoint.nvfp4 import dequantize

    rounded = _rounding()

    # vLLM's weight loader looks for ModelOpt in the name of the class.
    class ModelOptNvFp4CpuFusedMoE(modelopt.ModelOptNvFp4FusedMoE):  # type: ignore[misc]
        """Experts in W4A4 (or W4A16): the checkpoint's parameters, one plain loop over experts.

        As in vLLM's backends, gate and up share gate's weight_scale_2, and the layer's largest
        input scale stands for all its experts.
        """

        def __init__(self, quant_config: Any, moe_config: Any) -> None:
            if moe_config.activation != MoEActivation.SILU or moe_config.swiglu_limit is not None:
                raise NotImplementedError(
                    "the CPU emulation of NVFP4 experts computes plain SwiGLU, "
                    f"not {moe_config.activation} with limit {moe_config.swiglu_limit}"
                )
            FusedMoEMethodBase.__init__(self, moe_config)
            self.quant_config = quant_config
            self.use_a16 = quant_config.quant_method == "W4A16_NVFP4"
            self.use_global_sf = False
            self.dtype = torch.get_default_dtype()
            precision = "W4A16" if self.use_a16 else "W4A4"
            name = str(self.dtype).removeprefix("torch.")
            report_mode(f"cpu-emulation, experts {precision}, {name}")

        def process_weights_after_loading(self, layer: Any) -> None:
            for name, scale_2 in (
                ("w13", layer.w13_weight_scale_2[:, 0]),
                ("w2", layer.w2_weight_scale_2),
            ):
                packed = getattr(layer, f"{name}_weight").data
                scale = getattr(layer, f"{name}_weight_scale").data
                experts = zip(packed, scale, scale_2, strict=True)
                weight = torch.stack([dequantize(*expert).double() for expert in experts])
                setattr(layer, f"{name}_weight", torch.nn.Parameter(weight, requires_grad=False))
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
            """Return the routed experts' sum, [tokens, hidden], for x [tokens, hidden]."""
            assert layer.expert_map is None, "expert parallelism needs more than one CPU rank"
            on_input = layer.apply_router_weight_on_input
            out = torch.zeros_like(x)
            for expert in torch.unique(topk_ids).tolist():
                tokens, slot = (topk_ids == expert).nonzero(as_tuple=True)
                share = topk_weights[tokens, slot, None].to(x.dtype)
                h = x[tokens] * share if on_input else x[tokens]
                h = _multiply(self._rounded(h, layer.w13_input_scale), layer.w13_weight[expert])
                gate, up = h.chunk(2, -1)
                h = silu(gate) * up
                h = _multiply(self._rounded(h, layer.w2_input_scale), layer.w2_weight[expert])
                out.index_add_(0, tokens, h if on_input else h * share)
            return out

        def _rounded(self, x: Tensor, input_scale: Tensor) -> Tensor:
            return x if self.use_a16 else rounded(x, input_scale)

    # The NVFP4 config takes the first, the mixed-precision config the second.
    modelopt.ModelOptNvFp4Config.FusedMoEMethodCls = ModelOptNvFp4CpuFusedMoE
    modelopt.ModelOptNvFp4FusedMoE = ModelOptNvFp4CpuFusedMoE
