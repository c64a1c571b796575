"""The FP8 codec, bit for bit with ModelOpt's weights and vLLM's activations."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onboard.checkpoint import fp8, nvfp4
from onboard.checkpoint.reciprocal import invertible


def test_golden() -> None:
    """448 is the largest code; 17 lies between 16 and 18 and goes to the even 16."""
    weight = torch.tensor([[448.0, -448.0, 17.0, 0.0, -0.0, 2.0**-9, 1.0, 2.0**-11]])
    scale = fp8.tensor_scale(weight.abs().amax())
    assert scale == 1
    codes = fp8.quantize(weight, scale)
    assert codes.view(torch.uint8).tolist() == [[0x7E, 0xFE, 0x58, 0, 0x80, 1, 0x38, 0]]
    assert fp8.dequantize(codes, scale).tolist() == [[448, -448, 16, 0, 0, 2.0**-9, 1, 0]]


def test_weights_are_modelopt_s() -> None:
    from modelopt.torch.quantization.qtensor import FP8QTensor

    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        weight = (torch.randn(64, 96) * torch.logspace(-6, 2, 96)).to(dtype)
        theirs, scale = FP8QTensor.quantize(weight.float())
        ours = fp8.tensor_scale(weight.abs().amax())
        assert torch.equal(ours, scale.reshape(()))
        codes = fp8.quantize(weight, ours)
        assert torch.equal(codes.view(torch.uint8), theirs._quantized_data.view(torch.uint8))
        assert torch.equal(
            fp8.dequantize(codes, ours), theirs.dequantize(torch.float32, scale=scale)
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_saturate_and_keep_their_dtype(dtype: torch.dtype) -> None:
    scale = torch.tensor(0.25)
    x = torch.tensor([1000.0, -1000.0, 1.0, 0.3], dtype=dtype)
    seen = fp8.quantize_dequantize(x, scale)
    assert seen.dtype == dtype
    assert seen.tolist() == [112.0, -112.0, 1.0, 0.3125]


def test_all_zero_weights_are_stored_exactly() -> None:
    weight = torch.zeros(2, 16)
    scale = fp8.tensor_scale(weight.abs().amax())
    assert scale > 0
    assert torch.equal(fp8.dequantize(fp8.quantize(weight, scale), scale), weight)


@given(st.floats(1e-12, 1e6))
def test_an_invertible_scale_stands_for_its_reciprocal(value: float) -> None:
    """Multiplying by s, by 1/(1/s), or dividing by 1/s: the same numbers for every block scale."""
    found = invertible(torch.tensor(value))
    assert found.item() == pytest.approx(value, rel=4e-5)
    assert torch.equal(invertible(found), found)
    stored = found.reciprocal()
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert torch.equal(stored.reciprocal(), found)
    assert torch.equal(codes / stored, codes * found)
    x = torch.randn(3, 64)
    assert torch.equal(
        nvfp4.quantize_dequantize(x, found), nvfp4.quantize_dequantize(x, stored.reciprocal())
    )


@pytest.mark.parametrize("power", [-30, -9, 0, 4])
def test_powers_of_two_are_invertible(power: int) -> None:
    assert invertible(torch.tensor(2.0**power)) == 2.0**power
