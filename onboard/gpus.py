"""Accelerators: dense rates as their makers publish them, and what a node of them holds and reads.

Rates as of November 2026; GB is 1e9 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

COUNTS = (1, 2, 4, 8, 16)
USABLE = 0.9  # of the memory: vLLM's default gpu_memory_utilization


@dataclass(frozen=True)
class Gpu:
    """`bf16`, `fp8`, `fp4` in dense TFLOPS (None: none), `memory` in GB, `bandwidth` in TB/s."""

    name: str
    bf16: float
    fp8: float
    fp4: float | None
    memory: float
    bandwidth: float
    nvfp4: Literal["native", "weight-only", "emulated"]  # how vLLM runs its matrices

    @property
    def native_nvfp4(self) -> bool:
        return self.nvfp4 == "native"


GPUS = (
    Gpu("H100", 989, 1979, None, 80, 3.35, "weight-only"),
    Gpu("H200", 989, 1979, None, 141, 4.8, "weight-only"),
    Gpu("B200", 2250, 4500, 9000, 180, 8.0, "native"),
    Gpu("B300", 2250, 4500, 13500, 268, 8.0, "native"),
    Gpu("GB300", 2500, 5000, 15000, 288, 8.0, "native"),
    Gpu("MI355X", 2516, 5033, 10066, 288, 8.0, "emulated"),  # its FP4 is MXFP4
    Gpu("RTX PRO 6000", 468, 936, 1871, 96, 1.79, "native"),
)


@dataclass(frozen=True)
class Node:
    """Some GPUs that share a model by tensor or expert parallelism."""

    gpu: Gpu
    count: int

    @property
    def name(self) -> str:
        return f"{self.count}x{self.gpu.name}"

    @property
    def usable_bytes(self) -> float:
        """Memory for weights and KV cache."""
        return self.count * self.gpu.memory * 1e9 * USABLE

    @property
    def bandwidth(self) -> float:
        """Bytes per second that all of them read."""
        return self.count * self.gpu.bandwidth * 1e12

    def fits(self, weights: float, cache: float) -> bool:
        """Whether bytes of weights and of KV cache fit, each kept once."""
        return weights + cache <= self.usable_bytes


def nodes(gpu: Gpu) -> tuple[Node, ...]:
    return tuple(Node(gpu, count) for count in COUNTS)


def smallest(gpu: Gpu, weights: float, cache: float) -> Node | None:
    """Return the least number of these GPUs that holds weights and cache, None where 16 do not."""
    return next((node for node in nodes(gpu) if node.fits(weights, cache)), None)


@dataclass(frozen=True)
class Decode:
    """What one decoding step reads, in bytes; `used` of `of` experts serve each token."""

    dense_bytes: float  # everything but routed experts and look-ups
    expert_bytes: float  # all routed experts
    used: int
    of: int
    cache_bytes_per_token: float

    def step_bytes(self, batch: int, context: int, drafted: int = 0) -> float:
        """Return the bytes of one step of `batch` sequences with `drafted` tokens to verify.

        Tokens choose experts independently: E * (1 - (1 - k/E)^tokens) of them are read.
        """
        tokens = batch * (drafted + 1)
        touched = 1 - (1 - self.used / self.of) ** tokens if self.of else 0.0
        cache = batch * context * self.cache_bytes_per_token
        return self.dense_bytes + self.expert_bytes * touched + cache

    def ceiling(
        self, node: Node, batch: int, context: int, drafted: int = 0, accepted: float = 0.0
    ) -> float:
        """Return tokens per second if nothing but memory bandwidth took time: no node does more.

        `accepted` is the probability that a drafted token is taken.
        """
        steps = node.bandwidth / self.step_bytes(batch, context, drafted)
        return batch * acceptance_length(accepted, drafted) * steps


def acceptance_length(accepted: float, drafted: int) -> float:
    """Return the tokens per step: (1 - a^(g+1)) / (1 - a)."""
    if accepted == 1:
        return float(drafted + 1)
    return (1 - accepted ** (drafted + 1)) / (1 - accepted)
