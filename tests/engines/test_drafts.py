"""vLLM's drafter says token for token what ours says, whatever the draft's shape."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from onboard.recipe import Draft
from onboard.speculators import export, head
from onboard.speculators.capture import aux_layers
from onboard.speculators.eagle3 import Eagle3, draft_sequentially
from onboard.speculators.shape import DraftConfig
from onboard.speculators.vocabulary import Vocabulary
from tests.conftest import SMALL, save_twin
from tests.engines.test_nvfp4_cpu import run_in_engine

pytestmark = [pytest.mark.engine, pytest.mark.slow]

WIDE_HEADS = {**SMALL, "head_dim": 32, "tie_word_embeddings": False}  # vLLM's CPU attention: 32
KEPT = torch.arange(1, 256, 2)
NEAR = 1e-3  # a draft logit this far behind the best one may be the best in another order of sums
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "two layers": {"layers": 2},
    "window": {"window": 8, "heads": 2, "kv_heads": 1},
    "P-EAGLE": {"family": "peagle", "layers": 2},
    "EAGLE-3.1": {"norm_before_residual": True, "norm_output": True, "fc_norm": True},
}


@dataclass(frozen=True)
class Round:
    """A draft: `ids` i64 [T] are x_1 .. x_T, `aux` [T, 3, H] what the engine gave for them."""

    ids: Tensor
    aux: Tensor
    drafts: Tensor


def rounds(recorded: dict[str, Tensor]) -> Iterator[Round]:
    """Yield the drafts of all requests; a request begins where the positions begin again."""
    tokens: dict[int, Tensor] = {}
    states: dict[int, Tensor] = {}
    for number in range(len(recorded) // 6):
        call = {name: recorded[f"{number}.{name}"] for name in
                ("tokens", "positions", "states", "last", "next", "drafts")}  # fmt: skip
        last = int(call["last"])
        for index in range(last + 1):  # what follows was drafted and refused
            position = int(call["positions"][index])
            tokens[position], states[position] = call["tokens"][index], call["states"][index]
        end = int(call["positions"][last])
        ids = torch.stack([*(tokens[p] for p in range(1, end + 1)), call["next"]])
        aux = torch.stack([states[p] for p in range(end + 1)]).unflatten(-1, (3, -1))
        yield Round(ids, aux, call["drafts"])


def random_draft(target: Path, shape: dict[str, Any]) -> tuple[Eagle3, Vocabulary]:
    """A draft no better than its start, with norms that are no ones."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    config = json.loads((target / "config.json").read_text())
    vocabulary = Vocabulary(KEPT, config["vocab_size"])
    made = DraftConfig.of_target(config, len(KEPT), Draft(**shape))
    draft = Eagle3.initial(made, head.of_model(model), vocabulary, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.ndim == 1:
                parameter.copy_(0.5 + torch.rand(len(parameter), generator=generator))
            elif parameter.requires_grad:
                parameter.mul_(3)
    return draft, vocabulary


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_draft_tokens_are_the_engine_s(tmp_path: Path, shape: dict[str, Any]) -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(**{**WIDE_HEADS, "num_hidden_layers": 8})
    target = save_twin(tmp_path / "target", config)
    draft, vocabulary = random_draft(target, shape)
    layers = aux_layers(config.num_hidden_layers)
    export.write(tmp_path / "draft", "vllm", draft, vocabulary, layers, ["LlamaForCausalLM"], 3)
    written = export.read(tmp_path / "draft", "vllm").draft()
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(256, (5 + n % 19,), generator=generator).tolist() for n in range(50)]
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    files = [tmp_path / name for name in ("target", "draft", "prompts.json", "out.safetensors")]
    run_in_engine("record_drafts.py", *map(str, files))
    found = list(rounds(load_file(files[-1])))
    assert len(found) >= 50 * 4
    ties = 0
    for one in found:
        logits = draft_sequentially(written, one.ids, one.aux, one.drafts[:-1])
        for said, row in zip(one.drafts.tolist(), logits, strict=True):
            ours = int(vocabulary.to_target(row.argmax()))
            if ours != said:
                draft_id = int(KEPT.eq(said).nonzero()[0])
                assert row.max() - row[draft_id] < NEAR, (ours, said)
                ties += 1
    assert ties <= len(found) * 3 // 200  # next to none
