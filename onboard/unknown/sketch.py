"""An architecture file for a model of unknown type, made from its headers; to be edited.

Its table regenerates exactly the names and shapes that were read. What it cannot know is meaning:
roles are guesses, and sizes and layers are written in keys that happen to have the right value.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from onboard.architectures import Architecture, Fused, Role
from onboard.architectures.table import generate, namespace
from onboard.configkeys import class_keys
from onboard.unknown.layers import condition
from onboard.unknown.names import Place, Shapes, Template, templates
from onboard.unknown.roles import EXPERT_COUNTS, Guess, guess
from onboard.unknown.shapes import Sizes

LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
EXPERTS_USED = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "top_k")
MTP_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
DOUBTFUL = 0.7  # roles guessed with less confidence are marked in the file


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    role: Role
    template: str
    shape: str
    condition: str
    confidence: float

    def __str__(self) -> str:
        when = f"  if {self.condition}" if self.condition else ""
        return f"{self.role:<9}  {self.template:<54}  {self.shape}{when}"


@dataclass(frozen=True)
class Sketch:
    """What becomes the file: the guesses per template, the table, and the bounds of variables."""

    config: Mapping[str, Any]
    guesses: Mapping[str, Guess]  # template -> role
    lines: tuple[Line, ...]
    architecture: Architecture

    @cached_property
    def regenerated(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes that the file's table gives for the config."""
        model_type = next(iter(self.architecture.model_types))
        made = generate(self.architecture, model_type, self.config)
        return {tensor.name: tensor.shape for tensor in made}


def sketch(config: Mapping[str, Any], shapes: Shapes, known: Mapping[str, Role]) -> Sketch:
    """Return the architecture of a model from its config and its tensors' shapes.

    `known` gives roles that need no guess, by template.
    """
    base, text = _base(config), _text(config)
    count = next((text[key] for key in LAYER_COUNTS if text.get(key)), None)
    found = templates(shapes, count)
    layers = [p.layer for t in found for p in t.places if p.layer is not None]
    num_all = max(layers, default=-1) + 1
    num_layers = num_all if count is None else int(count)
    base = _with_layers(base, text, num_layers, max(num_all, num_layers))
    names = namespace(base, config)
    guesses = {t.name: _known(t, known) or guess(t, text, num_layers) for t in found}
    writer = _Writer(Sizes(names), num_layers, max(num_all, num_layers), names)
    lines = [line for t in found for line in writer.lines(t, guesses[t.name])]
    ranges = {variable: writer.sizes.size(bound, _bounds(variable))
              for variable, bound in writer.ranges.items()}  # fmt: skip
    roles = {line.role for line in lines}
    merged = tuple(merge(lines))
    finished = replace(
        base,
        tensors="\n".join(str(line) for line in merged),
        ranges=ranges,
        quantize=(Role.EXPERT,) if Role.EXPERT in roles else (Role.ATTENTION, Role.MLP),
        fused_experts=_fused(found, guesses, text),
    )
    return Sketch(config, guesses, merged, finished)


def _known(template: Template, known: Mapping[str, Role]) -> Guess | None:
    role = known.get(template.name, Role.UNKNOWN)
    return None if role is Role.UNKNOWN else Guess(role, 1.0, "as in the nearest family")


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def _base(config: Mapping[str, Any]) -> Architecture:
    """Return the parts that need no tensor: keys, defaults, class."""
    text, model_type = _text(config), str(config.get("model_type") or "unknown")
    defaults = {}
    if text.get("num_attention_heads"):
        defaults["head_dim"] = "hidden_size // num_attention_heads"
        defaults["num_key_value_heads"] = "num_attention_heads"
    used = next((key for key in EXPERTS_USED if text.get(key)), EXPERTS_USED[0])
    latent = {"kv_lora_rank", "qk_rope_head_dim"} <= text.keys()
    return Architecture(
        model_types={model_type: _transformers_class(config, model_type)},
        tensors="",
        text_config="" if text is config else "text_config",
        defaults=defaults,
        quantize=(),
        experts_per_token=used,
        cache="kv_lora_rank + qk_rope_head_dim" if latent else "2 * num_key_value_heads * head_dim",
    )


def _transformers_class(config: Mapping[str, Any], model_type: str) -> str | None:
    return next(iter(config.get("architectures") or ()), None) if class_keys(model_type) else None


def _with_layers(
    base: Architecture, text: Mapping[str, Any], num_layers: int, num_all: int
) -> Architecture:
    """Return `base` with the number of layers and of MTP layers, by key where one has it."""
    defaults, extra = dict(base.defaults), num_all - num_layers
    if not text.get("num_hidden_layers"):
        key = next((key for key in LAYER_COUNTS if text.get(key)), str(num_layers))
        defaults["num_hidden_layers"] = key
    mtp = next((key for key in MTP_COUNTS if text.get(key) == extra and extra), str(extra))
    return replace(base, defaults=defaults, mtp_layers=mtp)


def _bounds(variable: str) -> tuple[str, ...]:
    return EXPERT_COUNTS if variable.startswith("expert") else ()


def _fused(
    found: Sequence[Template], guesses: Mapping[str, Guess], text: Mapping[str, Any]
) -> dict[str, Fused]:
    """Return how 3-D expert tensors come apart, as far as names and shapes tell."""
    fused = {}
    for template in found:
        if guesses[template.name].role is Role.EXPERT and len(template.shape) == 3:
            projection = re.sub(r"\.weight$", "", template.name).rpartition(".")[2]
            both = re.fullmatch(r"gate_?up(_proj)?|w13", projection)
            parts = ("gate_proj", "up_proj") if both else (projection,)
            outputs_first = (template.shape[2] == text.get("hidden_size")) == (
                "down" not in projection
            )
            fused[projection] = Fused(parts, "eoi" if outputs_first else "eio")
    return fused


class _Writer:
    """Writes templates as lines; `ranges` collects the variables that they use."""

    def __init__(
        self, sizes: Sizes, num_layers: int, num_all: int, names: Mapping[str, Any]
    ) -> None:
        self.sizes, self.names = sizes, names
        self.num_layers, self.num_all = num_layers, num_all
        self.ranges: dict[str, int] = {}

    def lines(self, template: Template, found: Guess) -> Iterator[Line]:
        """Yield the lines of a template: one for each shape, and for each irregular number."""
        by_shape: dict[tuple[int, ...], list[Place]] = defaultdict(list)
        for place in template.places:
            by_shape[place.shape].append(place)
        for shape, places in by_shape.items():
            expression = self.sizes.shape(shape, found.role, template.name)
            for words, held in self._numbered(template, places):
                when, layer = self._layers(held)
                if template.layer_at is not None:
                    words[template.layer_at] = f"{{{layer}}}"
                yield Line(found.role, ".".join(words), expression, when, found.confidence)

    def _numbered(
        self, template: Template, places: Sequence[Place]
    ) -> Iterator[tuple[list[str], list[Place]]]:
        """Yield words with variables where the numbers fill a box, else with the numbers."""
        per_layer: dict[int | None, set[tuple[int, ...]]] = defaultdict(set)
        for place in places:
            per_layer[place.layer].add(place.others)
        sets = list(per_layer.values())
        bounds = tuple(1 + max(numbers) for numbers in zip(*sets[0], strict=True))
        box = set(itertools.product(*map(range, bounds)))
        if all(held == box for held in sets):
            words = list(template.words)
            for at, bound in zip(template.others_at, bounds, strict=True):
                words[at] = f"{{{self._variable(words[at - 1], bound, words)}}}"
            yield words, list(places)
            return
        for others in dict.fromkeys(place.others for place in places):
            words = list(template.words)
            for at, number in zip(template.others_at, others, strict=True):
                words[at] = str(number)
            yield words, [place for place in places if place.others == others]

    def _variable(self, before: str, bound: int, words: Sequence[str]) -> str:
        """Return a variable with this bound, named after the module that the number picks."""
        singular = re.sub(r"\W|s$", "", before).lower() or "number"
        stem = f"{singular}_number" if singular in (*self.names, "layer", "any_layer") else singular
        taken = {word.strip("{}") for word in words}
        for suffix in itertools.chain([""], (f"_{n}" for n in itertools.count(2))):
            name = stem + suffix
            if name not in taken and self.ranges.setdefault(name, bound) == bound:
                return name
        raise AssertionError("unreachable: the suffixes do not end")

    def _layers(self, places: Sequence[Place]) -> tuple[str, str]:
        """Return the condition on the layer, and which variable runs over them."""
        held = {place.layer for place in places if place.layer is not None}
        if not held:
            return "", "layer"
        variable = "any_layer" if max(held) >= self.num_layers else "layer"
        return condition(held, self.num_layers, self.num_all, self.names), variable


def merge(lines: Sequence[Line]) -> Iterator[Line]:
    """Yield lines, those that differ in one word of the name alone written as one `{a,b}`."""
    left = list(lines)
    while left:
        first = left.pop(0)
        words = first.template.split(".")
        for at in range(len(words)):
            alike = [line for line in left if _differs_at(first, line, at)]
            if alike and re.fullmatch(r"\w+", words[at]):
                left = [line for line in left if line not in alike]
                choices = [words[at], *(line.template.split(".")[at] for line in alike)]
                words[at] = f"{{{','.join(choices)}}}"
                first = replace(first, template=".".join(words))
                break
        yield first


def _differs_at(one: Line, other: Line, at: int) -> bool:
    a, b = one.template.split("."), other.template.split(".")
    same = replace(one, template="") == replace(other, template="") and len(a) == len(b)
    return (
        same
        and re.fullmatch(r"\w+", b[at]) is not None
        and [*a[:at], *a[at + 1 :]]
        == [
            *b[:at],
            *b[at + 1 :],
        ]
    )


def source(made: Sketch, origin: str, nearest: str) -> str:
    """Return the Python source of the architecture file."""
    rules = made.architecture
    model_type = next(iter(rules.model_types))
    has_fused = bool(rules.fused_experts)
    rows = []
    for line in made.lines:
        if line.confidence < DOUBTFUL:
            rows.append(f"    # doubtful: role guessed with confidence {line.confidence:.2f}")
        rows.append(f"    {line}")
    table = "\n".join(rows)
    return f'''"""{model_type}: made by `onboard inspect` from headers; what it says is guessed."""

from onboard.architectures import Architecture, {"Fused, " if has_fused else ""}Role

ARCHITECTURE = Architecture(
    model_types={dict(rules.model_types)!r},
    text_config={rules.text_config!r},
    tensors="""
{table}
    """,
    defaults={dict(rules.defaults)!r},
    ranges={dict(rules.ranges)!r},
    quantize=({", ".join(f"Role.{role.name}" for role in rules.quantize)},),
    fused_experts={dict(rules.fused_experts)!r},
    experts_per_token={rules.experts_per_token!r},
    mtp_layers={rules.mtp_layers!r},
    cache={rules.cache!r},
    origin={f"{origin}; nearest known family: {nearest}"!r},
)
'''


def file_name(model_type: str) -> str:
    """Return the name of the file in onboard/architectures."""
    return re.sub(r"\W", "_", model_type) + ".py"
