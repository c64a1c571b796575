"""The product on one page: what happens to a checkpoint, in order.

Every line names the function that does the work and what it reads. `stage/file` means that only
that file of the artifact can make the stage run again: a chat template fixed upstream does not
touch the weights.
"""

from __future__ import annotations

from onboard.pipeline import Stage

WEIGHTS = "source/weights.json"
TOKENIZER = "source/tokenizer.json"
TORCH = ("torch", "transformers")

STAGES = (
    Stage("source", "onboard.source:run", fingerprint="onboard.source:fingerprint"),
    Stage("adapt", "onboard.adapt:run", (WEIGHTS,)),
    Stage(
        "data",
        "onboard.data.stage:run",
        (TOKENIZER,),
        packages=("transformers",),
        fingerprint="onboard.data.stage:fingerprint",
    ),
    Stage(
        "calibrate",
        "onboard.quantize.calibrate:run",
        (WEIGHTS, "adapt", "data/calibration.jsonl"),
        packages=(*TORCH, "nvidia-modelopt"),
        costly=True,
    ),
    Stage(
        "quantize",
        "onboard.quantize.stage:run",
        (
            WEIGHTS,
            TOKENIZER,
            "adapt",
            "calibrate",
            "data/calibration.jsonl",
            "data/selection.jsonl",
            "data/distillation.jsonl",
        ),
        packages=(*TORCH, "accelerate"),
        costly=True,
    ),
    Stage(
        "fidelity",
        "onboard.evals.fidelity:run",
        (WEIGHTS, TOKENIZER, "adapt", "quantize", "data/evaluation.jsonl", "data/hellaswag.jsonl"),
        packages=(*TORCH, "lm_eval"),
        costly=True,
    ),
    Stage(
        "features",
        "onboard.speculators.features:run",
        (WEIGHTS, TOKENIZER, "adapt", "quantize", "data/training_prompts.jsonl"),
        packages=TORCH,
        costly=True,
    ),
    Stage(
        "speculate",
        "onboard.speculators.stage:run",
        (WEIGHTS, "adapt", "quantize", "features"),
        packages=(*TORCH, "accelerate"),
        costly=True,
    ),
    Stage(
        "smoke",
        "onboard.evals.smoke:run",
        (WEIGHTS, TOKENIZER, "adapt", "quantize", "speculate", "data/evaluation_prompts.jsonl"),
        fingerprint="onboard.engines.environment:fingerprint",
        costly=True,
    ),
)
