"""Questions with one right kind of answer, put to a served model; a wrong kind is kept as evidence.

A probe is a request and a judge. The judge returns what it saw, or raises Unmet (or whatever a
malformed answer makes it raise: the probe has then failed with that).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jsonschema

from onboard.engines.client import Client, Exchange

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
LOGPROBS = 5
ROUNDING = 1e-3  # log-probabilities come as fp32, and as rounded text
# Markup that a parser should have taken out of the content.
LEFTOVER = re.compile(r"</?think>|</?tool_call>|<\|\w+\|>|<\|tool▁call", re.IGNORECASE)

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome", "Oslo"]},
        "capital": {"type": "boolean"},
        "stars": {"type": "integer", "enum": [1, 2, 3]},
    },
    "required": ["city", "capital", "stars"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Return the weather in a city.",
        "strict": True,  # else an engine may answer 200 with arguments that break the schema
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Unmet(Exception):
    """An answer that is not what was asked for."""


Judge = Callable[[Exchange], str]


@dataclass(frozen=True)
class Probe:
    name: str
    path: str
    request: Mapping[str, Any]
    judge: Judge


def probes(model: str, prompt_ids: Sequence[int], tools: bool) -> list[Probe]:
    """Return the probes of a chat model; `prompt_ids` is a rendered prompt, as token ids."""
    greedy = {"model": model, "temperature": 0}

    def chat(text: str, **more: Any) -> dict[str, Any]:
        return {**greedy, "messages": [{"role": "user", "content": text}], **more}

    capital = "What is the capital of France?"
    story = {**greedy, "prompt": "Once upon a time", "max_tokens": 12, "ignore_eos": True}
    streamed = {**story, "stream": True, "stream_options": {"include_usage": True}}
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
    asked = [
        Probe("chat", CHAT, chat(capital, max_tokens=16), judge_chat),
        Probe("completion", COMPLETIONS, story, judge_length),
        Probe("streaming", COMPLETIONS, streamed, judge_stream),
        Probe(
            "logprobs",
            COMPLETIONS,
            {**greedy, "prompt": capital, "max_tokens": 4, "logprobs": LOGPROBS},
            judge_logprobs,
        ),
        Probe(
            "json_schema",
            CHAT,
            chat("Describe Paris as JSON.", max_tokens=64, response_format=schema),
            judge_json,
        ),
        Probe(
            "token_ids",
            COMPLETIONS,
            {**greedy, "prompt": list(prompt_ids), "max_tokens": 1},
            lambda exchange: judge_usage(exchange, len(prompt_ids)),
        ),
        Probe("bad_request", CHAT, chat(capital, max_tokens=1, top_p=7.0), judge_refusal),
    ]
    if tools:
        weather = "What is the weather in Paris?"
        call = chat(weather, max_tokens=64, tools=[TOOL], tool_choice="required")
        asked.append(Probe("tool_call", CHAT, call, judge_tool_call))
    return asked


def ask(client: Client, asked: Sequence[Probe], concurrency: int) -> list[dict[str, Any]]:
    """Put all probes to the server; return a row each: name, passed, detail and the exchange."""
    answers = []
    for path in (CHAT, COMPLETIONS):
        of_path = [p for p in asked if p.path == path]
        exchanges = client.post_all(path, [p.request for p in of_path], concurrency)
        answers += list(zip(of_path, exchanges, strict=True))
    rows = [_row(probe, exchange) for probe, exchange in answers]
    return [*rows, _stream_adds_up(rows)]


def judge_chat(exchange: Exchange) -> str:
    """A message with text, no leftover markup, a known finish reason, usage that adds up."""
    answer = exchange.json
    choice = answer["choices"][0]
    content = choice["message"]["content"]
    if not (content or "").strip():
        raise Unmet("the message is empty")
    if found := LEFTOVER.search(content):
        raise Unmet(f"markup left in the content: {found.group()}")
    if choice["finish_reason"] not in ("stop", "length"):
        raise Unmet(f"finish_reason is {choice['finish_reason']!r}")
    usage = answer["usage"]
    if usage["prompt_tokens"] + usage["completion_tokens"] != usage["total_tokens"]:
        raise Unmet(f"usage does not add up: {usage}")
    return str(content.strip())


def judge_length(exchange: Exchange) -> str:
    """All the tokens asked for, and `finish_reason: length`."""
    answer = exchange.json
    return _judge_cut(
        answer["choices"][0]["text"],
        answer["choices"][0]["finish_reason"],
        answer["usage"]["completion_tokens"],
        exchange.request["max_tokens"],
    )


def judge_stream(exchange: Exchange) -> str:
    """The same of a stream; whether it equals the plain answer is judged with that answer."""
    *chunks, last = exchange.events
    choices = [chunk["choices"][0] for chunk in chunks]
    return _judge_cut(
        "".join(choice["text"] for choice in choices),
        choices[-1]["finish_reason"],
        last["usage"]["completion_tokens"],
        exchange.request["max_tokens"],
    )


def _judge_cut(text: str, reason: str, tokens: int, asked: int) -> str:
    if not text.strip():
        raise Unmet("the text is empty")
    if reason != "length":
        raise Unmet(f"cut off at max_tokens, but finish_reason is {reason!r}")
    if tokens != asked:
        raise Unmet(f"usage says {tokens} completion tokens, {asked} were asked for")
    return text


def judge_logprobs(exchange: Exchange) -> str:
    """Finite, not positive, no more probability than 1 in all, the greedy token the likeliest."""
    logprobs = exchange.json["choices"][0]["logprobs"]
    for token, chosen, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        values = [chosen, *top.values()]
        if not all(math.isfinite(v) and v <= ROUNDING for v in values):
            raise Unmet(f"log-probabilities at {token!r} are not finite and negative: {values}")
        if (total := sum(math.exp(v) for v in top.values())) > 1 + ROUNDING:
            raise Unmet(f"probabilities at {token!r} sum to {total:.4f}")
        if chosen < max(top.values()) - ROUNDING:
            raise Unmet(f"{token!r} was not the likeliest token at temperature 0: {top}")
    return f"{len(logprobs['tokens'])} positions"


def judge_json(exchange: Exchange) -> str:
    """Content that is JSON and obeys the schema asked for."""
    choice = exchange.json["choices"][0]
    content = choice["message"]["content"]
    if choice["finish_reason"] != "stop":
        raise Unmet(f"finish_reason is {choice['finish_reason']!r}, content {content!r}")
    jsonschema.validate(json.loads(content), SCHEMA)
    return str(content)


def judge_usage(exchange: Exchange, prompt_tokens: int) -> str:
    """A prompt given as token ids is counted exactly."""
    found = exchange.json["usage"]["prompt_tokens"]
    if found != prompt_tokens:
        raise Unmet(f"usage says {found} prompt tokens, {prompt_tokens} were sent")
    return f"{found} prompt tokens"


def judge_refusal(exchange: Exchange) -> str:
    """A parameter out of range is refused, not ignored."""
    if exchange.status != 400:
        raise Unmet(f"top_p = 7 was answered with {exchange.status}, not 400")
    return "refused with 400"


def judge_tool_call(exchange: Exchange) -> str:
    """One call of the tool, arguments that obey its schema."""
    choice = exchange.json["choices"][0]
    calls = choice["message"].get("tool_calls") or []
    if len(calls) != 1:
        raise Unmet(f"{len(calls)} tool calls, content {choice['message'].get('content')!r}")
    function = calls[0]["function"]
    if function["name"] != TOOL["function"]["name"]:  # type: ignore[index]
        raise Unmet(f"called {function['name']!r}")
    jsonschema.validate(json.loads(function["arguments"]), TOOL["function"]["parameters"])  # type: ignore[index]
    return str(function["arguments"])


def _row(probe: Probe, exchange: Exchange) -> dict[str, Any]:
    try:
        passed, detail = True, probe.judge(exchange)
    except Exception as e:  # whatever an answer's shape breaks is the finding
        passed, detail = False, f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
    return {
        "name": probe.name,
        "passed": passed,
        "detail": detail,
        "request": {"path": probe.path, **probe.request},
        "response": exchange.body[:4000],
        "seconds": round(exchange.seconds, 3),
    }


def _stream_adds_up(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compare the streamed answer with the plain one to the same greedy request."""
    plain, streamed = (next(r for r in rows if r["name"] == n) for n in ("completion", "streaming"))
    equal = plain["passed"] and streamed["passed"] and plain["detail"] == streamed["detail"]
    return {
        "name": "stream_equals_answer",
        "passed": equal,
        "detail": "equal" if equal else f"{plain['detail']!r} became {streamed['detail']!r}",
        "request": streamed["request"],
        "response": streamed["response"],
        "seconds": streamed["seconds"],
    }
