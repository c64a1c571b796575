"""Stage calibrate: what enters every quantized matrix, measured on the calibration documents.

The largest magnitudes come from NVIDIA ModelOpt's max calibrator; a search in the same forward
passes may move the range that NVFP4 is given (`onboard.quantize.ranges`). They also collect the
diagonal of each input's second moment, E[x_j^2], which weighs rounding errors, and the number of
tokens that reached each matrix.
"""

from __future__ import annotations

import itertools
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from onboard.checkpoint import taps
from onboard.checkpoint.cache import Passing, projections
from onboard.checkpoint.matrices import EXPERT, Matrix, range_groups, scale_groups
from onboard.checkpoint.models import Runner, compute_dtype, open_reference
from onboard.checkpoint.nvfp4 import E4M3_MAX
from onboard.errors import InputError
from onboard.hardware import device_kind
from onboard.pipeline import Job
from onboard.quantize.ranges import RangeSearch
from onboard.recipe import Calibrate
from onboard.source import root
from onboard.store import write_json

ZERO_INPUT_AMAX = 1.0  # the range of an input that was zero on every calibration token
SHRINKAGE_TOKENS = 64  # weight of the layer's mean second moment in an expert's own


def run(job: Job[Calibrate]) -> None:
    """Write `activations.safetensors`, `ranges.json` and `tokens.json`.

    Of a module, the first holds `.amax` f32 [], the largest magnitude; `.range` f32 [], what NVFP4
    reaches up to: `.amax` times the factor in `ranges.json`; and `.second_moment` f32 [in].
    The source is read once, a layer at a time. A model without a transformers class is not run:
    the files are empty, and weights will be rounded without data. Raises InputError where there is
    no calibration document.
    """
    documents = [row["ids"] for row in job.inputs["data"].lines("calibration.jsonl")]
    if not documents:
        raise InputError(
            "calibrate: no calibration documents, so no activation range can be known",
            "give data.corpora something to read",
        )
    adaptation = job.inputs["adapt"].json("adaptation.json")
    if adaptation["architecture"] is None:
        _without_forward(job, adaptation["model_type"])
    else:
        _with_forward(job, adaptation, documents)


def _with_forward(
    job: Job[Calibrate], adaptation: Mapping[str, Any], documents: Sequence[Sequence[int]]
) -> None:
    groups = scale_groups(adaptation)
    ranges = range_groups(groups)
    matrices = [matrix for group in groups for matrix in group]
    runner = open_reference(root(job.inputs["source"]), compute_dtype(), resident=False)
    cached = CacheRanges() if job.params.kv_cache else None
    batches = document_batches(documents, job.params.batch_size)
    search = RangeSearch(groups) if job.params.ranges == "search" else None
    seen = measure(runner, matrices, batches, job.progress, cached, search)
    amax = {name: one.amax for name, one in seen.items() if one.amax is not None}
    settle_ranges(amax, ranges, seen, job)
    factors = search.factors(amax) if search else dict.fromkeys(amax, 1.0)
    tensors = {f"{name}.amax": value for name, value in amax.items()}
    tensors |= {f"{name}.range": factors[name] * value for name, value in amax.items()}
    second = shrunk_moments(seen, ranges)
    tensors |= {f"{name}.second_moment": value for name, value in second.items()}
    if cached is not None:
        tensors |= cache_scales(cached, projections(runner.skeleton))
    save_file(dict(sorted(tensors.items())), job.out / "activations.safetensors")
    write_json(job.out / "tokens.json", {name: one.tokens for name, one in seen.items()})
    write_json(job.out / "ranges.json", factors)
    moved = sum(factors[members[0].module] != 1 for members in ranges)
    write_json(job.out / "metrics.json", _metrics(seen) | {"ranges_moved": moved})


def _without_forward(job: Job[Calibrate], model_type: str) -> None:
    job.warn(
        f"forward: not run, no transformers class for {model_type}; weights are rounded without "
        "data, activations are not quantized"
    )
    save_file({}, job.out / "activations.safetensors")
    write_json(job.out / "tokens.json", {})
    write_json(job.out / "ranges.json", {})
    write_json(job.out / "metrics.json", _metrics({}) | {"ranges_moved": 0})


class Inputs:
    """What entered one place: ModelOpt's running maximum, the sum of x_j^2 f64 [in], tokens."""

    def __init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from modelopt.torch.quantization.calib import MaxCalibrator
        self._range = MaxCalibrator(num_bits=(2, 1), axis=None, unsigned=False)
        self.total: Tensor | None = None
        self.tokens = 0

    def collect(self, x: Tensor) -> None:
        """Add activations [..., in]."""
        self._range.collect(x)
        rows = x.flatten(0, -2)
        squares = rows.float().square().sum(0).double()
        self.total = squares if self.total is None else self.total + squares
        self.tokens += len(rows)

    @property
    def amax(self) -> Tensor | None:
        """The largest magnitude, f32 [] on the CPU; None where nothing was seen."""
        found = self._range.compute_amax()
        return None if found is None else found.detach().float().cpu().reshape(())

    @property
    def mean(self) -> Tensor:
        assert self.total is not None
        return self.total / self.tokens


def measure(
    runner: Runner,
    matrices: Sequence[Matrix],
    batches: Sequence[Tensor],
    progress: Callable[[str, int, int, str], None] = lambda what, done, total, unit: None,
    cached: CacheRanges | None = None,
    search: RangeSearch | None = None,
) -> dict[str, Inputs]:
    """Push the batches [documents, tokens] through the model; return what entered, by module."""
    places = taps.points(runner.skeleton, matrices)
    seen = {point: Inputs() for point in places}

    def see(point: taps.Point, x: Tensor) -> None:
        seen[point].collect(x)
        if search:
            search.collect(places[point], x)

    def layer_done(done: int, total: int) -> None:
        if search:
            search.settle()
        progress("activations", done, total, "layers")

    taps.attach(runner.skeleton.model, places, see)

    def forward(batch: Tensor) -> Callable[[], None]:
        def run() -> None:
            runner.model(
                batch.to(device_kind()),
                use_cache=cached is not None,
                cache=cached and cached.watch(runner.model.config),
                logits_to_keep=1,
            )

        return run

    runner.run([forward(batch) for batch in batches], layer_done)
    return {matrix.module: seen[point] for point, held in places.items() for matrix in held}


class CacheRanges:
    """The largest magnitudes of keys (after rotary embedding) and values, by layer."""

    def __init__(self) -> None:
        self.amax: dict[int, tuple[float, float]] = {}

    def watch(self, config: Any) -> Passing:
        """Return a cache that keeps nothing but these magnitudes."""
        return Passing(config, self._see)

    def _see(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        before = self.amax.get(layer, (0.0, 0.0))
        found = (float(keys.abs().amax()), float(values.abs().amax()))
        self.amax[layer] = (max(before[0], found[0]), max(before[1], found[1]))
        return keys, values


def cache_scales(
    cached: CacheRanges, modules: Mapping[int, Mapping[str, str]]
) -> dict[str, Tensor]:
    """Return `<…k_proj>.k_scale` and `<…v_proj>.v_scale` f32 [], amax over E4M3's largest number.

    `modules` are the `projections` of the model. Layers without a `k_proj`, which cache something
    else than keys and values, get none: engines then cache with scale 1.
    """
    scales = {}
    for number, amax in cached.amax.items():
        for part, largest in zip("kv", amax, strict=True):
            if module := modules.get(number, {}).get(part):
                scales[f"{module}.{part}_scale"] = torch.tensor((largest or 1.0) / E4M3_MAX)
    return scales


def settle_ranges(
    amax: dict[str, Tensor],
    ranges: Sequence[Sequence[Matrix]],
    moments: Mapping[str, Inputs],
    job: Job[Calibrate],
) -> None:
    """Give every matrix of a range group the group's largest amax, in place.

    So an expert that saw no token gets the range of its layer; an input that was all zero gets
    `ZERO_INPUT_AMAX`, with a warning. Each result is finite and positive. Raises InputError for
    an infinite range and, with `unseen_experts: error`, for an expert that saw no token.
    """
    for members in ranges:
        names = [matrix.module for matrix in members]
        seen = [amax[name] for name in names if name in amax]
        if job.params.unseen_experts == "error" and (
            unseen := [name for name in names if not moments[name].tokens]
        ):
            raise InputError(
                f"calibrate: no calibration token was routed to {unseen[0]}",
                "add documents (data.calibration_documents) or set "
                "calibrate.unseen_experts=layer_max",
            )
        top = torch.stack(seen).amax() if seen else torch.tensor(0.0)
        if not torch.isfinite(top):
            raise InputError(f"calibrate: the input of {names[0]} is not finite")
        if top == 0:
            job.warn(f"{names[0]}: its input was always zero; range set to {ZERO_INPUT_AMAX}")
            top = torch.tensor(ZERO_INPUT_AMAX)
        amax.update({name: top.cpu().clone() for name in names})


def shrunk_moments(
    moments: Mapping[str, Inputs], ranges: Sequence[Sequence[Matrix]]
) -> dict[str, Tensor]:
    """Return E[x_j^2] f32 [in] per module; an expert's is shrunk towards its layer's mean.

    own = (n * own + k * layer) / (n + k) with n the expert's tokens and k = SHRINKAGE_TOKENS. A
    matrix that saw nothing at all weighs every input alike.
    """
    result: dict[str, Tensor] = {}
    for members in ranges:
        by_width: dict[tuple[int, str], list[Matrix]] = defaultdict(list)
        for matrix in members:
            by_width[matrix.shape[1], matrix.module.rpartition(".")[2]].append(matrix)
        for alike in by_width.values():
            result |= _shrink(alike, moments)
    return result


def _shrink(alike: Sequence[Matrix], moments: Mapping[str, Inputs]) -> dict[str, Tensor]:
    seen = [m for matrix in alike if (m := moments[matrix.module]).total is not None]
    if not seen:
        return {m.module: torch.ones(m.shape[1]) for m in alike}
    totals = torch.stack([m.total for m in seen if m.total is not None])
    layer = totals.sum(0) / sum(m.tokens for m in seen)
    pull = SHRINKAGE_TOKENS if EXPERT.match(alike[0].module) else 0
    result = {}
    for matrix in alike:
        own = moments[matrix.module]
        total = torch.zeros_like(layer) if own.total is None else own.total
        mean = (total + pull * layer) / (own.tokens + pull)
        result[matrix.module] = mean.float().cpu()
    return result


def document_batches(documents: Sequence[Sequence[int]], size: int) -> list[Tensor]:
    """Return [n, length] ids of equally long documents: padding would count as activations."""
    batches = []
    for _, alike in itertools.groupby(sorted(documents, key=len), key=len):
        rows = list(alike)
        batches += [torch.tensor(rows[i : i + size]) for i in range(0, len(rows), size)]
    return batches


def _metrics(moments: Mapping[str, Inputs]) -> dict[str, float]:
    silent = [name for name, m in moments.items() if not m.tokens]
    experts = [name for name in silent if EXPERT.match(name)]
    return {
        "tensors_without_tokens": len(silent) - len(experts),
        "unseen_experts": len({name.rpartition(".")[0] for name in experts}),
        "calibrated_tensors": len(moments),
    }
