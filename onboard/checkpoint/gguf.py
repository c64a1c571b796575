"""A GGUF file as an ordinary bf16 safetensors model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

Progress = Callable[[int, int], None]  # tensors done, tensors in total


def convert(gguf: Path, dest: Path, progress: Progress = lambda done, total: None) -> None:
    """Write config, generation config, safetensors (bf16) and tokenizer of `gguf` into `dest`.

    transformers maps the names and dequantizes each tensor in fp32 before it rounds to bf16; by
    default it would keep the weights packed. The same file gives the same bytes.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder, file = str(gguf.parent), gguf.name
    with _bars(progress):
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            gguf_file=file,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
        if hasattr(model.config, "quantization_config"):  # it describes the packed file
            del model.config.quantization_config
        model.save_pretrained(dest)
    AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(dest)
    for path in dest.iterdir():
        path.chmod(0o644)


@contextlib.contextmanager
def _bars(progress: Progress) -> Iterator[None]:
    """Report the tensors to `progress` in place of the bars that transformers draws."""
    from transformers import modeling_gguf_pytorch_utils as reader
    from transformers.utils import logging

    def watch(tensors: Sequence[Any], **_: Any) -> Iterator[Any]:
        for done, tensor in enumerate(tensors, 1):
            yield tensor
            progress(done, len(tensors))

    bar, shown = reader.tqdm, logging.is_progress_bar_enabled()
    reader.tqdm = watch
    logging.disable_progress_bar()
    try:
        yield
    finally:
        reader.tqdm = bar
        if shown:
            logging.enable_progress_bar()
