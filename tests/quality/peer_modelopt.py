"""NVIDIA ModelOpt's methods, run on a CPU; see peer.py for the command line.

Weight-only methods are ModelOpt's presets with the input quantizers off; `w4a4` is its
NVFP4_DEFAULT_CFG as it stands. `autoquantize-METHOD-BITS` searches NVFP4, FP8 and no
quantization per group of linears, at BITS a weight in ModelOpt's own count.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization import algorithms
from torch import Tensor

from tests.quality import modelopt_cpu, peer
from tests.quality.peer import Task

Settings = dict[str, Any]
KEPT = ["*lm_head*", "*embed_tokens*", "*mlp.gate"]
SCORE_SECONDS = 400.0  # kl_div scores as many documents as fit, at least one
SEARCHERS = {
    "gradient": algorithms.AutoQuantizeGradientSearcher,
    "kl_div": algorithms.AutoQuantizeKLDivSearcher,
}


def weight_only(settings: Settings) -> Settings:
    """Return a preset with its input quantizers off."""
    changed = copy.deepcopy(settings)
    off = {"quantizer_name": "*input_quantizer", "enable": False}
    changed["quant_cfg"] = [*changed["quant_cfg"], off]
    return changed


def gptq_recipe(layerwise: bool) -> Settings:
    """Return the recipe nvfp4_default-kv_none-gptq without inputs: layer after layer, or at once.

    `fused` names the same update, a column at a time, which modelopt_cpu gives to the CPU.
    """
    settings = weight_only(mtq.NVFP4_W4A4_WEIGHT_LOCAL_HESSIAN_CFG)  # static block scales too
    algorithm = {"method": "gptq", "fused": True, "layerwise": {"enable": layerwise}}
    return {**settings, "algorithm": algorithm}


PRESETS: dict[str, Callable[[], Settings]] = {
    "w4a4": lambda: mtq.NVFP4_DEFAULT_CFG,
    "w4a16": lambda: mtq.W4A16_NVFP4_CFG,
    "awq_lite": lambda: weight_only(mtq.NVFP4_AWQ_LITE_CFG),
    "local_hessian": lambda: weight_only(mtq.NVFP4_W4A4_WEIGHT_LOCAL_HESSIAN_CFG),
    "local_hessian_w4a4": lambda: mtq.NVFP4_W4A4_WEIGHT_LOCAL_HESSIAN_CFG,
    "gptq": lambda: gptq_recipe(layerwise=True),
    "gptq_at_once": lambda: gptq_recipe(layerwise=False),
}


def calibrate(task: Task, model: Any) -> Any:
    """Quantize with one of the presets."""
    batches = task.batches()

    def forward(m: Any) -> None:
        with torch.no_grad():
            for batch in batches:
                m(input_ids=batch)

    with task.timed("seconds"):
        return mtq.quantize(model, PRESETS[task.method](), forward)


# --- AutoQuantize


def logits(model: Any, batch: Tensor) -> Tensor:
    out: Tensor = model(input_ids=batch).logits
    return out


def next_token_loss(output: Tensor, batch: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next token, the loss that `gradient` differentiates."""
    flat = output[:, :-1].flatten(0, 1).float()
    return torch.nn.functional.cross_entropy(flat, batch[:, 1:].flatten())


def affordable_steps(task: Task, model: Any, batches: list[Tensor]) -> int:
    """Return how many batches kl_div can score: a forward per group, format and batch."""
    with torch.inference_mode():
        reference = logits(model, batches[0]).log_softmax(-1)
        began = time.monotonic()
        candidate = logits(model, batches[0]).log_softmax(-1)
        torch.nn.functional.kl_div(candidate, reference, log_target=True, reduction="sum")
        task.notes["forward_seconds"] = time.monotonic() - began
    layers = model.config.num_hidden_layers
    forwards = 2 * 4 * layers  # q/k/v, o, gate/up and down, in two formats
    steps = int(SCORE_SECONDS / (forwards * task.notes["forward_seconds"]))
    return max(1, min(steps, len(batches)))


@contextmanager
def timed_scoring(task: Task, searcher: Any) -> Iterator[None]:
    """Time the scoring inside; scores reused from another budget count what they took then.

    Notes whether they are reused, their seconds and how many batches and documents they saw.
    """
    path = task.out.parent / f"{searcher.method_name}-scoring.json"
    estimate = searcher.estimate_sensitivity_scores

    def timed(self: Any) -> None:
        with task.timed("score_seconds"):
            estimate(self)
        scored = {n: v for n, v in task.notes.items() if n.startswith("score_")}
        path.write_text(json.dumps(scored))

    searcher.estimate_sensitivity_scores = timed
    try:
        yield
    finally:
        searcher.estimate_sensitivity_scores = estimate
    task.notes["scores_reused"] = "score_seconds" not in task.notes
    task.notes.update(json.loads(path.read_text()))


@contextmanager
def timed_search(task: Task, searcher: Any) -> Iterator[None]:
    search = searcher.run_search

    def timed(self: Any) -> None:
        with task.timed("search_seconds"):
            search(self)

    searcher.run_search = timed
    try:
        yield
    finally:
        searcher.run_search = search


def autoquantize(task: Task, model: Any) -> Any:
    """Search a format per group; `select_seconds` is scoring and search, without calibrating.

    Calibration and scores are kept beside `task.out` for the next budget of the same method.
    """
    _, method, bits = task.method.split("-")
    kl_div = method == "kl_div"
    batches = task.batches(1 if kl_div else peer.BATCH)
    steps = affordable_steps(task, model, batches) if kl_div else len(batches)
    task.notes["score_steps"] = steps
    task.notes["score_documents"] = sum(len(b) for b in batches[:steps])
    searcher = SEARCHERS[method]
    with task.timed("seconds"), timed_scoring(task, searcher), timed_search(task, searcher):
        model, state = mtq.auto_quantize(
            model,
            constraints={
                "effective_bits": float(bits),
                "cost": {"excluded_module_name_patterns": KEPT},
            },
            quantization_formats=[mtq.W4A16_NVFP4_CFG, mtq.FP8_DEFAULT_CFG],
            data_loader=batches,
            forward_step=logits,
            loss_func=None if kl_div else next_token_loss,
            disabled_layers=KEPT,
            num_calib_steps=len(batches),
            num_score_steps=steps,
            method=method,
            checkpoint=str(task.out.parent / f"autoquantize-{method}.pth"),
        )
    task.notes["select_seconds"] = task.notes["score_seconds"] + task.notes["search_seconds"]
    task.notes["claimed_bits"] = float(state["best"]["constraints"]["effective_bits"])
    task.notes["satisfied"] = bool(state["best"]["is_satisfied"])
    return model


def quantize(task: Task) -> None:
    modelopt_cpu.install()
    model = peer.load(task.model)
    run = autoquantize if task.method.startswith("autoquantize-") else calibrate
    model = run(task, model)
    with task.timed("export_seconds"), torch.inference_mode():
        export_hf_checkpoint(model, export_dir=task.export)


if __name__ == "__main__":
    peer.main(quantize, ("nvidia-modelopt",))
