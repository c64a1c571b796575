"""Writes checkpoints by hand: headers as the format's specification has them, zeros as data."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WIDTH = {"BF16": 2, "F32": 4, "I32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "U8": 1, "I8": 1}
Shapes = Mapping[str, tuple[int, ...]]

LLAMA_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "rope_theta": 10000.0,
}


def write_shard(
    path: Path, shapes: Shapes, dtype: str = "BF16", dtypes: Mapping[str, str] | None = None
) -> Path:
    """Write a safetensors file of zeros that holds `shapes` (name -> shape).

    `dtypes` gives the dtype of names that end so, `dtype` that of the others.
    """
    table, end = {}, 0
    for name, shape in shapes.items():
        word = next((w for ending, w in (dtypes or {}).items() if name.endswith(ending)), dtype)
        begin, end = end, end + math.prod(shape) * WIDTH[word]
        table[name] = {"dtype": word, "shape": list(shape), "data_offsets": [begin, end]}
    header = json.dumps(table).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(end))
    return path


def write_index(folder: Path, weight_map: Mapping[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def write_model(
    folder: Path,
    shapes: Shapes,
    config: Mapping[str, Any],
    dtype: str = "BF16",
    dtypes: Mapping[str, str] | None = None,
) -> Path:
    """Write config.json and one shard; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_shard(folder / "model.safetensors", shapes, dtype, dtypes)
    return folder


def llama_shapes(layers: int = 2, hidden: int = 64, width: int = 96) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a Llama with tied embeddings and grouped-query attention."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (128, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.input_layernorm.weight": (hidden,),
            f"{at}.post_attention_layernorm.weight": (hidden,),
            f"{at}.self_attn.q_proj.weight": (64, hidden),
            f"{at}.self_attn.k_proj.weight": (32, hidden),
            f"{at}.self_attn.v_proj.weight": (32, hidden),
            f"{at}.self_attn.o_proj.weight": (hidden, 64),
            f"{at}.mlp.gate_proj.weight": (width, hidden),
            f"{at}.mlp.up_proj.weight": (width, hidden),
            f"{at}.mlp.down_proj.weight": (hidden, width),
        }
    return shapes
