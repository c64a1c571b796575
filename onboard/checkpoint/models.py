"""A checkpoint as a transformers model in memory: the source, or the bytes that ship."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from onboard.checkpoint import fp8, nvfp4, taps
from onboard.checkpoint.cache import Fp8Cache, Passing, fp8_cache
from onboard.checkpoint.matrices import Matrix, scale_groups
from onboard.checkpoint.reader import Reader
from onboard.checkpoint.skeleton import Skeleton
from onboard.checkpoint.streaming import stream_layers
from onboard.hardware import device_kind, device_memory

T = TypeVar("T")
MEMORY_SHARE = 0.6  # of the device's memory that a model may take; activations need the rest

_quantize_activations: ContextVar[bool] = ContextVar("quantize activations", default=True)

Adaptation = Mapping[str, Any]
Key = tuple[bool, float]  # whether it is FP8, and the scale


@dataclass(frozen=True)
class Runner:
    """A model and how its forward passes run: from memory, or a layer at a time (`stream_layers`).

    Outside of its layers the model is always loaded.
    """

    skeleton: Skeleton
    read: Callable[[str], Tensor]
    resident: bool
    quantizes_inputs: bool = False
    cache: Fp8Cache | None = None  # what engines keep keys and values in, where that is FP8

    @property
    def model(self) -> Any:
        """What takes token ids and gives logits."""
        return self.skeleton.text

    @property
    def weights_alone(self) -> bool:
        """Whether nothing but the weights differs from full precision."""
        return not self.quantizes_inputs and self.cache is None

    def fresh_cache(self) -> Passing | None:
        """Return what one forward pass is to use as its cache; None for none."""
        return None if self.cache is None else self.cache.fresh(self.model.config)

    def run(
        self,
        passes: Sequence[Callable[[], T]],
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[T]:
        """Return what each pass returns; each calls the model once. `progress` counts layers."""
        if not self.resident:
            return stream_layers(self.skeleton, self.read, passes, progress)
        with torch.inference_mode():
            return [one() for one in passes]


def open_reference(root: Path, dtype: torch.dtype, resident: bool | None = None) -> Runner:
    """Open the source model; `resident` None keeps it in memory where it fits there."""
    reader = Reader.open(root)
    return _open(Skeleton(root, reader.weights, dtype), reader.weight, resident)


def open_candidate(
    checkpoint: Path, adaptation: Adaptation, dtype: torch.dtype, resident: bool | None = None
) -> Runner:
    """Open the written checkpoint as an engine computes it.

    Weights are dequantized from the file. The input of every matrix that has an `input_scale` is
    quantized and dequantized as a W4A4 kernel does (W8A8 where the weight is FP8), but inside
    `full_precision_activations`. An FP8 KV cache takes part in the passes that are given the
    runner's `fresh_cache`.
    """
    candidate = Candidate(checkpoint, adaptation)
    runner = _open(candidate.skeleton(dtype), candidate.weight, resident)
    return replace(
        runner,
        quantizes_inputs=candidate.quantize_inputs(runner.skeleton),
        cache=fp8_cache(candidate.reader, runner.skeleton),
    )


def load_reference(root: Path, dtype: torch.dtype) -> Any:
    """Return the source model in eval mode, in the memory of this machine's device."""
    return open_reference(root, dtype, resident=True).model


def load_candidate(checkpoint: Path, adaptation: Adaptation, dtype: torch.dtype) -> Any:
    """Return the written checkpoint in memory; see `open_candidate`."""
    return open_candidate(checkpoint, adaptation, dtype, resident=True).model


def _open(skeleton: Skeleton, read: Callable[[str], Tensor], resident: bool | None) -> Runner:
    if resident is None:
        resident = skeleton.bytes < MEMORY_SHARE * device_memory()
    names = skeleton.targets if resident else skeleton.outside_layers()
    skeleton.load({name: read(name) for name in names})
    skeleton.finish(skeleton.model if resident else skeleton.text.get_output_embeddings())
    return Runner(skeleton, read, resident)


class Candidate:
    """The written checkpoint seen as its source: the same tensor names, values dequantized."""

    def __init__(self, checkpoint: Path, adaptation: Adaptation) -> None:
        self.reader = Reader.open(checkpoint)
        self.tensors = adaptation["tensors"]
        self.matrices: dict[str, list[Matrix]] = {}
        for group in scale_groups(adaptation):
            for matrix in group:
                self.matrices.setdefault(matrix.tensor, []).append(matrix)

    def skeleton(self, dtype: torch.dtype) -> Skeleton:
        return Skeleton(self.reader.root, self.tensors, dtype)

    def weight(self, name: str) -> Tensor:
        """Return a source tensor as the written files hold it."""
        if name in self.reader.weights or name not in self.matrices:
            return self.reader.weight(name)
        whole = torch.empty(self.tensors[name]["shape"])
        for matrix in self.matrices[name]:
            assert matrix.expert is not None
            one = whole[matrix.expert].T if matrix.transposed else whole[matrix.expert]
            one[matrix.outputs] = self.reader.weight(f"{matrix.module}.weight")
        return whole

    def quantize_inputs(self, skeleton: Skeleton) -> bool:
        """Quantize what enters each matrix that has an `input_scale`; return whether any has."""
        scales = self.reader.input_scales()
        every = [m for matrices in self.matrices.values() for m in matrices if m.module in scales]
        places = taps.points(skeleton, every)
        quantizer = InputQuantizer(
            {point: scales[entered[0].module] for point, entered in places.items()},
            fp8={p for p, m in places.items() if self.reader.scheme(m[0].module) != "nvfp4"},
        )
        taps.attach(skeleton.model, places, quantizer)
        return bool(places)


class InputQuantizer:
    """Quantizes what enters a matrix; q/k/v and gate/up read one tensor, which is done once.

    It becomes NVFP4, but E4M3 at the places in `fp8`; a place without a scale is left alone.
    """

    def __init__(
        self, scales: Mapping[taps.Point, Tensor], fp8: Collection[taps.Point] = ()
    ) -> None:
        self.fp8 = frozenset(fp8)
        self.scales = {point: scale.to(device_kind()) for point, scale in scales.items()}
        self.values = {point: scale.item() for point, scale in scales.items()}
        self.last: tuple[Tensor, Key, Tensor] | None = None  # input, how, result

    def __call__(self, point: taps.Point, x: Tensor) -> Tensor | None:
        if point not in self.values or not _quantize_activations.get():
            return None
        key = (point in self.fp8, self.values[point])
        if self.last is None or self.last[0] is not x or self.last[1] != key:
            rounded = (fp8 if key[0] else nvfp4).quantize_dequantize(x, self.scales[point])
            self.last = (x, key, rounded)
        return self.last[2]


@contextmanager
def full_precision_activations() -> Iterator[None]:
    """Leave a candidate's activations as they are, in this pass, for a while."""
    token = _quantize_activations.set(False)
    try:
        yield
    finally:
        _quantize_activations.reset(token)


def compute_dtype() -> torch.dtype:
    """Return the dtype to run models in: bf16 on an accelerator, fp32 on a CPU."""
    return torch.float32 if device_kind() == "cpu" else torch.bfloat16
