"""A target small enough to follow by hand, and twins that can be asked questions."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from onboard.speculators.head import Head, Settings
from onboard.speculators.shards import Document, Place, places_of, write_shard

WIDTH, VOCAB = 32, 48

TOY_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}


def toy_head() -> Head:
    generator = torch.Generator().manual_seed(1)
    embedding = torch.randn(VOCAB, WIDTH, generator=generator).to(torch.bfloat16)
    gain = 0.5 + torch.rand(WIDTH, generator=generator)
    return Head(embedding, embedding, gain, Settings(eps=1e-5))


def toy_document(start: int, length: int = 24, prompt: int = 6, dtype: Any = torch.bfloat16) -> Any:
    """A document of the target that answers 5x + 1 (mod V) to x, and is sure of it."""
    ids = [start]
    while len(ids) < length + 1:
        ids.append((5 * ids[-1] + 1) % VOCAB)
    head = toy_head()
    now, after = head.embedding[ids[:-1]], head.embedding[ids[1:]]
    aux = torch.stack((now, now + after, after), 1).to(dtype)
    mask = torch.arange(length) >= prompt
    return Document(torch.tensor(ids[:-1]), aux, (after / head.gain).to(torch.bfloat16), mask)


@pytest.fixture
def toy_places(tmp_path: Path) -> list[Place]:
    documents = [toy_document(i % VOCAB, 16 + i % 9) for i in range(24)]
    file = tmp_path / "shard-00000.safetensors"
    write_shard(file, documents)
    return list(places_of(file, [f"doc{i}" for i in range(24)]))


def add_tokenizer(folder: Path, size: int = 256) -> None:
    """Save a tokenizer of the words w0, w1, ... beside a twin; the last one ends a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w0", eos_token=f"w{size - 1}"
    ).save_pretrained(folder)


def prompts(count: int) -> list[dict[str, Any]]:
    """Prompts of 3 to 9 tokens, no two alike."""
    return [
        {
            "id": f"p{i}",
            "domain": "code",
            "ids": [(7 * i + 13 * j * j) % 255 for j in range(3 + i % 7)],
        }
        for i in range(count)
    ]


@pytest.fixture
def ask(bench: Any, tmp_path: Path) -> Callable[..., Any]:
    """Put the artifacts before `features` on the bench, for a twin that ships unquantized."""

    def put(twin: Path, count: int = 10) -> Any:
        root = tmp_path / "model"
        shutil.copytree(twin, root)
        add_tokenizer(root)
        location = {"root": str(root), "model": "twin", "revision": None, "kind": "directory"}
        bench.put("source", location__json={**location, "licence": None})
        bench.put("data", training_prompts__jsonl=prompts(count))
        shutil.copytree(twin, tmp_path / "quantize" / "checkpoint")
        bench.artifacts["quantize"] = _commit(tmp_path / "quantize")
        return bench

    return put


def _commit(folder: Path) -> Any:
    from onboard.store import Artifact

    return Artifact(folder, {"files": {}, "digest": "0" * 64}, {})
