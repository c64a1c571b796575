"""Stage `features`: the target answers the training prompts, and its hidden states are kept."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from onboard.checkpoint.models import (
    Runner,
    compute_dtype,
    full_precision_activations,
    open_candidate,
    open_reference,
)
from onboard.engines.vllm import MODEL
from onboard.errors import InputError
from onboard.evals.loops import WORD_RUN, cycle, find_loop, runs
from onboard.modelconfig import read_config
from onboard.pipeline import Job
from onboard.recipe import Features
from onboard.source import root
from onboard.speculators import disk, head, served
from onboard.speculators.capture import Answer, answer, aux_layers, prefill
from onboard.speculators.shards import Document, Place, places_of, write_shard
from onboard.store import write_json

Row = dict[str, Any]

CHECKED_TOKENS = 4  # generated to compare a batch with each of its texts alone
AGREEMENT_MIN = 0.9  # of the head's argmax with the tokens generated; bf16 rounding costs < 0.02


@dataclass(frozen=True)
class Work:
    """What answers are made with, and kept: `stop` are the ids that end one."""

    job: Job[Features]
    runner: Runner
    target: head.Head
    prompts: Sequence[Row]
    stop: frozenset[int]
    tokenizer: Any

    @property
    def batches(self) -> list[Sequence[Row]]:
        """The prompts that are answered at once."""
        size = self.job.params.batch_size
        return [self.prompts[i : i + size] for i in range(0, len(self.prompts), size)]


def run(job: Job[Features]) -> None:
    """Write shards, `index.json`, `samples.jsonl`, `head.safetensors` and `metrics.json`.

    Shards are kept in scratch, where a restart continues. Raises InputError where no answer is fit
    for training, or where the head read off the target does not reproduce its answers, and
    EnvironmentFault where the disk is too small.
    """
    source = root(job.inputs["source"])
    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    prompts = sorted(
        job.inputs["data"].lines("training_prompts.jsonl"), key=lambda p: (len(p["ids"]), p["id"])
    )
    job = _with_storage(job, source, prompts)
    _check_disk(job, source, prompts)
    runner = _target(job, source)
    target_head = head.of_model(runner.model)
    work = Work(job, runner, target_head, prompts, stop_tokens(source), tokenizer)
    records = _generated(work) if job.params.answers is None else _served(work)
    _publish(job, records)
    target_head.save(job.out)
    text = runner.model.config.get_text_config()
    write_json(
        job.out / "index.json",
        {
            "shards": [r["shard"] for r in records if r["shard"]],
            "hidden_size": text.hidden_size,
            "aux_layers": list(aux_layers(text.num_hidden_layers)),
            "storage": job.params.storage,
            "target": job.params.target,
            "head": asdict(target_head.settings),
        },
    )
    checked = [prompts[i]["ids"] for i in (0, len(prompts) // 2, -1)]  # short, middling, long
    write_json(job.out / "metrics.json", _metrics(job, runner, records, checked))


def _with_storage(job: Job[Features], source: Path, prompts: Sequence[Row]) -> Job[Features]:
    """Return the job with `auto` decided by what the states of all answers may take."""
    params, width = job.params, read_config(source).hidden_size
    storage = disk.chosen(params.storage, width, _most_tokens(job, prompts), params.gigabytes)
    return replace(job, params=params.model_copy(update={"storage": storage}))


def _check_disk(job: Job[Features], source: Path, prompts: Sequence[Row]) -> None:
    """Raise EnvironmentFault where the disk cannot hold what is still to be stored."""
    records = [json.loads(file.read_text()) for file in job.scratch.glob("shard-*.json")]
    stored = {sample["id"] for record in records for sample in record["samples"]}
    missing = [p for p in prompts if p["id"] not in stored]
    width = read_config(source).hidden_size
    disk.check(job.scratch, width, job.params.storage, _most_tokens(job, missing))


def _most_tokens(job: Job[Features], prompts: Sequence[Row]) -> int:
    """Return the tokens of prompts and answers, where every answer is as long as it may be."""
    return sum(len(p["ids"]) + job.params.max_new_tokens for p in prompts)


def _generated(work: Work) -> list[Row]:
    """Answer in this process; a batch of prompts makes a shard."""
    job, records, batches = work.job, [], work.batches
    for number, batch in enumerate(batches):
        record = job.scratch / f"shard-{number:05d}.json"
        if not record.exists():
            ids = [p["ids"] for p in batch]
            answers = answer(work.runner.model, ids, work.stop, job.params.max_new_tokens)
            if number == 0:
                check_head(work.target, answers)
            _keep(work, record, batch, answers)
        records.append(json.loads(record.read_text()))
        job.progress("answers", number + 1, len(batches), "batches")
    return records


def _served(work: Work) -> list[Row]:
    """Have a server answer, then take the states; what one reading of the target does is a shard.

    Raises InputError where the server's answers are not the target's.
    """
    job, prompts = work.job, work.prompts
    location = job.inputs["source"].json("location.json")
    names = {location["model"], Path(location["model"]).name, Path(location["root"]).name, MODEL}
    endpoint = served.connect(str(job.params.answers), names, job.warn)
    tokens: list[list[int]] = []
    batches = work.batches
    for number, batch in enumerate(batches):
        file = job.scratch / f"answers-{number:05d}.json"
        if not file.exists():
            ids = [p["ids"] for p in batch]
            given = served.ask(endpoint, ids, work.stop, job.params.max_new_tokens)
            served.check_vocabulary(work.target, given)
            _write_whole(file, given)
        tokens += json.loads(file.read_text())
        job.progress("answers", number + 1, len(batches), "batches")
    lengths = [len(p["ids"]) + len(t) for p, t in zip(prompts, tokens, strict=True)]
    groups = list(served.groups(lengths, job.params.prefill_tokens))
    records = []
    for number, group in enumerate(groups):
        record = job.scratch / f"shard-{number:05d}.json"
        if not record.exists():
            part = f"states, part {number + 1} of {len(groups)}"
            answers = served.with_states(
                work.runner,
                [p["ids"] for p in prompts[group]],
                tokens[group],
                partial(_count_layers, job, part),
            )
            same = served.check_answers(work.target, answers, endpoint)
            _keep(work, record, prompts[group], answers, reproduced=same)
        records.append(json.loads(record.read_text()))
        job.progress("states", number + 1, len(groups), "parts")
    return records


def _count_layers(job: Job[Features], part: str, done: int, total: int) -> None:
    job.progress(part, done, total, "layers")


def stop_tokens(source: Path) -> frozenset[int]:
    """Return every end-of-text id that `generation_config.json` and `config.json` name."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        if (source / name).exists():
            ids = json.loads((source / name).read_text()).get("eos_token_id")
            found |= set(ids) if isinstance(ids, list) else {ids} - {None}
    return frozenset(found)


def check_head(target: head.Head, answers: Sequence[Answer]) -> None:
    """Raise InputError unless the stored states reproduce what the target generated.

    The states lie before the final norm: states from its other side, or a head with something
    more in it than this one knows, fail here.
    """
    same, total = 0, 0
    for given in answers:
        last = given.states[given.prompt_length - 1 :, -1].to(target.gain.device)
        same += int((target.logits(last).argmax(-1).cpu() == torch.tensor(given.tokens)).sum())
        total += len(given.tokens)
    if same < AGREEMENT_MIN * total:
        raise InputError(
            f"features: the head read off the target reproduces {same} of its {total} tokens, "
            f"expected at least {AGREEMENT_MIN:.0%}: its logits hold more than norm, lm_head, "
            "scale and softcap"
        )


def batch_invariance_error(runner: Runner, prompts: Sequence[Sequence[int]]) -> float:
    """Return how far the states of padded, cached answers lie from those of each text alone.

    Measured with full-precision activations: rounding them to 4 bits turns the last bits that a
    batch shape changes into whole steps, which `stored_state_error` shows.
    """
    with full_precision_activations():
        answers = answer(runner.model, prompts, (), CHECKED_TOKENS)
        return state_error(runner, [document_of(given) for given in answers])


def state_error(runner: Runner, documents: Sequence[Document]) -> float:
    """Return how far documents' states lie from those of each alone, without a cache: the largest.

    Of a document: the mean over tokens of |stored - alone| / |alone|, for the worst of its states.
    """
    errors = []
    for document, states in zip(
        documents, prefill(runner, [d.ids for d in documents]), strict=True
    ):
        alone = states.float()
        stored = torch.cat((document.aux, document.last[:, None]), 1).float()
        relative = (stored - alone).norm(dim=-1) / alone.norm(dim=-1).clamp(min=1e-6)
        errors.append(float(relative.mean(0).max()))
    return max(errors)


def _target(job: Job[Features], source: Path) -> Runner:
    if job.params.target == "source":
        runner = open_reference(source, compute_dtype())
    else:
        adaptation = job.inputs["adapt"].json("adaptation.json")
        checkpoint = job.inputs["quantize"].path / "checkpoint"
        runner = open_candidate(checkpoint, adaptation, compute_dtype())
    if job.params.answers is None and not runner.resident:
        raise InputError(
            "features: the target does not fit in this machine's memory, and it has to generate "
            f"answers there: {runner.skeleton.bytes / 1e9:.0f} GB of weights",
            "serve it elsewhere and set features.answers to the server's URL, or run the stage on "
            "a machine with more memory; everything before it is kept",
        )
    return runner


def _keep(
    work: Work,
    record: Path,
    prompts: Sequence[Row],
    answers: Sequence[Answer],
    reproduced: int | None = None,
) -> None:
    """Write one shard, then the record that says it is complete.

    `reproduced` counts the tokens of a server's answers that the target would have given too.
    """
    tokenizer, samples, documents, ids = work.tokenizer, [], [], []
    for prompt, given in zip(prompts, answers, strict=True):
        text = tokenizer.decode(given.tokens, skip_special_tokens=True)
        looped = find_loop(given.tokens, text, lambda token: str(tokenizer.decode([token])))
        samples.append(
            {
                "id": prompt["id"],
                "domain": prompt["domain"],
                "prompt_ids": prompt["ids"],
                "answer_ids": given.tokens,
                "text": text,
                "looped": looped,
            }
        )
        document = document_of(given, None if looped is None else before_loop(given.tokens))
        if document.mask.any():
            documents.append(document)
            ids.append(prompt["id"])
    shard = None
    if documents:
        file = record.with_suffix(".safetensors")
        write_shard(file, documents, work.job.params.storage)
        shard = {
            "file": file.name,
            "sequences": len(documents),
            "tokens": sum(len(d.ids) for d in documents),
            "ids": ids,
        }
    _write_whole(
        record,
        {
            "shard": shard,
            "samples": samples,
            "trained": sum(int(d.mask.sum()) for d in documents),
            "zero": sum(zero_rows(d) for d in documents),
            "reproduced": reproduced,
        },
    )


def _write_whole(file: Path, value: Any) -> None:
    """Write JSON, whole or not at all."""
    part = file.with_suffix(".json.part")
    write_json(part, value)
    part.replace(file)


def document_of(given: Answer, answer_length: int | None = None) -> Document:
    """Mark the answer's tokens, by the known length of the prompt rather than by a template.

    `answer_length` cuts the answer short; the last generated token is never fed, hence not kept.
    """
    stop = None if answer_length is None else given.prompt_length + answer_length
    ids, states = given.ids[:stop], given.states[:stop]
    mask = torch.arange(len(ids)) >= given.prompt_length
    return Document(ids, states[:, :-1], states[:, -1], mask)


def before_loop(tokens: Sequence[int]) -> int:
    """Return how many tokens of a looping answer are fit for training.

    Those before the repeated token, or up to the end of the first round of a cycle; none where
    only the text's compression betrays the loop.
    """
    position = 0
    for _, length in runs(tokens):
        if length >= WORD_RUN:
            return position
        position += length
    if (period := cycle(tokens)) is None:
        return 0
    begin = best = current = 0
    for i, (a, b) in enumerate(zip(tokens, tokens[period:], strict=False)):
        current = current + 1 if a == b else 0
        if current > best:
            best, begin = current, i + 1 - current
    return begin + period


def zero_rows(document: Document) -> int:
    """Count tokens with a hidden state that is all zero."""
    states: Tensor = torch.cat((document.aux, document.last[:, None]), 1)
    return int((states == 0).all(-1).any(-1).sum())


def _publish(job: Job[Features], records: Sequence[dict[str, Any]]) -> None:
    """Link the shards into the artifact; scratch stays whole until the store has committed it."""
    for record in records:
        if record["shard"]:
            file = record["shard"]["file"]
            _link(job.scratch / file, job.out / file)
    with (job.out / "samples.jsonl").open("w") as f:
        for record in records:
            f.writelines(json.dumps(sample) + "\n" for sample in record["samples"])


def _link(file: Path, to: Path) -> None:
    try:
        os.link(file, to)
    except OSError:  # a file system without hard links
        shutil.copyfile(file, to)


def _metrics(
    job: Job[Features],
    runner: Runner,
    records: Sequence[dict[str, Any]],
    prompts: Sequence[Sequence[int]],
) -> dict[str, float]:
    tokens = sum(r["shard"]["tokens"] for r in records if r["shard"])
    trained = sum(r["trained"] for r in records)
    samples = [s for r in records for s in r["samples"]]
    looped = sum(s["looped"] is not None for s in samples)
    if trained == 0:
        raise InputError(
            f"features: no token to train on: {looped} of "
            f"{len(samples)} answers loop from their start, the others are too short",
            "look at the target's fidelity, or give it other prompts (data.corpora, data.traffic)",
        )
    if looped:
        job.warn(f"{looped} answers loop; only what precedes the loop is trained on")
    served_metrics: dict[str, float] = {}
    if job.params.answers:
        same = sum(r["reproduced"] for r in records)
        served_metrics["answers_reproduced"] = same / sum(len(s["answer_ids"]) for s in samples)
    return {
        "feature_tokens": tokens,
        "feature_bytes": sum(
            (job.out / r["shard"]["file"]).stat().st_size for r in records if r["shard"]
        ),
        "trained_tokens": trained,
        "trained_token_share": trained / tokens,
        "zero_features": sum(r["zero"] for r in records),
        "looped_answers": looped,
        # Behind a server's answers every text is a pass of its own: there is no batch.
        "batch_invariance_error": 0.0
        if job.params.answers
        else batch_invariance_error(runner, prompts),
        "stored_state_error": 0.0
        if job.params.storage == "online"
        else state_error(runner, [place.read() for place in _probes(job.out, records)]),
        **served_metrics,
    }


def _probes(out: Path, records: Sequence[dict[str, Any]]) -> list[Place]:
    """Return the most padded document of the first, middle and last shard."""
    shards = [r["shard"] for r in records if r["shard"]]
    chosen = [shards[0], shards[len(shards) // 2], shards[-1]][: len(shards)]
    return [next(iter(places_of(out / s["file"], s["ids"]))) for s in chosen]
