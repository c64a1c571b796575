"""The data stage: tokenized documents and prompts in sets that share nothing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from onboard import source
from onboard.data import corpora, readers
from onboard.data.documents import Document, count_overlapping
from onboard.data.rendering import Renderer
from onboard.data.splits import Dealer, Kind, Need, Row, compared
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
    dealt = _deal(job, _pools(job), renderer)
    for name, pairs in dealt.items():
        _write_lines(job.out / f"{name}.jsonl", (row for _, row in pairs))
    _write_lines(job.out / "hellaswag.jsonl", _hellaswag(job))
    write_json(job.out / "sources.json", _sources(dealt))
    missing = _missing(params, dealt)
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


def _pools(job: Job[Data]) -> list[list[Document]]:
    """Return the distinct documents of each corpus, shuffled by the hash of their text."""
    limit = SPARE * sum(need.count for need in needs(job.params))
    pools = []
    for number, corpus in enumerate(job.params.corpora):
        job.progress("reading corpora", number, len(job.params.corpora), "corpora")
        distinct = {document.id: document for document in corpora.read(corpus, limit)}
        pools.append(sorted(distinct.values(), key=lambda d: d.order(job.params.seed)))
    return pools


def _deal(job: Job[Data], pools: list[list[Document]], renderer: Renderer) -> Dealt:
    params = job.params

    def admit(document: Document, kind: Kind) -> Row | None:
        row = {
            "id": document.id,
            "domain": document.domain,
            "source": document.source,
            "licence": document.licence,
        }
        if kind == "document":
            ids = renderer.document(document.content, params.tokens_per_document)
            enough = len(ids) >= min(MINIMUM_TOKENS, params.tokens_per_document)
            return {**row, "text": renderer.decode(ids), "ids": ids} if enough else None
        prompt = renderer.prompt(document, params.tokens_per_prompt)
        if prompt is None:
            return None
        return {**row, "messages": prompt[0], "ids": prompt[1]}

    dealer = Dealer(pools, [corpus.weight for corpus in params.corpora], admit)
    dealt: Dealt = {}
    sets = needs(params)
    for number, need in enumerate(sets):
        job.progress("dealing documents", number, len(sets), "sets")
        dealt[need.name] = dealer.deal(need)
        if (found := len(dealt[need.name])) < need.count:
            job.warn(f"{need.name}: the corpora hold only {found} of {need.count} rows")
            if not found:
                raise InputError(
                    f"data.corpora: no document is fit for the {need.name} set",
                    "add a corpus, or raise data.tokens_per_prompt",
                )
    return dealt


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


def _missing(params: Data, dealt: Dealt) -> list[tuple[str, str]]:
    """Return (set, domain) wherever a set of documents lacks a domain of the recipe."""
    wanted = sorted({corpus.domain for corpus in params.corpora})
    return [
        (name, domain)
        for name in ("evaluation", "calibration", "training_prompts")
        for domain in wanted
        if all(document.domain != domain for document, _ in dealt[name])
    ]


def _metrics(missing: int, renderer: Renderer, dealt: Dealt) -> dict[str, float]:
    texts = [(name, compared(*pair)) for name, pairs in dealt.items() for pair in pairs]
    return {
        "overlapping_documents": count_overlapping(texts),
        "domains_missing": missing,
        "chat_template_missing": int(not renderer.has_template),
        **{f"documents_{name}": len(pairs) for name, pairs in dealt.items()},
        "calibration_tokens": sum(len(row["ids"]) for _, row in dealt["calibration"]),
    }


def _write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as f:
        f.writelines(json.dumps(row) + "\n" for row in rows)
