"""Run a model of any size: each layer is loaded once, sees all the batches, and is dropped.

Nothing of a family's forward pass is repeated here. Every batch runs the model's own forward in a
thread of its own, and the threads go from layer to layer in lock step, one at a time: so whatever a
model hands from layer to layer (masks, shared indices, several residual streams) just works.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from onboard.checkpoint.skeleton import Skeleton

T = TypeVar("T")


def stream_layers(
    skeleton: Skeleton,
    read: Callable[[str], Tensor],
    passes: Sequence[Callable[[], T]],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[T]:
    """Return what each of `passes` returns; each calls the skeleton's model once.

    What lies outside of the layers must be loaded. `read` gives a source tensor by its name and is
    called once for each tensor of a layer, whatever the number of passes. Memory: one layer, and
    the activations of every pass.
    """
    inside = skeleton.inside_layers()
    layers = skeleton.layers

    def load(layer: int) -> None:
        skeleton.load({name: read(name) for name in inside[layer]})
        skeleton.finish(layers[layer], f"{skeleton.prefix}.{layer}.")
        progress(layer + 1, len(layers))

    return in_lock_step(layers, load, lambda layer: skeleton.drop(layers[layer]), passes)


def in_lock_step(
    layers: nn.ModuleList,
    load: Callable[[int], None],
    drop: Callable[[int], None],
    passes: Sequence[Callable[[], T]],
) -> list[T]:
    """Run `passes` so that each module of `layers` is loaded once, used by all, and dropped."""
    runs = [_Pass(function) for function in passes]
    hooks = [
        layer.register_forward_pre_hook(_stop_at(number), prepend=True)
        for number, layer in enumerate(layers)
    ]
    try:
        for run in runs:
            run.start()
            run.go_on()
        while waiting := [run for run in runs if run.wants is not None]:
            layer = waiting[0].wants
            assert layer is not None
            load(layer)
            for run in waiting:
                if run.wants == layer:
                    run.go_on()
            drop(layer)
    finally:
        for hook in hooks:
            hook.remove()
    return [run.result for run in runs]


def _stop_at(number: int) -> Callable[[nn.Module, Any], None]:
    def hook(module: nn.Module, args: Any) -> None:
        run = threading.current_thread()
        if isinstance(run, _Pass):
            run.wait_for(number)

    return hook


class _Pass(threading.Thread, Generic[T]):
    """A forward pass that stops before each layer; only one of them runs at any time."""

    def __init__(self, function: Callable[[], T]) -> None:
        super().__init__(daemon=True)
        self.function = function
        self.wants: int | None = None
        self.error: BaseException | None = None
        self._may_run, self._stopped = threading.Semaphore(0), threading.Semaphore(0)

    def run(self) -> None:
        self._may_run.acquire()
        try:
            with torch.inference_mode():
                self.result = self.function()
        except BaseException as e:
            self.error = e
        self.wants = None
        self._stopped.release()

    def wait_for(self, layer: int) -> None:
        """Called from inside: hand over until `layer` is loaded."""
        self.wants = layer
        self._stopped.release()
        self._may_run.acquire()

    def go_on(self) -> None:
        """Called from outside: run until the next layer, or the end."""
        self._may_run.release()
        self._stopped.acquire()
        if self.error is not None:
            raise self.error
