"""Which layers have a tensor, as a condition over the config's keys and `layer`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from onboard.architectures.table import evaluate
from onboard.errors import InputError

MOST_STEP = 16  # longest pattern of layers that is looked for


def condition(held: set[int], num_layers: int, num_all: int, names: Mapping[str, Any]) -> str:
    """Return an expression that is true in the layers of `held` alone, "" where in all of them.

    Layers from `num_layers` to `num_all` are those of multi-token prediction.
    """
    everything = range(num_all if max(held) >= num_layers else num_layers)
    if held == set(everything):
        return ""
    trunk = {layer for layer in held if layer < num_layers}
    if not trunk and held == set(range(num_layers, num_all)):
        return "layer >= num_hidden_layers"
    for candidate in _candidates(trunk, num_layers, names):
        for expression in (candidate, f"layer >= num_hidden_layers or {candidate}"):
            if _holds(expression, everything, names) == held:
                return expression
    return f"layer in {tuple(sorted(held))}"


def _holds(expression: str, layers: range, names: Mapping[str, Any]) -> set[int] | None:
    try:
        return {n for n in layers if evaluate(expression, {**names, "layer": n}, "layers")}
    except InputError:
        return None


def _candidates(held: set[int], num_layers: int, names: Mapping[str, Any]) -> Iterator[str]:
    """Yield conditions that may hold in `held`; the config's own words come first."""
    lists = [(key, v) for key, v in _values(names) if isinstance(v, list | tuple) and v]
    for key, entries in lists:
        if len(entries) >= num_layers and all(isinstance(e, str | int) for e in entries):
            inside = {entries[layer] for layer in held}
            if len(inside) == 1:
                yield f"{key}[layer] == {inside.pop()!r}"
        yield from (f"layer in {key}", f"layer not in {key}", f"layer + 1 in {key}")
    numbers = [(key, v) for key, v in _values(names) if type(v) is int and 0 < v < num_layers]
    first, last = min(held, default=0), max(held, default=0)
    yield from (f"layer >= {key}" for key, value in numbers if value == first)
    yield from (f"layer < {key}" for key, value in numbers if value == last + 1)
    yield from (f"(layer + 1) % {key} == 0" for key, value in numbers if value > 1)
    yield from (f"layer % {key} == 0" for key, value in numbers if value > 1)
    yield from (f"layer >= {first}", f"layer < {last + 1}", f"{first} <= layer <= {last}")
    for step in range(2, MOST_STEP + 1):
        yield f"layer % {step} == {first % step}"


def _values(names: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in names.items():
        if isinstance(value, SimpleNamespace) and not prefix:
            yield from _values(vars(value), f"{key}.")
        elif key.isidentifier():
            yield prefix + key, value
