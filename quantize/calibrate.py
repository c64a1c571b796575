"""Stage calibrate: what enters every quantized matrix, measured on the calibration documents.

Activation ranges come from NVIDIA ModelOpt's max calibrator. The same forward passes collect the
diagonal of each input's second moment, E[x_j^2], which weighs rounding errors, and the number of
tokens that reached each matrix.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from onboard.checkpoint.models import compute_dtype, load_reference
from onboard.errors import InputError
from onboard.hardware import device_kind
from onboard.pipeline import Job
from onboard.quantize.plan import EXPERT, Matrix, range_groups, scale_groups
from onboard.recipe import Calibrate
from onboard.source import root
from onboard.store import write_json

ZERO_INPUT_AMAX = 1.0  # the range of an input that was zero on every calibration token
SHRINKAGE_TOKENS = 64  # weight of the layer's mean second moment in an expert's own


def run(job: Job[Calibrate]) -> None:
    """Write `activations.safetensors` (`<module>.amax` f32 [], `<module>.second_moment` f32 [in]).

    Raises InputError where there is no calibration document.
    """
    documents = [row["ids"] for row in job.inputs["data"].lines("calibration.jsonl")]
    if not documents:
        raise InputError(
            "calibrate: no calibration documents, so no activation range can be known",
            "give data.corpora something to read",
        )
    groups = scale_groups(job.inputs["adapt"].json("adaptation.json"))
    ranges = range_groups(groups)
    modules = [matrix.module for group in groups for matrix in group]
    model = load_reference(root(job.inputs["source"]), compute_dtype())
    amax, moments = measure(model, modules, _batches(documents, job))
    settle_ranges(amax, ranges, moments, job)
    tensors = {f"{name}.amax": value for name, value in amax.items()}
    second = shrunk_moments(moments, ranges)
    tensors |= {f"{name}.second_moment": value for name, value in second.items()}
    save_file(dict(sorted(tensors.items())), job.out / "activations.safetensors")
    write_json(job.out / "tokens.json", {name: m.tokens for name, m in moments.items()})
    write_json(job.out / "metrics.json", _metrics(moments))


class Moments:
    """Sum of x_j^2 over tokens, f64 [in], and their number."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.tokens = 0

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        x = args[0].flatten(0, -2)
        squares = x.float().square().sum(0).double()
        self.total = squares if self.total is None else self.total + squares
        self.tokens += len(x)

    @property
    def mean(self) -> Tensor:
        assert self.total is not None
        return self.total / self.tokens


def measure(
    model: Any, modules: Sequence[str], batches: Iterable[Tensor]
) -> tuple[dict[str, Tensor], dict[str, Moments]]:
    """Run the batches [documents, tokens] once; return amax (where seen) and moments per module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import modelopt.torch.quantization as mtq

    by_name = dict(model.named_modules())
    if absent := [name for name in modules if name not in by_name]:
        raise InputError(f"calibrate: the model has no module {absent[0]} ({len(absent)} absent)")
    moments = {name: Moments() for name in modules}
    handles = [by_name[name].register_forward_pre_hook(moments[name]) for name in modules]
    with torch.inference_mode(), contextlib.redirect_stdout(io.StringIO()):
        mtq.quantize(model, _ranges_only(modules), lambda m: [m(batch) for batch in batches])
    for handle in handles:
        handle.remove()
    by_name = dict(model.named_modules())
    found = {name: by_name[name].input_quantizer.amax for name in modules}
    amax = {name: v.detach().float().reshape(()) for name, v in found.items() if v is not None}
    return amax, moments


def _ranges_only(modules: Sequence[str]) -> dict[str, Any]:
    """Return a ModelOpt config that watches the input of exactly these modules."""
    nvfp4 = {
        "num_bits": (2, 1),
        "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)},
    }
    watched = [
        {"quantizer_name": f"{name}.input_quantizer", "cfg": nvfp4, "enable": True}
        for name in modules
    ]
    return {"quant_cfg": [{"quantizer_name": "*", "enable": False}, *watched], "algorithm": "max"}


def settle_ranges(
    amax: dict[str, Tensor],
    ranges: Sequence[Sequence[Matrix]],
    moments: Mapping[str, Moments],
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
    moments: Mapping[str, Moments], ranges: Sequence[Sequence[Matrix]]
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


def _shrink(alike: Sequence[Matrix], moments: Mapping[str, Moments]) -> dict[str, Tensor]:
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


def _batches(documents: Sequence[Sequence[int]], job: Job[Calibrate]) -> Iterator[Tensor]:
    """Yield [n, length] ids of equally long documents: padding would count as activations."""
    done = 0
    ordered = sorted(documents, key=len)
    for _, alike in itertools.groupby(ordered, key=len):
        rows = list(alike)
        for first in range(0, len(rows), job.params.batch_size):
            part = rows[first : first + job.params.batch_size]
            yield torch.tensor(part, device=device_kind())
            done += len(part)
            job.progress("activations", done, len(documents), "documents")


def _metrics(moments: Mapping[str, Moments]) -> dict[str, float]:
    silent = [name for name, m in moments.items() if not m.tokens]
    experts = [name for name in silent if EXPERT.match(name)]
    return {
        "tensors_without_tokens": len(silent) - len(experts),
        "unseen_experts": len({name.rpartition(".")[0] for name in experts}),
        "calibrated_tensors": len(moments),
    }
