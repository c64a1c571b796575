"""Rounded matrices on the way to the checkpoint: a file a layer, in the scratch of the stage."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

REPLACED = "replaced.safetensors"


class Layers:
    """What a folder holds: packed matrices by module, and weights that take the source's place.

    A matrix is `weight`, `weight_scale` and, in NVFP4, `weight_scale_2`, as the ModelOpt layout
    stores them; it is read when asked for. `notes` are what the report says of a module.
    `replaced` are other weights that were trained, such as norms, by their source's name.
    """

    def __init__(self, folder: Path) -> None:
        self.notes: dict[str, dict[str, Any]] = {}
        self._files: dict[str, Path] = {}
        for path in sorted(folder.glob("layer-*.safetensors")):
            notes = json.loads(path.with_suffix(".json").read_text())
            self.notes |= notes
            self._files |= dict.fromkeys(notes, path)
        trained = folder / REPLACED
        self.replaced: dict[str, Tensor] = load_file(trained) if trained.exists() else {}

    def __contains__(self, module: str) -> bool:
        return module in self._files

    def parts(self, module: str) -> dict[str, Tensor]:
        """Return the stored tensors of a module, `weight` first, in the order they are written."""
        with safe_open(self._files[module], framework="pt") as f:
            names = [f"{module}.{part}" for part in ("weight", "weight_scale", "weight_scale_2")]
            held = frozenset(f.keys())
            return {n.rpartition(".")[2]: f.get_tensor(n) for n in names if n in held}


def save_layer(path: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, Any]) -> None:
    """Write the notes, then the tensors: a layer whose file is there is complete."""
    path.with_suffix(".json").write_text(json.dumps(notes))
    save_whole(path, tensors)


def save_whole(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a file that is either whole or absent."""
    partial = path.with_suffix(".partial")
    save_file({name: tensors[name].contiguous() for name in sorted(tensors)}, partial)
    partial.rename(path)
