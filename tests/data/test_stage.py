"""The data stage on a twin's tokenizer: disjoint, balanced, the same every time."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onboard.data import stage
from onboard.data.splits import largest_remainder
from onboard.errors import InputError
from onboard.recipe import Corpus, Data

SETS = ("calibration", "selection", "evaluation", "training_prompts", "evaluation_prompts")


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=8), st.integers(0, 500))
def test_shares_are_whole_and_complete(weights: list[float], count: int) -> None:
    shares = largest_remainder(weights, count)
    assert sum(shares) == count
    total = sum(weights)
    assert all(abs(s - w * count / total) < 1 for s, w in zip(shares, weights, strict=True))


def words(number: int, length: int = 40) -> str:
    return " ".join(f"word{number}x{i}" for i in range(length))


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def params(tmp_path: Path) -> Data:
    prose = write(tmp_path / "prose.jsonl", [words(n) for n in range(60)])
    chats = [
        [{"role": "user", "content": words(n, 5)}, {"role": "assistant", "content": words(n + 500)}]
        for n in range(100, 160)
    ]
    chat = write(tmp_path / "chat.jsonl", [*chats, chats[0]])
    return Data(
        corpora=(Corpus(domain="prose", jsonl=prose), Corpus(domain="chat", jsonl=chat, weight=3)),
        calibration_documents=12,
        selection_documents=4,
        evaluation_documents=8,
        training_prompts=16,
        evaluation_prompts=4,
        tokens_per_document=100,
        tokens_per_prompt=600,
    )


def sets(artifact: Any) -> dict[str, list[Any]]:
    return {name: artifact.lines(f"{name}.jsonl") for name in SETS}


def test_sets_are_full_weighted_and_share_nothing(
    bench: Any, put_source: Any, params: Data
) -> None:
    put_source()
    artifact = bench.run("data", stage.run, params)
    rows = sets(artifact)
    assert {name: len(r) for name, r in rows.items()} == dict(
        zip(SETS, (12, 4, 8, 16, 4), strict=True)
    )
    assert Counter(r["domain"] for r in rows["calibration"]) == {"prose": 3, "chat": 9}
    every = [row["id"] for name in SETS for row in rows[name]]
    assert len(set(every)) == len(every)
    assert all(len(row["ids"]) <= 100 for row in rows["calibration"])
    assert artifact.metrics["overlapping_documents"] == 0
    assert artifact.metrics["domains_missing"] == 0
    assert len(artifact.lines("hellaswag.jsonl")) == 100
    assert artifact.json("sources.json") == [
        {"source": "jsonl:chat.jsonl", "domain": "chat", "licence": "unknown", "documents": 33},
        {"source": "jsonl:prose.jsonl", "domain": "prose", "licence": "unknown", "documents": 11},
    ]


def test_the_same_bytes_twice_and_other_ones_with_another_seed(
    bench: Any, put_source: Any, params: Data
) -> None:
    put_source()
    first = bench.run("data", stage.run, params).manifest["files"]
    job = bench.job("data", params, again=True)
    stage.run(job)
    assert {name: (job.out / name).stat().st_size for name in first} == {
        name: entry["size"] for name, entry in first.items()
    }
    held_out = (job.out / "evaluation.jsonl").read_text()
    stage.run(bench.job("data", params.model_copy(update={"seed": 1}), again=True))
    assert (job.out / "evaluation.jsonl").read_text() != held_out


def test_held_out_sets_stay_when_more_training_data_is_asked_for(
    bench: Any, put_source: Any, params: Data
) -> None:
    put_source()
    before = sets(bench.run("data", stage.run, params))
    more = params.model_copy(update={"calibration_documents": 20, "training_prompts": 30})
    job = bench.job("data", more, again=True)
    stage.run(job)
    for name in ("evaluation", "evaluation_prompts"):
        lines = (job.out / f"{name}.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == before[name]


def test_near_copies_stay_within_one_set(
    bench: Any, put_source: Any, params: Data, tmp_path: Path
) -> None:
    variants = [f"{words(n)} variant {v}" for n in range(30) for v in range(4)]
    copies = Corpus(domain="prose", jsonl=write(tmp_path / "copies.jsonl", variants))
    put_source()
    artifact = bench.run("data", stage.run, params.model_copy(update={"corpora": (copies,)}))
    where: dict[str, set[str]] = {}
    for name in ("calibration", "selection", "evaluation"):
        for row in artifact.lines(f"{name}.jsonl"):
            where.setdefault(row["text"][:20], set()).add(name)
    assert max(map(len, where.values())) == 1
    assert artifact.metrics["overlapping_documents"] == 0


def test_a_short_corpus_is_made_up_by_others_and_said(
    bench: Any, put_source: Any, params: Data, tmp_path: Path
) -> None:
    few = Corpus(domain="math", jsonl=write(tmp_path / "few.jsonl", [words(900)]), weight=4)
    put_source()
    given = params.model_copy(update={"corpora": (*params.corpora, few)})
    artifact = bench.run("data", stage.run, given)
    assert len(artifact.lines("calibration.jsonl")) == 12
    assert artifact.metrics["domains_missing"] == 1
    too_many = given.model_copy(update={"training_prompts": 1000})
    stage.run(bench.job("data", too_many, again=True))
    assert any("training_prompts: the corpora hold only" in text for text in bench.warnings)


def test_nothing_fit_for_a_set_is_an_error(
    bench: Any, put_source: Any, params: Data, tmp_path: Path
) -> None:
    put_source()
    with pytest.raises(InputError, match="names no documents"):
        stage.run(bench.job("data", params.model_copy(update={"corpora": ()})))
    short = Corpus(domain="math", jsonl=write(tmp_path / "short.jsonl", ["too short"]))
    with pytest.raises(InputError, match="no document is fit for the evaluation set"):
        stage.run(bench.job("data", params.model_copy(update={"corpora": (short,)}), again=True))


def test_the_fingerprint_needs_neither_torch_nor_a_tokenizer(params: Data) -> None:
    code = (
        "import sys; from onboard.data.stage import fingerprint; from onboard.recipe import Data;"
        "fingerprint(Data.model_validate_json(sys.argv[1]));"
        "assert not {'torch', 'transformers', 'datasets'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, params.model_dump_json()], check=True)
