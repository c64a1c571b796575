"""What a real engine accepts of a draft, prompt by prompt."""

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
from tests.drafts.prepare import Stand

PARAMS = Smoke(max_num_seqs=10, max_tokens=96)


def accepted(stand: Stand, draft: Path, folder: Path) -> list[dict[str, Any]]:
    """Return a row per held-out prompt: `id`, `domain`, `looped`, and the `histogram` of drafts.

    `draft` is a folder in vLLM's layout. Answers are greedy, in the precision of the smoke test.
    """
    bundle = _bundle(stand, draft, folder)
    command = smoke.commands_of(PARAMS, bundle)["speculative"]
    launch = smoke.launch(command, find(), bundle, _environment(stand))
    with server.running(launch, folder / "engine.log", PARAMS.startup_seconds) as engine:
        client = Client(engine.url)
        found = _ask(client, stand.prompts)
    return [
        {
            "id": p["id"],
            "domain": p["domain"],
            "looped": bool(a["loop"]),
            "histogram": a["histogram"],
        }
        for p, a in zip(stand.prompts, found, strict=True)
    ]


def _ask(client: Client, prompts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    requests = [answers.request(prompt["ids"], PARAMS.max_tokens) for prompt in prompts]
    said, _ = answers.ask(client, requests, PARAMS.max_num_seqs, lambda done: None)
    answers.mark_loops(client, said)
    return said


def _bundle(stand: Stand, draft: Path, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    artifacts = stand.bench.artifacts
    assemble(artifacts["quantize"], artifacts["source"], folder / "checkpoint")
    (folder / smoke.DRAFT).parent.mkdir()
    (folder / smoke.DRAFT).symlink_to(draft.resolve(), target_is_directory=True)
    return folder


def _environment(stand: Stand) -> dict[str, str]:
    config = stand.bench.artifacts["quantize"].json("checkpoint/config.json")
    return vllm.environment(PARAMS, device_kind(), config)
