"""A byte-level tokenizer with 256 tokens, and a source artifact that holds it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[[Path, str | None], Path]:
    """Save one token per byte, with or without a chat template, in a folder."""

    def make(folder: Path, template: str | None = CHAT) -> Path:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        bpe = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = decoders.ByteLevel()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, chat_template=template)
        tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.fixture
def put_source(bench: Any, tmp_path: Path, make_tokenizer: Any) -> Callable[[str | None], Any]:
    """Make the source artifact of a model directory that has a tokenizer."""

    def put(template: str | None = CHAT) -> Any:
        root = make_tokenizer(tmp_path / "model", template)
        location = {
            "root": str(root),
            "model": "twin",
            "revision": None,
            "kind": "directory",
            "licence": None,
        }
        return bench.put("source", location__json=location)

    return put
