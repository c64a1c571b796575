from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from onboard.data.documents import Document
from onboard.data.rendering import Renderer
from onboard.errors import InputError

ASKED = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
]
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('no system role') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)


def document(content: Any, domain: str = "chat") -> Document:
    return Document(content, domain, "here", "MIT")


@pytest.fixture
def load(tmp_path: Path, make_tokenizer: Any) -> Any:
    return lambda *template: Renderer.load(make_tokenizer(tmp_path, *template))


def test_documents_show_the_answer_and_prompts_end_where_it_begins(load: Any) -> None:
    renderer = load()
    assert renderer.decode(renderer.document(ASKED, 999)) == (
        "<system>Be brief.\n<user>1+1?\n<assistant>2\n"
    )
    messages, ids = renderer.prompt(document(ASKED), 999)
    assert messages == ASKED[:2]
    assert renderer.decode(ids) == "<system>Be brief.\n<user>1+1?\n<assistant>"


def test_documents_are_cut_and_long_prompts_refused(load: Any) -> None:
    renderer = load()
    assert renderer.decode(renderer.document("abcdef" * 100, 7)) == "abcdefa"
    length = len(renderer.prompt(document(ASKED), 999)[1])
    assert renderer.prompt(document(ASKED), length) is not None
    assert renderer.prompt(document(ASKED), length - 1) is None


def test_a_text_is_asked_to_be_continued(load: Any) -> None:
    messages, _ = load().prompt(document("x = 1\ny = 2\nz = " + "3" * 500, "code"), 999)
    assert messages == [
        {"role": "user", "content": "Continue this code:\n\n```\nx = 1\ny = 2\n```"}
    ]


def test_a_template_without_system_role_gets_it_in_the_first_user_turn(load: Any) -> None:
    renderer = load(NO_SYSTEM)
    messages, ids = renderer.prompt(document(ASKED), 999)
    assert messages == [{"role": "user", "content": "Be brief.\n\n1+1?"}]
    assert renderer.decode(ids) == "<user>Be brief.\n\n1+1?"


def test_without_a_template_conversations_are_plain_text(load: Any) -> None:
    renderer = load(None)
    assert not renderer.has_template
    assert renderer.decode(renderer.prompt(document(ASKED), 99)[1]) == "Be brief.\n\n1+1?\n\n"


def test_a_template_that_prints_the_date_gives_the_same_ids_every_day(load: Any) -> None:
    renderer = load("{{ strftime_now('%Y-%m-%d') }} {{ messages[0].content }}")
    assert renderer.decode(renderer.document([ASKED[1]], 99)) == "2025-01-01 1+1?"


@pytest.mark.parametrize("template", ["{{ raise_exception('never') }}", "{% for %}"])
def test_a_template_that_cannot_render_is_refused(load: Any, template: str) -> None:
    with pytest.raises(InputError, match="chat template renders no user message"):
        load(template)


def test_a_conversation_that_the_template_refuses_is_named(load: Any) -> None:
    renderer = load("{% if messages|length > 2 %}{{ raise_exception('long') }}{% endif %}ok")
    with pytest.raises(InputError, match="system, user, assistant: long"):
        renderer.document(ASKED, 99)
