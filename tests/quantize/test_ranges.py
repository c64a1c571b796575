"""The search for NVFP4 input ranges: what moves one, and what must not."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from onboard.checkpoint.matrices import Matrix, range_groups, scale_groups
from onboard.checkpoint.reciprocal import invertible
from onboard.quantize import calibrate, ranges
from onboard.quantize.ranges import Errors, RangeSearch, Sample, best_factor
from onboard.recipe import Calibrate
from tests.quantize.mixed import calibrated, formats_by, write_mixed
from tests.quantize.test_quantize import planned

STEP = 2688.0  # 6 * 448: with this range a block's scale is its amax over 6
GRID = torch.tensor([6.0, -4, 3, 2, 1.5, 1, -0.5, 0, 6, 4, -3, 2, 1.5, 1, 0.5, 0])
TOO_SMALL = 0.9 * 2.0**-10  # a scale that E4M3 rounds to zero; over 0.85 it is 2^-9


def tokens(scale: float, count: int = 500) -> Tensor:
    """Return [count, 32] of E2M1 values times `scale`: exact where E4M3 holds the scale."""
    return (GRID * scale).repeat(count, 2)


def massive() -> Tensor:
    """Return one token [1, 32] with a value of `STEP`, and small ones."""
    token = tokens(1.0, 1)
    token[0, 5] = STEP
    return token


def settled(batches: Iterable[Tensor]) -> Sample:
    sample = Sample()
    for batch in batches:
        sample.add(batch)
    sample.settle()
    return sample


def test_a_factor_that_holds_the_scales_exactly_wins() -> None:
    """33/32 lies between the E4M3 numbers 1 and 9/8; over 1.5 it is 11/16, which is one."""
    rows = tokens(33 / 32)
    assert Errors.of(rows, rows, STEP).mean == pytest.approx((1 / 33) ** 2, rel=1e-4)
    assert Errors.of(rows, rows, 1.5 * STEP).mean == pytest.approx(0, abs=1e-12)
    assert settled([rows, massive()]).factor == 1.5


def test_a_tie_keeps_the_largest_magnitude() -> None:
    """2, 4 and 1/2 are E4M3 numbers, and so they are over 1.25, 1.5 and 1.75, or all as wrong."""
    assert settled([tokens(1.0), massive()]).factor == 1
    assert settled([torch.zeros(4, 32)]).factor == 1


@pytest.mark.parametrize(("exact", "factor"), [(5, 1.0), (10, 1.5)])
def test_a_gain_below_one_per_cent_keeps_the_largest_magnitude(exact: int, factor: float) -> None:
    """500 tokens lose as much with 1.5 of the range, a few others nothing: 0.8% or 1.5% less."""
    rows = torch.cat((tokens(29 / 16), tokens(33 / 32, exact)))
    plain, wider = (Errors.of(rows, massive(), f * STEP) for f in (1.0, 1.5))
    assert wider.mean / plain.mean == pytest.approx(1 - exact * 0.00154, abs=2e-4)
    assert best_factor(rows, massive(), STEP) == factor


def test_one_massive_token_forbids_a_range_that_saturates_it() -> None:
    """All others are lost with its magnitude as the range, and most of each is kept below it."""
    rows = tokens(TOO_SMALL)
    assert Errors.of(rows, rows, STEP).mean == 1
    assert best_factor(rows, rows, STEP) < 1
    assert best_factor(rows, torch.cat((rows[:15], massive())), STEP) == 1
    assert settled([rows, massive()]).factor == 1


def test_an_average_may_not_hide_one_ruined_token() -> None:
    """Factor 1.5 makes 5000 tokens exact, and loses all of one with very small values."""
    rows = torch.cat((tokens(33 / 32, 5000), tokens(1.1 * 2.0**-10, 1)))
    plain, wider = (Errors.of(rows, massive(), f * STEP) for f in (1.0, 1.5))
    assert wider.mean < 0.5 * plain.mean
    assert wider.sampled.max() == 1
    assert best_factor(rows, massive(), STEP) == 1
    assert best_factor(rows[:5000], massive(), STEP) == 1.5


def test_relative_errors_by_hand() -> None:
    """With half the range, the scale of STEP stops at 448 and it becomes half of itself."""
    rows = torch.zeros(2, 16)
    rows[0, 3] = STEP
    assert ranges.relative_errors(rows, STEP / 2).tolist() == [pytest.approx(0.5**2, rel=1e-4), 0]


def test_a_massive_token_tells_as_much_as_any_other() -> None:
    """Nine tokens lose a 33rd of each value; one is exact, 256 times as large, and no help."""
    found = Errors.of(torch.cat((tokens(33 / 32, 9), tokens(256.0, 1))), massive(), STEP)
    assert found.mean == pytest.approx(0.9 * (1 / 33) ** 2, rel=1e-4)


def test_tokens_are_drawn_evenly_from_all_batches() -> None:
    """Whatever their sizes, and without a token twice; the largest are kept beside them."""
    sizes = [1000, 1, 3000, 500, 2000, 1500]
    values = torch.arange(sum(sizes)).float()[:, None].expand(-1, 16) + 1
    sample = Sample()
    for batch in values.split(sizes):
        sample.add(batch)
    drawn = sample.rows[:, 0]
    assert len(drawn.unique()) == ranges.ROWS == len(sample.rows)
    for share, batch in zip(sizes, values[:, 0].split(sizes), strict=True):
        expected = ranges.ROWS * share / sum(sizes)
        count = int(((drawn >= batch[0]) & (drawn <= batch[-1])).sum())
        assert abs(count - expected) <= 4 * expected**0.5 + 1
    assert sorted(sample.largest[:, 0].tolist()) == (values[-ranges.LARGEST :, 0]).tolist()


def test_a_short_calibration_is_kept_whole() -> None:
    sample = Sample()
    rows = torch.randn(40, 16)
    for batch in rows.split([13, 1, 26]):
        sample.add(batch)
    assert torch.equal(sample.rows, rows)


def test_tokens_after_the_end_of_a_layer_make_the_factor_one() -> None:
    sample = settled([tokens(33 / 32), massive()])
    sample.add(2 * massive())
    assert sample.factor == 1


def test_a_sample_that_missed_the_largest_magnitude_decides_nothing() -> None:
    matrix = Matrix("layer.o_proj", "layer.o_proj.weight", (8, 32), "attention")
    search = RangeSearch([(matrix,)])
    search.collect([matrix], torch.cat((tokens(33 / 32), massive())).reshape(3, 167, 32))
    assert search.factors({"layer.o_proj": torch.tensor(STEP)}) == {"layer.o_proj": 1.5}
    assert search.factors({"layer.o_proj": torch.tensor(2 * STEP)}) == {"layer.o_proj": 1.0}


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the best factor beside 1 wherever that is safe at all."""
    monkeypatch.setattr(ranges, "LEAST_GAIN", -1.0)
    monkeypatch.setattr(ranges, "WORST_GROWTH", 4.0)


@pytest.mark.usefixtures("eager")
def test_siblings_and_the_experts_of_a_layer_share_a_factor(
    bench: Any, qwen3_moe_twin: Path
) -> None:
    calibrated(bench, qwen3_moe_twin, ranges="search")
    folder = bench.artifacts["calibrate"].path
    factors = json.loads((folder / "ranges.json").read_text())
    found = load_file(folder / "activations.safetensors")
    groups = range_groups(scale_groups(bench.artifacts["adapt"].json("adaptation.json")))
    moved = 0
    for members in groups:
        names = [matrix.module for matrix in members]
        (factor,) = {factors[name] for name in names}
        moved += factor != 1
        for name in names:
            assert torch.equal(found[f"{name}.range"], factor * found[f"{name}.amax"])
    assert sorted(factors) == sorted(m.module for members in groups for m in members)
    assert moved == bench.artifacts["calibrate"].metrics["ranges_moved"] > len(groups) / 2
    assert {factors[m.module] for members in groups if len(members) == 16 for m in members} != {1}


@pytest.mark.usefixtures("eager")
def test_fp8_keeps_the_largest_magnitude(bench: Any, llama_twin: Path) -> None:
    calibrated(bench, llama_twin, ranges="search")
    folder = bench.artifacts["calibrate"].path
    factors = json.loads((folder / "ranges.json").read_text())
    assert set(factors.values()) != {1.0}
    found = load_file(folder / "activations.safetensors")
    groups = scale_groups(bench.artifacts["adapt"].json("adaptation.json"))
    formats = formats_by(groups, layer_1="fp8")
    mixed = write_mixed(bench, formats)
    out = load_file(mixed.checkpoint / "model.safetensors")
    for name in factors:
        scale = out[f"{name}.input_scale"]
        if name in formats:
            assert torch.equal(scale, found[f"{name}.amax"] / 448)
        else:
            assert torch.equal(scale, invertible(found[f"{name}.range"] / 2688))


@pytest.mark.usefixtures("eager")
def test_without_the_search_a_range_is_the_largest_magnitude(bench: Any, llama_twin: Path) -> None:
    planned(bench, llama_twin)
    artifact = bench.run("calibrate", calibrate.run, Calibrate(ranges="max"))
    found = load_file(artifact.path / "activations.safetensors")
    names = [name.removesuffix(".amax") for name in found if name.endswith(".amax")]
    assert all(torch.equal(found[f"{n}.range"], found[f"{n}.amax"]) for n in names)
    assert artifact.metrics["ranges_moved"] == 0


@pytest.mark.usefixtures("eager")
def test_two_runs_write_the_same_bytes(bench: Any, qwen3_moe_twin: Path, tmp_path: Path) -> None:
    other = type(bench)(tmp_path / "other")
    other.folder.mkdir()
    for one in (bench, other):
        torch.manual_seed(id(one) % 1000)  # the search has random numbers of its own
        calibrated(one, qwen3_moe_twin, ranges="search")
    for file in ("activations.safetensors", "ranges.json", "metrics.json"):
        first, second = (one.artifacts["calibrate"].path / file for one in (bench, other))
        assert first.read_bytes() == second.read_bytes()
