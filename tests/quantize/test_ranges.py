"""The search for NVFP4 input ranges: what moves one, and what must not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from onboard.checkpoint.matrices import EXPERT, Matrix
from onboard.quantize import calibrate, ranges
from onboard.quantize.ranges import FACTORS, Errors, RangeSearch, Sample, best_factor
from onboard.recipe import Calibrate
from tests.quantize.mixed import calibrated, formats_by, write_mixed
from tests.quantize.test_quantize import documents, planned

STEP = 2688.0  # 6 * 448: with this range a block's scale is its amax over 6
GRID = torch.tensor([6.0, -4, 3, 2, 1.5, 1, -0.5, 0, 6, 4, -3, 2, 1.5, 1, 0.5, 0])


def tokens(scale: float, count: int = 8) -> Tensor:
    """Return [count, 32] of E2M1 values times `scale`: exact where E4M3 holds the scale."""
    return (GRID * scale).repeat(count, 2)


def massive() -> Tensor:
    """Return one token [1, 32] that reaches `STEP` in one of its values, and is small elsewhere."""
    token = tokens(1.0, 1)
    token[0, 5] = STEP
    return token


def settled(*batches: Tensor) -> Sample:
    sample = Sample()
    for batch in batches:
        sample.add(batch)
    sample.settle()
    return sample


def test_a_factor_that_stores_the_scales_exactly_wins() -> None:
    """33/32 lies between the E4M3 numbers 1 and 9/8; over 1.5 it is 11/16, which is one."""
    rows = torch.cat((tokens(33 / 32), massive()))
    plain, wider = (Errors.of(tokens(33 / 32), massive(), f * STEP) for f in (1.0, 1.5))
    assert plain.mean == pytest.approx((1 / 33) ** 2, rel=1e-3), "every scale is 32/33 of its own"
    assert wider.mean == pytest.approx(0, abs=1e-12)
    assert settled(rows).factor == 1.5


def test_ties_and_small_gains_keep_the_largest_magnitude(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settled(tokens(1.0), massive()).factor == 1, "exact already"
    torch.manual_seed(0)
    rows = torch.randn(256, 64)
    means = {f: Errors.of(rows, rows, f * float(rows.abs().max())).mean for f in FACTORS}
    gain = 1 - min(means.values()) / means[1.0]
    assert best_factor(rows, rows, float(rows.abs().max())) == 1
    assert gain < ranges.LEAST_GAIN
    monkeypatch.setattr(ranges, "LEAST_GAIN", gain * 0.9)
    kept = best_factor(rows, rows, float(rows.abs().max()))
    assert (kept != 1) == (gain > 0)


def small(count: int = 500) -> Tensor:
    """Return tokens whose blocks need scales that E4M3 holds better at 0.7 of the range.

    2^-9 is its smallest number and half of it rounds to zero: 0.7 lifts these above that.
    """
    return tokens(0.9 * 2.0**-10, count)


def test_one_massive_token_forbids_a_range_that_saturates_it() -> None:
    rows, sink = small(), massive()
    plain, narrow = (Errors.of(rows, sink, f * STEP) for f in (1.0, 0.7))
    assert plain.mean == 1, "all of it is lost"
    assert narrow.mean < 0.2
    assert narrow.worst_largest > 5 * plain.mean / 100
    assert not narrow.is_safe(Errors(0.01, 1.0, plain.worst_largest))


def test_relative_errors_by_hand() -> None:
    """A value of STEP with 0.7 of the range: its scale stops at 448, and it at 0.7 of itself."""
    sink = torch.zeros(2, 16)
    sink[0, 3] = STEP
    found = ranges.relative_errors(sink, 0.7 * STEP)
    assert found.tolist() == [pytest.approx(0.3**2, rel=1e-4), 0.0]
