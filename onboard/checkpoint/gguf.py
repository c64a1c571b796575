"""A GGUF file as an ordinary bf16 safetensors model."""

from __future__ import annotations

from pathlib import Path


def convert(gguf: Path, dest: Path) -> None:
    """Write config, generation config, safetensors (bf16) and tokenizer of `gguf` into `dest`.

    transformers maps the names and dequantizes each tensor in fp32 before it rounds to bf16; by
    default it would keep the weights packed. The same file gives the same bytes.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder, file = str(gguf.parent), gguf.name
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=file,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    if hasattr(model.config, "quantization_config"):  # it describes the packed file, not this one
        del model.config.quantization_config
    model.save_pretrained(dest)
    AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(dest)
    for path in dest.iterdir():
        path.chmod(0o644)
