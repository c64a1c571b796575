"""Quantization-aware distillation: the rounded model learns to predict what its source predicts.

The student begins as another method left it and is trained on KL(source || student) over the whole
vocabulary, through the exact rounding (`onboard.quantize.straight_through`). Looks at held-out
documents decide which state is kept, the start among them: the result is never worse on them. All
that the next step depends on is saved at every look, where a run that was killed goes on.

Runs under `accelerate launch` on several processes, which share `scratch`.
"""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, broadcast
from safetensors.torch import load_file
from torch import Tensor, nn

from onboard.checkpoint import nvfp4
from onboard.checkpoint.matrices import Group
from onboard.checkpoint.models import open_reference
from onboard.checkpoint.reader import Reader
from onboard.evals.hidden import last_hidden
from onboard.evals.kl import Head, kl_divergence
from onboard.hardware import device_kind
from onboard.quantize.grids import dequantize
from onboard.quantize.layers import REPLACED, Layers, save_layer, save_whole
from onboard.quantize.straight_through import Norm
from onboard.quantize.student import Beginning, Parts, Student, begin
from onboard.recipe import Distill

FOLDER, RESULT, STATE = "distilled", "distillation.json", "training.pt"
INSET = 0.2  # of a cell, kept free between a latent weight and the cell's bounds at the start
BETAS = (0.9, 0.95)
EPS = 1e-12  # gradients are per step of a block, and small
NORM_RATE = 0.1  # of the learning rate: every token feels a norm's change
CLIP = 1.0  # largest gradient norm
WINDOW = 16  # batches within which documents are sorted by length, to pad less
CHUNK = 128  # tokens whose logits exist at once

Documents = Sequence[Sequence[int]]
Progress = Callable[[str, int, int, str], None]


@dataclass(frozen=True)
class Look:
    """What was seen after a step; losses are KL in nats per token, None where they are no number.

    `tokens` and `seconds` count from the start of training, `train_loss` from the look before.
    """

    step: int
    tokens: int
    seconds: float
    train_loss: float | None
    held_out_kl: float | None

    @property
    def kl(self) -> float:
        return math.inf if self.held_out_kl is None else self.held_out_kl


@dataclass(frozen=True)
class Outcome:
    """What came out: `folder` is for `Layers`, the rest is `distillation.json` in it."""

    folder: Path
    kl_before: float
    kl_after: float
    best_step: int
    stopped: str  # epochs, patience or minutes
    curve: list[Look]

    @classmethod
    def read(cls, folder: Path) -> Outcome:
        found = json.loads((folder / RESULT).read_text())
        return cls(folder, **{**found, "curve": [Look(**row) for row in found["curve"]]})

    def write(self) -> None:
        fields = {name: value for name, value in asdict(self).items() if name != "folder"}
        partial = self.folder / f"{RESULT}.partial"
        partial.write_text(json.dumps(fields, indent=1))
        partial.rename(self.folder / RESULT)


def distill(
    root: Path,
    start: Layers,
    groups: Sequence[Group],
    input_scale: Callable[[str], Tensor | None] | None,
    documents: Documents,
    held_out: Documents,
    params: Distill,
    scratch: Path,
    progress: Progress = lambda what, done, total, unit: None,
    vocabulary: int | None = None,
) -> Outcome:
    """Train what `start` holds of the model at `root`; write `scratch/distilled` for `Layers`.

    `documents` and `held_out` are token ids. `input_scale` gives the one that is written for a
    module, f32 []; None leaves activations as they are. Matrices that `start` has in FP8, or not
    at all, stay. `vocabulary` is the number of the head's rows that are real tokens.

    Bytes are equal between runs with the same device, number of threads and of processes, unless
    `params.minutes` ends one.
    """
    folder = scratch / FOLDER
    if (folder / RESULT).exists():
        return Outcome.read(folder)
    once = DistributedDataParallelKwargs(find_unused_parameters=True)  # unseen experts
    accelerator = Accelerator(cpu=device_kind() == "cpu", kwargs_handlers=[once])
    skeleton = open_reference(root, torch.float32, resident=True).skeleton
    rows = len(skeleton.text.get_output_embeddings().weight)
    head = Head.of(skeleton.text, vocabulary or rows)
    teacher = Teacher(accelerator, skeleton.text, scratch, params.batch_size)
    lessons = teacher("training", documents, progress)
    judges = teacher("held-out", held_out, progress)
    beginning = Beginning(skeleton, Reader.open(root), start, groups, input_scale)
    student = begin(beginning, params.train, INSET)
    work = Work(accelerator, beginning, student, head, lessons, judges, params, scratch)
    return _train(work, progress)


# --- the teacher


@dataclass(frozen=True)
class Lessons:
    """Documents and, in a file each, the source's states that predict their tokens from the 2nd."""

    documents: Documents
    files: Sequence[Path]

    def states(self, number: int) -> Tensor:
        """Return the source's last hidden states, [len - 1, H], f32."""
        hidden: Tensor = load_file(self.files[number])["hidden"]
        return hidden.float()


@dataclass(frozen=True)
class Teacher:
    """The unquantized model, which is run once; processes share the documents."""

    accelerator: Accelerator
    model: Any
    scratch: Path
    batch_size: int

    def __call__(self, name: str, documents: Documents, progress: Progress) -> Lessons:
        folder = self.scratch / "teacher"
        folder.mkdir(exist_ok=True)
        files = [folder / f"{name}-{number:06d}.safetensors" for number in range(len(documents))]
        number, processes = self.accelerator.process_index, self.accelerator.num_processes
        share = [n for n in by_length(documents)[number::processes] if not files[n].exists()]
        for first in range(0, len(share), self.batch_size):
            batch = share[first : first + self.batch_size]
            with _autocast():
                states = last_hidden(self.model, [list(documents[n]) for n in batch])
            kept = states if device_kind() == "cpu" else states.to(torch.bfloat16)
            lengths = [len(documents[n]) - 1 for n in batch]
            for n, hidden in zip(batch, torch.split(kept, lengths), strict=True):
                save_whole(files[n], {"hidden": hidden.clone()})
            progress("source's predictions", first + len(batch), len(share), "documents")
        self.accelerator.wait_for_everyone()
        return Lessons(documents, files)


def by_length(documents: Documents) -> list[int]:
    return sorted(range(len(documents)), key=lambda n: (len(documents[n]), n))


def _autocast() -> AbstractContextManager[Any]:
    """Compute in bf16 on an accelerator; what is trained, and the logits, stay f32."""
    return torch.autocast("cuda", dtype=torch.bfloat16, enabled=device_kind() == "cuda")


# --- training


@dataclass(frozen=True)
class Work:
    """What training reads; see `State` for what it changes."""

    accelerator: Accelerator
    beginning: Beginning
    student: Student
    head: Head
    lessons: Lessons
    held_out: Lessons
    params: Distill
    scratch: Path

    @property
    def latents(self) -> list[nn.Parameter]:
        return [one.latent for one in self.student.trained]

    @property
    def steps(self) -> int:
        per_epoch = math.ceil(len(self.lessons.documents) / self.params.batch_size)
        return self.params.epochs * per_epoch

    def kept(self, step: int) -> Path:
        """Where the state of a step waits while it is the best."""
        return self.scratch / f"best-{step:06d}"


@dataclass
class State:
    """All that the next step depends on: the order of documents follows from `step`."""

    latents: Sequence[nn.Parameter]
    optimizer: Any
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best: int = 0  # the step that is kept
    curve: list[Look] = field(default_factory=list)

    SCALARS: ClassVar = ("step", "tokens", "seconds", "best")

    def save(self, path: Path) -> None:
        part = path.with_suffix(".part")
        state = {name: getattr(self, name) for name in self.SCALARS}
        state["curve"] = [asdict(look) for look in self.curve]
        state["latents"] = [latent.data for latent in self.latents]
        torch.save({**state, "optimizer": self.optimizer.state_dict()}, part)
        part.replace(path)

    def load(self, path: Path) -> None:
        saved = torch.load(path, map_location=device_kind(), weights_only=True)
        for name in self.SCALARS:
            setattr(self, name, saved[name])
        self.curve = [Look(**look) for look in saved["curve"]]
        for latent, value in zip(self.latents, saved["latents"], strict=True):
            latent.data.copy_(value)
        self.optimizer.load_state_dict(saved["optimizer"])


def _train(work: Work, progress: Progress) -> Outcome:
    params, documents = work.params, work.lessons.documents
    model, optimizer = work.accelerator.prepare(
        work.student,
        torch.optim.AdamW(_groups(work), betas=BETAS, eps=EPS, weight_decay=0.0, fused=True),
    )
    state, path = State(work.latents, optimizer), work.scratch / STATE
    if path.exists():
        state.load(path)
        work.student.show()
    clock, losses = Clock(work, state.seconds), list[float]()
    if not state.curve:
        _look(work, state, clock, losses)
    while not (stopped := _why_stop(work, state)):
        batch = batch_at(documents, state.step, params)
        rate = learning_rate(state.step, work.steps, clock.read(), params)
        losses.append(_update(work, model, optimizer, batch, rate))
        state.step += 1
        state.tokens += sum(len(documents[n]) - 1 for n in batch)
        is_last = state.step == work.steps or clock.read() >= clock.limit
        if is_last or state.step % params.evaluate_steps == 0:
            _look(work, state, clock, losses)
        progress("distilling", state.step, work.steps, "steps")
    return _finish(work, state, stopped)


def _groups(work: Work) -> list[dict[str, Any]]:
    """Return the optimizer's groups; `share` is theirs of the learning rate.

    Norms stay as they are where weights train: a norm moves by a step of its dtype, which is more
    at once than a weight learns in many steps.
    """
    norms = [one.latent for one in work.student.trained if isinstance(one, Norm)]
    others = [one.latent for one in work.student.trained if not isinstance(one, Norm)]
    groups = [{"params": others, "share": 1.0}]
    if work.params.train == "norms":
        groups.append({"params": norms, "share": NORM_RATE})
    return groups


def _why_stop(work: Work, state: State) -> str:
    """Return why no step follows, or "": asked after a step that was looked at, or between."""
    if sum(look.step > state.best for look in state.curve) >= work.params.patience:
        return "patience"
    if work.params.minutes is not None and state.seconds >= 60 * work.params.minutes:
        return "minutes"
    return "epochs" if state.step == work.steps else ""


class Clock:
    """Seconds of training, with those of killed runs up to their last look."""

    def __init__(self, work: Work, before: float) -> None:
        self._accelerator, self._began = work.accelerator, time.monotonic() - before
        self.limit = math.inf if work.params.minutes is None else 60 * work.params.minutes

    def read(self) -> float:
        """Return the first process's time, which all go by."""
        now = torch.tensor(time.monotonic() - self._began, device=self._accelerator.device)
        return float(broadcast(now))


def batch_at(documents: Documents, step: int, params: Distill) -> list[int]:
    """Return the documents of a step: shuffled by epoch, then of like length within a batch."""
    size = params.batch_size
    epoch, position = divmod(step, math.ceil(len(documents) / size))
    shuffler = random.Random(f"{params.seed} {epoch}")
    order = list(range(len(documents)))
    shuffler.shuffle(order)
    windows = [order[i : i + size * WINDOW] for i in range(0, len(order), size * WINDOW)]
    order = [n for window in windows for n in sorted(window, key=lambda n: len(documents[n]))]
    groups = [order[i : i + size] for i in range(0, len(order), size)]
    shuffler.shuffle(groups)
    return groups[position]


def learning_rate(step: int, total: int, seconds: float, params: Distill) -> float:
    """Linear warm-up times a cosine from 1 to 0, by steps or by time, whichever ends first."""
    warm = min(1.0, (step + 1) / params.warmup_steps) if params.warmup_steps else 1.0
    done = step / total
    if params.minutes is not None:
        done = max(done, min(1.0, seconds / (60 * params.minutes)))
    return params.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * done))


def _update(
    work: Work, model: nn.Module, optimizer: Any, batch: Sequence[int], rate: float
) -> float:
    """Take one AdamW step on the documents `batch`; return their mean KL before it."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["share"]
    total = sum(len(work.lessons.documents[n]) - 1 for n in batch)
    processes, number = work.accelerator.num_processes, work.accelerator.process_index
    share = batch[number::processes]
    own = share or batch[:1]  # every process takes part in every step, some with a weight of 0
    with _autocast():
        hidden = _predicting(model, [work.lessons.documents[n] for n in own])
    teacher = torch.cat([work.lessons.states(n) for n in own])
    loss, gradient = loss_and_gradient(teacher, hidden.detach(), work.head)
    weight = 1 / total if share else 0.0
    work.accelerator.backward((hidden.float() * gradient).sum() * (weight * processes))  # averaged
    work.student.take_gradients()
    moving = [latent for group in optimizer.param_groups for latent in group["params"]]
    work.accelerator.clip_grad_norm_(moving, CLIP)
    optimizer.step()
    optimizer.zero_grad()
    work.student.show()
    return _sum(work.accelerator, loss * weight)


def _sum(accelerator: Accelerator, value: float) -> float:
    """Return the sum over processes."""
    own = torch.tensor(value, dtype=torch.float64, device=accelerator.device)
    return float(accelerator.reduce(own))


def _predicting(model: nn.Module, documents: Documents) -> Tensor:
    """Return the states that predict each document's tokens from the second on, [T, H]."""
    device, longest = device_kind(), max(map(len, documents))
    ids = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in documents], device=device)
    mask = torch.tensor(
        [[1] * len(ids) + [0] * (longest - len(ids)) for ids in documents], device=device
    )
    hidden = model(ids, mask)
    return torch.cat([row[: len(ids) - 1] for row, ids in zip(hidden, documents, strict=True)])


def loss_and_gradient(teacher: Tensor, student: Tensor, head: Head) -> tuple[float, Tensor]:
    """Return the sum over tokens of KL(teacher || student), and its gradient f32 [T, H].

    Both sides are hidden states [T, H]. Logits, and what autograd keeps of them, exist for `CHUNK`
    tokens at a time, so the head is not run again for the gradient.
    """
    total, gradients = 0.0, []
    for wanted, found in zip(*(torch.split(x, CHUNK) for x in (teacher, student)), strict=True):
        found = found.float().requires_grad_(True)
        with torch.no_grad():
            reference = head.logits(wanted.to(found.device))
        kl = kl_divergence(reference, head.logits(found)).sum()
        gradients += torch.autograd.grad(kl, found)
        total += float(kl.detach())
    return total, torch.cat(gradients)


# --- looks at the held-out documents, and what is kept


def _look(work: Work, state: State, clock: Clock, losses: list[float]) -> None:
    """Measure, keep the state if it is the best so far, and save all that the next step needs."""
    kl, best = held_out_kl(work), min((look.kl for look in state.curve), default=math.inf)
    state.seconds = clock.read()
    loss = sum(losses) / len(losses) if losses else math.nan
    losses.clear()
    seconds = round(state.seconds, 1)
    found = [value if math.isfinite(value) else None for value in (loss, kl)]
    state.curve.append(Look(state.step, state.tokens, seconds, *found))
    is_better = state.step > 0 and kl < best
    state.best = state.step if is_better else state.best
    if work.accelerator.is_main_process:
        if is_better:
            _keep(work, work.kept(state.step))
        state.save(work.scratch / STATE)
        for old in work.scratch.glob("best-*"):
            if old != work.kept(state.best):
                shutil.rmtree(old)
    work.accelerator.wait_for_everyone()


@torch.inference_mode()
def held_out_kl(work: Work) -> float:
    """Return the mean KL per token on the held-out documents; processes share them."""
    lessons, accelerator = work.held_out, work.accelerator
    order, size = by_length(lessons.documents), work.params.batch_size
    batches = [order[first : first + size] for first in range(0, len(order), size)]
    total = 0.0
    for batch in batches[accelerator.process_index :: accelerator.num_processes]:
        with _autocast():
            found = _predicting(work.student, [lessons.documents[n] for n in batch])
        wanted = torch.cat([lessons.states(n) for n in batch]).to(found.device)
        for teacher, student in zip(*(torch.split(x, CHUNK) for x in (wanted, found)), strict=True):
            logits = (work.head.logits(teacher), work.head.logits(student))
            total += float(kl_divergence(*logits).double().sum())
    tokens = sum(len(ids) - 1 for ids in lessons.documents)
    return _sum(accelerator, total) / tokens


def _keep(work: Work, folder: Path, trained: bool = True) -> None:
    """Write what `Layers` reads: what would be stored now, or else what the start has."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    start = work.beginning.start
    changed = work.student.stored() if trained else {}
    for number, modules in sorted(_by_layer(start.notes).items()):
        tensors, notes = dict[str, Tensor](), {}
        for module in modules:
            parts, new = start.parts(module), changed.get(module, {})
            stored = {**parts, **{name: part.cpu().clone() for name, part in new.items()}}
            notes[module] = {
                **start.notes[module],
                **(_note(work, module, parts, stored) if new else {}),
            }
            tensors |= {f"{module}.{name}": part for name, part in stored.items()}
        save_layer(folder / f"layer-{number:05d}.safetensors", tensors, notes)
    replaced = {**start.replaced, **(work.student.replaced() if trained else {})}
    if replaced:
        save_whole(folder / REPLACED, {name: part.cpu() for name, part in replaced.items()})


def _by_layer(modules: Iterable[str]) -> dict[int, list[str]]:
    """Group modules by the first number in their name, those without one last."""
    found: dict[int, list[str]] = defaultdict(list)
    for module in modules:
        number = re.search(r"\.(\d+)\.", module)
        found[int(number[1]) if number else 99999].append(module)
    return found


def _note(work: Work, module: str, before: Parts, after: Parts) -> dict[str, float]:
    """Return the relative error to the source, and which share of the codes training changed."""
    source = work.beginning.read(work.beginning.matrices[module])
    error = float((dequantize(after) - source).norm())
    norm = float(source.norm())
    changed = nvfp4.unpack(before["weight"]) != nvfp4.unpack(after["weight"])
    return {
        "relative_error": round(error / norm, 6) if norm else 0.0,
        "codes_changed": round(float(changed.float().mean()), 6),
    }


def _finish(work: Work, state: State, stopped: str) -> Outcome:
    """Give the kept state its name; where nothing was better, that is the start's bytes."""
    folder, kept = work.scratch / FOLDER, work.kept(state.best)
    kls = [look.kl for look in state.curve]
    outcome = Outcome(folder, kls[0], min(kls), state.best, stopped, state.curve)
    if work.accelerator.is_main_process:
        if not state.best:
            _keep(work, folder, trained=False)
        elif kept.exists():
            shutil.rmtree(folder, ignore_errors=True)
            kept.rename(folder)
        outcome.write()
    work.accelerator.wait_for_everyone()
    return outcome
