"""ModelOpt's NVFP4 fake quantization on a CPU: importing this installs plain torch kernels.

ModelOpt 0.47 refuses NVFP4 on a CPU ("amax must be a CUDA tensor", "requires triton"). The
functions below compute what its CUDA and Triton kernels do, block scales in the order of its
`NVFP4QTensor.get_weights_scaling_factor`; its calibration, search and export stay its own.
"""

from __future__ import annotations

from typing import Any

import modelopt.torch.quantization.tensor_quant as tensor_quant
import modelopt.torch.quantization.utils.calib_utils as calib_utils
import torch
from torch import Tensor

E2M1_MAX, E4M3_MAX, E4M3_MIN, BLOCK = 6.0, 448.0, 2.0**-9, 16
_dynamic_block_quantize = tensor_quant.dynamic_block_quantize_op
_triton = tensor_quant.triton_kernel


def round_to_e2m1(x: Tensor) -> Tensor:
    """Round f32 to the nearest E2M1 value, ties to the even code; the sign of `x` stays."""
    a = x.abs().clamp_(max=E2M1_MAX)
    power = (a.view(torch.int32) & 0x7F800000).view(torch.float32)
    step = power.clamp_(min=1.0).mul_(0.5)
    return a.div_(step).round_().mul_(step).copysign_(x)


def block_steps(amax: Tensor, global_step: Tensor) -> Tensor:
    """Return E4M3(amax / 6 / global_step) * global_step f32, a zero block's scale being 1."""
    scale = amax.float() / (E2M1_MAX * global_step)
    scale = torch.where(scale == 0, 1.0, scale).clamp(E4M3_MIN, E4M3_MAX)
    return scale.to(torch.float8_e4m3fn).float() * global_step


def fake_quantize(x: Tensor, block_amax: Tensor | None, global_amax: Tensor) -> Tensor:
    """Quantize and dequantize `x` [..., in]; block maxima are those of `x` unless given."""
    values = x.float().reshape(-1, BLOCK)
    if global_amax <= 0:
        return torch.zeros_like(x)
    amax = values.abs().amax(-1, keepdim=True) if block_amax is None else block_amax.reshape(-1, 1)
    step = block_steps(amax, global_amax.float() / (E2M1_MAX * E4M3_MAX))
    return (round_to_e2m1(values / step) * step).reshape(x.shape)


def dynamic_block_quantize(
    inputs: Tensor,
    block_size: int,
    amax: Tensor | None,
    num_bits: int,
    exponent_bits: int,
    scale_num_bits: int,
    scale_exponent_bits: int,
) -> Tensor:
    """Stand in for ModelOpt's operator of this name; other formats go to the original."""
    is_nvfp4 = (num_bits, exponent_bits, scale_exponent_bits, block_size) == (4, 2, 4, BLOCK)
    if inputs.is_cuda or amax is None or not is_nvfp4:
        out: Tensor = _dynamic_block_quantize(
            inputs, block_size, amax, num_bits, exponent_bits, scale_num_bits, scale_exponent_bits
        )
        return out
    return fake_quantize(inputs, None, amax.max()).to(inputs.dtype)


class CpuKernels:
    """ModelOpt's module of Triton kernels, with the one that static scales need."""

    IS_AVAILABLE = True

    def __getattr__(self, name: str) -> Any:
        return getattr(_triton, name)

    @staticmethod
    def static_blockwise_fp4_fake_quant(
        x: Tensor,
        amax: Tensor,
        global_amax: Tensor | None = None,
        quantize_block_scales: bool = True,
        fp8_max_for_normalization: float = E4M3_MAX,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Fake quantize with given block maxima [blocks]; block scales must be E4M3."""
        assert quantize_block_scales
        assert fp8_max_for_normalization == E4M3_MAX
        largest = amax.amax() if global_amax is None else global_amax
        return fake_quantize(x, amax, largest).to(out_dtype or x.dtype)


def gptq_update(
    weight: Tensor,
    block_amax: Tensor,
    global_scale: float,
    h_inv: Tensor,
    block_size: int,
    quant_block_size: int,
) -> None:
    """Do in place what `gptq_blockwise_update_fused_scalar` does with its Triton kernel.

    `weight` [out, in] f32, `block_amax` [out, in/16], `h_inv` [in, in] the upper Cholesky factor.
    """
    steps = block_steps(block_amax, torch.tensor(global_scale))
    columns = weight.shape[1]
    for start in range(0, columns, block_size):
        end = min(start + block_size, columns)
        part, factor = weight[:, start:end].clone(), h_inv[start:end, start:end]
        errors = torch.zeros_like(part)
        for i in range(end - start):
            step = steps[:, (start + i) // quant_block_size]
            rounded = round_to_e2m1(part[:, i] / step) * step
            weight[:, start + i] = rounded
            errors[:, i] = (part[:, i] - rounded) / factor[i, i]
            part[:, i:].addr_(errors[:, i], factor[i, i:], alpha=-1)
        weight[:, end:].addmm_(errors, h_inv[start:end, end:], alpha=-1)


def install() -> None:
    """Put the kernels in place where there is no CUDA device."""
    if not torch.cuda.is_available():
        tensor_quant.dynamic_block_quantize_op = dynamic_block_quantize
        tensor_quant.triton_kernel = CpuKernels()
        calib_utils.gptq_blockwise_update_fused_scalar = gptq_update
