"""Sizes as expressions over the config's keys, such as `num_attention_heads * head_dim`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from types import SimpleNamespace
from typing import Any

from onboard.architectures import Role
from onboard.architectures.table import evaluate
from onboard.errors import InputError

HIDDEN = "hidden_size"
LEAST = 5  # smaller sizes stay numbers: too many keys have such values
QUERIES = (
    "num_attention_heads * head_dim",
    "num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim)",
    "2 * num_attention_heads * head_dim",
)
KEYS = ("num_key_value_heads * head_dim", "2 * num_key_value_heads * head_dim")
LATENT = (
    "kv_lora_rank + qk_rope_head_dim",
    "q_lora_rank",
    "kv_lora_rank",
    "num_attention_heads * (qk_nope_head_dim + v_head_dim)",
    "num_attention_heads * v_head_dim",
)
# What sizes of a role usually are, the likeliest first.
USUAL: dict[Role, tuple[str, ...]] = {
    Role.EMBED: ("vocab_size",),
    Role.HEAD: ("vocab_size",),
    Role.ATTENTION: (*LATENT, *QUERIES, *KEYS),
    Role.INDEXER: ("index_n_heads * index_head_dim", "index_head_dim", "index_n_heads", *LATENT),
    Role.MLP: ("intermediate_size", "2 * intermediate_size", "dense_intermediate_size"),
    Role.EXPERT: (
        *("moe_intermediate_size", "2 * moe_intermediate_size"),
        *("intermediate_size", "2 * intermediate_size", "n_routed_experts", "num_experts"),
        "num_local_experts",
    ),
    Role.SHARED_EXPERT: (
        *("shared_expert_intermediate_size", "n_shared_experts * moe_intermediate_size"),
        *("moe_intermediate_size", "shared_intermediate_size"),
    ),
    Role.ROUTER: ("n_routed_experts", "num_experts", "num_local_experts"),
    Role.NORM: (HIDDEN, "head_dim", "q_lora_rank", "kv_lora_rank"),
}
_NO_SIZE = re.compile(
    r"token|position|window|topk|top_k|per_tok|version|layers|theta|seed|_group|interval|freq|^ep_"
)
_COUNT = re.compile(r"^n_|num_|_heads|_groups|^o_groups")
_SIZE = re.compile(r"dim|size|rank|width")


class Sizes:
    """Expressions for numbers, from the names that a family's expressions see."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        self.names = names
        self._general: dict[int, str] = {}
        for expression, value in _candidates(dict(_numbers(names))):
            self._general.setdefault(value, expression)

    def shape(self, sizes: Sequence[int], role: Role, name: str) -> str:
        """Return the expression of a shape, columns of an architecture file's table."""
        hints = _hints(role, name)
        if len(sizes) == 2 and role not in (Role.NORM, Role.VISION, Role.MTP):
            wide, narrow = (0, 1) if not _reduces(name) else (1, 0)
            parts = ["", ""]
            parts[narrow] = self.size(sizes[narrow], (HIDDEN, *hints))
            parts[wide] = self.size(sizes[wide], (*hints, HIDDEN))
            return ", ".join(parts)
        return ", ".join(self.size(size, (*hints, HIDDEN)) for size in sizes)

    def size(self, number: int, hints: Sequence[str] = ()) -> str:
        """Return an expression that gives `number`: a hint, any other, or the number itself."""
        if number < LEAST:
            return str(number)
        for hint in hints:
            try:
                if evaluate(hint, self.names, "size") == number:
                    return hint
            except InputError:
                continue
        return self._general.get(number, str(number))


def _hints(role: Role, name: str) -> tuple[str, ...]:
    usual = USUAL.get(role, ())
    if role is Role.ATTENTION and re.search(r"\b[kv]_proj|\bw[kv]\b|key|value", name):
        return (*KEYS, *usual)
    if role is Role.ATTENTION and re.search(r"\bq_proj|\bo_proj|\bw[qo]\b|query|out", name):
        return (*QUERIES, *usual)
    return usual


def _reduces(name: str) -> bool:
    """Whether a matrix leads back to the hidden size, by its name."""
    return re.search(r"\bo_proj|down|\bw2\b|\bwo\b|out|fc_?2|dense_4h_to_h", name) is not None


def _numbers(names: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, int]]:
    """Yield the sizes and counts of a config, those of nested tables as `table.key`."""
    for key, value in names.items():
        if isinstance(value, SimpleNamespace) and not prefix:
            yield from _numbers(vars(value), f"{key}.")
        elif type(value) is int and value > 1 and key.isidentifier() and not _NO_SIZE.search(key):
            yield prefix + key, value


def _candidates(numbers: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Yield expressions with their values, the plainest first."""
    yield from numbers.items()
    counts = {key: n for key, n in numbers.items() if _COUNT.search(key)}
    sizes = {key: n for key, n in numbers.items() if _SIZE.search(key)}
    products = [(f"{c} * {s}", n * m) for c, n in counts.items() for s, m in sizes.items()]
    yield from products
    yield from ((f"{f} * {key}", f * n) for key, n in sizes.items() for f in (2, 3, 4))
    yield from ((f"{a} + {b}", sizes[a] + sizes[b]) for a, b in combinations(sizes, 2))
    yield from ((f"2 * {expression}", 2 * n) for expression, n in products)
