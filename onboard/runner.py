"""One run: stages, gates, report, and a bundle when every gate stands."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from onboard.errors import GATE_FAILED, InputError
from onboard.events import Events, to_file, to_lines, to_terminal
from onboard.pipeline import Pipeline, Run, new_run_id
from onboard.recipe import Recipe
from onboard.stages import STAGES
from onboard.store import Store, write_json

BEFORE_IMPORTS = {  # read when tqdm and torch are imported
    "TQDM_DISABLE": "1",  # progress is ours to show
    "GOMP_SPINCOUNT": "1000",  # spin over short waits; for longer ones leave the core to others
}


def store_root() -> Path:
    """Return where artifacts live: ONBOARD_HOME, else `.onboard` in the working directory."""
    return Path(os.environ.get("ONBOARD_HOME", ".onboard")).absolute()


def execute(
    recipe: Recipe,
    *,
    out: Path,
    store: Store,
    keep_going: bool = False,
    overrides: Mapping[str, str] | None = None,
    adoptions: Mapping[str, tuple[str, str]] | None = None,
    command: Sequence[str] = (),
    quiet: bool = False,
) -> tuple[dict[str, Any], int]:
    """Run `recipe`; return the result document and the exit code (0 passed, 3 a gate failed).

    The report is always written, to the run's directory; a bundle appears in `out` only when
    every gate stands.
    """
    os.environ |= BEFORE_IMPORTS
    run_id = new_run_id()
    listener, close = to_terminal() if sys.stderr.isatty() and not quiet else (to_lines(), _nothing)
    events = Events([to_file(store.run_dir(run_id) / "events.jsonl"), listener])
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for the result alone
            run = Pipeline(STAGES, store, events).run(
                recipe,
                run_id,
                keep_going=keep_going,
                overrides=overrides,
                adoptions=adoptions,
                command=command,
            )
            return _conclude(run, out)
    finally:
        close()


def _conclude(run: Run, out: Path) -> tuple[dict[str, Any], int]:
    from onboard.bundle.build import build_bundle
    from onboard.report.render import write_report

    report = run.dir / "report"
    write_report(run, report)
    bundle = build_bundle(run, out) if run.passed else None
    result = document(run, bundle)
    write_json(
        run.dir / "run.json",
        {
            **result,
            "recipe": run.recipe.model_dump(mode="json"),
            "command": list(run.command),
        },
    )
    return result, 0 if run.passed else GATE_FAILED


def document(run: Run, bundle: Path | None) -> dict[str, Any]:
    """Return the document that `onboard run --json` prints."""
    from onboard.report.facts import speculator

    return {
        "verdict": "pass" if run.passed else "fail",
        "bundle": str(bundle) if bundle else None,
        "run": run.id,
        "report": str(run.dir / "report" / "index.html"),
        "gates": [
            {
                "stage": gate.stage,
                "name": gate.name,
                "value": gate.value,
                "limit": gate.limit,
                "passed": gate.passed,
                "override": gate.override,
            }
            for gate in run.gates
        ],
        "speculator": speculator(run),
        "metrics": run.metrics,
        "stages": [asdict(outcome) for outcome in run.outcomes],
    }


def _nothing() -> None:
    return None


def find_report(run_id: str | None) -> Path:
    """Return the report folder of a run, of the latest one without an id."""
    runs = store_root() / "runs"
    pattern = f"{run_id or '*'}/report/index.html"
    found = sorted(runs.glob(pattern))
    if not found:
        raise InputError(f"{runs}: no report of run {run_id or '(any)'}", "onboard run MODEL")
    return found[-1].parent
