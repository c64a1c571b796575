"""The known family that a model of unknown type is most like, and whether it is that family."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from onboard.architectures import Architecture, families
from onboard.architectures.table import canonical, generate, parse
from onboard.configkeys import COMMON, dotted, expression_names, unknown_keys
from onboard.errors import InputError
from onboard.unknown.names import Shapes

Verdict = Literal["supported", "config delta", "new architecture"]
NAMES_WEIGHT = 0.75  # of the tensor names in the likeness; the config's keys have the rest
_ROOT = re.compile(r"^(?:(?:model|language_model|text_model|transformer|backbone)\.)+")


@dataclass(frozen=True)
class Nearest:
    """`name_overlap` and `key_overlap` are Jaccard indices of templates and of config keys.

    `covered` is the share of the model's templates that the family knows; `regenerates`, whether
    its table gives exactly the model's names and shapes.
    """

    family: str
    name_overlap: float | None  # None where no header was read
    key_overlap: float
    covered: float | None
    regenerates: bool
    unknown_keys: tuple[str, ...]

    @property
    def likeness(self) -> float:
        if self.name_overlap is None:
            return self.key_overlap
        return NAMES_WEIGHT * self.name_overlap + (1 - NAMES_WEIGHT) * self.key_overlap

    @property
    def verdict(self) -> Verdict:
        """`config delta` where only model_type, its prefix or keys differ from the family's."""
        if self.covered is None:
            return "new architecture" if self.unknown_keys else "config delta"
        return "config delta" if self.covered == 1 else "new architecture"


def nearest(config: Mapping[str, Any], shapes: Shapes | None) -> Nearest:
    """Return the most alike of all families."""
    held = {stem(canonical(name)) for name in shapes} if shapes is not None else None
    compared = [_compare(name, rules, config, shapes, held) for name, rules in families().items()]
    return max(compared, key=lambda found: (found.regenerates, found.likeness))


def stem(template: str) -> str:
    """Return a template without the prefix that differs between wrappers of one text model."""
    return _ROOT.sub("", template)


def family_templates(rules: Architecture) -> tuple[set[str], set[str]]:
    """Return the stems of a family's published templates, and of all that it recognises."""
    root = next(iter(rules.roots.values()), "")
    published, beside = (
        {stem(canonical(row.template.replace("{root}", root))) for row in rows}
        for rows in (rules.rows, parse(rules.also))
    )
    return published, published | beside


def _compare(
    name: str,
    rules: Architecture,
    config: Mapping[str, Any],
    shapes: Shapes | None,
    held: Collection[str] | None,
) -> Nearest:
    rows, known = family_templates(rules)
    keys = {key.rpartition(".")[2] for key in dotted(config)} - COMMON
    read = expression_names(rules) - COMMON
    covered = None if held is None else len(known.intersection(held)) / max(1, len(held))
    return Nearest(
        family=name,
        name_overlap=None if held is None else _jaccard(held, rows),
        key_overlap=_jaccard(keys, read),
        covered=covered,
        regenerates=covered == 1 and shapes is not None and _regenerates(rules, config, shapes),
        unknown_keys=tuple(unknown_keys(config, rules)),
    )


def _jaccard(one: Iterable[str], other: Iterable[str]) -> float:
    a, b = set(one), set(other)
    return len(a & b) / max(1, len(a | b))


def _regenerates(rules: Architecture, config: Mapping[str, Any], shapes: Shapes) -> bool:
    """Whether the table of a family, under any of its model_types, gives the names and shapes."""
    for model_type in rules.model_types:
        renamed = {**config, "model_type": model_type}
        try:
            made = {tensor.name: tensor.shape for tensor in generate(rules, model_type, renamed)}
        except (InputError, KeyError):
            continue
        if made == dict(shapes):
            return True
    return False
