"""llm-compressor's methods in NVFP4A16, run on a CPU; see peer.py for the command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from llmcompressor import oneshot  # type: ignore[import-not-found]
from llmcompressor.modifiers.gptq import GPTQModifier  # type: ignore[import-not-found]
from llmcompressor.modifiers.quantization import QuantizationModifier  # type: ignore[import-not-found]
from llmcompressor.modifiers.transform.awq import AWQModifier  # type: ignore[import-not-found]
from llmcompressor.pipelines.cache import IntermediatesCache  # type: ignore[import-not-found]
from torch.utils.data import DataLoader

from tests.quality import peer
from tests.quality.peer import Task

ALL_LINEARS: dict[str, Any] = {
    "targets": "Linear",
    "scheme": "NVFP4A16",
    "ignore": ["lm_head", "re:.*mlp.gate$"],
}
RECIPES: dict[str, Callable[[], list[Any]]] = {
    "rtn": lambda: [QuantizationModifier(**ALL_LINEARS)],
    "gptq": lambda: [GPTQModifier(**ALL_LINEARS)],
    "awq": lambda: [AWQModifier(), QuantizationModifier(**ALL_LINEARS)],
}


def loader(task: Task) -> DataLoader[Any]:
    """Return the calibration documents in their order, as the model takes them."""
    rows = [{"input_ids": row, "attention_mask": torch.ones_like(row)}
            for row in torch.tensor(task.ids)]  # fmt: skip
    batches: DataLoader[Any] = DataLoader(rows, batch_size=peer.BATCH)  # type: ignore[arg-type]
    return batches


def keep_unpinned() -> None:
    """Let AWQ run without an accelerator: 0.14.0.1 pins its cached activations for one."""
    if not torch.accelerator.is_available():
        IntermediatesCache.pin_memory = lambda *_: None


def quantize(task: Task) -> None:
    keep_unpinned()
    model = peer.load(task.model)
    with task.timed("seconds"):
        oneshot(model=model, dataset=loader(task), recipe=RECIPES[task.method]())
    with task.timed("export_seconds"):
        model.save_pretrained(task.export, save_compressed=True)


if __name__ == "__main__":
    peer.main(quantize, ("llmcompressor", "compressed-tensors"))
