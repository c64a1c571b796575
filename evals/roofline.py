"""The speed-up that an acceptance length promises where memory bandwidth bounds decoding.

An expectation, not a measurement: it counts bytes on disk and leaves out the KV cache, launches
and everything that is not a weight. An engine that unpacks its weights reads others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onboard.architectures import Role
from onboard.checkpoint.headers import Header
from onboard.gpus import Decode
from onboard.tensorplan import expert_container, module_of

LOOKED_UP = ("embed_tokens.weight", "d2t", "t2d")  # a row or an entry a token
NOT_DECODED = (Role.MTP, Role.VISION, Role.BUFFER)


def expected_speedup(
    acceptance_length: float,
    drafted: int,
    draft_bytes: int,
    target: Decode,
    batch: int,
    passes: int | None = None,
) -> float:
    """Return tokens per second with the speculator over those without.

    Leviathan et al. 2023 (arXiv 2211.17192), Theorem 3.8: tau / (1 + gamma * c), where tau is the
    tokens per step, gamma the `drafted` tokens and c the cost of drafting one over that of a step
    of the target, here in bytes read. Their tau follows from an i.i.d. acceptance rate; here it is
    the measured acceptance length. A target with routed experts reads more of them to verify
    gamma + 1 tokens than to decode one, so that the 1 becomes the ratio of these two; for a dense
    target this is their formula at any `batch`.
    """
    plain = target.step_bytes(batch, context=0)
    verified = target.step_bytes(batch, context=0, drafted=drafted)
    return acceptance_length * plain / (verified + (passes or drafted) * draft_bytes)


def draft_bytes(headers: Mapping[str, Header]) -> int:
    """Return the bytes that drafting one token reads: all but tables that are looked up.

    EAGLE-3's `fc` is read once a step, not once a token, and counts all the same.
    """
    return sum(header.bytes for name, header in headers.items() if name not in LOOKED_UP)


def target_decode(headers: Mapping[str, Header], adaptation: Mapping[str, Any]) -> Decode:
    """Return what a decoding step reads of the written checkpoint, the KV cache left out.

    `adaptation` is the content of `adaptation.json`. An embedding is read as a whole only where it
    is the output head too. Where the config does not say how many experts serve a token, all do.
    """
    roles = {module_of(name): row["role"] for name, row in adaptation["tensors"].items()}
    found = {name: _role(name, roles) for name in headers}
    idle = {*NOT_DECODED, Role.EXPERT}
    if Role.HEAD in found.values():
        idle.add(Role.EMBED)
    dense = sum(h.bytes for name, h in headers.items() if found[name] not in idle)
    routed = sum(h.bytes for name, h in headers.items() if found[name] == Role.EXPERT)
    experts = adaptation["experts"] or {"count": 0, "per_token": 0}
    used = experts["per_token"] if experts["per_token"] is not None else experts["count"]
    return Decode(dense, routed, used, experts["count"], cache_bytes_per_token=0)


def _role(name: str, roles: Mapping[str, str]) -> str | None:
    """Return the role of a written tensor, None for the scales of a KV cache.

    It is its own, its module's (`weight_scale`), or that of experts stored as one tensor.
    """
    own = roles.get(module_of(name)) or roles.get(name.rpartition(".")[0])
    return own or (Role.EXPERT if expert_container(name) else None)
