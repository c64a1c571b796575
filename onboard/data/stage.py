"""The data stage: tokenized documents and prompts in sets that share nothing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from onboard import source
from onboard.data import corpora, readers, traffic
from onboard.data.documents import Document, count_overlapping
from onboard.data.rendering import Renderer
from onboard.data.splits import Dealer, Kind, Mix, Need, Row, compared
from onboard.errors import EnvironmentFault, InputError
from onboard.pipeline import Job
from onboard.recipe import Data
from onboard.store import write_json

MINIMUM_TOKENS = 64  # a shorter document says little about a model
SPARE = 4  # rows of a streamed dataset read per row that may be needed

Dealt = dict[str, list[tuple[Document, Row]]]


def fingerprint(params: Data) -> Any:
    """Return what decides the documents besides the recipe: package versions, file digests."""
    return {
        "corpora": [corpora.identity(corpus) for corpus in params.corpora],
        "traffic": [corpora.identity(origin) for origin, _ in traffic.origins(params)]
        if params.traffic
        else None,
        "hellaswag": corpora.version(readers.HELLASWAG),
    }


def run(job: Job[Data]) -> None:
    """Write the six sets, HellaSwag's items, and where each document comes from."""
    params = job.params
    if not params.corpora:
        raise InputError("data.corpora: the recipe names no documents", "extend base.yaml")
    renderer = Renderer.load(source.root(job.inputs["source"]))
    if not renderer.has_template:
        job.warn("the tokenizer has no chat template: conversations are written as plain text")
    mixes = _mixes(job)
    dealt = _deal(job, mixes, renderer)
    for name, pairs in dealt.items():
        _write_lines(job.out / f"{name}.jsonl", (row for _, row in pairs))
    _write_lines(job.out / "hellaswag.jsonl", _hellaswag(job))
    write_json(job.out / "sources.json", _sources(dealt))
    missing = _missing(mixes, dealt)
    for name, domain in missing:
        job.warn(f"{name}: no document of the domain {domain}; ask for more, or for longer ones")
    write_json(
        job.out / "metrics.json", _metrics(len({domain for _, domain in missing}), renderer, dealt)
    )


def needs(params: Data) -> tuple[Need, ...]:
    """Return the sets in dealing order: held-out ones first."""
    return (
        Need("evaluation", params.evaluation_documents, "document"),
        Need("evaluation_prompts", params.evaluation_prompts, "prompt"),
        Need("selection", params.selection_documents, "document"),
        Need("calibration", params.calibration_documents, "document"),
        Need("training_prompts", params.training_prompts, "prompt"),
        Need("distillation", params.distillation_documents, "document"),
    )


def _mixes(job: Job[Data]) -> dict[Kind, Mix]:
    """Return what documents and what prompts are dealt from: the corpora, and the traffic."""
    params = job.params
    documents = _mix(job, [(c, c.weight) for c in params.corpora], needs(params))
    if params.traffic is None:
        return {"document": documents, "prompt": documents}
    prompts = [need for need in needs(params) if need.kind == "prompt"]
    return {"document": documents, "prompt": _mix(job, traffic.origins(params), prompts)}


def _mix(
    job: Job[Data], origins: Sequence[tuple[corpora.Origin, float]], sets: Sequence[Need]
) -> Mix:
    """Read the distinct documents of each origin, shuffled by the hash of their text."""
    limit = SPARE * sum(need.count for need in sets)
    pools = []
    for number, (origin, _) in enumerate(origins):
        job.progress("reading corpora", number, len(origins), "corpora")
        distinct = {document.id: document for document in corpora.read(origin, limit)}
        pools.append(sorted(distinct.values(), key=lambda d: d.order(job.params.seed)))
    domains = [corpora.domain(origin) for origin, _ in origins]
    return Mix(pools, domains, [weight for _, weight in origins])


def _deal(job: Job[Data], mixes: Mapping[Kind, Mix], renderer: Renderer) -> Dealt:
    params = job.params

    def admit(document: Document, kind: Kind) -> Row | None:
        row = {
            "id": document.id,
            "domain": document.domain,
            "source": document.source,
            "licence": document.licence,
            "private": document.private,
        }
        if kind == "document":
            ids = renderer.document(document.content, params.tokens_per_document)
            enough = len(ids) >= min(MINIMUM_TOKENS, params.tokens_per_document)
            return {**row, "text": renderer.decode(ids), "ids": ids} if enough else None
        prompt = renderer.prompt(document, params.tokens_per_prompt)
        if prompt is None:
            return None
        return {**row, "messages": prompt[0], "ids": prompt[1]}

    dealer = Dealer(admit)
    dealt: Dealt = {}
    sets = needs(params)
    for number, need in enumerate(sets):
        job.progress("dealing documents", number, len(sets), "sets")
        mix = mixes[need.kind]
        dealt[need.name] = dealer.deal(need, mix)
        if need.kind == "prompt" and params.traffic:
            _say_shortfalls(job, need, mix, dealt[need.name])
        if (found := len(dealt[need.name])) < need.count:
            job.warn(f"{need.name}: the corpora hold only {found} of {need.count} rows")
            if not found:
                key = "traffic" if need.kind == "prompt" and params.traffic else "corpora"
                raise InputError(
                    f"data.{key}: no document is fit for the {need.name} set",
                    "add a corpus, or raise data.tokens_per_prompt",
                )
    return dealt


def _say_shortfalls(
    job: Job[Data], need: Need, mix: Mix, pairs: Sequence[tuple[Document, Row]]
) -> None:
    """Warn where a domain gives fewer prompts than its share of the traffic."""
    given = Counter(document.domain for document, _ in pairs)
    for domain, wanted in mix.quotas(need.count).items():
        if given[domain] < wanted:
            job.warn(
                f"{need.name}: {domain} gives {given[domain]} of the {wanted} prompts of its "
                "share (others are too long, too alike or used up); the rest of the traffic "
                "makes up for them"
            )


def _hellaswag(job: Job[Data]) -> list[dict[str, Any]]:
    try:
        return list(readers.hellaswag())
    except EnvironmentFault as e:
        job.warn(f"no HellaSwag items: {e.message}; {e.hint}")
        return []


def _sources(dealt: Dealt) -> list[dict[str, Any]]:
    rows = [row for pairs in dealt.values() for _, row in pairs]
    counts = Counter((row["source"], row["domain"], row["licence"]) for row in rows)
    return [
        {"source": origin, "domain": domain, "licence": licence, "documents": number}
        for (origin, domain, licence), number in sorted(counts.items())
    ]


def _missing(mixes: Mapping[Kind, Mix], dealt: Dealt) -> list[tuple[str, str]]:
    """Return (set, domain) wherever a set of documents lacks a domain of what it is dealt from."""
    sets: dict[str, Kind] = {
        "evaluation": "document",
        "calibration": "document",
        "training_prompts": "prompt",
    }
    return [
        (name, domain)
        for name, kind in sets.items()
        for domain in sorted(set(mixes[kind].domains))
        if all(document.domain != domain for document, _ in dealt[name])
    ]


def _metrics(missing: int, renderer: Renderer, dealt: Dealt) -> dict[str, float]:
    texts = [(name, compared(*pair)) for name, pairs in dealt.items() for pair in pairs]
    return {
        "overlapping_documents": count_overlapping(texts),
        "domains_missing": missing,
        "chat_template_missing": int(not renderer.has_template),
        **{f"documents_{name}": len(pairs) for name, pairs in dealt.items()},
        **{f"training_prompts_{domain}": n for domain, n in _domains(dealt).items()},
        "calibration_tokens": sum(len(row["ids"]) for _, row in dealt["calibration"]),
    }


def _domains(dealt: Dealt) -> dict[str, int]:
    """Return domain -> training prompts, sorted."""
    counts = Counter(document.domain for document, _ in dealt["training_prompts"])
    return dict(sorted(counts.items()))


def _write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as f:
        f.writelines(json.dumps(row) + "\n" for row in rows)
