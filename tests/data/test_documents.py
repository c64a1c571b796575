from __future__ import annotations

from onboard.data.documents import Document, NearDuplicates, count_overlapping, shingles

WORDS = [f"w{i}" for i in range(100)]


def text(start: int, end: int) -> str:
    return " ".join(WORDS[start:end])


def document(content: object) -> Document:
    return Document(content, "code", "here", "MIT")  # type: ignore[arg-type]


def test_id_ignores_case_spacing_and_compatibility_forms() -> None:
    assert document("Hello  World\n").id == document("hello world").id
    assert document("ｆｕｌｌ").id == document("full").id
    assert document("hello world").id != document("hello, world").id


def test_a_conversation_is_known_by_all_it_says() -> None:
    asked = [{"role": "user", "content": "hi"}]
    assert document(asked).id == document("hi").id
    assert document([*asked, {"role": "assistant", "content": "ho"}]).id != document(asked).id


def test_shingles_are_runs_of_eight_words() -> None:
    assert len(shingles(text(0, 8))) == 1
    assert len(shingles(text(0, 20))) == 13
    assert shingles(text(0, 20)) & shingles(text(10, 30)) == shingles(text(10, 20))
    assert len(shingles("short")) == 1


def test_near_copies_in_another_set_clash() -> None:
    index = NearDuplicates()
    index.add(text(0, 40), "evaluation")
    assert index.clashes(text(0, 40), "training")
    assert index.clashes(text(5, 45), "training")  # most of it is the same
    assert index.clashes(text(10, 20), "training")  # an excerpt
    assert not index.clashes(text(35, 75), "training")
    assert not index.clashes(text(0, 40), "evaluation")


def test_overlap_is_counted_on_both_sides() -> None:
    pairs = [("a", text(0, 30)), ("b", text(2, 30)), ("b", text(40, 70)), ("a", text(0, 30))]
    assert count_overlapping(pairs) == 3
