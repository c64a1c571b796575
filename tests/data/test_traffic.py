"""Whose prompts a speculator learns from: profiles by share, and requests of one's own."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from onboard.data import corpora, stage, traffic
from onboard.data.documents import Document
from onboard.data.readers import READERS
from onboard.errors import InputError
from onboard.recipe import PROFILES, Corpus, Data, parse

SOURCE: dict[str, Any] = {"source": {"model": "acme/tiny"}}


def words(number: int, length: int = 30) -> str:
    return " ".join(f"word{number}x{i}" for i in range(length))


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# The recipe


def test_every_profile_is_there_with_licences_and_works_offline() -> None:
    assert tuple(traffic.PROFILES) == PROFILES
    for held in traffic.PROFILES.values():
        assert any(corpus.reader for corpus in held)
        assert len({corpus.domain for corpus in held}) == 1
        for corpus in held:
            known = READERS[corpus.reader].licence if corpus.reader else corpus.licence
            assert known != "unknown"
            assert corpus.weight > 0


def test_without_traffic_prompts_come_from_the_corpora() -> None:
    held = (Corpus(domain="code", reader="human_eval", weight=3), Corpus(domain="math", jsonl="x"))
    assert traffic.origins(Data(corpora=held)) == [(held[0], 3), (held[1], 1)]


def test_a_profiles_share_is_divided_among_its_corpora() -> None:
    shares = {"code": 0.5, "agent": 0.3, "chat": 0.2, "math": 0, "mine.jsonl": 1}
    found = traffic.origins(Data(traffic=shares))
    by_domain: Counter[str] = Counter()
    for origin, weight in found:
        by_domain[corpora.domain(origin)] += weight  # type: ignore[assignment]
    assert by_domain == pytest.approx({"code": 0.5, "tools": 0.3, "chat": 0.2, "traffic": 1})
    assert found[-1] == (Path("mine.jsonl"), 1)
    assert not any(isinstance(o, Corpus) and o.dataset for o, _ in found)


def test_online_profiles_draw_on_public_datasets_too() -> None:
    found = traffic.origins(Data(traffic={"math": 2}, online=True))
    assert [o.dataset for o, _ in found if isinstance(o, Corpus)] == [
        None,
        "open-r1/OpenR1-Math-220k",
    ]
    assert sum(weight for _, weight in found) == pytest.approx(2)


@pytest.mark.parametrize("key", ["data.traffic", "speculate.traffic"])
def test_a_path_alone_is_all_of_the_traffic(key: str) -> None:
    parsed = parse(SOURCE, "tiny", [f"{key}=logs/mine.jsonl"])
    assert parsed.data.traffic == {"logs/mine.jsonl": 1}
    assert parse(SOURCE, "tiny", [f"{key}={{code: 1, mine.jsonl: 3}}"]).data.traffic == {
        "code": 1,
        "mine.jsonl": 3,
    }


@pytest.mark.parametrize(
    ("assignment", "complaint"),
    [
        ("data.traffic={cod: 1}", r"recipe: data.traffic: .*'cod' is no profile.*mean code\?"),
        ("data.traffic={code: -1}", "share of code is -1"),
        ("data.traffic={code: 0}", "no share is above 0"),
        ("data.traffic={}", "no share is above 0"),
        ("features.traffic=x.jsonl", r"unknown key features.traffic; did you mean data.traffic\?"),
        ("traffic=x.jsonl", r"unknown key traffic; did you mean data.traffic\?"),
    ],
)
def test_a_wrong_share_is_named(assignment: str, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        parse(SOURCE, "tiny", [assignment])


# The user's own requests


def own(path: Path) -> list[Document]:
    return list(corpora.read(path, 9))


def test_requests_in_each_way_of_writing_them(tmp_path: Path) -> None:
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    shared = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]
    path = lines(
        tmp_path / "mine.jsonl",
        {"messages": asked, "user": "someone"},
        {"prompt": "hello"},
        {"text": "once upon"},
        {"messages": shared},
    )
    path.write_text(path.read_text() + "\n")  # a blank line is no request
    found = own(path)
    assert [document.content for document in found] == [
        asked,
        [{"role": "user", "content": "hello"}],
        "once upon",
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}],
    ]
    assert all(document.private and document.domain == "traffic" for document in found)
    assert found[1].where == f"{path}:2"
    assert not any("mine" in document.source for document in found)


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"body": "x"}, "expected one of messages, prompt, text, found only body"),
        ({"prompt": 3}, "field 'prompt' .* found int"),
        ({"messages": []}, "field 'messages' .* found an empty list"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "no message of the user"),
        (
            {"messages": [{"role": "user", "content": "secret"}, {"role": "a", "content": None}]},
            r"item 2 is no message of text \(role, content\)",
        ),
    ],
)
def test_a_bad_request_is_named_without_its_words(tmp_path: Path, row: Any, complaint: str) -> None:
    path = lines(tmp_path / "mine.jsonl", {"prompt": "fine"}, row)
    with pytest.raises(InputError, match=rf"mine.jsonl:2: .*{complaint}") as caught:
        own(path)
    assert "secret" not in caught.value.message


def test_a_missing_file_is_named_with_its_key(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"data.traffic: .*none.jsonl: no such file"):
        own(tmp_path / "none.jsonl")


def test_identity_follows_the_bytes(tmp_path: Path) -> None:
    path = lines(tmp_path / "mine.jsonl", {"prompt": "a"})
    before = stage.fingerprint(Data(traffic={str(path): 1}))
    lines(path, {"prompt": "b"})
    assert stage.fingerprint(Data(traffic={str(path): 1})) != before


# The stage


@pytest.fixture
def params(tmp_path: Path) -> Data:
    texts = lines(tmp_path / "prose.jsonl", *({"text": words(n)} for n in range(40)))
    return Data(
        corpora=(Corpus(domain="prose", jsonl=str(texts)),),
        traffic={"code": 3, str(lines(tmp_path / "mine.jsonl", *requests(60))): 1},
        calibration_documents=6,
        selection_documents=2,
        evaluation_documents=4,
        training_prompts=24,
        evaluation_prompts=8,
        tokens_per_document=100,
        tokens_per_prompt=1500,
    )


def requests(count: int) -> list[Any]:
    """Half of them stand in the corpus of documents too."""
    return [{"prompt": words(n + 20)} for n in range(count)]


def test_prompts_follow_the_traffic_and_documents_the_corpora(
    bench: Any, put_source: Any, params: Data
) -> None:
    put_source()
    made = bench.run("data", stage.run, params)
    rows = {
        name: made.lines(f"{name}.jsonl")
        for name in ("evaluation", "calibration", "training_prompts", "evaluation_prompts")
    }
    assert Counter(r["domain"] for r in rows["training_prompts"]) == {"code": 18, "traffic": 6}
    assert Counter(r["domain"] for r in rows["evaluation_prompts"]) == {"code": 6, "traffic": 2}
    assert {r["domain"] for r in rows["calibration"] + rows["evaluation"]} == {"prose"}
    ids = [row["id"] for held in rows.values() for row in held]
    assert len(set(ids)) == len(ids)
    assert made.metrics["overlapping_documents"] == 0
    assert made.metrics["domains_missing"] == 0
    assert made.metrics["training_prompts_traffic"] == 6
    for row in rows["training_prompts"]:
        assert row["private"] == (row["domain"] == "traffic")
    assert {
        "source": "the user's own traffic",
        "domain": "traffic",
        "licence": "private",
        "documents": 8,
    } in made.json("sources.json")


def test_a_share_that_cannot_be_filled_is_said(
    bench: Any, put_source: Any, params: Data, tmp_path: Path
) -> None:
    few = lines(tmp_path / "few.jsonl", *requests(2), *requests(2))
    put_source()
    given = params.model_copy(update={"traffic": {"code": 1, str(few): 1}})
    made = bench.run("data", stage.run, given)
    assert len(made.lines("training_prompts.jsonl")) == 24
    assert any(
        "training_prompts: traffic gives 0 of the 12 prompts" in text for text in bench.warnings
    )
    assert made.metrics["domains_missing"] == 1


def test_a_conversation_the_template_refuses_is_named_by_its_line(
    bench: Any, put_source: Any, params: Data, tmp_path: Path
) -> None:
    put_source("{% if messages|length > 2 %}{{ raise_exception('long') }}{% endif %}ok")
    turns = [{"role": role, "content": words(7)} for role in ("user", "assistant", "user")]
    path = lines(tmp_path / "bad.jsonl", {"messages": turns})
    given = params.model_copy(update={"traffic": {str(path): 1}})
    with pytest.raises(InputError, match=r"bad.jsonl:1: the chat template cannot render"):
        stage.run(bench.job("data", given))
