"""The core's promises: cached, resumable, locked, atomic; gates judged every time."""

from __future__ import annotations

import errno
import importlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from onboard import codehash
from onboard.errors import EnvironmentFault, InputError
from onboard.events import Events
from onboard.pipeline import Pipeline, Run, Stage
from onboard.recipe import Recipe, parse
from onboard.store import MANIFEST, Store, disk_faults

# Stands in for two stages of the recipe: `source` makes numbers one by one (each survives a
# crash in scratch), `adapt` sums them.
STAGES = """
import json, os, signal, time
from pathlib import Path

TRACE = Path(os.environ["TRACE"])

def trace(word):
    with TRACE.open("a") as f:
        f.write(word + "\\n")

def numbers(job):
    trace("numbers")
    for i in range(5):
        part = job.scratch / str(i)
        if not part.exists():
            trace(f"part {i}")
            part.write_text(str(i * i))
        if os.environ.get("KILL_AT") == str(i):
            os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(float(os.environ.get("SLEEP", 0)))
    parts = [int((job.scratch / str(i)).read_text()) for i in range(5)]
    (job.out / "numbers.json").write_text(json.dumps(parts))
    (job.out / "noise.json").write_text("{}")
    if os.environ.get("KILL_AT") == "commit":
        os.kill(os.getpid(), signal.SIGKILL)

def total(job):
    trace("total")
    total = sum(job.inputs["source"].json("numbers.json"))
    (job.out / "metrics.json").write_text(json.dumps({"unknown_tensors": total}))
"""

DRIVER = """
import json, sys
from pathlib import Path
from onboard.events import Events
from onboard.pipeline import Pipeline, Stage
from onboard.recipe import parse
from onboard.store import Store
stages = (
    Stage("source", "stages_under_test:numbers"),
    Stage("adapt", "stages_under_test:total", ("source/numbers.json",), costly=True),
)
recipe = parse({"source": {"model": "x"}, "adapt": {"gates": {"unknown_tensors": 30}}}, "t")
run = Pipeline(stages, Store(Path(sys.argv[1])), Events()).run(recipe, "run")
print(json.dumps({o.stage: [o.status, o.digest] for o in run.outcomes}))
"""


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "stages_under_test.py").write_text(STAGES)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("TRACE", str(tmp_path / "trace"))
    forget_code()
    return tmp_path


def forget_code() -> None:
    """Let this process see an edit of stages_under_test.py, as a new process would."""
    sys.modules.pop("stages_under_test", None)
    importlib.invalidate_caches()
    for cached in (codehash.code_digest, codehash.imports, codehash._tree, codehash._tree_digest):
        cached.cache_clear()


def edit(world: Path, code: str) -> None:
    (world / "stages_under_test.py").write_text(code)
    forget_code()


def trace(world: Path) -> list[str]:
    path = world / "trace"
    return path.read_text().splitlines() if path.exists() else []


def recipe(**adapt: Any) -> Recipe:
    return parse({"source": {"model": "x"}, "adapt": adapt}, "t")


def run(world: Path, recipe: Recipe, **options: Any) -> Run:
    stages = (
        Stage("source", "stages_under_test:numbers"),
        Stage("adapt", "stages_under_test:total", ("source/numbers.json",), costly=True),
    )
    return Pipeline(stages, Store(world / "store"), Events()).run(recipe, "run", **options)


def drive(world: Path, **env: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(world), **env}
    command = [sys.executable, "-c", DRIVER, str(world / "store")]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def statuses(run: Run) -> dict[str, str]:
    return {outcome.stage: outcome.status for outcome in run.outcomes}


def test_a_second_run_makes_nothing(world: Path) -> None:
    assert statuses(run(world, recipe())) == {"source": "made", "adapt": "made"}
    before = trace(world)
    assert statuses(run(world, recipe())) == {"source": "cached", "adapt": "cached"}
    assert trace(world) == before


def test_gates_are_judged_again_without_recomputing(world: Path) -> None:
    assert run(world, recipe(gates={"unknown_tensors": 30})).passed
    before = trace(world)
    tighter = run(world, recipe(gates={"unknown_tensors": 29}))
    assert not tighter.passed
    assert [(g.name, g.value, g.limit, g.passed) for g in tighter.gates] == [
        ("unknown_tensors", 30, 29, False)
    ]
    assert trace(world) == before


def test_an_override_lets_a_failed_gate_stand_and_is_kept(world: Path) -> None:
    overridden = run(
        world, recipe(gates={"unknown_tensors": 1}), overrides={"adapt.unknown_tensors": "why not"}
    )
    assert overridden.passed
    assert overridden.gates[0].override == "why not"
    assert not overridden.gates[0].passed


def test_an_override_of_an_unknown_gate_is_an_error(world: Path) -> None:
    with pytest.raises(InputError, match=r"adapt\.nonsense"):
        run(world, recipe(), overrides={"adapt.nonsense": "x"})


def test_a_failed_gate_stops_costly_stages_unless_told_otherwise(world: Path) -> None:
    """The gate hangs on a metric the artifact lacks: that is a failure too."""
    failing = parse({"source": {"model": "x"}, "adapt": {"gates": {"unknown_tensors": 1}}}, "t")
    stages = (
        Stage("source", "stages_under_test:numbers"),
        Stage("adapt", "stages_under_test:total", ("source",)),
        Stage("calibrate", "stages_under_test:total", ("source",), costly=True),
        Stage("quantize", "stages_under_test:total", ("calibrate", "source"), costly=True),
    )
    pipeline = Pipeline(stages, Store(world / "store"), Events())
    stopped = pipeline.run(failing, "run")
    assert statuses(stopped) == {
        "source": "made",
        "adapt": "made",
        "calibrate": "skipped",
        "quantize": "skipped",
    }
    assert not stopped.passed
    assert statuses(pipeline.run(failing, "run", keep_going=True))["calibrate"] == "made"


def test_only_the_named_file_of_an_input_changes_the_key(world: Path) -> None:
    first = run(world, recipe())
    edit(world, STAGES.replace('"{}"', '"{ }"'))  # noise.json only
    second = run(world, recipe())
    assert second.artifacts["source"].digest != first.artifacts["source"].digest
    same = "stages_under_test.py changed, so the code is new; the input's digest is not"
    assert (
        first.artifacts["adapt"].manifest["inputs"] == second.artifacts["adapt"].manifest["inputs"]
    ), same


def test_comments_and_docstrings_are_no_code_change(world: Path) -> None:
    run(world, recipe())
    words = STAGES.replace("def numbers(job):", 'def numbers(job):\n    """Words."""')
    edit(world, words + "\n# a comment\n")
    assert statuses(run(world, recipe())) == {"source": "cached", "adapt": "cached"}


def test_an_adopted_artifact_stands_for_new_code_but_not_for_other_settings(world: Path) -> None:
    old = run(world, recipe()).artifacts["source"]
    edit(world, STAGES + "\nMORE = 1\n")
    key = old.manifest["key"]
    adopted = run(world, recipe(), adoptions={"source": (key, "MORE is unused")})
    assert adopted.outcomes[0].status == "adopted"
    assert adopted.artifacts["source"].digest == old.digest
    assert adopted.artifacts["source"].adopted == "MORE is unused"
    again = run(world, recipe())
    assert again.outcomes[0].status == "adopted", "the adoption is remembered"
    other = parse({"source": {"model": "y"}}, "t")
    with pytest.raises(InputError, match="other params"):
        run(world, other, adoptions={"source": (key, "no")})


@pytest.mark.parametrize("where", ["2", "commit"])
def test_kill_9_resumes_and_ends_in_the_same_bytes(world: Path, where: str) -> None:
    killed = drive(world, KILL_AT=where)
    assert killed.wait() == -signal.SIGKILL
    assert not list((world / "store").glob("artifacts/*/*"))
    resumed = drive(world)
    out, _ = resumed.communicate()
    assert [line for line in trace(world) if line.startswith("part")] == [
        f"part {i}" for i in range(5)
    ], "no finished part is made twice"
    assert not list((world / "store" / "scratch").iterdir())
    assert not list((world / "store" / "tmp").iterdir())

    fresh = world / "elsewhere"
    fresh.mkdir()
    clean = Pipeline((Stage("source", "stages_under_test:numbers"),), Store(fresh), Events()).run(
        recipe(), "run"
    )
    assert json.loads(out)["source"] == ["made", clean.artifacts["source"].digest]


def test_two_runs_at_once_do_the_work_once(world: Path) -> None:
    both = [drive(world, SLEEP="1"), drive(world, SLEEP="1")]
    results = [json.loads(process.communicate()[0]) for process in both]
    assert sorted(r["source"][0] for r in results) == ["cached", "made"]
    assert results[0]["source"][1] == results[1]["source"][1]
    assert trace(world).count("numbers") == 1


def test_a_dead_process_leaves_no_lock(world: Path) -> None:
    assert drive(world, KILL_AT="1").wait() == -signal.SIGKILL
    began = time.monotonic()
    assert drive(world).wait() == 0
    assert time.monotonic() - began < 30


def test_a_damaged_artifact_is_made_again(world: Path) -> None:
    first = run(world, recipe()).artifacts["source"]
    (first.path / "numbers.json").write_text("[]")
    again = run(world, recipe())
    assert again.outcomes[0].status == "made"
    assert again.artifacts["source"].digest == first.digest


def test_the_manifest_names_every_file_and_nothing_of_this_run(world: Path) -> None:
    artifact = run(world, recipe()).artifacts["adapt"]
    manifest = json.loads((artifact.path / MANIFEST).read_text())
    assert set(manifest["files"]) == {"metrics.json"}
    assert set(manifest) == {
        "schema", "stage", "key", "params", "inputs", "environment", "files", "digest",
    }  # fmt: skip
    assert str(world) not in json.dumps(manifest)
    assert artifact.record["seconds"] >= 0


def test_a_full_disk_is_recognised_in_a_librarys_own_error(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="cannot write"):  # noqa: SIM117
        with disk_faults("source", tmp_path):
            raise RuntimeError("Error while serializing: No space left on device (os error 28)")


def test_another_error_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="shape"):  # noqa: SIM117
        with disk_faults("source", tmp_path):
            raise RuntimeError("shape mismatch")


def test_a_full_disk_is_an_environment_fault_that_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="No space left") as caught:  # noqa: SIM117
        with disk_faults("quantize", tmp_path):
            raise OSError(errno.ENOSPC, "No space left on device", "x.safetensors")
    assert caught.value.exit_code == 4
    assert "x.safetensors" in caught.value.message
    assert "ONBOARD_HOME" in (caught.value.hint or "")


def test_a_cached_run_imports_no_torch(world: Path) -> None:
    code = textwrap.dedent(
        """
        import sys
        from onboard.stages import STAGES
        from onboard.runner import execute
        from onboard.pipeline import Pipeline, load
        for stage in STAGES:
            if stage.fingerprint:
                load(stage.fingerprint)
        assert "torch" not in sys.modules, "torch imported"
        """
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_family_s_file_is_code_of_adapt_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another family's file must not make a finished calibration run again."""

    def digests() -> dict[str, str]:
        codehash.code_digest.cache_clear()
        return {m: codehash.code_digest(m) for m in ("onboard.adapt", "onboard.quantize.calibrate")}

    before, tree = digests(), codehash._tree_digest
    changed = "onboard.architectures.llama"
    monkeypatch.setattr(
        codehash, "_tree_digest", lambda name: "new" if name == changed else tree(name)
    )
    after = digests()
    codehash.code_digest.cache_clear()
    assert before["onboard.adapt"] != after["onboard.adapt"]
    assert before["onboard.quantize.calibrate"] == after["onboard.quantize.calibrate"]
