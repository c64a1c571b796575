"""Tiny random twins of real architectures, saved as published checkpoints are."""

from __future__ import annotations

import os
import shutil

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# A busy machine must not turn a property into a failure.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}


def save_twin(folder: Path, config: Any, seed: int = 0) -> Path:
    """Save a random bf16 model of `config`; weights are large enough to make peaked outputs."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def make_llama() -> Callable[..., Path]:
    """Save a two-layer Llama with tied embeddings; keywords change its config."""

    def make(folder: Path, **changes: Any) -> Path:
        from transformers import LlamaConfig

        return save_twin(folder, LlamaConfig(**{**SMALL, "tie_word_embeddings": True, **changes}))

    return make


@pytest.fixture(scope="session")
def llama_twin(tmp_path_factory: pytest.TempPathFactory, make_llama: Callable[..., Path]) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def qwen3_moe_twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Qwen3-MoE with eight experts, two a token, under published per-expert names."""
    from transformers import Qwen3MoeConfig

    moe = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = Qwen3MoeConfig(**SMALL, **moe, tie_word_embeddings=False)
    return save_twin(tmp_path_factory.mktemp("qwen3_moe"), config)


CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., Path]:
    """Save one token per byte, with or without a chat template, in a folder."""

    def make(folder: Path, template: str | None = CHAT) -> Path:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        bpe = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = decoders.ByteLevel()
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=bpe, chat_template=template, eos_token=letters[0]
        )
        tokenizer.save_pretrained(folder)
        return folder

    return make


def commit(folder: Path) -> Any:
    """Return what a stage wrote in `folder` as an artifact, as later stages get it."""
    from onboard.store import Artifact, file_digest

    files = {
        str(p.relative_to(folder)): {"sha256": file_digest(p), "size": p.stat().st_size}
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }
    return Artifact(folder, {"files": files, "digest": "0" * 64}, {})


@dataclass
class Bench:
    """Runs stage functions one by one, outside a pipeline; `warnings` keeps what they said."""

    folder: Path
    artifacts: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def job(self, stage: str, section: Any, again: bool = False) -> Any:
        from onboard.events import Events
        from onboard.pipeline import Job

        def listen(event: dict[str, Any]) -> None:
            if event["event"] == "warning":
                self.warnings.append(event["message"])

        out, scratch = self.folder / stage, self.folder / f"{stage}.scratch"
        out.mkdir(exist_ok=again)
        scratch.mkdir(exist_ok=True)
        return Job(section, dict(self.artifacts), out, scratch, Events([listen]), stage)

    def run(self, stage: str, function: Any, section: Any) -> Any:
        """Run a stage on the artifacts so far; its output joins them and is returned."""
        job = self.job(stage, section)
        function(job)
        self.artifacts[stage] = commit(job.out)
        return self.artifacts[stage]

    def once(self, stage: str, function: Any, section: Any) -> None:
        """Run a stage, unless the folder has it whole from another time."""
        done = self.folder / f"{stage}.done"
        if done.exists():
            self.artifacts[stage] = commit(self.folder / stage)
            return
        shutil.rmtree(self.folder / stage, ignore_errors=True)  # of a run that was stopped
        self.run(stage, function, section)
        done.touch()

    def put(self, stage: str, **files: Any) -> Any:
        """Make an artifact by hand; `calibration__jsonl=[...]` becomes calibration.jsonl."""
        folder = self.folder / stage
        folder.mkdir()
        for name, value in files.items():
            path = folder / name.replace("__", ".")
            rows = "".join(json.dumps(row) + "\n" for row in value)
            path.write_text(rows if path.suffix == ".jsonl" else json.dumps(value))
        self.artifacts[stage] = commit(folder)
        return self.artifacts[stage]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)
