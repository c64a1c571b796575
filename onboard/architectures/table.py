"""The table of a family's tensors: one line per tensor, with its role, name, shape and condition.

    expert  model.layers.{layer}.mlp.experts.{expert}.{gate,up}_proj.weight  width, hidden_size  if …

Columns are separated by two or more spaces. `{a,b}` stands for each of a and b. `{layer}` runs over
the layers of the trunk, `{any_layer}` over those and the multi-token-prediction layers that some
families number after them; both are the variable `layer` in expressions. Every other variable is
bounded by the family's `ranges`. Shapes and the condition are expressions over the config's keys.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import CodeType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from onboard.errors import InputError

if TYPE_CHECKING:
    from onboard.architectures import Architecture

LAYERS = ("layer", "any_layer")
_VARIABLE = re.compile(r"\{(\w+)\}")
_CHOICE = re.compile(r"\{([^{}]*,[^{}]*)\}")


@dataclass(frozen=True)
class Row:
    """One line. `shape` is the tuple expression of the sizes, outputs before inputs."""

    role: str
    template: str
    shape: str
    condition: str

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of the template's variables, but for `root`."""
        return tuple(v for v in _VARIABLE.findall(self.template) if v != "root")


@dataclass(frozen=True)
class Tensor:
    """A tensor as the table describes it: a role, a name and a shape."""

    role: str
    name: str
    shape: tuple[int, ...]


def parse(table: str) -> tuple[Row, ...]:
    """Return the rows of a table, choices expanded; blank lines and `#` comments are skipped."""
    rows = []
    for line in table.splitlines():
        text = line.strip()
        if text and not text.startswith("#"):
            rows += list(_row(text))
    return tuple(rows)


def _row(line: str) -> Iterator[Row]:
    body, _, condition = line.partition("  if ")
    role, template, shape = re.split(r"\s{2,}", body.strip(), maxsplit=2)
    for name in _expand(template):
        yield Row(role, name, f"({shape.strip()},)" if shape.strip() else "()", condition.strip())


def _expand(template: str) -> Iterator[str]:
    choice = _CHOICE.search(template)
    if choice is None:
        yield template
        return
    for word in choice[1].split(","):
        yield from _expand(template[: choice.start()] + word + template[choice.end() :])


@cache
def canonical(name: str) -> str:
    """Return a tensor's name or template with every number, or variable, as `#`."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)|\{\w+\}", "#", name)


def namespace(architecture: Architecture, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what expressions see: the text config's keys, nested ones as attributes."""
    text = config.get(architecture.text_config, config) if architecture.text_config else config
    names: dict[str, Any] = {"config": config, **_plain(config), **_plain(text)}
    names |= {"min": min, "max": max, "len": len, "any": any, "bool": bool, "range": range}
    names |= {"sum": sum, "getattr": getattr}
    for key, expression in architecture.defaults.items():
        if names.get(key) is None:
            with contextlib.suppress(InputError):  # whoever needs the key will say so
                names[key] = evaluate(expression, names, f"default of {key}")
    return names


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    return {k: SimpleNamespace(**_plain(v)) if isinstance(v, Mapping) else v
            for k, v in config.items()}  # fmt: skip


@cache
def _compiled(expression: str) -> CodeType:
    return compile(expression, f"<{expression}>", "eval")


def evaluate(expression: str, names: Mapping[str, Any], what: str) -> Any:
    """Return the value of an expression; raises InputError naming the config key it misses."""
    try:
        return eval(_compiled(expression), {"__builtins__": {}}, dict(names))
    except NameError as e:
        raise InputError(f"config.json: {e.name} is missing; it gives the {what}") from e
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError) as e:
        raise InputError(f"config.json: cannot tell the {what} from {expression!r}: {e}") from e


def num_mtp_layers(architecture: Architecture, names: Mapping[str, Any]) -> int:
    """Return how many multi-token-prediction layers the config announces."""
    try:
        return int(evaluate(architecture.mtp_layers, names, "MTP layers") or 0)
    except InputError:
        return 0


def generate(
    architecture: Architecture, model_type: str, config: Mapping[str, Any]
) -> Iterator[Tensor]:
    """Yield every tensor that a published checkpoint with this config holds.

    Shapes are of the weights themselves, whatever format the source stores them in. Raises
    InputError where the config lacks a key.
    """
    names = namespace(architecture, config)
    trunk = names["num_hidden_layers"]
    spans = {"layer": range(trunk),
             "any_layer": range(trunk + num_mtp_layers(architecture, names))}  # fmt: skip
    for variable, bound in architecture.ranges.items():
        if any(variable in row.variables for row in architecture.rows):
            spans[variable] = range(int(evaluate(bound, names, f"number of {variable}s") or 0))
    root = architecture.roots.get(model_type, "")
    for row in architecture.rows:
        yield from _tensors(row, row.template.replace("{root}", root), names, spans)


def _tensors(
    row: Row, template: str, names: Mapping[str, Any], spans: Mapping[str, range]
) -> Iterator[Tensor]:
    outer = [v for v in row.variables if v in LAYERS][:1]
    inner = [v for v in row.variables if v not in LAYERS]
    if not all(spans[v] for v in inner):
        return  # such as the blocks of a vision tower that a text-only config lacks
    for layer in spans[outer[0]] if outer else (None,):
        seen = {**names, "layer": layer}
        if row.condition and not evaluate(row.condition, seen, f"layers of {row.template}"):
            continue
        shape = tuple(int(n) for n in evaluate(row.shape, seen, f"shape of {row.template}"))
        for numbers in itertools.product(*(spans[v] for v in inner)):
            values: dict[str, Any] = dict(zip(inner, numbers, strict=True))
            values |= dict.fromkeys(outer, layer)
            yield Tensor(row.role, template.format(**values), shape)
