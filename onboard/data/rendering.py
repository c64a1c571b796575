"""Documents as token ids: plain text as it is, conversations through the chat template."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from onboard.data.documents import Content, Document, Message, plain
from onboard.errors import InputError

# Templates that print today's date would make every day's artifact another one: this macro takes
# the place of the function they call.
DAY = date(2025, 1, 1)
FORMATS = "YmdBbAaHMSpy"
FIXED_DATE = (
    "{%- macro strftime_now(format) -%}{{ format"
    + "".join(f"|replace('%{f}', '{DAY.strftime('%' + f)}')" for f in FORMATS)
    + " }}{%- endmacro %}"
)
TEMPLATE_FAULTS = (TemplateError, TypeError)  # its own complaint, or a message it cannot handle
CHARACTERS_PER_TOKEN = 16  # more than real text has: tokenizing stops there
EXCERPT = 400  # characters of a plain text that a prompt made from it shows


@dataclass(frozen=True)
class Renderer:
    """A tokenizer and what its chat template can do."""

    tokenizer: Any
    has_template: bool
    has_system_role: bool

    @classmethod
    def load(cls, root: Path) -> Renderer:
        """Read the tokenizer of a model directory; no code of the model is run.

        Raises InputError where the tokenizer cannot be loaded or its template renders no user
        message.
        """
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(
                root, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError) as e:
            raise InputError(f"{root}: the tokenizer cannot be loaded: {e}") from e
        renderer = cls(tokenizer, bool(tokenizer.chat_template), True)
        if not renderer.has_template:
            return renderer
        user: Message = {"role": "user", "content": "Hello"}
        try:
            renderer._template([user], generate=True)
        except TEMPLATE_FAULTS as e:
            raise InputError(f"{root}: the chat template renders no user message: {e}") from e
        try:
            renderer._template([{"role": "system", "content": "Be brief."}, user], generate=True)
        except TEMPLATE_FAULTS:
            return cls(tokenizer, True, False)
        return renderer

    def document(self, content: Content, limit: int) -> list[int]:
        """Return at most `limit` ids from the start of a document."""
        if isinstance(content, str):
            return self._encode(content, limit, special=True)
        return self._conversation(content, limit, generate=False)

    def prompt(self, document: Document, limit: int) -> tuple[list[Message], list[int]] | None:
        """Return the messages that ask for an answer, and their ids up to where it begins.

        A plain text is asked to be continued. None where a conversation has no user turn, or
        takes more than `limit` tokens: a cut prompt would not end where the answer begins.
        """
        messages = prompt_messages(document)
        if not messages:
            return None
        messages = messages if self.has_system_role else fold_system(messages)
        ids = self._conversation(messages, limit + 1, generate=True, where=document.where)
        return (messages, ids) if len(ids) <= limit else None

    def decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids))

    def _conversation(
        self, messages: list[Message], limit: int, *, generate: bool, where: str = ""
    ) -> list[int]:
        if not self.has_template:
            return self._encode(plain(messages) + "\n\n" * generate, limit, special=True)
        if not self.has_system_role:
            messages = fold_system(messages)
        try:
            text = self._template(messages, generate=generate)
        except TEMPLATE_FAULTS as e:
            roles = ", ".join(message["role"] for message in messages)
            raise InputError(
                f"{where}: " * bool(where)
                + f"the chat template cannot render a conversation of {roles}: {e}",
                "fix the template, or the order of the messages in data.corpora or data.traffic",
            ) from e
        return self._encode(text, limit, special=False)

    def _template(self, messages: list[Message], *, generate: bool) -> str:
        template = self.tokenizer.get_chat_template()
        return str(
            self.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=generate,
                chat_template=FIXED_DATE * ("strftime_now" in template) + template,
            )
        )

    def _encode(self, text: str, limit: int, *, special: bool) -> list[int]:
        text = text[: limit * CHARACTERS_PER_TOKEN]
        ids = self.tokenizer(text, add_special_tokens=special, verbose=False).input_ids
        return list(ids[:limit])


def prompt_messages(document: Document) -> list[Message]:
    """Return the conversation up to its last user turn, or a request to continue the text."""
    if not isinstance(document.content, str):
        turns = list(document.content)
        while turns and turns[-1]["role"] != "user":
            turns.pop()
        return turns
    excerpt = document.content[:EXCERPT].rpartition("\n")[0] or document.content[:EXCERPT]
    if document.domain == "code":
        request = f"Continue this code:\n\n```\n{excerpt}\n```"
    else:
        request = f"Continue this text:\n\n{excerpt}"
    return [{"role": "user", "content": request}]


def fold_system(messages: list[Message]) -> list[Message]:
    """Return the conversation with its system message put before the first user message."""
    system = [message["content"] for message in messages if message["role"] == "system"]
    rest = [message for message in messages if message["role"] != "system"]
    if not system or not rest:
        return rest
    first = {**rest[0], "content": "\n\n".join([*system, rest[0]["content"]])}
    return [first, *rest[1:]]
