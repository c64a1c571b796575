"""Stage `smoke`: the bytes that ship, served by a real engine, without and with the speculator.

The bundle is laid out in scratch as it will ship, and started with the commands that will ship.
Without the speculator: probes, greedy and sampled answers to the evaluation prompts. With it: the
same answers again, of which the greedy ones must agree, and the acceptance of its drafts. Both are
timed at the recipe's concurrencies. From all this follows whether the speculator ships.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from onboard.checkpoint.assemble import assemble
from onboard.checkpoint.headers import read_headers
from onboard.engines import server, vllm
from onboard.engines.client import Client
from onboard.engines.environment import Engine, find
from onboard.errors import EnvironmentFault, InputError
from onboard.evals import acceptance, answers, probes, roofline, sampling, ship, speed
from onboard.evals.acceptance import Drafts
from onboard.evals.lossless import Agreement, compare
from onboard.hardware import device_kind
from onboard.pipeline import Job
from onboard.recipe import Smoke
from onboard.store import write_json

Row = dict[str, Any]
Commands = dict[str, list[str]]  # the argv without ("plain") and with the speculator

DRAFT = Path("speculator/vllm")  # within a bundle

WITHHELD = "(the user's own traffic: not shown)"
NEUTRAL = (1, 2, 3, 4, 5, 6, 7, 8)  # token ids to probe with where every prompt is private
CPU_HINT = (
    "read the whole log; vLLM's CPU platform does not run every architecture (not sparse "
    "attention, not sigmoid routers): such a model needs a GPU and may be in order"
)


def run(job: Job[Smoke]) -> None:
    """Write what was measured and said, and in `ship.json` whether the speculator ships.

    Files: `metrics.json`, `engine.json`, `probes.json`, `samples.jsonl`, `acceptance.json`,
    `speed.json`, `ship.json`, logs, and `sampling.json` where the recipe asks for it. Raises
    EnvironmentFault where there is no engine, or one that does not start, stops answering, or
    never uses the speculator.
    """
    engine = find(job.params.engine, job.params.engine_minimum)
    prompts = usable_prompts(job)
    bundle = lay_out(job)
    config = json.loads((bundle / "checkpoint" / "config.json").read_text())
    environment = vllm.environment(job.params, device_kind(), config)
    commands = commands_of(job.params, bundle)

    def start(name: str) -> server.Launch:
        return launch(commands[name], engine, bundle, environment)

    plain = phase(job, "plain", start, lambda client: measure_plain(job, client, prompts))
    fast = phase(
        job, "speculative", start, lambda client: measure_speculative(job, client, prompts)
    )
    said = (side[kind] for side in (plain, fast) for kind in ("greedy", "sampled"))
    samples = [sample(*rows) for rows in zip(prompts, *said, strict=True)]
    _write(job, engine, environment, commands, plain, fast, samples)


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


def commands_of(params: Smoke, bundle: Path) -> Commands:
    """Return the commands that ship, without and with the speculator of a laid-out bundle."""
    family = json.loads((bundle / DRAFT / "config.json").read_text())["speculators_model_type"]
    families = {"plain": None, "speculative": family}
    return {name: vllm.command(params, device_kind(), each) for name, each in families.items()}


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


def _started(
    job: Job[Smoke], name: str, command: server.Launch
) -> AbstractContextManager[server.Server]:
    limit = job.params.startup_seconds

    def waiting(seconds: float) -> None:
        job.progress(f"{name}: starting the engine", round(seconds), limit, "s")

    hint = CPU_HINT if device_kind() == "cpu" else None
    return server.running(command, job.scratch / f"{name}.log", limit, waiting, hint)


def measure_plain(job: Job[Smoke], client: Client, prompts: Sequence[Row]) -> Row:
    """Probe; answer every prompt greedily (timed) and at temperature 0.7; look for loops."""
    job.progress("plain: probes", 0, 1)
    shown = next((p["ids"] for p in prompts if not p.get("private")), NEUTRAL)
    asked = probes.probes(vllm.MODEL, shown, job.params.tool_call_parser is not None)
    rows = probes.ask(client, asked, job.params.max_num_seqs)
    return {"probes": rows, **_measured(job, client, prompts, "plain", answer)}


def measure_speculative(job: Job[Smoke], client: Client, prompts: Sequence[Row]) -> Row:
    """Give such answers again, and count what became of each one's drafts."""
    answer(job, client, prompts[:1], "speculative: warming up")
    return _measured(job, client, prompts, "speculative", counted)


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
        raise EnvironmentFault(
            "the engine started with the speculator, but it never drafted a token "
            f"in {len(prompts)} answers",
            f"less {job.scratch / 'speculative.log'}",
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
    def finished(count: int) -> None:
        job.progress(what, count, len(requests), "prompts")

    return answers.ask(client, requests, width or job.params.max_num_seqs, finished)


def sample(prompt: Row, greedy: Row, sampled: Row, fast: Row, fast_sampled: Row) -> Row:
    """Return a row of `samples.jsonl`: a prompt's answers, the `fast` ones with the speculator.

    `looped` is about both greedy answers, which should be the same; `looped_sampled` about the one
    with the speculator, whose drafts are `drafts_sampled`.
    Of a private prompt the row holds what was counted, and no word of it or its answers.
    """
    candidates = [
        {int(token): value for token, value in top.items()} for top in greedy["candidates"]
    ]
    agreement: Agreement = compare(greedy["ids"], candidates, fast["ids"])
    private = prompt.get("private", False)

    def shown(words: str | None) -> str | None:
        return WITHHELD if private and words else words

    return {
        "id": prompt["id"],
        "domain": prompt["domain"],
        "prompt": shown("\n".join(f"{m['role']}: {m['content']}" for m in prompt["messages"])),
        "plain": shown(greedy["text"]),
        "speculative": shown(fast["text"]),
        "sampled": shown(sampled["text"]),
        "looped": bool(greedy["loop"] or fast["loop"]),
        "looped_sampled": bool(fast_sampled["loop"]),
        "loops": {"greedy": shown(greedy["loop"]), "sampled": shown(sampled["loop"])},
        "agreement": agreement.kind,
        "gap": agreement.gap,
        "position": agreement.position,
        "drafts": fast["histogram"],
        "drafts_sampled": fast_sampled["histogram"],
    }


def metrics(plain: Row, fast: Row, samples: Sequence[Row]) -> dict[str, float]:
    """Return the flat numbers, speed at the recipe's concurrencies apart.

    `looped_share` is over the greedy and sampled answers without the speculator.
    """
    loops = [loop for row in samples for loop in row["loops"].values()]
    kinds = [row["agreement"] for row in samples]
    return {
        "probes": len(plain["probes"]),
        "probes_failed": sum(not row["passed"] for row in plain["probes"]),
        "prompts": len(samples),
        "looped_share": sum(loop is not None for loop in loops) / len(loops),
        "divergences": kinds.count("diverged"),
        "exempt": kinds.count("near-tie"),
        "near_tie_share": kinds.count("near-tie") / len(samples),
        "tokens_per_s": _throughput(plain),
        "tokens_per_s_speculative": _throughput(fast),
        **acceptance.metrics(samples),
    }


def _throughput(phase: Row) -> float:
    return float(sum(len(row["ids"]) for row in phase["greedy"]) / phase["seconds"])


def speeds(job: Job[Smoke], plain: Row, fast: Row, acceptance_length: float | None) -> Row:
    """Return the content of `speed.json`: paces and speed-ups, and what the expected ones rest on.

    Without an acceptance length there is nothing to expect.
    """
    draft = roofline.draft_bytes(read_headers(job.inputs["speculate"].path / "vllm"))
    checkpoint = read_headers(job.inputs["quantize"].path / "checkpoint")
    target = roofline.target_decode(checkpoint, job.inputs["adapt"].json("adaptation.json"))
    drafted = job.params.num_speculative_tokens
    shape = json.loads((job.inputs["speculate"].path / "vllm" / "config.json").read_text())
    passes = 1 if shape["speculators_model_type"] == "peagle" else drafted

    def expected(concurrency: int) -> float | None:
        if acceptance_length is None:
            return None
        return roofline.expected_speedup(
            acceptance_length, drafted, draft, target, concurrency, passes
        )

    return {
        "rows": speed.compare(plain["paces"], fast["paces"], expected),
        "acceptance_length": acceptance_length,
        "drafted": drafted,
        "draft_bytes": draft,
        "target_bytes": target.step_bytes(1, context=0),
    }


def _write(
    job: Job[Smoke],
    engine: Engine,
    environment: Mapping[str, str],
    commands: Commands,
    plain: Row,
    fast: Row,
    samples: Sequence[Row],
) -> None:
    found = metrics(plain, fast, samples)
    if "acceptance_length" not in found:
        job.warn("every greedy answer loops: there is no acceptance length")
    timed = speeds(job, plain, fast, found.get("acceptance_length"))
    found |= speed.metrics(timed["rows"])
    if plain["first_tokens"]:
        compared = sampling.compare(plain["first_tokens"], fast["first_tokens"])
        found |= compared.metrics
        write_json(job.out / "sampling.json", compared.as_dict())
    native = vllm.runs_natively(device_kind(), plain["modes"])
    write_json(job.out / "metrics.json", found)
    write_json(job.out / "engine.json", _facts(engine, environment, commands, plain, fast))
    write_json(job.out / "probes.json", plain["probes"])
    write_json(job.out / "acceptance.json", acceptance.tables(samples))
    write_json(job.out / "speed.json", timed)
    write_json(job.out / "ship.json", ship.decide(job.params, found, native))
    lines = [json.dumps(row, sort_keys=True) for row in samples]
    (job.out / "samples.jsonl").write_text("".join(f"{line}\n" for line in lines))
    for name in ("plain", "speculative"):
        shutil.copyfile(job.scratch / f"{name}.log", job.out / f"{name}.log")


def _facts(
    engine: Engine, environment: Mapping[str, str], commands: Commands, plain: Row, fast: Row
) -> Row:
    """Return the content of `engine.json`: what ran, how, and the commands that ship."""
    phases = {"plain": plain, "speculative": fast}
    return {
        "engine": engine.name,
        "version": engine.version,
        "mode": "; ".join(plain["modes"]) or vllm.UNQUANTIZED,
        "dtype": {"cpu": "float32"}.get(device_kind(), "auto"),
        "commands": commands,
        "environment": dict(environment),
        "threads": {name: phase["threads"] for name, phase in phases.items()},
        "startup_seconds": {name: phase["startup_seconds"] for name, phase in phases.items()},
    }
