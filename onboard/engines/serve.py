"""Serve a bundle in the foreground with the commands that its smoke test used."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from onboard.engines import server
from onboard.engines.environment import find
from onboard.engines.vllm import fill, threading
from onboard.errors import InputError
from onboard.hardware import device_kind

COMMANDS = "serve/commands.json"
DRAFTERS = {"speculator": "speculative", "mtp": "mtp", "none": "plain"}  # the command of each


def serve(bundle: Path, port: int, drafter: str | None, extra: list[str]) -> None:
    """Become the engine that serves `bundle` on 127.0.0.1:`port`; Ctrl-C ends it.

    `drafter` is one of DRAFTERS; None is what the smoke test chose. `extra` are further arguments
    of the engine. Does not return.
    """
    commands = _commands(bundle)
    kind = commands.get("use", "plain") if drafter is None else DRAFTERS[drafter]
    if not commands.get(kind):
        ships = [name for name, command in DRAFTERS.items() if commands.get(command)]
        raise InputError(
            f"{bundle / COMMANDS} has no {kind!r} command: this bundle ships no {drafter}",
            f"onboard serve {bundle} --draft {ships[0]}",
        )
    engine = find()
    values = {"python": str(engine.python), "bundle": str(bundle.resolve()), "port": str(port)}
    argv = [*fill(commands[kind], **values), *extra]
    print(f"serving {bundle} at http://{server.HOST}:{port}/v1", file=sys.stderr, flush=True)
    added = {**commands.get("environment", {}), **threading(device_kind())}
    os.execve(argv[0], argv, server.environment(os.environ, added))


def _commands(bundle: Path) -> dict[str, Any]:
    path = bundle / COMMANDS
    if not path.is_file():
        raise InputError(
            f"{bundle} is no bundle of onboard: it has no {COMMANDS}", "onboard run MODEL"
        )
    commands = json.loads(path.read_text())
    assert isinstance(commands, dict)
    return commands
