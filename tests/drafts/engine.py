"""What a real engine makes of a draft, prompt by prompt.

Both functions take the folder of a draft's exports, and return `prompts`: a row per held-out
prompt with `id`, `domain`, `looped`, and the `histogram` of its drafts by accepted tokens. Answers
are greedy, in the precision of the smoke test.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onboard.checkpoint.assemble import assemble
from onboard.engines import server, vllm
from onboard.engines.client import Client
from onboard.engines.environment import find
from onboard.evals import answers, smoke
from onboard.hardware import device_kind
from onboard.recipe import Smoke
from tests.conftest import commit
from tests.drafts.prepare import Stand

PARAMS = Smoke(max_num_seqs=10, max_tokens=96, sampling_checks=10)


def smoked(stand: Stand, exports: Path) -> dict[str, Any]:
    """Run the smoke stage, lossless answers and sampling included; its metrics are `smoke`."""
    stand.bench.artifacts["speculate"] = commit(exports)
    stand.bench.once("smoke", smoke.run, PARAMS)
    found = stand.bench.artifacts["smoke"]
    rows = [
        {**{name: row[name] for name in ("id", "domain", "looped")}, "histogram": row["drafts"]}
        for row in found.lines("samples.jsonl")
    ]
    return {"prompts": rows, "smoke": found.json("metrics.json")}


def accepted(stand: Stand, exports: Path) -> dict[str, Any]:
    """Ask for the greedy answers alone."""
    bundle = _bundle(stand, exports)
    command = smoke.commands_of(PARAMS, bundle, mtp=False)["speculative"]
    launch = smoke.launch(command, find(), bundle, _environment(stand))
    with server.running(launch, bundle / "engine.log", PARAMS.startup_seconds) as engine:
        client = Client(engine.url)
        found = _ask(client, stand.prompts)
    rows = [
        {
            "id": p["id"],
            "domain": p["domain"],
            "looped": bool(a["loop"]),
            "histogram": a["histogram"],
        }
        for p, a in zip(stand.prompts, found, strict=True)
    ]
    return {"prompts": rows}


def _ask(client: Client, prompts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    requests = [answers.request(prompt["ids"], PARAMS.max_tokens) for prompt in prompts]
    said, _ = answers.ask(client, requests, PARAMS.max_num_seqs, lambda done: None)
    answers.mark_loops(client, said)
    return said


def _bundle(stand: Stand, exports: Path) -> Path:
    bundle = exports.with_name("bundle")
    shutil.rmtree(bundle, ignore_errors=True)
    artifacts = stand.bench.artifacts
    assemble(artifacts["quantize"], artifacts["source"], bundle / "checkpoint")
    (bundle / smoke.DRAFT).parent.mkdir()
    (bundle / smoke.DRAFT).symlink_to((exports / "vllm").resolve(), target_is_directory=True)
    return bundle


def _environment(stand: Stand) -> dict[str, str]:
    config = stand.bench.artifacts["quantize"].json("checkpoint/config.json")
    return vllm.environment(PARAMS, device_kind(), config)
