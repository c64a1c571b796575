"""Read tensors of a checkpoint directory one at a time, NVFP4 ones dequantized on request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from onboard.checkpoint import nvfp4
from onboard.checkpoint.headers import Header, read_headers
from onboard.errors import InputError

SCALES = ("weight_scale", "weight_scale_2", "input_scale")


@dataclass(frozen=True)
class Reader:
    """Lazy access to the safetensors of one directory; nothing stays in memory."""

    root: Path
    headers: dict[str, Header]

    @classmethod
    def open(cls, root: Path) -> Reader:
        return cls(root, read_headers(root))

    def __contains__(self, name: str) -> bool:
        return name in self.headers

    def tensor(self, name: str) -> Tensor:
        """Return one tensor as stored."""
        header = self.headers.get(name)
        if header is None:
            raise InputError(f"{self.root}: no tensor {name!r}")
        with safe_open(self.root / header.shard, framework="pt") as f:
            stored: Tensor = f.get_tensor(name)
        return stored

    def rows(self, name: str, expert: int | None, first: int, count: int) -> Tensor:
        """Return `count` rows from `first` of [out, in], or of one expert in [E, out, in]."""
        header = self.headers[name]
        with safe_open(self.root / header.shard, framework="pt") as f:
            part = f.get_slice(name)
            rows: Tensor = (
                part[first : first + count]
                if expert is None
                else part[expert : expert + 1, first : first + count].squeeze(0)
            )
        return rows

    def is_nvfp4(self, module: str) -> bool:
        return f"{module}.weight_scale_2" in self.headers

    def input_scales(self) -> dict[str, Tensor]:
        """Return module -> `input_scale` f32 [] for every module quantized with one."""
        ending = ".input_scale"
        return {n.removesuffix(ending): self.tensor(n) for n in self.headers if n.endswith(ending)}

    def dequantized(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) as a model sees them: NVFP4 weights as f32, the rest as stored."""
        for name in self.headers:
            module, _, kind = name.rpartition(".")
            if kind in SCALES and self.is_nvfp4(module):
                continue
            if kind == "weight" and self.is_nvfp4(module):
                yield name, self.dequantize(module)
            else:
                yield name, self.tensor(name)

    def dequantize(self, module: str) -> Tensor:
        """Return the f32 [out, in] weight of an NVFP4 module."""
        return nvfp4.dequantize(
            self.tensor(f"{module}.weight"),
            self.tensor(f"{module}.weight_scale"),
            self.tensor(f"{module}.weight_scale_2"),
        )
