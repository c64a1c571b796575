"""The codec against numbers worked out by hand, and bit for bit against ModelOpt."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onboard.checkpoint import nvfp4


def test_rounding_ties_go_to_the_even_code() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    even = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0])
    assert torch.equal(nvfp4.round_to_e2m1(ties), even)
    assert torch.equal(nvfp4.round_to_e2m1(-ties), -even)


def test_rounding_takes_the_nearest_next_to_every_number_and_boundary() -> None:
    """By distances in f64: just below a power of two the exponent of a sum could change."""
    grid = torch.tensor(nvfp4.E2M1, dtype=torch.float64)
    turns = torch.cat([grid[1:], (grid[1:] + grid[:-1]) / 2]).float().view(torch.int32)
    near = (turns[:, None] + torch.arange(-64, 65, dtype=torch.int32)).flatten()
    a = near.view(torch.float32).abs()
    distances = (a.double()[:, None].clamp(max=6) - grid).abs()
    for sign in (1, -1):
        found = sign * nvfp4.round_to_e2m1(sign * a).double()
        assert torch.equal((found - a.double().clamp(max=6)).abs(), distances.min(1)[0])
        assert torch.isin(found, grid).all()


def test_rounding_saturates_at_six() -> None:
    assert nvfp4.round_to_e2m1(torch.tensor([5.1, 6.0, 7.0, 1e9])).tolist() == [6.0] * 4


def test_a_block_by_hand() -> None:
    """amax 12, scale_2 = 12/(6*448); its block scale is 448; 12 -> 6, 2 -> 1, -1 -> -0.5."""
    row = torch.zeros(1, 16)
    row[0, 0], row[0, 1], row[0, 2] = 12.0, 2.0, -1.0
    scale_2 = nvfp4.tensor_scale(torch.tensor(12.0))
    assert scale_2.item() == pytest.approx(12 / 2688)
    scale = nvfp4.block_scale(nvfp4.block_amax(row), scale_2)
    assert scale.float().tolist() == [[448.0]]
    packed = nvfp4.quantize(row, scale, scale_2)
    # codes 6 -> 7, 1 -> 2, -0.5 -> 8 + 1; low nibble first
    assert packed[0, :2].tolist() == [0x27, 0x09]
    assert nvfp4.dequantize(packed, scale, scale_2)[0, :3].tolist() == pytest.approx([12, 2, -1])


def test_zero_blocks_get_scale_one_and_minus_zero_is_stored_as_zero() -> None:
    row = torch.full((1, 16), -0.0)
    scale = nvfp4.block_scale(nvfp4.block_amax(row), torch.tensor(1e-3))
    assert scale.float().item() == 1.0
    assert nvfp4.quantize(row, scale, torch.tensor(1e-3)).tolist() == [[0] * 8]


def test_all_sixteen_codes_survive_packing() -> None:
    grid = torch.tensor([*nvfp4.E2M1, *(-v for v in nvfp4.E2M1)])
    code = nvfp4.codes(grid[None])
    assert code.tolist() == [[*range(16)]]
    back = nvfp4.unpack(nvfp4.pack(code))[0]
    assert torch.equal(back, grid)
    assert torch.equal(back.signbit(), grid.signbit())


@given(st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=64))
def test_codes_are_the_nearest_values_with_ties_to_even(values: list[float]) -> None:
    found = nvfp4.codes(nvfp4.round_to_e2m1(torch.tensor(values))).tolist()
    for value, code in zip(values, found, strict=True):
        distances = [abs(min(abs(value), 6) - magnitude) for magnitude in nvfp4.E2M1]
        nearest = [c for c, d in enumerate(distances) if d == min(distances)]
        assert code & 7 == (
            nearest[0] if len(nearest) == 1 else next(c for c in nearest if not c % 2)
        )
        assert code >> 3 == (math.copysign(1, value) < 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("spread", [1e-6, 0.02, 50.0])
def test_packing_is_that_of_modelopt_bit_for_bit(dtype: torch.dtype, spread: float) -> None:
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    torch.manual_seed(0)
    weight = (torch.randn(64, 256) * spread).to(dtype)
    weight[0, :16] = 0
    weight[1, 3] = -0.0
    weight[2, 16:32] *= 1e-5
    theirs, their_scale, their_scale_2 = NVFP4QTensor.quantize(weight.clone(), nvfp4.BLOCK)
    scale_2 = nvfp4.tensor_scale(weight.abs().amax())
    scale = nvfp4.block_scale(nvfp4.block_amax(weight), scale_2)
    assert torch.equal(scale_2, their_scale_2)
    assert torch.equal(scale.view(torch.uint8), their_scale.view(torch.uint8))
    packed = nvfp4.quantize(weight, scale, scale_2)
    assert torch.equal(packed, theirs._quantized_data)
    values = theirs.dequantize(
        dtype=torch.float32, scale=their_scale, double_scale=their_scale_2, block_sizes={-1: 16}
    )
    assert torch.equal(nvfp4.dequantize(packed, scale, scale_2), values)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(1e-4, 1e4))
def test_quantizing_twice_changes_nothing(seed: int, spread: float) -> None:
    weight = torch.randn(4, 32, generator=torch.Generator().manual_seed(seed)) * spread
    scale_2 = nvfp4.tensor_scale(weight.abs().amax())
    scale = nvfp4.block_scale(nvfp4.block_amax(weight), scale_2)
    once = nvfp4.dequantize(nvfp4.quantize(weight, scale, scale_2), scale, scale_2)
    twice = nvfp4.dequantize(nvfp4.quantize(once, scale, scale_2), scale, scale_2)
    assert torch.equal(once, twice)


def test_activations_round_within_half_a_step_and_keep_their_dtype() -> None:
    x = torch.randn(8, 64).to(torch.bfloat16)
    scale = nvfp4.tensor_scale(x.abs().amax())
    y = nvfp4.quantize_dequantize(x, scale)
    assert y.dtype == x.dtype
    blocks = x.float().unflatten(-1, (-1, 16))
    step = blocks.abs().amax(-1, keepdim=True) / 6 * 1.07  # E4M3 rounds a scale by at most 1/16
    assert ((y.float().unflatten(-1, (-1, 16)) - blocks).abs() <= step).all()


def test_a_zero_activation_block_stays_zero() -> None:
    x = torch.zeros(1, 32)
    x[0, 16:] = 1.0
    y = nvfp4.quantize_dequantize(x, torch.tensor(1 / 2688))
    assert y[0, :16].abs().max() == 0
    assert torch.isfinite(y).all()
