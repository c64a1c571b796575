"""A tensor's role, guessed from the words of its name and from its shape, with a confidence."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onboard.architectures import Role
from onboard.unknown.names import Template

# The first expression that is found in a name decides. Order: what is said of a whole part of the
# model (vision, MTP) before what is said of a module.
WORDS: tuple[tuple[Role, str], ...] = (
    (Role.BUFFER, r"inv_freq|rotary|rope_freqs"),
    (Role.VISION, r"vis(ion|ual)|image|audio|patch_|projector|\bmm_"),
    (Role.MTP, r"\bmtp|nextn|eh_proj|enorm|hnorm"),
    (Role.STATE, r"A_log|dt_bias"),
    (Role.BIAS, r"\bbias$|_bias$"),
    (Role.NORM, r"norm|\bln_?\w*\b"),
    (Role.INDEXER, r"indexer|index_[qkw]"),
    (Role.EMBED, r"embed(?!.*_out)|\bwte\b|word_embeddings"),
    (Role.HEAD, r"lm_head|^output\b|^head\b|embed_out"),
    (Role.ROUTER, r"router|\bgate(\.weight)?$|gate\.wg|expert_gate"),
    (Role.SHARED_EXPERT, r"shared_(expert|mlp)"),
    (Role.EXPERT, r"experts?\b"),
    (Role.STATE, r"linear_attn|mamba|ssm|conv1d|dt_|\bkda|delta|recurren|lightning"),
    (Role.ATTENTION, r"attn|attention|\b[qkvo]_proj|qkv|\b[qk]v?_[ab]_proj|\bw[qkvo]\b"),
    (Role.MLP, r"mlp|ffn|feed_forward|(gate|up|down)_proj|\bw[123]\b|\bfc_?[12]\b"),
)
EXPERT_COUNTS = (
    *("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts", "num_moe_experts"),
)
AGREED, BANKED, NAMED, SHAPED, CONTRADICTED = 0.95, 0.85, 0.75, 0.6, 0.4


@dataclass(frozen=True)
class Guess:
    """A role with a confidence from 0 to 1, and what it rests on."""

    role: Role
    confidence: float
    evidence: str


def guess(template: Template, config: Mapping[str, Any], num_layers: int | None) -> Guess:
    """Return the role of a template's tensors; `config` is the text model's."""
    layers = [place.layer for place in template.places if place.layer is not None]
    if num_layers is not None and layers and min(layers) >= num_layers:
        return Guess(Role.MTP, AGREED, f"in layer {min(layers)}, past the trunk")
    named, fitting = by_words(template.name), by_shape(template, config)
    if named is Role.MLP and fitting == [Role.EXPERT]:
        return Guess(Role.EXPERT, BANKED, "an MLP, one for each of the config's experts")
    if named and named in fitting:
        return Guess(named, AGREED, "name and shape")
    if named and not fitting:
        return Guess(named, NAMED, "name")
    if named:
        return Guess(named, CONTRADICTED, f"name; its shape looks like {fitting[0]}")
    if fitting:
        return Guess(fitting[0], SHAPED if len(fitting) == 1 else SHAPED / 2, "shape")
    return Guess(Role.UNKNOWN, 0.0, "neither name nor shape")


def by_words(name: str) -> Role | None:
    """Return the role that the words of a name speak for."""
    return next((role for role, words in WORDS if re.search(words, name)), None)


def by_shape(template: Template, config: Mapping[str, Any]) -> list[Role]:
    """Return the roles that a shape speaks for, the likeliest first; none where it says nothing."""
    shape, hidden, vocabulary = template.shape, config.get("hidden_size"), config.get("vocab_size")
    experts = num_experts(config)
    if len(shape) == 1:
        return [Role.NORM, Role.BIAS, Role.STATE]
    if vocabulary in shape and hidden in shape:
        return [Role.EMBED, Role.HEAD]
    if experts and (len(shape) == 3 and shape[0] == experts):
        return [Role.EXPERT]
    if experts and template.others_at and 1 + max(p.others[-1] for p in template.places) == experts:
        return [Role.EXPERT]
    if experts and shape == (experts, hidden):
        return [Role.ROUTER]
    if hidden not in shape or len(shape) != 2 or template.layer_at is None:
        return []
    return _layer_matrix(shape[0] if shape[1] == hidden else shape[1], config)


def _layer_matrix(width: int, config: Mapping[str, Any]) -> list[Role]:
    """Return the roles that the other width of a [., hidden] matrix in a layer speaks for."""
    heads, size = config.get("num_attention_heads"), config.get("head_dim")
    groups = config.get("num_key_value_heads", heads)
    if heads and not size:
        size = config.get("hidden_size", 0) // heads
    fits = []
    if heads and size and width in (heads * size, groups * size):
        fits.append(Role.ATTENTION)
    if width == config.get("intermediate_size"):
        fits.append(Role.MLP)
    if width == config.get("shared_expert_intermediate_size", config.get("moe_intermediate_size")):
        fits.append(Role.SHARED_EXPERT)
    return fits


def num_experts(config: Mapping[str, Any]) -> int | None:
    """Return the number of routed experts, under whichever key the config has it."""
    return next((int(config[key]) for key in EXPERT_COUNTS if config.get(key)), None)
