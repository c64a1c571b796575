"""Run a model of any size: each layer is loaded once, sees all the batches, and is dropped.

Nothing of a family's forward pass is repeated here. Every batch runs the model's own forward in a
greenlet of its own, and these go from layer to layer in lock step, one at a time: so whatever a
model hands from layer to layer (masks, shared indices, several residual streams) just works.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn
from torch.utils import _pytree as pytree

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
    inside = skeleton.inside_layers()

    def visit_loaded(layer: int, runs: Sequence[Pass[T]]) -> None:
        with loaded(skeleton, read, layer, inside[layer]):
            visit(layer, runs)

    return in_lock_step(skeleton.layers, visit_loaded, passes)


@contextlib.contextmanager
def loaded(
    skeleton: Skeleton, read: Callable[[str], Tensor], layer: int, names: Iterable[str]
) -> Iterator[None]:
    """Have one layer in memory for a while; `names` are its source tensors."""
    module = skeleton.layers[layer]
    skeleton.load({name: read(name) for name in names})
    skeleton.finish(module, f"{skeleton.prefix}.{layer}.")
    yield
    skeleton.drop(module)


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
        run = getcurrent()
        if not isinstance(run, Pass):
            return forward(*args, **kwargs)
        while True:
            run.wait_for(number)
            result = forward(*args, **kwargs)
            if not run.on_trial:
                return result
            del result  # or it would be held through all that waits before the layer

    return stop_before


def pause() -> None:
    """Called by a hook inside of a layer: hand over until the pass may go on."""
    run = getcurrent()
    assert isinstance(run, Pass)
    run.hand_over()


class Pass(greenlet, Generic[T]):
    """A forward pass that stops before each layer, with gradient and inference modes of its own.

    A thread would do as well but for speed: OpenMP gives each a team, and once there are more of
    these than cores every parallel loop waits for its team to wake up.
    """

    result: T

    def __init__(self, function: Callable[[], T]) -> None:
        super().__init__(function)
        self.wants: int | None = None
        self.on_trial = False
        self._inference, self._gradients = True, False

    def wait_for(self, layer: int) -> None:
        """Called from inside: hand over until `layer` is loaded."""
        self.wants = layer
        self.hand_over()

    def hand_over(self) -> None:
        self._inference = torch.is_inference_mode_enabled()
        self._gradients = torch.is_grad_enabled()
        assert self.parent is not None
        self.parent.switch()

    def try_out(self) -> None:
        """Called from outside: run on in the layer, until a hook pauses or to be before it again.

        What was paused goes on from there, with the weights as they then are.
        """
        self.on_trial = True
        self.go_on()
        self.on_trial = False

    def go_on(self) -> None:
        """Called from outside: run until the next layer, or the end, or until a hook pauses."""
        with torch.inference_mode(self._inference), torch.set_grad_enabled(self._gradients):
            returned = self.switch()
        if self.dead:
            self.wants, self.result = None, returned


@dataclass(frozen=True)
class Call:
    """One run of a layer: what it got, and leaves that stand for the tensors it gave.

    `inputs` are those of its arguments that depend on what was given before.
    """

    layer: int
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    inputs: list[Tensor]
    outputs: list[Tensor]


class Tape:
    """A forward pass on which gradients can go back, a layer at a time.

    Of a layer only the arguments are kept; what lies between layers is kept as a graph.
    `gradients` are of the outputs of calls still on the tape, [draws, ...] by call and output.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.gradients: dict[tuple[int, int], Tensor] = {}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record what this pass sends through `taped` layers."""
        token = _tape.set(self)
        with torch.inference_mode(False), torch.enable_grad():
            yield
        _tape.reset(token)

    def run(self, layer: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with torch.no_grad():
            output = forward(*args, **kwargs)
        given = floats(output)
        leaves = [tensor.detach().requires_grad_() for tensor in given]
        inputs = [tensor for tensor in floats((args, kwargs)) if tensor.requires_grad]
        self.calls.append(Call(layer, (args, kwargs), inputs, leaves))
        return exchanged(output, given, leaves)

    def hand_back(self, tensors: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Add what gradients [draws, ...] of `tensors` mean for the calls on the tape."""
        places = [(n, i) for n, call in enumerate(self.calls) for i in range(len(call.outputs))]
        leaves = [self.calls[n].outputs[i] for n, i in places]
        for draw in range(len(gradients[0]) if leaves else 0):
            parts = [gradient[draw] for gradient in gradients]
            found = torch.autograd.grad(
                tensors, leaves, parts, retain_graph=True, allow_unused=True
            )
            for place, leaf, part in zip(places, leaves, found, strict=True):
                if part is not None:
                    empty = leaf.detach().new_zeros(len(gradients[0]), *leaf.shape)
                    self.gradients.setdefault(place, empty)[draw] += part

    def pop(self) -> tuple[Call, list[Tensor | None]]:
        """Take the last call off, with the gradients of its outputs."""
        call, number = self.calls.pop(), len(self.calls)
        return call, [self.gradients.pop((number, i), None) for i in range(len(call.outputs))]


_tape: ContextVar[Tape | None] = ContextVar("tape", default=None)


@contextlib.contextmanager
def taped(layers: nn.ModuleList) -> Iterator[None]:
    """Let each layer's runs go onto the tape that is recording in their pass."""

    def recorded(number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            tape = _tape.get()
            assert tape is not None
            return tape.run(number, forward, args, kwargs)

        return run

    forwards = [layer.forward for layer in layers]
    for number, layer in enumerate(layers):
        layer.forward = recorded(number, layer.forward)
    try:
        yield
    finally:
        for layer, forward in zip(layers, forwards, strict=True):
            layer.forward = forward


def floats(tree: Any) -> list[Tensor]:
    """Return the floating-point tensors in nested arguments or results, in order."""
    leaves = pytree.tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def exchanged(tree: Any, old: Sequence[Tensor], new: Sequence[Tensor]) -> Any:
    """Return nested arguments or results with some tensors replaced."""
    by_id: Mapping[int, Tensor] = dict(zip(map(id, old), new, strict=True))
    return pytree.tree_map(lambda leaf: by_id.get(id(leaf), leaf), tree)
