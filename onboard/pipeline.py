"""A tuple of stages turns artifacts into artifacts; gates judge what they measured."""

from __future__ import annotations

import importlib
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from onboard import __version__
from onboard.codehash import code_digest
from onboard.errors import InputError
from onboard.events import Events
from onboard.hardware import PeakMemory, describe, device_kind
from onboard.recipe import Limit, Recipe, Section
from onboard.store import Artifact, Store, digest, disk_faults

P = TypeVar("P", bound=Section)


@dataclass(frozen=True)
class Job(Generic[P]):
    """Everything a stage function may touch."""

    params: P
    inputs: Mapping[str, Artifact]
    out: Path  # empty; becomes the artifact when the function returns
    scratch: Path  # survives a crash: same key, same directory
    events: Events
    stage: str
    known_digests: dict[str, str] = field(default_factory=dict)  # sha256 taken while writing

    def progress(self, what: str, done: float, total: float, unit: str = "") -> None:
        self.events("progress", stage=self.stage, what=what, done=done, total=total, unit=unit)

    def warn(self, message: str) -> None:
        self.events("warning", stage=self.stage, message=message)


@dataclass(frozen=True)
class Stage:
    """One step: `run` names its function as "module:function", imported only when needed.

    `needs` are stages, or `stage/file` where only that file of the artifact matters to the key.
    `packages` are distributions whose version belongs to the key, `fingerprint` a function of the
    section ("module:function", no torch) whose JSON value does too. A `costly` stage is skipped
    once a gate has failed.
    """

    name: str
    run: str
    needs: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    fingerprint: str | None = None
    costly: bool = False
    version: int = 1

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the stages it reads, each once."""
        return tuple(dict.fromkeys(need.partition("/")[0] for need in self.needs))

    def identity(
        self, params: Section, inputs: Mapping[str, Artifact], mark: Any
    ) -> dict[str, Any]:
        """Return what decides the content, besides code: settings, inputs, versions, device.

        `mark` is what the stage's fingerprint function returned.
        """
        return {
            "params": params.model_dump(mode="json", exclude={"gates"}),
            "inputs": {need: _digest(need, inputs) for need in self.needs},
            "environment": {
                "device": device_kind(),
                "packages": {name: _version(name) for name in self.packages},
                "fingerprint": mark,
            },
        }

    def key(self, identity: Mapping[str, Any]) -> str:
        code = code_digest(self.run.partition(":")[0])
        return digest({"stage": self.name, "version": self.version, "code": code, **identity})


@dataclass(frozen=True)
class GateResult:
    """One limit held against one committed metric. `override` is a reason, or None."""

    stage: str
    name: str
    value: float | None
    bound: str  # "<=" or ">="
    limit: float
    passed: bool
    override: str | None = None

    @property
    def stands(self) -> bool:
        return self.passed or self.override is not None


@dataclass(frozen=True)
class Outcome:
    """What this run did about a stage: "made", "cached", "adopted" or "skipped"."""

    stage: str
    status: str
    key: str | None = None
    digest: str | None = None
    reason: str | None = None


@dataclass
class Run:
    """A pass over the stages: what the report and the bundle are made from."""

    id: str
    recipe: Recipe
    store: Store
    artifacts: dict[str, Artifact] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    gates: list[GateResult] = field(default_factory=list)
    command: tuple[str, ...] = ()

    @property
    def dir(self) -> Path:
        return self.store.run_dir(self.id)

    @property
    def passed(self) -> bool:
        """Every stage has an artifact and every gate stands."""
        return all(o.status != "skipped" for o in self.outcomes) and all(
            g.stands for g in self.gates
        )

    @property
    def metrics(self) -> dict[str, float]:
        """Every stage's numbers, with `seconds_<stage>` and `peak_rss_bytes` of their making."""
        flat: dict[str, float] = {}
        for name, artifact in self.artifacts.items():
            assert not flat.keys() & artifact.metrics.keys(), f"{name} reuses a metric's name"
            flat |= artifact.metrics
            flat[f"seconds_{name}"] = artifact.record.get("seconds", 0.0)
        peaks = [a.record.get("peak_rss_bytes", 0) for a in self.artifacts.values()]
        return {**flat, "peak_rss_bytes": max(peaks, default=0)}


@dataclass(frozen=True)
class Pipeline:
    stages: Sequence[Stage]
    store: Store
    events: Events

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for stage in self.stages:
            assert seen.issuperset(stage.inputs), f"{stage.name} needs a stage that comes later"
            seen.add(stage.name)

    def run(
        self,
        recipe: Recipe,
        run_id: str,
        *,
        keep_going: bool = False,
        overrides: Mapping[str, str] | None = None,
        adoptions: Mapping[str, tuple[str, str]] | None = None,
        command: Sequence[str] = (),
    ) -> Run:
        """Run every stage that is not in the store yet; judge every gate, each time.

        `overrides` maps "stage.gate" to a written reason. `adoptions` maps a stage to the key of
        an older artifact and the reason why it stands despite a code change.
        """
        overrides, adoptions = overrides or {}, adoptions or {}
        _check_known(overrides, {f"{s}.{g}" for s, g, _ in recipe.bounds()}, "--override")
        _check_known(adoptions, {s.name for s in self.stages}, "--adopt")
        run = Run(run_id, recipe, self.store, command=tuple(command))
        marks = self._fingerprints(recipe)  # a missing engine is found now, not after hours
        for stage in self.stages:
            missing = [need for need in stage.inputs if need not in run.artifacts]
            failed = [g for g in run.gates if not g.stands]
            if missing:
                self._skip(run, stage, f"needs {', '.join(missing)}")
                continue
            may_make = keep_going or not (stage.costly and failed)
            artifact = self._make_or_find(
                run, stage, marks[stage.name], adoptions.get(stage.name), may_make
            )
            if artifact is None:
                self._skip(run, stage, f"gate {failed[0].stage}.{failed[0].name} failed")
                continue
            run.artifacts[stage.name] = artifact
            for name, limit in recipe.section(stage.name).limits().items():
                self._judge(run, stage.name, name, limit, overrides.get(f"{stage.name}.{name}"))
        return run

    def _fingerprints(self, recipe: Recipe) -> dict[str, Any]:
        return {
            stage.name: load(stage.fingerprint)(recipe.section(stage.name))
            if stage.fingerprint
            else None
            for stage in self.stages
        }

    def _make_or_find(
        self, run: Run, stage: Stage, mark: Any, adoption: tuple[str, str] | None, may_make: bool
    ) -> Artifact | None:
        params = run.recipe.section(stage.name)
        inputs = {name: run.artifacts[name] for name in stage.inputs}
        identity = stage.identity(params, inputs, mark)
        key = stage.key(identity)
        found = self.store.find(stage.name, key)
        if found is None and adoption:
            found = self.store.adopt(stage.name, key, *adoption, identity)
        if found:
            status = "adopted" if found.adopted else "cached"
            self.events(status, stage=stage.name, key=key, reason=found.adopted)
            run.outcomes.append(Outcome(stage.name, status, key, found.digest, found.adopted))
            return found
        if not may_make:
            return None
        with self.store.lock(key):
            if found := self.store.find(stage.name, key):  # made by another process meanwhile
                self.events("cached", stage=stage.name, key=key, reason=None)
                run.outcomes.append(Outcome(stage.name, "cached", key, found.digest))
                return found
            artifact = self._make(stage, key, identity, params, inputs)
        run.outcomes.append(Outcome(stage.name, "made", key, artifact.digest))
        return artifact

    def _make(
        self,
        stage: Stage,
        key: str,
        identity: Mapping[str, Any],
        params: Section,
        inputs: Mapping[str, Artifact],
    ) -> Artifact:
        self.events("start", stage=stage.name, key=key)
        began = time.monotonic()
        PeakMemory.start()
        scratch = self.store.scratch(key)
        with disk_faults(stage.name, self.store.root), self.store.writing(key) as out:
            job = Job(params, inputs, out, scratch, self.events, stage.name)
            load(stage.run)(job)
            manifest = {"schema": 1, "stage": stage.name, "key": key, **identity}
            record = {
                "seconds": round(time.monotonic() - began, 2),
                "peak_rss_bytes": PeakMemory.read(),
                "hardware": describe(),
                "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            }
            artifact = self.store.commit(out, manifest, record, job.known_digests)
        shutil.rmtree(scratch)
        self.events("made", stage=stage.name, key=key, seconds=record["seconds"])
        return artifact

    def _judge(self, run: Run, stage: str, name: str, limit: Limit, override: str | None) -> None:
        value = run.artifacts[stage].metrics.get(name)
        passed = value is not None and limit.holds(value)
        result = GateResult(stage, name, value, limit.bound, limit.value, passed, override)
        run.gates.append(result)
        shown = {**vars(result), "value": float("nan") if value is None else value}
        self.events("gate", **shown)

    def _skip(self, run: Run, stage: Stage, reason: str) -> None:
        self.events("skipped", stage=stage.name, reason=reason)
        run.outcomes.append(Outcome(stage.name, "skipped", reason=reason))


def load(reference: str) -> Callable[..., Any]:
    """Import "module:function"."""
    module, _, name = reference.partition(":")
    return cast(Callable[..., Any], getattr(importlib.import_module(module), name))


def new_run_id() -> str:
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.getpid()}"


def _digest(need: str, inputs: Mapping[str, Artifact]) -> str:
    stage, _, file = need.partition("/")
    return inputs[stage].digest_of(file) if file else inputs[stage].digest


def _version(package: str) -> str:
    if package == "onboard":
        return __version__
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def _check_known(given: Mapping[str, Any], known: set[str], option: str) -> None:
    for name in given:
        if name not in known:
            raise InputError(f"{option}: {name!r} is none of {', '.join(sorted(known))}")
