"""The commands: parse, call, print. Heavy modules are imported inside them."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal

import typer
from typer.exceptions import TyperException

from onboard import __version__
from onboard.errors import INTERRUPTED, OnboardError

app = typer.Typer(
    name="onboard",
    help="Take an open-weights checkpoint to a served, measured and judged NVFP4 bundle.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich would double the time that --help takes
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document, and nothing else.")]
Model = Annotated[
    str,
    typer.Argument(
        help="A recipe, a YAML file, a local directory, a config.json or a Hub id.",
        show_default=False,
    ),
]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key: adapt.quantize=[expert]."),
]
Drafter = Literal["speculator", "mtp", "none"]
BundleDir = Annotated[Path, typer.Argument(help="A bundle directory.", show_default=False)]


def _version(show: bool) -> None:
    if show:
        print(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Take an open-weights checkpoint to a served, measured and judged NVFP4 bundle."""


@app.command()
def run(
    model: Annotated[
        str, typer.Argument(help="A recipe, a YAML file, a local directory or a Hub id.")
    ] = "smollm2-135m",
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key: fidelity.batch_size=8."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where the bundle goes. [default: bundles/RECIPE]")
    ] = None,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Run costly stages even after a failed gate.")
    ] = False,
    override: Annotated[
        list[str] | None,
        typer.Option(metavar="STAGE.GATE=REASON", help="Let a failed gate stand, with a reason."),
    ] = None,
    adopt: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Keep an artifact across a code change. Needs --reason."),
    ] = None,
    reason: Annotated[str | None, typer.Option(help="Why the adopted artifact stands.")] = None,
    as_json: Json = False,
) -> None:
    """Run the whole pipeline on a model; print the verdict and the bundle."""
    from onboard.recipe import resolve
    from onboard.runner import execute, store_root
    from onboard.store import Store

    recipe = resolve(model, assignments or ())
    store = Store(store_root())
    result, code = execute(
        recipe,
        out=(out or Path("bundles") / recipe.name).absolute(),
        store=store,
        keep_going=keep_going,
        overrides=_reasons(override or []),
        adoptions={store.stage_of(key): (key, _needed(reason)) for key in adopt or []},
        command=("onboard", *sys.argv[1:]),
        quiet=as_json,
    )
    if as_json:
        _print_json(result)
    else:
        _print_verdict(result)
    raise typer.Exit(code)


@app.command()
def inspect(
    model: Model,
    assignments: Assignments = None,
    write: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the architecture file of an unknown model_type."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what a model is, from config.json and tensor headers alone."""
    from onboard.inspection import inspect as look
    from onboard.lookup import find

    facts = look(find(model, assignments or ()))
    if write is not None:
        _write_new(write, facts.get("architecture"))
    if as_json:
        _print_json(facts)
    else:
        from onboard.display import inspection

        print(inspection(facts))


@app.command()
def plan(model: Model, assignments: Assignments = None, as_json: Json = False) -> None:
    """Say what a run would read, write and take, and what serves the result; write nothing."""
    from onboard.lookup import find
    from onboard.planning import plan as look_ahead

    facts = look_ahead(find(model, assignments or ()))
    if as_json:
        _print_json(facts)
    else:
        from onboard.display import plan as show

        print(show(facts))


@app.command()
def rehearse(model: Model, assignments: Assignments = None, as_json: Json = False) -> None:
    """Run the whole pipeline on a tiny random twin made from the model's real config."""
    from onboard.rehearsal import rehearse as run_twin
    from onboard.rehearsal import text
    from onboard.runner import store_root
    from onboard.store import Store

    result, code = run_twin(model, assignments or (), Store(store_root()))
    if as_json:
        _print_json(result)
    else:
        print(text(result))
    raise typer.Exit(code)


@app.command()
def recipes(as_json: Json = False) -> None:
    """List the models that have a recipe."""
    from onboard.recipe import names, resolve

    rows = [resolve(name) for name in names()]
    if as_json:
        _print_json([recipe.model_dump(mode="json") for recipe in rows])
        return
    for recipe in rows:
        print(f"{recipe.name:<16} {recipe.source.model:<44} {recipe.summary}")


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what is installed, what is missing, and the command that mends it."""
    from dataclasses import asdict

    from onboard.doctor import diagnose

    checks = diagnose()
    if as_json:
        _print_json([asdict(check) for check in checks])
    else:
        for check in checks:
            mark = "ok  " if check.ok else "MISS"
            print(f"{mark}  {check.name:<28} {check.found}")
            if not check.ok:
                print(f"      expected {check.expected}; {check.fix}")
    raise typer.Exit(0 if all(check.ok or check.optional for check in checks) else 4)


@app.command()
def report(
    run_id: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="A run's id. [default: the latest]")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print where a run's report is, or the report itself as JSON."""
    from onboard.runner import find_report

    folder = find_report(run_id)
    if as_json:
        print((folder / "report.json").read_text(), end="")
    else:
        print(folder / "index.html")


@app.command()
def verify(
    bundle: BundleDir,
    expect: Annotated[
        str | None, typer.Option(metavar="SHA256", help="The digest that manifest.json must have.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check every file of a bundle against its manifest."""
    from onboard.bundle.verify import verify as check

    digest = check(bundle, expect)
    if as_json:
        _print_json({"verdict": "pass", "bundle": str(bundle), "manifest_sha256": digest})
    else:
        print(f"{bundle}: every file is as its manifest says\nmanifest sha256 {digest}")


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def serve(
    context: typer.Context,
    bundle: BundleDir,
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1.")] = 8000,
    draft: Annotated[
        Drafter | None,
        typer.Option(help="What drafts. [default: what the smoke test found best]"),
    ] = None,
) -> None:
    """Serve a bundle with the command its smoke test used; further options go to the engine."""
    from onboard.engines.serve import serve as start

    start(bundle, port, draft, context.args)


def main() -> None:
    """Run the command line; turn every failure into one message and a stable exit code."""
    interrupts = _noted_interrupts()
    try:
        code = app(standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except Exception as e:
        # A package that is interrupted while it is imported may say that it cannot be imported.
        code = INTERRUPTED if interrupts else _explained(e)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # what is decided stands, however long exit takes
    sys.exit(code)


def _noted_interrupts() -> list[int]:
    """Return a list that every SIGINT from now on is added to, beside raising KeyboardInterrupt."""
    interrupts: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    return interrupts


def _explained(error: Exception) -> int:
    """Say what went wrong; return the exit code."""
    if isinstance(error, OnboardError):
        return _fail(error.as_dict())
    said = {"kind": "input", "message": str(error), "hint": "onboard --help", "exit_code": 2}
    if not isinstance(error, TyperException):
        if os.environ.get("ONBOARD_DEBUG") == "1":
            raise error
        said |= {
            "kind": "bug",
            "message": f"bug in onboard: {type(error).__name__}: {error}",
            "hint": "set ONBOARD_DEBUG=1 for the traceback and report it",
            "exit_code": 1,
        }
    return _fail(said)


def _fail(error: dict[str, Any]) -> int:
    if "--json" in sys.argv:
        _print_json({"error": error})
    else:
        print(f"error: {error['message']}", file=sys.stderr)
        if error["hint"]:
            print(f"  try: {error['hint']}", file=sys.stderr)
    return int(error["exit_code"])


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))


def _print_verdict(result: dict[str, Any]) -> None:
    for gate in result["gates"]:
        if not gate["passed"]:
            why = f"overridden: {gate['override']}" if gate["override"] else "FAILED"
            print(f"{gate['stage']}.{gate['name']} = {gate['value']}, limit {gate['limit']}  {why}")
    print(f"verdict  {result['verdict']}")
    print(f"report   {result['report']}")
    print(f"bundle   {result['bundle'] or 'none: a gate failed'}")
    if result["bundle"] and (speculator := result["speculator"]) and not speculator["ships"]:
        print(f"         without the speculator: {'; '.join(speculator['reasons'])}")


def _write_new(path: Path, text: str | None) -> None:
    if text is None:
        raise typer.BadParameter(
            "--write: only a model of unknown type, with headers, needs a file"
        )
    if path.exists():
        raise typer.BadParameter(f"--write: {path} is there already")
    path.write_text(text)


def _reasons(items: list[str]) -> dict[str, str]:
    pairs = [item.partition("=") for item in items]
    for gate, _, reason in pairs:
        if not reason.strip():
            raise typer.BadParameter(f"--override {gate}: write a reason, STAGE.GATE=REASON")
    return {gate: reason for gate, _, reason in pairs}


def _needed(reason: str | None) -> str:
    if not reason:
        raise typer.BadParameter("--adopt needs --reason")
    return reason
