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


# GGUF's words for the keys of a config.json; "{}" is its name of the architecture.
_KEYS = {
    "{}.embedding_length": "hidden_size",
    "{}.block_count": "num_hidden_layers",
    "{}.feed_forward_length": "intermediate_size",
    "{}.attention.head_count": "num_attention_heads",
    "{}.attention.head_count_kv": "num_key_value_heads",
    "{}.attention.key_length": "head_dim",
    "{}.attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "{}.context_length": "max_position_embeddings",
    "{}.rope.freq_base": "rope_theta",
}


def describe(gguf: Path) -> dict[str, Any]:
    """Return the main keys of the config.json that `convert` would write, from metadata alone."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf)
    named = reader.fields["general.architecture"].contents()
    config: dict[str, Any] = {"model_type": named}
    for field, key in _KEYS.items():
        if (held := reader.fields.get(field.format(named))) is not None:
            config[key] = held.contents()
    shapes = {tensor.name: tensor.shape for tensor in reader.tensors}
    config["vocab_size"] = int(shapes["token_embd.weight"][1])  # GGUF puts the inputs first
    config["tie_word_embeddings"] = "output.weight" not in shapes
    return config


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
