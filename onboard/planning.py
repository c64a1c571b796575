"""What `onboard plan` says of a run before it: sizes, reads, memory, disk, time, where it fits.

Sizes follow from headers or the family's table. Times are estimates from the rates below; what was
not measured says so.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from onboard import hardware
from onboard.architectures import Engine, Role
from onboard.gpus import GPUS, Decode, Gpu, Node, nodes, smallest
from onboard.inspection import by_role, kv_cache_bytes, output
from onboard.inventory import Inventory, nvfp4_bytes, take
from onboard.lookup import Found
from onboard.modelconfig import parse_config
from onboard.recipe import Recipe, Smoke
from onboard.source import kind_of
from onboard.speculators.disk import STATES, Storage, bytes_per_token, chosen

Facts = dict[str, Any]

PASSES = {"gptq": 1, "sequential": 5}  # forward, of the calibration documents: wanted, trials, last
SENSITIVITY_PASSES = 5  # forward and back through the source, and every unit's part again
DISTILLATION_PASSES = 4  # teacher, student, back through the student
METHODS = ("rtn", "sweep", "gptq", "sequential")
STEP_WIDTHS = 8  # hidden sizes that the inputs of a layer's matrices are wide, about
BF16, FP32 = 2, 4  # bytes
TASK_TOKENS = 4 * 128  # of one HellaSwag item: four endings; an upper estimate
CONTEXT = 8192  # tokens, of the decoding ceilings


@dataclass(frozen=True)
class Reads:
    """How often a stage reads whole checkpoints: the source, and the written candidate."""

    source: int = 0
    candidate: int = 0


# Stages stream layers: a layer is loaded once, all tokens pass, and it is dropped.
READS = {
    "source": Reads(source=1),  # sha256; none where the Hub gives the digests
    "adapt": Reads(),
    "data": Reads(),
    "calibrate": Reads(source=1),
    "quantize": Reads(source=1),
    "fidelity": Reads(source=1, candidate=1),
    "features": Reads(candidate=2),  # its target: to generate in the engine, to keep the states
    "speculate": Reads(),
    "smoke": Reads(candidate=2),  # the engine starts without and with the speculator
}

# Rates. Packing is measured (plain torch, one busy core); the others are assumptions.
PACKING_PER_CORE = 45e6  # bytes of bf16 per second
PACKING_PER_GPU = 2e9
DISK = 2e9  # bytes per second, one NVMe drive
NETWORK = 250e6  # bytes per second from the Hub
FLOPS_PER_CORE = 3e10
EFFICIENCY = 0.4  # of dense bf16 FLOPS that a forward or backward pass reaches
DECODE_EFFICIENCY = 0.5  # of the bandwidth ceiling that generation reaches
CPU_BANDWIDTH = 2e10  # bytes per second

ASSUMPTIONS = (
    f"disk {DISK / 1e9:g} GB/s, network {NETWORK / 1e6:g} MB/s (assumed)",
    f"packing {PACKING_PER_CORE / 1e6:g} MB/s per core (measured), "
    f"{PACKING_PER_GPU / 1e9:g} GB/s per GPU (assumed)",
    f"{EFFICIENCY:.0%} of a GPU's dense bf16 rate, {FLOPS_PER_CORE / 1e9:g} GFLOPS per core, "
    f"{DECODE_EFFICIENCY:.0%} of the decoding ceiling (assumed)",
    "a node fits where weights, MTP included, and an FP8 KV cache for the recipe's "
    "max_num_seqs x max_model_len tokens take at most 90% of its memory, each kept once",
)


@dataclass(frozen=True)
class Machine:
    """What runs the stages. Rates per second: FLOPs, bytes packed, bytes read while decoding."""

    name: str
    flops: float
    packing: float
    bandwidth: float


@dataclass(frozen=True)
class Work:
    """The work of one stage, in bytes, FLOPs and generated tokens."""

    stage: str
    source_reads: int
    candidate_reads: int
    read_bytes: float
    memory_bytes: float
    disk_bytes: float
    flops: float = 0
    packed_bytes: float = 0
    fetched_bytes: float = 0
    decode_bytes: float = 0  # read from the accelerator's memory to generate

    def seconds(self, machine: Machine) -> float:
        """Return an estimate: reading overlaps with computing, the rest follows."""
        streamed = max(self.read_bytes / DISK, self.flops / machine.flops)
        decoded = self.decode_bytes / (machine.bandwidth * DECODE_EFFICIENCY)
        written = self.disk_bytes / DISK
        packed = max(self.packed_bytes / machine.packing, written)
        return streamed + packed + decoded + self.fetched_bytes / NETWORK


def plan(found: Found) -> Facts:
    """Return the plan of a recipe's run, ready for JSON. Bytes are bytes, times seconds."""
    config = parse_config(found.config, Path(found.path))
    recipe = found.recipe
    held = take(found, config, recipe.adapt)
    sizes = output(held)
    cache_per_token = kv_cache_bytes(config)
    cache = cache_budget(recipe, cache_per_token)
    total = sizes["bytes"] + sizes["mtp_bytes"]
    step = decode(held, cache_per_token)
    work = stages(held, recipe, step)
    serving = [node for gpu in GPUS if (node := smallest(gpu, total, cache))]
    machines = [this_machine(), *map(of_node, _recommended(serving))]
    return {
        "model": recipe.source.model,
        "origin": found.origin,
        "recipe": recipe.name,
        "family": config.family,
        "quantize": {
            "roles": _quantized(held),
            "keep": list(dict.fromkeys((*recipe.adapt.keep, *config.rules.keep))),
        },
        "roles": by_role(held),
        "kept": kept(held),
        "unknown_tensors": list(held.unknown),
        "output": {
            **sizes,
            "total_bytes": total,
            "bits_per_parameter": 8 * total / sum(w.parameters for w in held.entries),
            "if_all_were_nvfp4": nvfp4_bytes(held.parameters),
        },
        "stages": [asdict(w) | {"seconds": {m.name: w.seconds(m) for m in machines}} for w in work],
        "features": _features(held, recipe),
        "kv_cache": {"bytes_per_token": cache_per_token, "budget_bytes": cache},
        "nodes": [_fit(gpu, total, cache) for gpu in GPUS],
        "decode_ceilings": [_ceiling(step, node, recipe) for node in serving],
        "engine": engine(config.rules.engine, recipe.smoke),
        "assumptions": list(ASSUMPTIONS),
    }


def engine(family: Engine, chosen: Smoke) -> Facts:
    """Return what serving needs: what the recipe says, else the family."""
    own = {
        "minimum": chosen.engine_minimum,
        "tool_call_parser": chosen.tool_call_parser,
        "reasoning_parser": chosen.reasoning_parser,
    }
    return {**asdict(family), **{key: value for key, value in own.items() if value}}


def _quantized(held: Inventory) -> list[str]:
    return sorted({w.role.value for w in held.entries if w.quantize})


def kept(held: Inventory) -> dict[str, int]:
    """Return why matrices of quantizable roles stay in high precision -> their parameters."""
    reasons: Counter[str] = Counter()
    for weight in held.entries:
        if not weight.quantize and weight.reason and not weight.reason.startswith("role "):
            reasons[re.sub(r"fused with \S+: ", "", weight.reason)] += weight.parameters
    return dict(reasons.most_common())


def decode(held: Inventory, cache_bytes_per_token: int) -> Decode:
    """Return what decoding with the written checkpoint reads; MTP, vision, look-ups left out."""
    idle = {Role.MTP, Role.VISION, Role.BUFFER, Role.EXPERT}
    if held.total(Role.HEAD):
        idle.add(Role.EMBED)
    dense = sum(w.output_bytes for w in held.entries if w.role not in idle)
    experts = sum(w.output_bytes for w in held.entries if w.role is Role.EXPERT)
    return Decode(dense, experts, *held.experts, cache_bytes_per_token)


def cache_budget(recipe: Recipe, bytes_per_token: float) -> float:
    """Return the bytes of a KV cache for every sequence at its longest."""
    return recipe.smoke.max_num_seqs * recipe.smoke.max_model_len * bytes_per_token


def stages(held: Inventory, recipe: Recipe, step: Decode) -> list[Work]:
    """Return the work of every stage in order."""
    sizes, hidden = output(held), held.config.hidden_size
    source, candidate = sizes["source_bytes"], sizes["bytes"] + sizes["mtp_bytes"]
    layer, data = largest_layer(held), recipe.data
    calibrated = data.calibration_documents * data.tokens_per_document
    evaluated = data.evaluation_documents * data.tokens_per_document
    evaluated += recipe.fidelity.task_documents * TASK_TOKENS
    answered = recipe.features
    methods = methods_of(recipe)
    rounded = sum(method in PASSES for method in methods)
    documents = min(recipe.quantize.documents, data.calibration_documents)
    compensated = documents * data.tokens_per_document
    kept_inputs = compensated * (STEP_WIDTHS * FP32 + 2 * BF16) * hidden
    kept_tokens = feature_tokens(recipe)
    logits = recipe.fidelity.batch_size * data.tokens_per_document * _vocabulary(held) * FP32 * 2
    state = hidden * BF16
    is_hub = kind_of(recipe.source.model) == "hub"
    forward = 2 * held.active  # FLOPs per token
    storage = storage_of(held, recipe)
    features = bytes_per_token(hidden, storage) * kept_tokens
    head = head_parameters(hidden, recipe.speculate.draft_vocab_size)
    trained = 6 * head * kept_tokens * recipe.speculate.epochs * recipe.speculate.ttt_steps
    steps = math.ceil(data.training_prompts / answered.batch_size) * answered.max_new_tokens
    per_step = step.step_bytes(answered.batch_size, data.tokens_per_prompt)
    in_flight = answered.batch_size * data.tokens_per_prompt
    if answered.answers:
        in_flight = (1 + STATES) * min(answered.prefill_tokens, kept_tokens)
    buffer = 0.0
    if storage == "online":
        trained += forward * taken_while_training(recipe)
        buffer = layer + (1 + STATES) * min(recipe.speculate.buffer_tokens, kept_tokens) * state

    def work(stage: str, memory: float = 0, disk: float = 0, **rest: float) -> Work:
        reads = reads_of(stage, recipe, storage)
        size = reads.source * source + reads.candidate * candidate
        return Work(stage, reads.source, reads.candidate, size, memory, disk, **rest)

    return [
        work("source", fetched_bytes=source if is_hub else 0),
        work("adapt"),
        work("data"),
        work("calibrate", layer + calibrated * state, flops=forward * calibrated),
        work(
            "quantize",
            3 * FP32 * largest_matrix(held) + min(1, rounded) * (layer + kept_inputs),
            candidate * (len(methods) + rounded),  # finished layers, and a checkpoint a method
            flops=forward * quantize_tokens(recipe, compensated),
            packed_bytes=sizes["nvfp4_parameters"] * BF16,
        ),
        work(
            "fidelity",
            layer + evaluated * state + logits,
            evaluated * state,
            flops=2 * forward * evaluated,
        ),
        work(
            "features",
            layer + in_flight * state,
            features,
            flops=forward * kept_tokens,
            decode_bytes=steps * per_step,
        ),
        work("speculate", 16 * head + buffer, head * BF16, flops=trained),
        work("smoke", candidate + cache_budget(recipe, step.cache_bytes_per_token)),
    ]


def reads_of(stage: str, recipe: Recipe, storage: Storage) -> Reads:
    """Return the reads of a stage, which its settings may change."""
    if stage == "features":
        reads = READS[stage].candidate
        if recipe.features.answers:  # of somebody's server; here states are taken, by the part
            reads = math.ceil(feature_tokens(recipe) / recipe.features.prefill_tokens)
        return _of_target(recipe, reads)
    if stage == "speculate" and storage == "online":  # a buffer at a time
        return _of_target(
            recipe, math.ceil(taken_while_training(recipe) / recipe.speculate.buffer_tokens)
        )
    if stage == "quantize":
        methods, has_budget = methods_of(recipe), recipe.quantize.budget.limit is not None
        measured = (len(methods) if len(methods) > 1 else 0) + has_budget
        # A layer at a time to round, then to copy what stays; forward and back for sensitivities.
        rounded = sum(method in PASSES or method == "qad" for method in methods)
        source = len(methods) + rounded + 2 * has_budget + (measured > 0)
        return Reads(source=source, candidate=measured)
    return READS[stage]


def _of_target(recipe: Recipe, reads: int) -> Reads:
    return Reads(source=reads) if recipe.features.target == "source" else Reads(candidate=reads)


def taken_while_training(recipe: Recipe) -> int:
    """Return the tokens whose states training takes: every epoch's, unless a buffer holds all."""
    tokens, params = feature_tokens(recipe), recipe.speculate
    return tokens if tokens <= params.buffer_tokens else tokens * params.epochs


def methods_of(recipe: Recipe) -> tuple[str, ...]:
    """Return the methods by which the quantize stage makes checkpoints, at most."""
    method = recipe.quantize.method
    if method == "qad":
        return ("sequential", "qad")
    if method != "auto":
        return (method,)
    return (*METHODS, "qad") if recipe.data.distillation_documents else METHODS


def quantize_tokens(recipe: Recipe, compensated: int) -> int:
    """Return the tokens of forward passes that rounding, budgets and distillation come to."""
    methods, data, params = methods_of(recipe), recipe.data, recipe.quantize
    tokens = sum(PASSES.get(method, 0) for method in methods) * compensated
    if params.budget.limit is not None:
        tokens += SENSITIVITY_PASSES * params.budget.documents * data.tokens_per_document
    if "qad" in methods:
        taught = data.distillation_documents * data.tokens_per_document
        tokens += DISTILLATION_PASSES * taught * params.distill.epochs
    return tokens


def largest_layer(held: Inventory) -> int:
    """Return the bytes of the largest layer in bf16."""
    layers: dict[str, int] = defaultdict(int)
    for weight in held.entries:
        if layer := re.match(r"(.*?layers\.\d+)\.", weight.name):
            layers[layer[1]] += weight.parameters * BF16
    return max(layers.values(), default=0)


def largest_matrix(held: Inventory) -> int:
    """Return the parameters of the largest matrix that is rounded at once: of one expert."""
    return max((math.prod(w.shape[-2:]) for w in held.entries if w.quantize), default=0)


def _vocabulary(held: Inventory) -> int:
    return max((w.shape[0] for w in held.entries if w.role in (Role.HEAD, Role.EMBED)), default=0)


def feature_tokens(recipe: Recipe) -> int:
    """Return the tokens whose hidden states are kept, where every text is as long as it may be."""
    data, answered = recipe.data, recipe.features
    return data.training_prompts * (data.tokens_per_prompt + answered.max_new_tokens)


def storage_of(held: Inventory, recipe: Recipe) -> Storage:
    """Return how the hidden states of so many tokens are kept."""
    params, tokens = recipe.features, feature_tokens(recipe)
    return chosen(params.storage, held.config.hidden_size, tokens, params.gigabytes)


def head_parameters(hidden_size: int, draft_vocab_size: int) -> int:
    """Return the size of a one-layer EAGLE-3 head, about: its MLP is taken as 4 hidden wide.

    fc 3H*H, q/k/v from 2H (grouped keys taken as a quarter), o, SwiGLU, output layer.
    """
    fc, attention, mlp = 3, 2 + 1 + 1, 12  # times H^2
    return (fc + attention + mlp) * hidden_size**2 + draft_vocab_size * hidden_size


def _features(held: Inventory, recipe: Recipe) -> Facts:
    tokens, storage = feature_tokens(recipe), storage_of(held, recipe)
    each = bytes_per_token(held.config.hidden_size, storage)
    return {
        "bytes_per_token": each,
        "storage": storage,
        "tokens": tokens,
        "bytes": each * tokens,
    }


def this_machine() -> Machine:
    """Return this machine's cores as they are; its GPUs, if any, are not measured here."""
    cores = int(hardware.describe()["cores"])
    return Machine(
        "this machine's CPU", cores * FLOPS_PER_CORE, cores * PACKING_PER_CORE, CPU_BANDWIDTH
    )


def of_node(node: Node) -> Machine:
    flops = node.count * node.gpu.bf16 * 1e12 * EFFICIENCY
    return Machine(node.name, flops, node.count * PACKING_PER_GPU, node.bandwidth)


def _recommended(serving: list[Node]) -> list[Node]:
    """Return the fewest GPUs that run NVFP4 natively, of those that hold the result."""
    native = [node for node in serving if node.gpu.native_nvfp4]
    return sorted(native, key=lambda node: (node.count, node.gpu.memory))[:1]


def _fit(gpu: Gpu, weights: float, cache: float) -> Facts:
    return {
        "gpu": gpu.name,
        "memory_gb": gpu.memory,
        "nvfp4": gpu.nvfp4,
        "fits": {str(node.count): node.fits(weights, cache) for node in nodes(gpu)},
    }


def _ceiling(step: Decode, node: Node, recipe: Recipe) -> Facts:
    """Return tokens per second of one stream and of a full batch; ceilings, never forecasts."""
    batch = recipe.smoke.max_num_seqs
    return {
        "node": node.name,
        "nvfp4": node.gpu.nvfp4,
        "context": CONTEXT,
        "one_stream": step.ceiling(node, 1, CONTEXT),
        "batch": batch,
        "batched": step.ceiling(node, batch, CONTEXT),
    }
