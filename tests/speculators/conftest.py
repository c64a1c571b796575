"""A target small enough to follow by hand, and twins that can be asked questions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from onboard.speculators.head import Head, Settings
from onboard.speculators.shards import Document, Place, places_of, write_shard

from ..conftest import SMALL, save_twin

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


TWINS = ("llama_twin", "qwen3_moe_twin", "deepseek_v3_twin", "gemma3_twin")


@pytest.fixture(scope="session")
def deepseek_v3_twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Latent attention: no keys and values that a draft could take its heads from."""
    from transformers import DeepseekV3Config

    latent = {
        "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 16, "head_dim": 8, "num_key_value_heads": 4,
    }  # fmt: skip
    moe = {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    }  # fmt: skip
    config = DeepseekV3Config(**{**SMALL, **latent, **moe})
    return save_twin(tmp_path_factory.mktemp("deepseek_v3"), config)


@pytest.fixture(scope="session")
def gemma3_twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sliding window in every second layer, norms that multiply by 1 + w, scaled embeddings.

    The padding is a token that no prompt has: its embedding is zero.
    """
    from transformers import Gemma3TextConfig

    kinds = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**SMALL, sliding_window=8, layer_types=kinds, pad_token_id=255)
    return save_twin(tmp_path_factory.mktemp("gemma3"), config)


def write_toy_features(folder: Path, places: list[Place]) -> None:
    """Lay out what training reads of a features artifact."""
    folder.mkdir()
    shutil.copy(places[0].shard, folder)
    head = toy_head()
    head.save(folder)
    index = {
        "storage": "bf16",
        "shards": [{"file": places[0].shard.name, "ids": [place.id for place in places]}],
        "aux_layers": [2, 15, 27],
        "head": asdict(head.settings),
    }
    (folder / "index.json").write_text(json.dumps(index))


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
