"""Train an EAGLE-3 draft with the `speculators` trainer on our features, in its own environment.

    python -m tests.drafts.peer WORK.json

WORK.json holds `target` (the checkpoint folder), `documents` ([shard, first, last] each), `kept`
(the draft's vocabulary), `aux_layers`, `settings` (learning_rate, epochs, row_tokens, ttt_steps,
step_decay, warmup_steps) and `out`, a folder that gets the draft as the trainer saves it and
`meta.json`: seconds, tokens judged, versions. Nothing here imports onboard.

The trainer is theirs as it stands, told that its device is the CPU; attention is their `sdpa`,
which does not go through flex attention's slow reference there.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.train import trainer
from speculators.train.data import BaseDataset, CollateFn
from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2
from torch.utils.data import DataLoader
from transformers import LlamaConfig

from speculators.losses import resolve_loss_config


class Features(BaseDataset):
    """Our shards as the trainer reads documents."""

    def __init__(self, documents: list[tuple[str, int, int]], row_tokens: int) -> None:
        self.documents = documents
        super().__init__(row_tokens, torch.float32)

    def __len__(self) -> int:
        return len(self.documents)

    def _compute_approx_lengths(self) -> list[int]:
        return [last - first for _, first, last in self.documents]

    def _get_raw_data(self, index: int) -> dict[str, Any]:
        shard, first, last = self.documents[index]
        with safe_open(shard, "pt") as f:
            ids, aux, states, mask = (
                f.get_slice(name)[first:last] for name in ("ids", "aux", "last", "mask")
            )
        return {
            "hidden_states": aux.flatten(1).float(),
            "input_ids": ids,
            "verifier_last_hidden_states": states.float(),
            "loss_mask": mask,
        }


def loader(work: dict[str, Any], width: int) -> DataLoader:
    dataset = Features(work["documents"], work["settings"]["row_tokens"])
    sampler = MultipackDistributedBatchSamplerV2(
        dataset.max_len, dataset.approx_lengths, num_replicas=1, rank=0
    )
    collate = CollateFn(dataset.max_len, width, dtype=torch.float32, preprocess=shift_batch)
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)


def model(work: dict[str, Any]) -> Eagle3DraftModel:
    """Build the draft as their command line does, in the target's shape."""
    target = json.loads((Path(work["target"]) / "config.json").read_text())
    shape = LlamaConfig(**{**target, "num_hidden_layers": 1, "torch_dtype": "float32"})
    kept = torch.tensor(work["kept"])
    known = torch.zeros(shape.vocab_size, dtype=torch.bool)
    known[kept] = True
    return Eagle3DraftModel.from_training_args(
        shape,
        t2d=known,
        d2t=kept - torch.arange(len(kept)),
        draft_vocab_size=len(kept),
        norm_before_residual=False,
        target_layer_ids=work["aux_layers"],
        verifier_name_or_path=work["target"],
        ttt_steps=work["settings"]["ttt_steps"],
        draft_attn_impl="sdpa",
    )


def train(work: dict[str, Any]) -> dict[str, Any]:
    trainer.get_local_rank = lambda: "cpu"
    torch.accelerator.synchronize = lambda *a: None
    settings, out = work["settings"], Path(work["out"])
    torch.manual_seed(0)
    draft = model(work).float()
    batches = loader(work, draft.hidden_size)
    loss = {
        "ttt_steps": settings["ttt_steps"],
        "ttt_step_loss_decay": settings["step_decay"],
        "loss_config": resolve_loss_config("kl_div", "eager"),
    }
    config = trainer.TrainerConfig(
        lr=settings["learning_rate"],
        num_epochs=settings["epochs"],
        save_path=str(out / "checkpoints"),
        train_call_kwargs=loss,
        optimizer="adamw",
        scheduler_type="cosine",
        scheduler_warmup_steps=settings["warmup_steps"],
        checkpoint_freq=settings["epochs"],
        hidden_states_dtype=torch.float32,
        log_freq=10**9,
    )
    own = trainer.Trainer(draft, config, batches)
    began = time.monotonic()
    for epoch in range(settings["epochs"]):
        own.train_epoch(epoch)
    seconds = time.monotonic() - began
    draft.save_pretrained(out / "exports" / "vllm")
    shutil.rmtree(out / "checkpoints", ignore_errors=True)
    judged = sum(int(batch["loss_mask"].sum()) for batch in batches) * settings["epochs"]
    return {
        "seconds": seconds,
        "steps": len(batches) * settings["epochs"],
        "tokens": judged,
        "parameters": sum(p.numel() for p in draft.parameters() if p.requires_grad),
        "threads": torch.get_num_threads(),
        "versions": {name: metadata.version(name) for name in ("torch", "speculators")},
    }


if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[1]).read_text())
    Path(asked["out"]).mkdir(parents=True, exist_ok=True)
    meta = train(asked)
    (Path(asked["out"]) / "meta.json").write_text(json.dumps(meta, indent=1))
