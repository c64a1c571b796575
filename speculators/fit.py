"""Train one draft from what lies on disk: in this process, or in several that accelerate starts.

accelerate launch -m onboard.speculators.fit WORK.json
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from onboard.errors import EnvironmentFault
from onboard.hardware import device_kind
from onboard.recipe import Draft, Speculate
from onboard.speculators import export, online
from onboard.speculators.acceptance import replay
from onboard.speculators.eagle3 import Eagle3
from onboard.speculators.head import Head
from onboard.speculators.online import Target
from onboard.speculators.shape import DraftConfig
from onboard.speculators.shards import places, split, stored
from onboard.speculators.training import Feed, train
from onboard.speculators.vocabulary import Vocabulary, count, coverage
from onboard.store import write_json

METRICS, LOG = "metrics.json", "training.jsonl"
LAUNCHER = "accelerate.commands.accelerate_cli"

# The first one: the launcher's own errors come behind those of its processes.
ERROR = re.compile(r"^(\[rank\d+\]: ?)?(?P<said>[\w.]*(Error|Fault): .*)$", re.MULTILINE)

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Work:
    """A draft to train: `features` is a folder, `target` a `config.json`; `folder` gets it all.

    `model` is what states are taken from where the features hold none.

    The folder holds the state of a training that was cut short, and when it is done an export per
    engine, `training.jsonl` and, last, `metrics.json`.
    """

    features: Path
    target: Path
    params: Speculate
    shape: Draft
    folder: Path
    model: Target | None = None

    @property
    def is_done(self) -> bool:
        return (self.folder / METRICS).exists()

    @property
    def metrics(self) -> dict[str, float]:
        found: dict[str, float] = json.loads((self.folder / METRICS).read_text())
        return found

    def write(self) -> Path:
        """Write the file that another process reads the work from."""
        file = self.folder / "work.json"
        paths = {name: str(getattr(self, name)) for name in ("features", "target", "folder")}
        sections = {name: getattr(self, name).model_dump() for name in ("params", "shape")}
        model = None
        if self.model is not None:
            own = self.model
            model = {"root": str(own.root), "adaptation": own.adaptation and str(own.adaptation)}
        write_json(file, {**paths, **sections, "model": model})
        return file

    @classmethod
    def read(cls, file: Path) -> Work:
        found = json.loads(file.read_text())
        features, target, folder = (Path(found[n]) for n in ("features", "target", "folder"))
        params, shape = Speculate(**found["params"]), Draft(**found["shape"])
        model = None
        if given := found["model"]:
            adaptation = given["adaptation"] and Path(given["adaptation"])
            model = Target(Path(given["root"]), adaptation)
        return cls(features, target, params, shape, folder, model)


def fit(work: Work, progress: Progress) -> None:
    """Do the work, with as many processes as its params ask for, unless it is done."""
    work.folder.mkdir(parents=True, exist_ok=True)
    processes = work.params.processes or max(1, torch.cuda.device_count())
    if work.is_done:
        return
    if processes == 1:
        fit_here(work, progress)
    else:
        _launch(work, processes, progress)


def fit_here(work: Work, progress: Progress) -> None:
    """Do the work, or this process's share of it."""
    params = work.params
    index = json.loads((work.features / "index.json").read_text())
    target = json.loads(work.target.read_text())
    head = Head.load(work.features, index["head"])
    trained, held_out = split(places(work.features))
    counts = count((d.read_tokens() for d in trained), len(head.output))
    config = DraftConfig.of_target(target, params.draft_vocab_size, work.shape)
    vocabulary = Vocabulary.most_frequent(counts, config.draft_vocab_size)
    draft = Eagle3.initial(config, head, vocabulary, params.seed)
    feed: Feed = stored
    if index["storage"] == "online":
        assert work.model is not None
        runner, tokens = work.model.open(), params.buffer_tokens
        feed = partial(online.feed, runner, tokens=tokens)
        with PartialState().main_process_first():
            held_out = online.store(runner, held_out, work.folder, tokens)
    log = train(draft, head, vocabulary, trained, held_out, params, work.folder, progress, feed)
    if not PartialState().is_main_process:
        return
    for engine in export.engines(config):
        export.write(
            work.folder / engine,
            engine,
            draft,
            vocabulary,
            tuple(index["aux_layers"]),
            target.get("architectures") or [],
            params.ttt_steps,
        )
        export.read(work.folder / engine, engine)
    (work.folder / LOG).write_text("".join(json.dumps(row) + "\n" for row in log))
    written = export.read(work.folder / "vllm", "vllm")
    estimate = replay(written.draft(), written.vocabulary, held_out, params.ttt_steps)
    last_epoch = log[-(len(log) // params.epochs) :]
    found: dict[str, Any] = {
        "offline_acceptance_length": estimate.length,
        "draft_parameters": sum(p.numel() for p in draft.parameters() if p.requires_grad),
        "draft_vocab_coverage": coverage(
            vocabulary, count((d.read_tokens() for d in held_out), len(head.output))
        ),
        "training_tokens": log[-1]["tokens"],
        "training_loss": sum(row["loss"] for row in last_epoch) / len(last_epoch),
    }
    write_json(work.folder / METRICS, found)


def _launch(work: Work, processes: int, progress: Progress) -> None:
    log = work.folder / "processes.log"
    command = [sys.executable, "-m", LAUNCHER, "launch", "--num_processes", str(processes)]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    command += ["--multi_gpu"] if device_kind() == "cuda" else ["--cpu"]
    command += ["-m", "onboard.speculators.fit", str(work.write())]
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            done, _, total = line.strip().partition("/")
            if done.isdecimal() and total.isdecimal():
                progress(int(done), int(total))
    if process.returncode or not work.is_done:
        found = ERROR.search(log.read_text(errors="replace"))
        reason = found["said"] if found else "no error was printed"
        raise EnvironmentFault(
            f"training on {processes} processes ended with {process.returncode}: {reason}",
            f"less {log}",
        )


def main() -> None:
    """Do this process's share of the work in the file named on the command line."""

    def say(done: int, total: int) -> None:
        if PartialState().is_main_process:
            print(f"{done}/{total}", flush=True)

    fit_here(Work.read(Path(sys.argv[1])), say)


if __name__ == "__main__":
    main()
