"""What rounding a unit does to the reference's predictions, token by token: <g_t, d_t>.

d_t is what rounding changes in the unit's own output at token t, g_t the gradient there of a random
direction of the predictions (`onboard.quantize.sensitivity` says which, and why). Layers are gone
through forward once, and back once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from onboard.checkpoint import fp8, nvfp4, taps
from onboard.checkpoint.matrices import Group, Matrix
from onboard.checkpoint.models import InputQuantizer, Runner
from onboard.checkpoint.skeleton import decoder_of
from onboard.checkpoint.streaming import Call, Tape, exchanged, floats, loaded, taped
from onboard.checkpoint.taps import Point
from onboard.evals.kl import CHUNK, Head
from onboard.hardware import device_kind
from onboard.quantize import rounding
from onboard.quantize.allocation import Unit
from onboard.quantize.layers import save_whole
from onboard.quantize.views import Views

LOWER = ("nvfp4", "fp8")  # formats that change a weight
InputScale = Callable[[str, str], Tensor | None]  # of a module in a format; None: inputs stay


@dataclass
class _Seen:
    """A module's run: its arguments, the tensors it gave, and their gradients by draw."""

    arguments: tuple[Any, Any]
    outputs: list[Tensor]
    gradients: list[list[Tensor | None]] = field(default_factory=list)

    def detach(self) -> None:
        """Let go of the graph behind it."""
        self.outputs = [tensor.detach() for tensor in self.outputs]
        held = floats(self.arguments)
        self.arguments = exchanged(self.arguments, held, [tensor.detach() for tensor in held])


Runs = dict[str, _Seen]  # by module


class Effects:
    """A model, the matrices in it by place, and how its layers are gone through."""

    def __init__(
        self,
        runner: Runner,
        groups: Sequence[Group],
        units: Sequence[Unit],
        second_moment: Callable[[Matrix], Tensor],
        input_scale: InputScale,
    ) -> None:
        self.runner, self.groups, self.units = runner, groups, units
        self.second_moment = second_moment
        self.places = taps.points(runner.skeleton, [m for group in groups for m in group])
        self.point = {m.module: point for point, held in self.places.items() for m in held}
        self.view = Views.of(runner)
        self.quantizers = {f: _quantizer(self.places, f, input_scale) for f in LOWER}
        self.quantize: InputQuantizer | None = None
        self.active: frozenset[Point] = frozenset()  # whose inputs are quantized

    @cached_property
    def modules(self) -> list[str]:
        """By unit, the module whose outputs tell what it does."""
        return [self._module_of(unit) for unit in self.units]

    def measure(
        self,
        batches: Sequence[Tensor],
        draws: int,
        seed: int,
        state: Path,
        progress: Callable[[int, int], None],
    ) -> dict[str, list[Tensor]]:
        """Return <g_t, d_t> by format and batch, f32 [draws, documents, tokens, U]."""
        skeleton, inside = self.runner.skeleton, self.runner.skeleton.inside_layers()
        kept = load_file(state) if state.exists() else {}
        tapes = self._tapes(batches, draws, None if kept else seed)
        found = {
            f"{format}.{n}": torch.zeros(draws, *batch.shape, len(self.units))
            for format in LOWER
            for n, batch in enumerate(batches)
        }
        if kept:
            _restore(kept, found, tapes)
        handles = taps.attach(skeleton.model, self.places, self._see)
        while tapes[0].calls:
            layer = tapes[0].calls[-1].layer
            if self.runner.resident:
                self._go_back(layer, tapes, found)
            else:
                with loaded(skeleton, self.runner.read, layer, inside[layer]):
                    self._go_back(layer, tapes, found)
            _keep(state, found, tapes)
            progress(len(skeleton.layers) - layer, len(skeleton.layers))
        for handle in handles:
            handle.remove()
        return {format: [found[f"{format}.{n}"] for n in range(len(batches))] for format in LOWER}

    # --- forward

    def _tapes(self, batches: Sequence[Tensor], draws: int, seed: int | None) -> list[Tape]:
        """Record a pass of each batch, with gradients at its end; without a seed, none."""
        model = self.runner.model
        head = Head.of(model, model.get_output_embeddings().weight.shape[0])

        def forward(number: int, batch: Tensor) -> Callable[[], Tape]:
            def run() -> Tape:
                tape = Tape()
                with tape.recording():
                    ids = batch.to(device_kind())
                    hidden = decoder_of(model)(input_ids=ids, use_cache=False).last_hidden_state
                    if seed is not None:
                        random = torch.Generator(device_kind()).manual_seed(seed + number)
                        tape.hand_back([hidden], [_signed(head, hidden, draws, random)])
                return tape

            return run

        embeddings = model.get_input_embeddings()
        hook = embeddings.register_forward_hook(lambda _m, _a, output: output.requires_grad_())
        with taped(self.runner.skeleton.layers):
            tapes = self.runner.run([forward(n, batch) for n, batch in enumerate(batches)])
        hook.remove()
        return tapes

    # --- back

    def _go_back(self, layer: int, tapes: Sequence[Tape], found: Mapping[str, Tensor]) -> None:
        path = f"{self.runner.skeleton.prefix}.{layer}"
        here = [n for n, m in enumerate(self.modules) if f"{m}.".startswith(f"{path}.")]
        runs = []
        for number, tape in enumerate(tapes):
            shape = found[f"{LOWER[0]}.{number}"].shape[1:3]
            runs.append(self._recomputed(path, here, tape, shape))
        for format in LOWER:
            for unit in here:
                with self._rounded(self.units[unit], format):
                    for number, (seen, chosen) in enumerate(runs):
                        effect = found[f"{format}.{number}"][..., unit]
                        effect.copy_(self._effect(chosen[unit], seen[chosen[unit]], effect.shape))

    def _recomputed(
        self, path: str, here: Sequence[int], tape: Tape, shape: Sequence[int]
    ) -> tuple[Runs, dict[int, str]]:
        """Run the tape's last call again, hand gradients back, and return what modules did.

        A unit is watched at its own module, or at the first one around it whose outputs are token
        by token: also returned, by unit.
        """
        call, gradients = tape.pop()
        around = {p for unit in here for p in _between(self.modules[unit], path)}
        fresh = [tensor.detach().requires_grad_() for tensor in call.inputs]
        seen, outputs = self._run_again(path, around, call, fresh)
        chosen = {unit: _by_token(self.modules[unit], path, seen, shape) for unit in here}
        kept = {name: seen[name] for name in chosen.values()}
        watched = [tensor for one in kept.values() for tensor in one.outputs]
        ends = [
            (o, g)
            for o, g in zip(outputs, gradients, strict=True)
            if g is not None and o.requires_grad
        ]
        back = [t.detach().new_zeros(len(ends[0][1]), *t.shape) for t in fresh]
        for draw in range(len(ends[0][1])):
            parts = torch.autograd.grad(
                [output for output, _ in ends],
                [*fresh, *watched],
                [gradient[draw] for _, gradient in ends],
                retain_graph=True,
                allow_unused=True,
            )
            for total, part in zip(back, parts, strict=False):
                total[draw] = 0 if part is None else part
            rest = iter(parts[len(fresh) :])
            for one in kept.values():
                one.gradients.append([next(rest) for _ in one.outputs])
        for one in kept.values():
            one.detach()
        tape.hand_back(call.inputs, back)
        return kept, chosen

    def _run_again(
        self, path: str, modules: Iterable[str], call: Call, fresh: Sequence[Tensor]
    ) -> tuple[Runs, list[Tensor]]:
        """Return what went through `modules`, and what the layer gave, with a graph to `fresh`."""
        seen: Runs = {}

        def watch(name: str) -> Callable[..., Any]:
            def keep(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
                given = floats(output)
                seen[name] = _Seen((args, kwargs), given)
                return exchanged(output, given, [t.clone() for t in given])  # may be changed then

            return keep

        model = self.runner.skeleton.model
        handles = [
            model.get_submodule(name).register_forward_hook(watch(name), with_kwargs=True)
            for name in modules
        ]
        args, kwargs = exchanged(call.arguments, call.inputs, fresh)
        with torch.enable_grad():
            output = model.get_submodule(path)(*args, **kwargs)
        for handle in handles:
            handle.remove()
        return seen, floats(output)

    @torch.no_grad()
    def _effect(self, module: str, seen: _Seen, shape: Sequence[int]) -> Tensor:
        """Return Σ <gradient, change of the outputs> per token, f32 [draws, documents, tokens]."""
        args, kwargs = seen.arguments
        outputs = floats(self.runner.skeleton.model.get_submodule(module)(*args, **kwargs))
        effect = torch.zeros(*shape, device=device_kind())
        for n, (after, before) in enumerate(zip(outputs, seen.outputs, strict=True)):
            change = (after - before).float().reshape(*shape[1:], -1)
            for draw, gradients in enumerate(seen.gradients):
                if (gradient := gradients[n]) is not None:
                    effect[draw] += (change * gradient.float().reshape(change.shape)).sum(-1)
        return effect.cpu()

    # --- rounding

    @contextmanager
    def _rounded(self, unit: Unit, format: str) -> Iterator[None]:
        """Give a unit's weights the values of a format for a while, and its inputs."""
        points = {self.point[module] for module in unit.modules}
        model, modules = self.runner.skeleton.model, frozenset(unit.modules)
        names = {point.parameter for point in points}
        exact = {name: model.get_parameter(name).data for name in names}
        groups = [group for group in self.groups if group[0].module in modules]
        values = [self._values(group, format) for group in groups]
        for name in names:
            model.get_parameter(name).data = exact[name].clone()
        for group, rounded in zip(groups, values, strict=True):
            for matrix, value in zip(group, rounded, strict=True):
                self.view(self.point[matrix.module], matrix).copy_(value)
        self.quantize, self.active = self.quantizers.get(format), frozenset(points)
        yield
        self.quantize = None
        for name in names:
            model.get_parameter(name).data = exact[name]

    def _values(self, group: Group, format: str) -> list[Tensor]:
        weights = [self.view(self.point[m.module], m) for m in group]
        amax = torch.stack([weight.abs().amax() for weight in weights]).amax().float()
        if format == "fp8":
            scale = fp8.tensor_scale(amax)
            return [fp8.dequantize(fp8.quantize(weight, scale), scale) for weight in weights]
        scale_2 = rounding.shared_scale(amax, "sweep")
        rounded = []
        for matrix, weight in zip(group, weights, strict=True):
            moment = self.second_moment(matrix).to(weight.device)
            packed = rounding.round_rows(weight, scale_2, "sweep", moment)
            rounded.append(nvfp4.dequantize(packed.weight, packed.weight_scale, scale_2))
        return rounded

    def _see(self, point: Point, x: Tensor) -> Tensor | None:
        return self.quantize(point, x) if self.quantize and point in self.active else None

    def _module_of(self, unit: Unit) -> str:
        """Return the owner of a unit's parameters, or the module around several owners.

        Attention mixes tokens: where keys and values are rounded, its outputs tell more.
        """
        owners = {self.point[module].parameter.rpartition(".")[0] for module in unit.modules}
        columns = zip(*(owner.split(".") for owner in owners), strict=False)
        common = itertools.takewhile(lambda parts: len(set(parts)) == 1, columns)
        path = ".".join(parts[0] for parts in common)
        module = self.runner.skeleton.model.get_submodule(path)
        return path.rpartition(".")[0] if isinstance(module, nn.ModuleList) else path


def _quantizer(
    places: Mapping[Point, Sequence[Matrix]], format: str, input_scale: InputScale
) -> InputQuantizer:
    """Return what quantizes inputs as an engine does those of matrices in a format."""
    found = {point: input_scale(held[0].module, format) for point, held in places.items()}
    scales = {point: scale for point, scale in found.items() if scale is not None}
    return InputQuantizer(scales, scales if format == "fp8" else ())


def _signed(head: Head, hidden: Tensor, draws: int, random: torch.Generator) -> Tensor:
    """Return gradients of v·z at hidden [B, T, H], [draws, B, T, H]; zero at last tokens."""
    result = torch.zeros(draws, *hidden.shape, dtype=hidden.dtype, device=hidden.device)
    last = hidden.shape[1] - 1
    for row in range(len(hidden)):
        for first in range(0, last, CHUNK):
            part = slice(first, min(first + CHUNK, last))
            states = hidden[row, part].detach().requires_grad_()
            logits = head.logits(states)
            p = logits.detach().softmax(-1)
            for draw in range(draws):
                v = torch.empty_like(p).bernoulli_(0.5, generator=random).mul_(2).sub_(1)
                v.mul_(p.sqrt())
                v -= p * v.sum(-1, keepdim=True)
                (gradient,) = torch.autograd.grad(logits, states, v, retain_graph=True)
                result[draw, row, part] = gradient
    return result


def _between(name: str, path: str) -> list[str]:
    """Return a module of a layer and those around it, the layer last."""
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(len(parts), path.count("."), -1)]


def _by_token(name: str, path: str, seen: Runs, shape: Sequence[int]) -> str:
    """Return the innermost module, from `name` on, whose outputs are a row a token."""
    flat = (shape[0] * shape[1],)
    for around in _between(name, path):
        outputs = seen[around].outputs if around in seen else []
        if outputs and all(t.shape[:2] == (*shape,) or t.shape[:1] == flat for t in outputs):
            return around
    raise AssertionError(f"{path}: its outputs are not token by token")


# --- what a killed run leaves


def _keep(state: Path, found: Mapping[str, Tensor], tapes: Sequence[Tape]) -> None:
    tensors = dict(found)
    for tape, held in enumerate(tapes):
        for (call, output), gradient in held.gradients.items():
            tensors[f"gradient.{tape}.{call}.{output}"] = gradient
    tensors["calls"] = torch.tensor([len(tape.calls) for tape in tapes])
    save_whole(state, tensors)


def _restore(
    kept: Mapping[str, Tensor], found: Mapping[str, Tensor], tapes: Sequence[Tape]
) -> None:
    for name, effect in found.items():
        effect.copy_(kept[name])
    for tape, calls in zip(tapes, kept["calls"].tolist(), strict=True):
        del tape.calls[calls:]
    for name in (name for name in kept if name.startswith("gradient.")):
        tape_number, call, output = map(int, name.split(".")[1:])
        tapes[tape_number].gradients[call, output] = kept[name].to(device_kind())
