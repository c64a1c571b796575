"""The commands that the smoke test used, made relative to the bundle: `serve/`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onboard.report.secrets import is_secret_name, scrubber
from onboard.store import write_json

SHELL = {"bundle": '"$bundle"', "port": '"$port"', "python": '"$python"'}
PLACEHOLDER = re.compile(r"\{(bundle|port|python)\}")
FILES = {
    "plain": "{engine}.sh",
    "speculative": "{engine}-speculative.sh",
    "mtp": "{engine}-mtp.sh",
}
SERVES = {"plain": "", "speculative": " with its speculator", "mtp": " with its own MTP layers"}

SCRIPT = """\
#!/bin/sh
# {what}, with the very command of the smoke test: {engine} {version}, {mode}.
# PYTHON is the engine's interpreter, PORT the port; further arguments go to the engine.
set -eu
bundle=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
port=${{PORT:-8000}}
python=${{PYTHON:-python3}}
{exports}exec {command} \\
  "$@"
"""


def shipped(
    commands: Mapping[str, Sequence[str]], decision: Mapping[str, Any] | None
) -> dict[str, Sequence[str]]:
    """Return the commands that ship: that without a drafter, and those of drafters that help.

    `decision` is the smoke test's `ship.json`.
    """
    decision = decision or {}
    helps = {"plain": True, "speculative": decision.get("ships")}
    helps["mtp"] = decision.get("mtp", {}).get("ships")
    return {name: argv for name, argv in commands.items() if argv and helps[name]}


def write_serving(
    engine: Mapping[str, Any], decision: Mapping[str, Any] | None, dest: Path
) -> None:
    """Write `commands.json`, which `onboard serve` reads, and one shell script per command.

    `engine` is the smoke test's `engine.json`; its commands hold `{bundle}`, `{port}` and
    `{python}` in the place of paths and numbers. `decision` says which of them ship, and which
    one to `use`.
    """
    commands = shipped(engine["commands"], decision)
    environment = {
        name: value
        for name, value in (engine.get("environment") or {}).items()
        if not is_secret_name(name)
    }
    facts = {name: engine.get(name) for name in ("engine", "version", "mode", "dtype")}
    facts["use"] = (decision or {}).get("use", "plain")
    clean: dict[str, Any] = scrubber()({**facts, **commands, "environment": environment})
    write_json(dest / "commands.json", clean)
    for name, argv in commands.items():
        script = dest / FILES[name].format(engine=engine["engine"])
        script.write_text(_script(name, argv, clean))
        script.chmod(0o755)


def shell_word(word: str) -> str:
    """Quote one argument for sh, placeholders becoming variables: '--port' "$port"."""
    parts = PLACEHOLDER.split(word)  # text, name, text, name, ..., text
    quoted = [
        SHELL[part] if i % 2 else shlex.quote(part) for i, part in enumerate(parts) if part or i % 2
    ]
    return "".join(quoted) or "''"


def _script(name: str, argv: Sequence[str], facts: Mapping[str, Any]) -> str:
    exports = "".join(
        f"export {key}={shell_word(str(value))}\n" for key, value in facts["environment"].items()
    )
    return SCRIPT.format(
        what=f"Serve the checkpoint{SERVES[name]}",
        engine=facts["engine"],
        version=facts["version"],
        mode=" ".join(str(facts["mode"]).split()),  # it came from a log, and stands in a comment
        exports=exports,
        command=_lines(argv),
    )


def _lines(argv: Sequence[str]) -> str:
    """Return the command with one option and its values a line."""
    text = shell_word(argv[0])
    for word in argv[1:]:
        text += (" \\\n  " if word.startswith("--") else " ") + shell_word(word)
    return text
