"""A recipe: YAML with `extends`, checked against one frozen section per stage."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from onboard.errors import InputError

RECIPES = Path(__file__).parent / "recipes"
DEFAULT = "smollm2-135m"
PARENTS = ("base", "release")  # extended by recipes, not models themselves
PROFILES = ("code", "agent", "chat", "math")  # of traffic; onboard/data/traffic.py fills them
MOVED = {"speculate.traffic": "data.traffic"}  # asked of one stage, done by another


@dataclass(frozen=True)
class Limit:
    """A bound on a metric: "<=" or ">="."""

    bound: str
    value: float

    def holds(self, measured: float) -> bool:
        return measured <= self.value if self.bound == "<=" else measured >= self.value


class Section(BaseModel):
    """Settings of one stage. Limits on its metrics live in its `gates`, outside the cache key."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def limits(self) -> dict[str, Limit]:
        """Return metric -> limit for every gate that is not null."""
        gates = getattr(self, "gates", None)
        if gates is None:
            return {}
        return {
            name: Limit(info.json_schema_extra["bound"], getattr(gates, name))
            for name, info in type(gates).model_fields.items()
            if getattr(gates, name) is not None
        }


def at_most(limit: float | None = None) -> Any:
    """A gate: the metric of this name must not exceed the limit; null switches it off."""
    return Field(limit, json_schema_extra={"bound": "<="})


def at_least(limit: float | None = None) -> Any:
    """A gate: the metric of this name must reach the limit; null switches it off."""
    return Field(limit, json_schema_extra={"bound": ">="})


class Source(Section):
    """Where the checkpoint comes from: a local directory, a Hub id, or `package:MODULE/FILE`."""

    model: str
    revision: str | None = None  # Hub only: branch, tag or commit
    allow_remote_code: bool = False  # record that the config names remote code, never run it


class AdaptGates(Section):
    unknown_tensors: float | None = at_most(0)


class Adapt(Section):
    """Which tensors play which role, and which are quantized."""

    quantize: tuple[str, ...] | None = None  # roles; null: those of the family's published NVFP4
    keep: tuple[str, ...] = ()  # fnmatch patterns of names that stay, beside the family's own
    gates: AdaptGates = AdaptGates()


class Corpus(Section):
    """One origin of documents: an installed package's reader, a `datasets` id, or a JSONL file."""

    domain: Literal["code", "chat", "math", "tools", "prose"]
    reader: str | None = None  # a function of onboard.data.readers
    dataset: str | None = None  # id for datasets.load_dataset, or a local path
    config: str | None = None
    split: str = "train"
    jsonl: str | None = None
    field: str = "text"  # the column with a text, or with a list of chat messages
    licence: str = "unknown"
    weight: float = 1.0


class DataGates(Section):
    overlapping_documents: float | None = at_most(0)
    domains_missing: float | None = at_most(0)


class Data(Section):
    """Documents for calibration, selection, training and evaluation, disjoint by content."""

    corpora: tuple[Corpus, ...] = ()
    # What prompts are like: shares of profiles and of JSONL files of one's own requests, or the
    # path of one such file; null: as the corpora. Documents always come from the corpora.
    traffic: dict[str, float] | None = None
    online: bool = False  # profiles also draw on public datasets of the Hub
    calibration_documents: int = Field(64, ge=1)
    selection_documents: int = Field(24, ge=0)
    evaluation_documents: int = Field(40, ge=2)
    distillation_documents: int = Field(0, ge=0)  # for quantize.method=qad
    training_prompts: int = Field(320, ge=1)
    evaluation_prompts: int = Field(20, ge=1)
    tokens_per_document: int = Field(256, ge=16)
    tokens_per_prompt: int = Field(192, ge=16)
    seed: int = 0
    gates: DataGates = DataGates()

    @field_validator("traffic", mode="before")
    @classmethod
    def _one_share(cls, given: Any) -> Any:
        return {given: 1.0} if isinstance(given, str) else given

    @field_validator("traffic")
    @classmethod
    def _known_shares(cls, shares: dict[str, float] | None) -> dict[str, float] | None:
        for name, share in (shares or {}).items():
            if name not in PROFILES and not is_file(name):
                near = difflib.get_close_matches(name, PROFILES, 1)
                raise ValueError(
                    f"{name!r} is no profile ({', '.join(PROFILES)}) and no path of a JSONL file"
                    + (f"; did you mean {near[0]}?" if near else "")
                )
            if not 0 <= share < math.inf:
                raise ValueError(f"the share of {name} is {share:g}, expected 0 or more")
        if shares is not None and not sum(shares.values()):
            raise ValueError("no share is above 0")
        return shares


def is_file(name: str) -> bool:
    """Tell whether a name in `data.traffic` is a path: profiles have no dot and no slash."""
    return "." in name or "/" in name


class CalibrateGates(Section):
    tensors_without_tokens: float | None = at_most(0)


class Calibrate(Section):
    """Activation ranges and input second moments of every quantized tensor."""

    batch_size: int = Field(8, ge=1)
    unseen_experts: Literal["layer_max", "error"] = "layer_max"
    ranges: Literal["max", "search"] = "max"  # NVFP4's: the largest magnitude, or near it
    kv_cache: Literal["fp8"] | None = None  # ranges of keys and values, written as scales
    gates: CalibrateGates = CalibrateGates()


class QuantizeGates(Section):
    weights_quantized_share: float | None = at_least()
    share_missing: float | None = at_most(0)
    tensors_lost: float | None = at_most(0)
    relative_error_max: float | None = at_most(0.2)


class Budget(Section):
    """What the allocation of NVFP4, FP8 and BF16 may spend; one limit, or none: all NVFP4."""

    bits: float | None = Field(None, ge=4.5, le=16)  # a weight that may be quantized, with scales
    bytes: int | None = Field(None, ge=1)  # of all weights that may be quantized
    speed: float | None = Field(None, ge=1, le=16 / 4.5)  # times bf16's, by bytes read per token
    kl_max: float | None = Field(None, gt=0)  # measured on the selection documents
    documents: int = Field(8, ge=2)  # of the calibration set, to measure sensitivities
    swaps: int = Field(4, ge=0)  # tried on the joint KL of the selection documents
    seed: int = 0

    @model_validator(mode="after")
    def _one_limit(self) -> Budget:
        given = [name for name in LIMITS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"one limit, not {' and '.join(given)}")
        return self

    @property
    def limit(self) -> tuple[str, float] | None:
        """The name and value of the limit that was given."""
        return next(((n, v) for n in LIMITS if (v := getattr(self, n)) is not None), None)


LIMITS = ("bits", "bytes", "speed", "kl_max")


class Distill(Section):
    """Quantization-aware distillation: KL against the source, through the exact rounding."""

    train: Literal["weights", "norms"] = "weights"  # norms: those and the tensors' fp32 scales
    epochs: int = Field(2, ge=1)  # over data.distillation_documents
    minutes: float | None = Field(None, gt=0)  # training ends after these
    batch_size: int = Field(4, ge=1)
    learning_rate: float = Field(3e-3, gt=0)  # in steps of a block: E2M1 numbers are 0.5 apart
    warmup_steps: int = Field(10, ge=0)
    evaluate_steps: int = Field(32, ge=1)  # between looks at the selection documents
    patience: int = Field(3, ge=1)  # looks without a gain, after which training ends
    seed: int = 0


class Quantize(Section):
    """How weights become NVFP4."""

    method: Literal["rtn", "sweep", "gptq", "sequential", "qad", "auto"] = "sequential"
    target_kl: float | None = Field(None, gt=0)  # on the selection documents, where auto stops
    minutes: float | None = Field(None, gt=0)  # after which auto begins no further method
    budget: Budget = Budget()
    distill: Distill = Distill()
    layout: Literal["modelopt", "compressed-tensors"] = "modelopt"
    documents: int = Field(64, ge=1)  # of the calibration set, for gptq and sequential
    batch_size: int = Field(4, ge=1)  # a quarter of the batches judges what the others fit
    activations: Literal["nvfp4", "none"] = "nvfp4"  # W4A4 or W4A16
    shard_bytes: int = Field(4 * 2**30, ge=2**20)
    workers: int | None = Field(None, ge=1)  # shards written at once; null: one a core
    gates: QuantizeGates = QuantizeGates()


class FidelityGates(Section):
    kl_mean: float | None = at_most()
    kl_mean_hi: float | None = at_most()
    kl_p99: float | None = at_most()
    kl_mean_weights_only: float | None = at_most()
    top1: float | None = at_least()
    ppl_ratio: float | None = at_most()
    hellaswag_drop: float | None = at_most()


class Fidelity(Section):
    """KL divergence and tasks of the written checkpoint against its source."""

    batch_size: int = Field(4, ge=1)
    bootstrap: int = Field(2000, ge=100)
    task_documents: int = Field(60, ge=0)  # of HellaSwag; 0 runs no task
    seed: int = 0
    gates: FidelityGates = FidelityGates()


class FeaturesGates(Section):
    zero_features: float | None = at_most(0)
    trained_token_share: float | None = at_least(0.05)
    batch_invariance_error: float | None = at_most(0.05)
    stored_state_error: float | None = at_most(0.25)  # a row shifted by one is above 0.3


class Features(Section):
    """Answers of the target to the training prompts, and the hidden states behind them."""

    target: Literal["source", "quantize"] = "quantize"
    # Base URL of an OpenAI-compatible server of the same target; null: it answers in this process.
    answers: str | None = Field(None, pattern=r"^https?://\S+$")
    max_new_tokens: int = Field(128, ge=1)
    batch_size: int = Field(32, ge=1)  # prompts answered at once
    # Tokens of a server's answers whose states are taken in one reading of the target.
    prefill_tokens: int = Field(2**18, ge=1)
    # fp8: E4M3 with a scale per hidden state; online: none is stored, training runs the target;
    # auto: bf16 up to so many gigabytes, online above.
    storage: Literal["auto", "bf16", "fp8", "online"] = "auto"
    gigabytes: float = Field(500.0, gt=0)
    gates: FeaturesGates = FeaturesGates()


class SpeculateGates(Section):
    offline_acceptance_length: float | None = at_least()


class Draft(Section):
    """The draft's shape; null: the target's, or heads of its own where the target's are latent."""

    family: Literal["eagle3", "peagle"] = "eagle3"  # peagle drafts all its tokens in one pass
    layers: int = Field(1, ge=1)
    window: int | None = Field(None, ge=2)  # tokens that a token attends to; null: all
    heads: int | None = Field(None, ge=1)
    kv_heads: int | None = Field(None, ge=1)
    head_dim: int | None = Field(None, ge=8, multiple_of=2)
    intermediate_size: int | None = Field(None, ge=1)
    norm_before_residual: bool = False  # EAGLE-3.1's switches, see Eagle3
    norm_output: bool = False
    fc_norm: bool = False

    @model_validator(mode="after")
    def _switches_fit(self) -> Draft:
        if self.family == "peagle" and (self.norm_output or self.fc_norm):
            raise ValueError("norm_output and fc_norm: engines know them of eagle3 drafts alone")
        return self


class Speculate(Section):
    """An EAGLE-3 head with training-time test."""

    draft: Draft = Draft()
    sweep: dict[str, tuple[Any, ...]] = {}  # field of draft -> values: every combination is trained
    processes: int | None = Field(None, ge=1)  # null: one per GPU
    draft_vocab_size: int = Field(4096, ge=2)
    ttt_steps: int = Field(3, ge=1)
    step_decay: float = Field(0.8, gt=0)
    loss: Literal["forward_kl", "reverse_kl", "lk", "lk_hybrid"] = "forward_kl"
    epochs: int = Field(3, ge=1)
    batch_size: int = Field(8, ge=1)
    row_tokens: int | None = Field(None, ge=2)  # pack documents into rows; null: a row each
    optimizer: Literal["adamw", "muon"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0)
    clip: float = Field(0.5, gt=0)  # largest gradient norm
    learning_rate: float = Field(1e-3, gt=0)
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    final_rate: float = Field(0.05, ge=0, le=1)  # share of the learning rate at the end
    warmup_steps: int = Field(30, ge=0)
    checkpoint_steps: int = Field(25, ge=1)
    # Tokens whose states are held at once where features are stored nowhere.
    buffer_tokens: int = Field(2**16, ge=1)
    looks: int = Field(10, ge=1)  # estimates of the acceptance length while training
    seed: int = 0
    gates: SpeculateGates = SpeculateGates()

    @model_validator(mode="after")
    def _sweep_fits(self) -> Speculate:
        """Check every value of the sweep as one of the draft's field."""
        for name, values in self.sweep.items():
            if not values:
                raise ValueError(f"sweep.{name}: no value to try")
            for value in values:
                Draft(**{name: value})
        return self


class SmokeGates(Section):
    probes_failed: float | None = at_most(0)
    looped_share: float | None = at_most(0.5)
    divergences: float | None = at_most(0)
    near_tie_share: float | None = at_most(0.1)
    acceptance_length: float | None = at_least()
    acceptance_length_lo: float | None = at_least()
    sampling_p_value: float | None = at_least(0.001)  # where smoke.sampling_checks asks for it


class ShipsIf(Section):
    """When the speculator ships; else the bundle goes without it and says why. null: not asked."""

    # The lower 95% bound of the greedy acceptance length must be above it; a head that never
    # helps measures exactly 1.
    acceptance_length_lo: float | None = Field(1.0, ge=1)
    # Tokens/s with it over those without, at least; asked only of an engine that runs the
    # checkpoint natively: an emulation's speed says nothing about a GPU.
    speedup: float | None = Field(1.0, gt=0)
    concurrency: int | None = Field(None, ge=1)  # of that speed-up; null: the first measured


class Smoke(Section):
    """The bundle served by a real engine, with and without the speculator."""

    engine: Literal["vllm"] = "vllm"
    engine_minimum: str | None = None  # lowest engine version that runs this family
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    serve_args: tuple[str, ...] = ()  # further arguments of the engine's server
    max_model_len: int = Field(1024, ge=64)
    max_num_seqs: int = Field(8, ge=1)
    num_speculative_tokens: int = Field(3, ge=1)
    max_tokens: int = Field(64, ge=8)
    startup_seconds: int = Field(600, ge=10)
    concurrencies: tuple[PositiveInt, ...] = Field((1, 4), min_length=1)  # that are timed
    sampling_checks: int = Field(0, ge=0)  # prompts whose sampled tokens are compared; 0: none
    ship: ShipsIf = ShipsIf()
    gates: SmokeGates = SmokeGates()

    @property
    def judged_concurrency(self) -> int:
        """The concurrency at which the speculator must not be slower."""
        return self.ship.concurrency or self.concurrencies[0]

    def limits(self) -> dict[str, Limit]:
        """Return the limits of what is measured: sampled tokens only where they are compared."""
        found = super().limits()
        measured = self.sampling_checks > 0
        return {k: v for k, v in found.items() if measured or k != "sampling_p_value"}

    @model_validator(mode="after")
    def _concurrencies_fit(self) -> Smoke:
        if (most := max(self.concurrencies)) > self.max_num_seqs:
            raise ValueError(f"concurrencies: {most} is more than max_num_seqs {self.max_num_seqs}")
        if self.judged_concurrency not in self.concurrencies:
            raise ValueError(f"ship.concurrency: {self.judged_concurrency} is not measured")
        return self


class Recipe(Section):
    """Everything `onboard run` needs; one section per stage."""

    name: str
    summary: str = ""
    base_model: str | None = None  # Hub id for the model card, where the source is no Hub id
    source: Source
    adapt: Adapt = Adapt()
    data: Data = Data()
    calibrate: Calibrate = Calibrate()
    quantize: Quantize = Quantize()
    fidelity: Fidelity = Fidelity()
    features: Features = Features()
    speculate: Speculate = Speculate()
    smoke: Smoke = Smoke()

    def section(self, stage: str) -> Section:
        section = getattr(self, stage)
        assert isinstance(section, Section)
        return section

    def bounds(self) -> Iterator[tuple[str, str, Limit]]:
        """Yield (stage, gate, limit) for every gate that has one."""
        for stage in type(self).model_fields:
            if isinstance(section := getattr(self, stage), Section):
                yield from ((stage, gate, limit) for gate, limit in section.limits().items())


def names() -> list[str]:
    """Return the shipped recipes that a user can type."""
    return sorted(p.stem for p in RECIPES.glob("*.yaml") if p.stem not in PARENTS)


def listing() -> list[dict[str, Any]]:
    """Return what `onboard recipes` shows of every shipped recipe, the default first."""
    recipes = [resolve(name) for name in sorted(names(), key=lambda n: (n != DEFAULT, n))]
    return [
        {
            "name": recipe.name,
            "summary": recipe.summary,
            "model": recipe.source.model,
            "default": recipe.name == DEFAULT,
            "quantizes": list(recipe.adapt.quantize or ()),  # empty: as the family's file says
            "engine": recipe.smoke.engine,
            "engine_minimum": recipe.smoke.engine_minimum,
            "gates": {
                f"{stage}.{gate}": f"{limit.bound} {limit.value:g}"
                for stage, gate, limit in recipe.bounds()
            },
        }
        for recipe in recipes
    ]


def resolve(model: str, assignments: Sequence[str] = ()) -> Recipe:
    """Return the recipe of a shipped name, a YAML file, a local model directory or a Hub id."""
    if model in names():
        return parse(read(RECIPES / f"{model}.yaml"), model, assignments)
    path = Path(model)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise InputError(f"recipe {model}: no such file", "onboard recipes")
        return parse(read(path), path.stem, assignments)
    if path.is_dir():
        name, source = path.resolve().name, str(path.resolve())
    elif model.count("/") == 1 and not model.startswith((".", "/")):
        name, source = model.rpartition("/")[2].lower(), model
    else:
        near = difflib.get_close_matches(model, names(), 1)
        raise InputError(
            f"{model!r} is no recipe, no YAML file, no local directory and no Hub id (owner/name)",
            f"onboard run {near[0]}" if near else "onboard recipes",
        )
    base = read(RECIPES / "base.yaml")
    return parse(merge(base, {"source": {"model": source}}), name, assignments)


def read(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return the YAML of `path` laid over its `extends` parent (a sibling, else a shipped one)."""
    path = path.resolve()
    if path in seen:
        raise InputError(f"{path}: `extends` goes round in a circle")
    try:
        data = yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as e:
        raise InputError(f"{path}: not valid YAML: {e}") from e
    if not isinstance(data, dict):
        raise InputError(f"{path}: expected a mapping of sections, found {type(data).__name__}")
    parent = data.pop("extends", None)
    if parent is None:
        return data
    file = next((f for f in (path.parent, RECIPES) if (f / f"{parent}.yaml").is_file()), None)
    if file is None:
        raise InputError(f"{path}: extends {parent!r}, but there is no {parent}.yaml")
    return merge(read(file / f"{parent}.yaml", (*seen, path)), data)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `over` laid on top, mapping by mapping; lists are replaced."""
    merged = dict(base)
    for key, value in over.items():
        under = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(under, Mapping)
        merged[key] = merge(under, value) if both else value  # type: ignore[arg-type]
    return merged


def parse(data: Mapping[str, Any], name: str, assignments: Sequence[str] = ()) -> Recipe:
    """Validate; raise one InputError that names the key and the nearest valid one."""
    data = merge({"name": name}, data)
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals:
            raise InputError(f"--set {assignment!r}: expected section.key=value")
        patch = yaml.safe_load(value)
        for part in reversed(key.strip().split(".")):
            patch = {part: patch}
        data = merge(data, patch)
    try:
        return Recipe.model_validate(_moved(data))
    except ValidationError as e:
        raise InputError(_explain(e)) from e


def _moved(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe with the keys of `MOVED` where they are read."""
    for old, new in MOVED.items():
        (section, key), (there, name) = old.split("."), new.split(".")
        held = data.get(section)
        if isinstance(held, Mapping) and key in held:
            rest = {k: v for k, v in held.items() if k != key}
            data = merge({**data, section: rest}, {there: {name: held[key]}})
    return dict(data)


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        *parents, unknown = first["loc"]
        valid = list(_model_at(parents).model_fields)
        near = difflib.get_close_matches(str(unknown), valid, 1)
        if not near and (elsewhere := _sections_with(str(unknown))):
            return f"recipe: unknown key {key}; did you mean {' or '.join(elsewhere)}?"
        return f"recipe: unknown key {key}" + (
            f"; did you mean {'.'.join(map(str, [*parents, near[0]]))}?"
            if near
            else f"; valid keys here: {', '.join(valid)}"
        )
    return f"recipe: {key}: {first['msg']} (found {first.get('input')!r})"


def _sections_with(key: str) -> list[str]:
    """Return where a key that is unknown here is known: the sections that have it."""
    return [
        f"{name}.{key}"
        for name, field in Recipe.model_fields.items()
        if isinstance(kind := field.annotation, type)
        and issubclass(kind, Section)
        and key in kind.model_fields
    ]


def _model_at(path: Sequence[str | int]) -> type[BaseModel]:
    model: type[BaseModel] = Recipe
    for part in path:
        if isinstance(part, int):
            continue
        annotation = model.model_fields[part].annotation
        options = [annotation, *get_args(annotation)]
        model = next(o for o in options if isinstance(o, type) and issubclass(o, BaseModel))
    return model
