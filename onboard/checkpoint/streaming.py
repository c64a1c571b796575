"""Run a model of any size: each layer is loaded once, sees all the batches, and is dropped.

Nothing of a family's forward pass is repeated here. Every batch runs the model's own forward in a
thread of its own, and the threads go from layer to layer in lock step, one at a time: so whatever a
model hands from layer to layer (masks, shared indices, several residual streams) just works.
"""

from __future__ import annotations

import contextlib
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

    def visit(layer: int, runs: Sequence[Pass[T]]) -> None:
        for run in runs:
            run.go_on()
        progress(layer + 1, len(skeleton.layers))

    return visit_layers(skeleton, read, passes, visit)


def visit_layers(
    skeleton: Skeleton,
    read: Callable[[str], Tensor],
    passes: Sequence[Callable[[], T]],
    visit: Callable[[int, Sequence[Pass[T]]], None],
) -> list[T]:
    """As `stream_layers`, with `visit` called while a layer is loaded and all passes are before it.

    It must make every one of them go on, and may send them through the layer for trial before.
    """
    inside, layers = skeleton.inside_layers(), skeleton.layers

    def loaded(layer: int, runs: Sequence[Pass[T]]) -> None:
        skeleton.load({name: read(name) for name in inside[layer]})
        skeleton.finish(layers[layer], f"{skeleton.prefix}.{layer}.")
        visit(layer, runs)
        skeleton.drop(layers[layer])

    return in_lock_step(layers, loaded, passes)


def in_lock_step(
    layers: nn.ModuleList,
    visit: Callable[[int, Sequence[Pass[T]]], None],
    passes: Sequence[Callable[[], T]],
) -> list[T]:
    """Run `passes`; `visit` gets each module of `layers` with the passes that wait before it."""
    runs = [Pass(function) for function in passes]
    forwards = [layer.forward for layer in layers]
    for number, layer in enumerate(layers):
        layer.forward = _stopping(number, layer.forward)
    try:
        for run in runs:
            run.start()
            run.go_on()
        while waiting := [run for run in runs if run.wants is not None]:
            layer_wanted = waiting[0].wants
            assert layer_wanted is not None
            visit(layer_wanted, [run for run in waiting if run.wants == layer_wanted])
    finally:
        for layer, forward in zip(layers, forwards, strict=True):
            layer.forward = forward
    return [run.result for run in runs]


def _stopping(number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
    def stop_before(*args: Any, **kwargs: Any) -> Any:
        run = threading.current_thread()
        if isinstance(run, Pass):
            run.wait_for(number)
            while run.on_trial:
                with contextlib.suppress(TrialEnds):
                    forward(*args, **kwargs)
                run.wait_for(number)
        return forward(*args, **kwargs)

    return stop_before


class TrialEnds(Exception):
    """Raised by a hook that has seen enough of a trial; the rest of the layer is not run."""


class Pass(threading.Thread, Generic[T]):
    """A forward pass that stops before each layer; only one of them runs at any time."""

    def __init__(self, function: Callable[[], T]) -> None:
        super().__init__(daemon=True)
        self.function = function
        self.wants: int | None = None
        self.on_trial = False
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

    def try_out(self) -> None:
        """Called from outside: run through the layer and be before it again, for what hooks see."""
        self.on_trial = True
        self.go_on()
        self.on_trial = False

    def go_on(self) -> None:
        """Called from outside: run until the next layer, or the end."""
        self._may_run.release()
        self._stopped.acquire()
        if self.error is not None:
            raise self.error
