"""`make bench-speculator`: our drafts in the engine beside the `speculators` trainer's.

    python -m tests.drafts [OUT]

Both train on the same features, vocabulary and head size. OUT (.onboard/drafts) gets bench.json
with what the engine accepted of every prompt's drafts; a run that was stopped goes on. The last
line is PASS, or FAIL: and what falls short.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from onboard.recipe import Speculate
from onboard.speculators.shards import places, split
from onboard.speculators.vocabulary import Vocabulary, count
from tests.drafts import engine, verdict
from tests.drafts.prepare import Stand
from tests.drafts.trial import Results, trial

ROOT = Path(__file__).parents[2]
PEER = ROOT / ".venv-speculators/bin/python"
PEER_LIMIT = 1800.0  # seconds
ROW_TOKENS = 1024  # of the peer's packed rows: about our batch of 8 documents
PARAMS = Speculate(epochs=3, batch_size=8, learning_rate=2e-3, warmup_steps=20)
MOST_EPOCHS = 24
BUDGET = 0.92 * 60 * verdict.MINUTES  # seconds that the long training is sized for


def peer(results: Results, stand: Stand) -> None:
    """The same with the peer's trainer, in its own environment."""
    if "prompts" in results.drafts.get("peer", {}):
        return
    folder = results.out / "peer"
    folder.mkdir(exist_ok=True)
    trained, _ = split(places(stand.features.path))
    vocabulary = Vocabulary.most_frequent(
        count((d.read_tokens() for d in trained), 2**20), PARAMS.draft_vocab_size
    )
    work = folder / "work.json"
    work.write_text(json.dumps({
        "target": str(stand.checkpoint.absolute()),
        "documents": [[str(p.shard.absolute()), p.start, p.stop] for p in trained],
        "kept": vocabulary.kept.tolist(),
        "aux_layers": stand.features.json("index.json")["aux_layers"],
        "settings": {**PARAMS.model_dump(mode="json"), "row_tokens": ROW_TOKENS},
        "out": str(folder.absolute()),
    }))  # fmt: skip
    if reason := _run([str(PEER), "-m", "tests.drafts.peer", str(work.absolute())], folder):
        results.keep("peer", {"failed": reason})
        return
    meta = json.loads((folder / "meta.json").read_text())
    speed = meta["tokens"] / meta["seconds"]
    found = engine.accepted(stand, folder / "exports")
    results.keep("peer", {**meta, "tokens_per_s": speed, **found})


def _run(command: Sequence[str], folder: Path) -> str | None:
    """Run the peer; return why it gave nothing, or None."""
    if not PEER.exists():
        return "not installed: make .venv-speculators/installed"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["OMP_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))
    with (folder / "log").open("w") as log:
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=log, stderr=log, timeout=PEER_LIMIT
            )
        except subprocess.TimeoutExpired:
            return f"not finished in {PEER_LIMIT:.0f} s"
    if done.returncode:
        lines = (folder / "log").read_text().strip().splitlines() or ["no output"]
        return f"ended with {done.returncode}: {lines[-1][:500]}"
    return None


def long_params(results: Results) -> Speculate:
    """Return as many epochs as the budget of training allows, by the speed of the short one."""
    short = results.drafts["ours"]
    epochs = int(BUDGET / (short["seconds"] / PARAMS.epochs))
    return PARAMS.model_copy(update={"epochs": max(1, min(MOST_EPOCHS, epochs))})


def main(out: Path) -> None:
    began = time.monotonic()
    results = Results(out, "bench.json")
    stand = Stand.of("smollm2-135m", out / "stand")
    trial(results, stand, "ours", stand.features.path, PARAMS)
    peer(results, stand)
    trial(results, stand, "long", stand.features.path, long_params(results), engine.smoked)
    long = results.drafts["long"]
    for row in long["curve"]:
        print(f"{row['tokens']:9} tokens  estimated acceptance {row['held_out_length']:.3f}")
    for domain in sorted({p["domain"] for p in stand.prompts}):
        rows = [p for p in long["prompts"] if p["domain"] == domain]
        found, lo, hi = verdict.length(rows)
        print(f"{domain:9} acceptance {found:.3f} [{lo:.3f}, {hi:.3f}] of {len(rows)} prompts")
    print(", ".join(f"{name} {long['smoke'][name]:.4g}" for name in verdict.LOSSLESS))
    print(f"{(time.monotonic() - began) / 60:.0f} minutes; {results.file}")
    fails = verdict.shortfalls(json.loads(results.file.read_text()))
    print("FAIL: " + "; ".join(fails) if fails else "PASS")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else ".onboard/drafts"))
