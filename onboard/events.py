"""What happens in a run, as JSON lines; a terminal shows them as progress bars."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

Event = dict[str, Any]


class Listener(Protocol):
    def __call__(self, event: Event, /) -> None: ...


@dataclass
class Events:
    """Send each event to every listener; `file` keeps them all."""

    listeners: list[Listener] = field(default_factory=list)

    def __call__(self, event: str, **fields: Any) -> None:
        row = {"time": round(time.time(), 3), "event": event, **fields}
        for listener in self.listeners:
            listener(row)


def to_file(path: Path) -> Listener:
    """Append every event to `path` as one JSON line."""

    def listen(event: Event) -> None:
        with path.open("a") as f:
            f.write(json.dumps(event, default=str) + "\n")

    return listen


def to_lines(
    write: Callable[[str], Any] = lambda s: print(s, file=sys.stderr, flush=True),
) -> Listener:
    """Write plain lines: starts, ends, gates and warnings, progress at most every ten seconds."""
    last = 0.0

    def listen(event: Event) -> None:
        nonlocal last
        if event["event"] == "progress":
            if event["time"] - last < 10:
                return
            last = event["time"]
        if line := describe(event):
            write(line)

    return listen


def to_terminal() -> tuple[Listener, Callable[[], None]]:
    """Return a listener that draws rich progress bars with an ETA on stderr, and its closer."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f} {task.fields[unit]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    progress.start()
    tasks: dict[tuple[str, str], Any] = {}

    def listen(event: Event) -> None:
        if event["event"] == "progress":
            key = (event["stage"], event["what"])
            if key not in tasks:
                label = f"{event['stage']}: {event['what']}"
                tasks[key] = progress.add_task(label, total=event["total"], unit=event["unit"])
            progress.update(tasks[key], completed=event["done"], total=event["total"])
            return
        if event["event"] in ("made", "failed"):
            for key in [k for k in tasks if k[0] == event["stage"]]:
                progress.remove_task(tasks.pop(key))
        if line := describe(event):
            progress.console.print(line, markup=False, highlight=False)

    return listen, progress.stop


def describe(event: Event) -> str | None:
    """Return the event as one line for a person, or None where it says nothing to one."""
    stage = event.get("stage", "")
    match event["event"]:
        case "cached":
            return f"{stage:<10} cached    {event['key'][:16]}"
        case "adopted":
            return f"{stage:<10} adopted   {event['key'][:16]}  ({event['reason']})"
        case "start":
            return f"{stage:<10} started   {event['key'][:16]}"
        case "made":
            return f"{stage:<10} done      {event['key'][:16]}  {event['seconds']:.1f} s"
        case "skipped":
            return f"{stage:<10} skipped   {event['reason']}"
        case "progress":
            return f"{stage:<10} {event['what']}: {event['done']}/{event['total']} {event['unit']}"
        case "warning":
            return f"{stage:<10} warning   {event['message']}"
        case "gate":
            word = "passed" if event["passed"] else "overridden" if event["override"] else "FAILED"
            limit = f"{event['bound']} {event['limit']:g}"
            return f"{stage:<10} gate      {event['name']} = {event['value']:.4g} ({limit})  {word}"
    return None
