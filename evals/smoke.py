"""Stage `smoke`: the bytes that ship, served by a real engine, without and with the speculator.

The bundle is laid out in scratch as it will ship, and started with the commands that will ship.
Without the speculator: probes, greedy and sampled answers to the evaluation prompts. With it: the
same answers again, of which the greedy ones must agree, and the acceptance of its drafts; and the
same with the model's own MTP layers, where it has any and the engine can run them. All are timed
at the recipe's concurrencies. From all this follows what ships, and what drafts by default.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from onboard.checkpoint.assemble import assemble
from onboard.engines import server, vllm
from onboard.engines.client import Client
from onboard.engines.environment import Engine, find
from onboard.engines.vllm import MTP
from onboard.errors import EnvironmentFault, InputError
from onboard.evals import answers, probes, results, sampling, speed
from onboard.evals.acceptance import Drafts
from onboard.hardware import device_kind
from onboard.pipeline import Job
from onboard.recipe import Smoke
from onboard.store import write_json

Row = dict[str, Any]
Commands = dict[str, list[str]]  # by phase: "plain", "speculative" and perhaps "mtp"

DRAFT = Path("speculator/vllm")  # within a bundle

NEUTRAL = (1, 2, 3, 4, 5, 6, 7, 8)  # token ids to probe with where every prompt is private
CPU_HINT = (
    "read the whole log; vLLM's CPU platform does not run every architecture (not sparse "
    "attention, not sigmoid routers): such a model needs a GPU and may be in order"
)


def run(job: Job[Smoke]) -> None:
    """Write what was measured and said, and in `ship.json` whether the speculator ships.

    Files: those of `results.write`, and a log of the engine per phase. Raises EnvironmentFault
    where there is no engine, or one that does not start, stops answering, or never uses the
    speculator; that it cannot run the model's MTP layers is a result.
    """
    engine = find(job.params.engine, job.params.engine_minimum)
    prompts = usable_prompts(job)
    bundle = lay_out(job)
    config = json.loads((bundle / "checkpoint" / "config.json").read_text())
    environment = vllm.environment(job.params, device_kind(), config)
    commands = commands_of(job.params, bundle, has_mtp(job))

    def start(name: str) -> server.Launch:
        return launch(commands[name], engine, bundle, environment)

    phases = {
        "plain": phase(job, "plain", start, lambda client: measure_plain(job, client, prompts)),
        "speculative": phase(job, "speculative", start, _drafting(job, "speculative", prompts)),
    }
    if MTP in commands:
        phases[MTP] = attempt(job, MTP, start, _drafting(job, MTP, prompts))
    results.write(job, results.Served(engine, environment, commands), phases, prompts)
    for name in phases:
        shutil.copyfile(job.scratch / f"{name}.log", job.out / f"{name}.log")


def _drafting(job: Job[Smoke], name: str, prompts: Sequence[Row]) -> Callable[[Client], Row]:
    return lambda client: measure_drafting(job, client, name, prompts)


def usable_prompts(job: Job[Smoke]) -> list[Row]:
    """Return the evaluation prompts that leave room for an answer."""
    room = job.params.max_model_len - job.params.max_tokens
    rows = job.inputs["data"].lines("evaluation_prompts.jsonl")
    fitting = [row for row in rows if len(row["ids"]) <= room]
    if not fitting:
        raise InputError(
            f"none of the {len(rows)} evaluation prompts leaves {job.params.max_tokens} tokens "
            f"within smoke.max_model_len = {job.params.max_model_len}",
            "raise smoke.max_model_len",
        )
    if len(fitting) < len(rows):
        job.warn(f"{len(rows) - len(fitting)} evaluation prompts are longer than {room} tokens")
    return fitting


def lay_out(job: Job[Smoke]) -> Path:
    """Return a directory laid out as the bundle: `checkpoint/` and `speculator/vllm/`."""
    bundle, unfinished = job.scratch / "bundle", job.scratch / "bundle.tmp"
    if not bundle.exists():
        shutil.rmtree(unfinished, ignore_errors=True)
        assemble(job.inputs["quantize"], job.inputs["source"], unfinished / "checkpoint")
        (unfinished / DRAFT).parent.mkdir()
        draft = (job.inputs["speculate"].path / "vllm").resolve()
        (unfinished / DRAFT).symlink_to(draft, target_is_directory=True)
        unfinished.rename(bundle)
    return bundle


def has_mtp(job: Job[Smoke]) -> bool:
    """Whether the checkpoint has MTP layers."""
    return bool(job.inputs["adapt"].json("adaptation.json")["mtp"]["tensors"])


def commands_of(params: Smoke, bundle: Path, mtp: bool) -> Commands:
    """Return the commands that ship: without a speculator, with that of a laid-out bundle, MTP."""
    family = json.loads((bundle / DRAFT / "config.json").read_text())["speculators_model_type"]
    drafters = {"plain": None, "speculative": family} | ({MTP: MTP} if mtp else {})
    return {name: vllm.command(params, device_kind(), each) for name, each in drafters.items()}


def launch(
    command: Sequence[str], engine: Engine, bundle: Path, environment: Mapping[str, str]
) -> server.Launch:
    """Return a command that ships, pointed at this directory, this engine and this machine."""
    filled = vllm.fill(command, python=str(engine.python), bundle=str(bundle.resolve()))
    return server.Launch(tuple(filled), {**environment, **vllm.threading(device_kind())})


def phase(
    job: Job[Smoke],
    name: str,
    start: Callable[[str], server.Launch],
    measure: Callable[[Client], Row],
) -> Row:
    """Start the engine and measure, or return what an earlier, interrupted run had measured."""
    done = job.scratch / f"{name}.json"
    if done.exists():
        job.progress(f"{name}: measured before", 1, 1)
    else:
        command = start(name)
        with _started(job, name, command) as engine:
            result = measure(Client(engine.url))
            log = engine.log.read_text(errors="replace")
            result |= {
                "startup_seconds": round(engine.startup_seconds, 2),
                "modes": vllm.modes(log),
            }
            result["threads"] = command.environment.get("OMP_NUM_THREADS")
        unfinished = done.with_suffix(".tmp")
        write_json(unfinished, result)
        unfinished.rename(done)
    measured = json.loads(done.read_text())
    assert isinstance(measured, dict)
    return measured


def attempt(
    job: Job[Smoke],
    name: str,
    start: Callable[[str], server.Launch],
    measure: Callable[[Client], Row],
) -> Row:
    """Return what `phase` does, or `failed`: why the engine cannot run it."""
    try:
        return phase(job, name, start, measure)
    except EnvironmentFault as e:
        reason = str(e).strip().splitlines()[0][:300]
        job.warn(f"the engine does not run the model's MTP layers: {reason}")
        return {"failed": reason}


def _started(
    job: Job[Smoke], name: str, command: server.Launch
) -> AbstractContextManager[server.Server]:
    limit = job.params.startup_seconds

    def waiting(seconds: float) -> None:
        job.progress(f"{name}: starting the engine", round(seconds), limit, "s")

    hint = CPU_HINT if device_kind() == "cpu" else None
    return server.running(command, job.scratch / f"{name}.log", limit, waiting, hint)


def measure_plain(job: Job[Smoke], client: Client, prompts: Sequence[Row]) -> Row:
    """Probe; answer every prompt greedily (timed) and at temperature 0.7; look for loops.

    `again` is what the engine thinks of its greedy answers in another batch shape.
    """
    job.progress("plain: probes", 0, 1)
    shown = next((p["ids"] for p in prompts if not p.get("private")), NEUTRAL)
    asked = probes.probes(vllm.MODEL, shown, job.params.tool_call_parser is not None)
    rows = probes.ask(client, asked, job.params.max_num_seqs)
    measured = _measured(job, client, prompts, "plain", answer)
    again = answers.read_again(
        client,
        [prompt["ids"] for prompt in prompts],
        measured["greedy"],
        job.params.max_num_seqs,
        _progress(job, "plain: its answers read again", len(prompts)),
    )
    return {"probes": rows, **measured, "again": again}


def measure_drafting(job: Job[Smoke], client: Client, name: str, prompts: Sequence[Row]) -> Row:
    """Give such answers again, and count what became of each one's drafts."""
    answer(job, client, prompts[:1], f"{name}: warming up")
    return _measured(job, client, prompts, name, counted)


def _measured(
    job: Job[Smoke],
    client: Client,
    prompts: Sequence[Row],
    name: str,
    given: Callable[..., tuple[list[Row], float]],
) -> Row:
    """Return what both phases measure; `given` is `answer`, or what does the same and more."""
    greedy, seconds = given(job, client, prompts, f"{name}: greedy")
    sampled, _ = given(job, client, prompts, f"{name}: sampled", answers.TEMPERATURE)
    answers.mark_loops(client, [*greedy, *sampled])
    return {
        "greedy": greedy,
        "sampled": sampled,
        "seconds": seconds,
        "paces": paces(job, client, prompts, name),
        "first_tokens": first_tokens(job, client, prompts, name),
    }


def counted(
    job: Job[Smoke], client: Client, prompts: Sequence[Row], what: str, temperature: float = 0
) -> tuple[list[Row], float]:
    """Return what `answer` does, its drafts held against the engine's own count.

    Every prompt's counts must add up to the engine's; if not, they are not to be trusted.
    """
    before = vllm.speculation(client.get("/metrics"))
    rows, seconds = answer(job, client, prompts, what, temperature)
    found = vllm.speculation(client.get("/metrics")) - before
    if found.drafts == 0:
        phase_name = what.split(":")[0]
        raise EnvironmentFault(
            "the engine started with the speculator, but it never drafted a token "
            f"in {len(prompts)} answers",
            f"less {job.scratch / phase_name}.log",
        )
    drafts = [Drafts(tuple(row["histogram"])) for row in rows]
    own = (sum(d.count for d in drafts), sum(d.accepted for d in drafts))
    if own != (found.drafts, found.accepted_tokens):
        raise EnvironmentFault(
            f"the engine counts {found.drafts} drafts and {found.accepted_tokens} accepted "
            f"tokens, but its answers count {own[0]} and {own[1]}",
            "is anything else sending requests to it?",
        )
    return rows, seconds


def answer(
    job: Job[Smoke],
    client: Client,
    prompts: Sequence[Row],
    what: str,
    temperature: float = 0,
    width: int | None = None,
) -> tuple[list[Row], float]:
    """Return an answer per prompt and the seconds that all of them took together.

    `width` requests are under way at once, the engine's `max_num_seqs` by default.
    """
    length = job.params.max_tokens
    requests = [
        answers.with_candidates(answers.request(prompt["ids"], length, temperature))
        for prompt in prompts
    ]
    return _ask(job, client, requests, what, width)


def paces(job: Job[Smoke], client: Client, prompts: Sequence[Row], name: str) -> list[Row]:
    """Time greedy answers at every concurrency of the recipe.

    The engine has answered these prompts before: it is warm, and has them in its prefix cache
    with the speculator as without it, so that it is decoding that is timed.
    """
    rows = []
    for width in job.params.concurrencies:
        what = f"{name}: speed at concurrency {width}"
        said, seconds = answer(job, client, speed.chosen(prompts, width), what, width=width)
        rows.append({"concurrency": width, **speed.pace(said, seconds)})
    return rows


def first_tokens(
    job: Job[Smoke], client: Client, prompts: Sequence[Row], name: str
) -> list[list[list[int]]]:
    """Return the first sampled tokens of many answers to the recipe's number of prompts."""
    ids = [prompt["ids"] for prompt in prompts[: job.params.sampling_checks]]
    if not ids:
        return []
    requests = sampling.requests(ids)
    said, _ = _ask(job, client, requests, f"{name}: sampling")
    return sampling.table([row["ids"] for row in said])


def _ask(
    job: Job[Smoke], client: Client, requests: Sequence[Row], what: str, width: int | None = None
) -> tuple[list[Row], float]:
    finished = _progress(job, what, len(requests))
    return answers.ask(client, requests, width or job.params.max_num_seqs, finished)


def _progress(job: Job[Smoke], what: str, total: int) -> Callable[[int], None]:
    return lambda count: job.progress(what, count, total, "prompts")
