"""See, and replace, what enters a model's matrices: linear layers and fused experts alike.

transformers keeps the experts of a layer in 3-D parameters. Its plain forward multiplies with one
expert's slice at a time (or with all of them in one `bmm`), in as many variants as there are
families; a tap recognises the slice by where it lies in memory, and leaves the forward as it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from onboard.checkpoint.matrices import EXPERT, Matrix
from onboard.checkpoint.skeleton import Skeleton
from onboard.errors import InputError

_PRODUCTS = (nn.functional.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm)


@dataclass(frozen=True)
class Point:
    """Where activations enter a matrix: a parameter of the model, and one expert of a 3-D one."""

    parameter: str
    expert: int | None = None


See = Callable[[Point, Tensor], Tensor | None]


def points(skeleton: Skeleton, matrices: Iterable[Matrix]) -> dict[Point, list[Matrix]]:
    """Return the matrices by the place where their input is seen; gate and up share one."""
    parameters = dict(skeleton.model.named_parameters())
    found: dict[Point, list[Matrix]] = defaultdict(list)
    for matrix in matrices:
        target = skeleton.targets.get(matrix.tensor, "")
        if target not in parameters:
            raise InputError(f"the model class has no parameter for {matrix.tensor}")
        expert = EXPERT.match(matrix.module)
        is_fused = parameters[target].ndim == 3
        found[Point(target, int(expert["number"]) if expert and is_fused else None)].append(matrix)
    return dict(found)


def attach(model: Any, places: Iterable[Point], see: See) -> list[Any]:
    """Call `see(point, input [..., in])` whenever an input enters; return the hooks' handles.

    A tensor that `see` returns takes the input's place. It is not called for an expert that no
    token is routed to.
    """
    handles: list[Any] = []
    experts: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for point in places:
        owner, _, name = point.parameter.rpartition(".")
        module = model.get_submodule(owner)
        if point.expert is not None:
            experts[owner][name].add(point.expert)
        else:
            handles.append(module.register_forward_pre_hook(_linear_hook(point, see)))
    for owner, parts in experts.items():
        module = model.get_submodule(owner)
        watch = _Watch(module, owner, parts, see)
        handles.append(module.register_forward_pre_hook(watch.enter))
        handles.append(module.register_forward_hook(watch.leave, always_call=True))
    return handles


def _linear_hook(point: Point, see: See) -> Callable[[nn.Module, Any], Any]:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> Any:
        seen = see(point, args[0])
        return None if seen is None else (seen, *args[1:])

    return hook


class _Watch:
    """Watches the products inside one experts module, from its forward's start to its end."""

    def __init__(
        self, module: nn.Module, owner: str, parts: Mapping[str, set[int]], see: See
    ) -> None:
        self.module, self.owner, self.parts, self.see = module, owner, parts, see
        self.modes: list[_Products] = []

    def enter(self, module: nn.Module, args: Any) -> None:
        mode = _Products(self)
        mode.__enter__()  # type: ignore[no-untyped-call]
        self.modes.append(mode)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.modes.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def replaced(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the input that is to enter `weight`."""
        for name in self.parts:
            whole = self.module._parameters[name]
            assert whole is not None
            size = whole.stride(0) * whole.element_size()
            expert, inside = divmod(weight.data_ptr() - whole.data_ptr(), size)
            if 0 <= expert < len(whole) and not inside:
                return self._of_all(name, x) if weight.ndim == 3 else self._of(name, expert, x)
        return x

    def _of(self, name: str, expert: int, x: Tensor) -> Tensor:
        if expert not in self.parts[name] or not x.numel():
            return x
        seen = self.see(Point(f"{self.owner}.{name}", expert), x)
        return x if seen is None else seen

    def _of_all(self, name: str, x: Tensor) -> Tensor:
        """[E, T, in]: every token for every expert, zero where it is not routed there."""
        rows = list(x)
        for expert, row in enumerate(rows):
            routed = row.any(-1)
            if routed.any():
                rows[expert] = row.clone()
                rows[expert][routed] = self._of(name, expert, row[routed])
        return torch.stack(rows)


class _Products(TorchFunctionMode):
    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _PRODUCTS and len(args) > 1:
            args = (self.watch.replaced(args[0], args[1]), *args[1:])
        return func(*args, **(kwargs or {}))
