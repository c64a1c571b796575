"""What the smoke stage writes of what it measured: figures, samples, and the decision to ship.

A phase's row is what `smoke` measured of an engine: its greedy and sampled answers, their seconds,
its paces, and with a speculator what became of each answer's drafts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onboard.checkpoint.headers import read_headers
from onboard.engines import vllm
from onboard.engines.environment import Engine
from onboard.evals import acceptance, roofline, sampling, ship, speed
from onboard.evals.lossless import NEAR_TIE_NATS, Agreement, Noise, compare, noise
from onboard.hardware import device_kind
from onboard.pipeline import Job
from onboard.recipe import Smoke
from onboard.store import write_json

Row = dict[str, Any]

WITHHELD = "(the user's own traffic: not shown)"


@dataclass(frozen=True)
class Served:
    """The engine, the variables it was started with, and the command of each phase."""

    engine: Engine
    environment: Mapping[str, str]
    commands: Mapping[str, Sequence[str]]


def write(
    job: Job[Smoke], served: Served, phases: Mapping[str, Row], prompts: Sequence[Row]
) -> None:
    """Write the stage's files.

    `metrics.json`, `engine.json`, `probes.json`, `samples.jsonl`, `acceptance.json`, `speed.json`
    and `ship.json`; `sampling.json` where the recipe asks for it; `mtp.json` where the model has
    MTP layers. `phases` hold "plain", "speculative" and perhaps "mtp", which may have `failed`.
    """
    plain, fast = phases["plain"], phases["speculative"]
    samples = samples_of(prompts, plain, fast)
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
    decision = ship.decide(job.params, found, native)
    if own := phases.get(vllm.MTP):
        content, measured = _mtp(own, plain, prompts, samples)
        decision["mtp"] = ship.decide_mtp(job.params, measured, native, own.get("failed"))
        found |= {f"mtp_{name}": value for name, value in measured.items()}
        write_json(job.out / "mtp.json", content)
    decision |= ship.prefer(job.params, decision, found, native)
    write_json(job.out / "metrics.json", found)
    write_json(job.out / "engine.json", _facts(served, phases))
    write_json(job.out / "probes.json", plain["probes"])
    write_json(job.out / "acceptance.json", acceptance.tables(samples))
    write_json(job.out / "speed.json", timed)
    write_json(job.out / "ship.json", decision)
    lines = [json.dumps(row, sort_keys=True) for row in samples]
    (job.out / "samples.jsonl").write_text("".join(f"{line}\n" for line in lines))


def samples_of(prompts: Sequence[Row], plain: Row, fast: Row) -> list[Row]:
    """Return a row per prompt: its answers without a drafter and with one."""
    said = (side[kind] for side in (plain, fast) for kind in ("greedy", "sampled"))
    near_tie = own_noise(plain).near_tie
    rows = zip(prompts, *said, strict=True)
    return [sample(*row, near_tie=near_tie) for row in rows]


def own_noise(plain: Row) -> Noise:
    """Return how the engine without a speculator changes its mind about its greedy answers."""
    said = plain["greedy"]
    first = [_by_token(row["candidates"]) for row in said]
    return noise([row["ids"] for row in said], first, [_by_token(row) for row in plain["again"]])


def _by_token(candidates: Sequence[Mapping[str, float]]) -> list[dict[int, float]]:
    return [{int(token): value for token, value in top.items()} for top in candidates]


def sample(
    prompt: Row,
    greedy: Row,
    sampled: Row,
    fast: Row,
    fast_sampled: Row,
    *,
    near_tie: float = NEAR_TIE_NATS,
) -> Row:
    """Return a row of `samples.jsonl`: a prompt's answers, the `fast` ones with the speculator.

    `looped` is about both greedy answers, which should be the same; `looped_sampled` about the one
    with the speculator, whose drafts are `drafts_sampled`.
    Of a private prompt the row holds what was counted, and no word of it or its answers.
    """
    candidates = _by_token(greedy["candidates"])
    agreement: Agreement = compare(greedy["ids"], candidates, fast["ids"], near_tie)
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

    `looped_share` is over the greedy and sampled answers without the speculator. `noise_nats` and
    `changed_unaided` are of the engine without it; `near_tie_share` is the share of answers exempt
    as near-ties, less those that it would have changed itself.
    """
    own = own_noise(plain)
    loops = [loop for row in samples for loop in row["loops"].values()]
    kinds = [row["agreement"] for row in samples]
    return {
        "probes": len(plain["probes"]),
        "probes_failed": sum(not row["passed"] for row in plain["probes"]),
        "prompts": len(samples),
        "looped_share": sum(loop is not None for loop in loops) / len(loops),
        "divergences": kinds.count("diverged"),
        "exempt": kinds.count("near-tie"),
        "noise_nats": own.nats,
        "near_tie_nats": own.near_tie,
        "changed_unaided": own.changed,
        "near_tie_share": max(0, kinds.count("near-tie") - own.changed) / len(samples),
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


def _mtp(
    own: Row, plain: Row, prompts: Sequence[Row], head: Sequence[Row]
) -> tuple[Row, dict[str, float]]:
    """Return the content of `mtp.json` and the flat numbers; `head` are the trained head's samples.

    Either it `failed`, or it has the tables of `acceptance.json`, the rows of `speed.json`, and by
    how much the trained head's acceptance length is larger on the same prompts.
    """
    if "failed" in own:
        return {"failed": own["failed"]}, {}
    samples = samples_of(prompts, plain, own)
    rows = speed.compare(plain["paces"], own["paces"], lambda concurrency: None)
    kinds = [row["agreement"] for row in samples]
    content = {
        "acceptance": acceptance.tables(samples),
        "speed": rows,
        "head_longer": acceptance.difference(head, samples),
    }
    measured = {
        **acceptance.metrics(samples),
        "divergences": kinds.count("diverged"),
        **{f"speedup_{row['concurrency']}": row["speedup"] for row in rows},
    }
    return content, measured


def _facts(served: Served, phases: Mapping[str, Row]) -> Row:
    """Return the content of `engine.json`: what ran, how, and the commands that ran."""
    ran = {name: phase for name, phase in phases.items() if "failed" not in phase}
    return {
        "engine": served.engine.name,
        "version": served.engine.version,
        "mode": "; ".join(phases["plain"]["modes"]) or vllm.UNQUANTIZED,
        "dtype": {"cpu": "float32"}.get(device_kind(), "auto"),
        "commands": {name: served.commands[name] for name in ran},
        "environment": dict(served.environment),
        "threads": {name: phase["threads"] for name, phase in ran.items()},
        "startup_seconds": {name: phase["startup_seconds"] for name, phase in ran.items()},
    }
