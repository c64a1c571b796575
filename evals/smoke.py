"""Stage `smoke`: the bytes that ship, served by a real engine, without and with the speculator.

The bundle is laid out in scratch as it will ship, and started with the commands that will ship.
Without the speculator: probes, greedy and sampled answers to the evaluation prompts. With it: the
same greedy answers, which must agree, and the acceptance length in the engine.
"""

from __future__ import annotations

import itertools
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

from onboard.checkpoint.assemble import assemble
from onboard.engines import server, vllm
from onboard.engines.client import Client, Exchange
from onboard.engines.environment import Engine, find
from onboard.errors import EnvironmentFault, InputError
from onboard.evals import acceptance, probes
from onboard.evals.acceptance import Drafts
from onboard.evals.loops import find_loop
from onboard.evals.lossless import Agreement, compare
from onboard.hardware import device_kind
from onboard.pipeline import Job
from onboard.recipe import Smoke
from onboard.store import write_json

Row = dict[str, Any]

CANDIDATES = 5  # log-probabilities kept at each position
TEMPERATURE = 0.7
CPU_HINT = (
    "read the whole log; vLLM's CPU platform does not run every architecture (not sparse "
    "attention, not sigmoid routers): such a model needs a GPU and may be in order"
)


def run(job: Job[Smoke]) -> None:
    """Write `metrics.json`, `engine.json`, `probes.json`, `samples.jsonl`, `acceptance.json`, logs.

    Raises EnvironmentFault where there is no engine, or one that does not start, stops answering,
    or never uses the speculator.
    """
    engine = find(job.params.engine, job.params.engine_minimum)
    prompts = usable_prompts(job)
    bundle = lay_out(job)
    config = json.loads((bundle / "checkpoint" / "config.json").read_text())
    environment = vllm.environment(job.params, device_kind(), config)

    def start(speculative: bool) -> server.Launch:
        return launch(job.params, engine, bundle, environment, speculative)

    plain = phase(job, "plain", start, lambda client: measure_plain(job, client, prompts))
    fast = phase(
        job, "speculative", start, lambda client: measure_speculative(job, client, prompts)
    )
    samples = [
        sample(prompt, *answers)
        for prompt, *answers in zip(
            prompts, plain["greedy"], plain["sampled"], fast["greedy"], strict=True
        )
    ]
    _write(job, engine, environment, plain, fast, samples)


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
        (unfinished / "speculator").mkdir()
        draft = (job.inputs["speculate"].path / "vllm").resolve()
        (unfinished / "speculator" / "vllm").symlink_to(draft, target_is_directory=True)
        unfinished.rename(bundle)
    return bundle


def launch(
    params: Smoke, engine: Engine, bundle: Path, environment: Mapping[str, str], speculative: bool
) -> server.Launch:
    """Return the command that ships, pointed at this directory, this engine and this machine."""
    device = device_kind()
    argv = vllm.command(params, device, speculative)
    return server.Launch(
        tuple(vllm.fill(argv, python=str(engine.python), bundle=str(bundle.resolve()))),
        {**environment, **vllm.threading(device)},
    )


def phase(
    job: Job[Smoke],
    name: str,
    start: Callable[[bool], server.Launch],
    measure: Callable[[Client], Row],
) -> Row:
    """Start the engine and measure, or return what an earlier, interrupted run had measured."""
    done = job.scratch / f"{name}.json"
    if done.exists():
        job.progress(f"{name}: measured before", 1, 1)
    else:
        command = start(name == "speculative")
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
    asked = probes.probes(vllm.MODEL, prompts[0]["ids"], job.params.tool_call_parser is not None)
    rows = probes.ask(client, asked, job.params.max_num_seqs)
    greedy, seconds = answer(job, client, prompts, "plain: greedy")
    sampled, _ = answer(job, client, prompts, "plain: sampled", temperature=TEMPERATURE)
    mark_loops(client, [*greedy, *sampled])
    return {"probes": rows, "greedy": greedy, "sampled": sampled, "seconds": seconds}


def measure_speculative(job: Job[Smoke], client: Client, prompts: Sequence[Row]) -> Row:
    """Answer every prompt greedily (timed) and count what became of each prompt's drafts.

    Every prompt's own counts must add up to the engine's; if not, they are not to be trusted.
    """
    answer(job, client, prompts[:1], "speculative: warming up")
    before = vllm.speculation(client.get("/metrics"))
    greedy, seconds = answer(job, client, prompts, "speculative: greedy")
    counted = vllm.speculation(client.get("/metrics")) - before
    if counted.drafts == 0:
        raise EnvironmentFault(
            "the engine started with the speculator, but it never drafted a token "
            f"in {len(prompts)} answers",
            f"less {job.scratch / 'speculative.log'}",
        )
    drafts = [Drafts(tuple(row["histogram"])) for row in greedy]
    own = (sum(d.count for d in drafts), sum(d.accepted for d in drafts))
    if own != (counted.drafts, counted.accepted_tokens):
        raise EnvironmentFault(
            f"the engine counts {counted.drafts} drafts and {counted.accepted_tokens} accepted "
            f"tokens, but its answers count {own[0]} and {own[1]}",
            "is anything else sending requests to it?",
        )
    mark_loops(client, greedy)
    return {"greedy": greedy, "seconds": seconds}


def answer(
    job: Job[Smoke], client: Client, prompts: Sequence[Row], what: str, temperature: float = 0
) -> tuple[list[Row], float]:
    """Return an answer per prompt and the seconds that all of them took together.

    An answer has `ids`, `text`, `candidates` (per position, id -> log-probability) and, where the
    engine speculates, the `histogram` of its drafts by accepted tokens.
    """
    requests = [
        {
            "model": vllm.MODEL,
            "prompt": prompt["ids"],
            "max_tokens": job.params.max_tokens,
            "temperature": temperature,
            "seed": number,
            "logprobs": CANDIDATES,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        for number, prompt in enumerate(prompts)
    ]

    def finished(count: int) -> None:
        job.progress(what, count, len(prompts), "prompts")

    finished(0)
    began = time.monotonic()
    path, width = probes.COMPLETIONS, job.params.max_num_seqs
    exchanges = client.post_all(path, requests, width, finished)
    seconds = time.monotonic() - began
    return [_answer(exchange) for exchange in exchanges], seconds


def _answer(exchange: Exchange) -> Row:
    try:
        body = exchange.json
    except ValueError as e:
        raise EnvironmentFault(f"the engine failed on an evaluation prompt: {e}") from e
    choice = body["choices"][0]
    speculation = (body.get("metrics") or {}).get("speculative_decoding") or {}
    return {
        "ids": choice["token_ids"],
        "text": choice["text"],
        "candidates": [
            {token.removeprefix("token_id:"): value for token, value in top.items()}
            for top in choice["logprobs"]["top_logprobs"]
        ],
        "histogram": speculation.get("acceptance_histogram", []),
    }


def mark_loops(client: Client, answers: Sequence[Row]) -> None:
    """Set `loop` of every answer: how it loops, or None."""

    @cache
    def decode(token: int) -> str:
        request = {"model": vllm.MODEL, "tokens": [token]}
        return str(client.post("/detokenize", request).json["prompt"])

    for row in answers:
        row["loop"] = find_loop(row["ids"], row["text"], decode)


def sample(prompt: Row, greedy: Row, sampled: Row, speculative: Row) -> Row:
    """Return a row of `samples.jsonl`; `looped` is about the greedy answers only."""
    candidates = [
        {int(token): value for token, value in top.items()} for top in greedy["candidates"]
    ]
    agreement: Agreement = compare(greedy["ids"], candidates, speculative["ids"])
    return {
        "id": prompt["id"],
        "domain": prompt["domain"],
        "prompt": "\n".join(f"{m['role']}: {m['content']}" for m in prompt["messages"]),
        "plain": greedy["text"],
        "speculative": speculative["text"],
        "sampled": sampled["text"],
        "looped": bool(greedy["loop"] or speculative["loop"]),
        "loops": {"greedy": greedy["loop"], "sampled": sampled["loop"]},
        "agreement": agreement.kind,
        "gap": agreement.gap,
        "position": agreement.position,
        "drafts": speculative["histogram"],
    }


def metrics(plain: Row, fast: Row, samples: Sequence[Row]) -> dict[str, float]:
    """Return the flat numbers. `looped_share` is over greedy and sampled answers alike.

    Acceptance counts only answers that do not loop; where all of them do there is none.
    """
    loops = [loop for row in samples for loop in row["loops"].values()]
    kinds = [row["agreement"] for row in samples]
    healthy = healthy_drafts(samples)
    return {
        "probes": len(plain["probes"]),
        "probes_failed": sum(not row["passed"] for row in plain["probes"]),
        "prompts": len(samples),
        "looped_share": sum(loop is not None for loop in loops) / len(loops),
        "looped_excluded": sum(row["looped"] for row in samples),
        "divergences": kinds.count("diverged"),
        "exempt": kinds.count("near-tie"),
        "near_tie_share": kinds.count("near-tie") / len(samples),
        "tokens_per_s": _speed(plain),
        "tokens_per_s_speculative": _speed(fast),
        **(_acceptance(healthy) if healthy else {}),
        **{f"acceptance_rate_{k}": r for k, r in enumerate(acceptance.rates(healthy))},
    }


def healthy_drafts(samples: Sequence[Row]) -> list[Drafts]:
    """Return the drafts of the answers that do not loop (an answer of one token has none)."""
    return [Drafts(tuple(r["drafts"])) for r in samples if not r["looped"] and sum(r["drafts"])]


def _acceptance(prompts: Sequence[Drafts]) -> dict[str, float]:
    lo, hi = acceptance.interval(prompts)
    return {
        "acceptance_length": acceptance.length(prompts),
        "acceptance_length_lo": lo,
        "acceptance_length_hi": hi,
    }


def _speed(phase: Row) -> float:
    return float(sum(len(row["ids"]) for row in phase["greedy"]) / phase["seconds"])


def _by_domain(samples: Sequence[Row]) -> list[Row]:
    rows = []
    by_domain = sorted(samples, key=lambda r: str(r["domain"]))
    for domain, group in itertools.groupby(by_domain, key=lambda r: str(r["domain"])):
        if prompts := healthy_drafts(list(group)):
            rows.append({"domain": domain, "prompts": len(prompts), **_acceptance(prompts)})
    return rows


def _write(
    job: Job[Smoke],
    engine: Engine,
    environment: Mapping[str, str],
    plain: Row,
    fast: Row,
    samples: Sequence[Row],
) -> None:
    healthy = healthy_drafts(samples)
    if not healthy:
        job.warn("every greedy answer loops: there is no acceptance length")
    device = device_kind()
    dtype = {"cpu": "float32"}.get(device, "auto")
    write_json(
        job.out / "engine.json",
        {
            "engine": engine.name,
            "version": engine.version,
            "mode": "; ".join(plain["modes"]) or vllm.UNQUANTIZED,
            "dtype": dtype,
            "commands": {
                "plain": vllm.command(job.params, device, speculative=False),
                "speculative": vllm.command(job.params, device, speculative=True),
            },
            "environment": dict(environment),
            "threads": {"plain": plain["threads"], "speculative": fast["threads"]},
            "startup_seconds": {
                "plain": plain["startup_seconds"],
                "speculative": fast["startup_seconds"],
            },
        },
    )
    write_json(job.out / "metrics.json", metrics(plain, fast, samples))
    write_json(job.out / "probes.json", plain["probes"])
    write_json(
        job.out / "acceptance.json",
        {
            "domains": _by_domain(samples),
            "positions": acceptance.rates(healthy),
            "looped": [row["id"] for row in samples if row["looped"]],
        },
    )
    lines = [json.dumps(row, sort_keys=True) for row in samples]
    (job.out / "samples.jsonl").write_text("".join(f"{line}\n" for line in lines))
    for name in ("plain", "speculative"):
        shutil.copyfile(job.scratch / f"{name}.log", job.out / f"{name}.log")
