"""Every judge accepts a right answer and refuses the wrong ones that engines have given."""

import json
from typing import Any

import jsonschema
import pytest

from onboard.engines.client import Exchange
from onboard.evals import probes
from onboard.evals.probes import Unmet


def exchange(body: Any, status: int = 200, **request: Any) -> Exchange:
    return Exchange(
        "/v1", request, status, body if isinstance(body, str) else json.dumps(body), 0.1
    )


def message(content: str | None, finish_reason: str = "stop", **more: Any) -> dict[str, Any]:
    choice = {"message": {"content": content, **more}, "finish_reason": finish_reason}
    usage = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
    return {"choices": [choice], "usage": usage}


def test_chat() -> None:
    assert probes.judge_chat(exchange(message(" Paris. "))) == "Paris."


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (message(""), "empty"),
        (message(None), "empty"),
        (message("</think>Paris"), "markup"),
        (message('<tool_call>{"name": 1}'), "markup"),
        (message("Paris<|im_end|>"), "markup"),
        (message("Paris", "abort"), "finish_reason"),
        ({**message("Paris"), "usage": {"prompt_tokens": 9, "completion_tokens": 3,
                                        "total_tokens": 13}}, "add up"),
    ],
)  # fmt: skip
def test_chat_refuses(body: Any, complaint: str) -> None:
    with pytest.raises(Unmet, match=complaint):
        probes.judge_chat(exchange(body))


def test_an_empty_body_with_status_200_is_no_answer() -> None:
    with pytest.raises(ValueError, match="Expecting value"):
        probes.judge_chat(exchange(""))


def completion(text: str, tokens: int, finish_reason: str) -> dict[str, Any]:
    choice = {"text": text, "finish_reason": finish_reason}
    return {"choices": [choice], "usage": {"completion_tokens": tokens}}


def test_a_cut_answer_says_length() -> None:
    assert probes.judge_length(exchange(completion("abc", 4, "length"), max_tokens=4)) == "abc"
    with pytest.raises(Unmet, match="finish_reason is 'stop'"):
        probes.judge_length(exchange(completion("abc", 4, "stop"), max_tokens=4))
    with pytest.raises(Unmet, match="5 completion tokens, 4"):
        probes.judge_length(exchange(completion("abc", 5, "length"), max_tokens=4))


def stream(*chunks: dict[str, Any], end: str = "data: [DONE]\n\n") -> str:
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + end


def test_a_stream_is_put_together() -> None:
    parts = [
        {"choices": [{"text": "On", "finish_reason": None}]},
        {"choices": [{"text": "ce", "finish_reason": "length"}]},
        {"choices": [], "usage": {"completion_tokens": 2}},
    ]
    assert probes.judge_stream(exchange(stream(*parts), max_tokens=2)) == "Once"
    with pytest.raises(ValueError, match="does not end"):
        probes.judge_stream(exchange(stream(*parts, end=""), max_tokens=2))


def test_streamed_and_plain_answers_are_compared() -> None:
    def rows(plain: str, streamed: str) -> list[dict[str, Any]]:
        common = {"passed": True, "request": {}, "response": "", "seconds": 0}
        return [
            {"name": "completion", "detail": plain, **common},
            {"name": "streaming", "detail": streamed, **common},
        ]

    assert probes._stream_adds_up(rows("Once upon", "Once upon"))["passed"]
    lost = probes._stream_adds_up(rows("Once upon", "Onceupon"))
    assert not lost["passed"]
    assert lost["detail"] == "'Once upon' became 'Onceupon'"


def logprobs(*positions: tuple[float, dict[str, float]]) -> Exchange:
    return exchange(
        {
            "choices": [
                {
                    "logprobs": {
                        "tokens": ["a"] * len(positions),
                        "token_logprobs": [p[0] for p in positions],
                        "top_logprobs": [p[1] for p in positions],
                    }
                }
            ]
        }
    )


def test_logprobs() -> None:
    assert probes.judge_logprobs(logprobs((-0.1, {"a": -0.1, "b": -2.5}))) == "1 positions"


@pytest.mark.parametrize(
    ("position", "complaint"),
    [
        ((-0.1, {"a": -0.1, "b": -0.2}), "sum to 1.7"),
        ((-9.0, {"b": -0.1, "a": -9.0}), "not the likeliest"),
        ((0.5, {"a": 0.5}), "not finite and negative"),
        ((float("nan"), {"a": float("nan")}), "not finite"),
    ],
)
def test_logprobs_refuses(position: tuple[float, dict[str, float]], complaint: str) -> None:
    with pytest.raises(Unmet, match=complaint):
        probes.judge_logprobs(logprobs(position))


GOOD = {"city": "Paris", "capital": True, "stars": 3}


def test_json() -> None:
    assert probes.judge_json(exchange(message(json.dumps(GOOD))))
    with pytest.raises(jsonschema.ValidationError):
        probes.judge_json(exchange(message(json.dumps({**GOOD, "stars": "3"}))))
    with pytest.raises(Unmet, match="length"):
        probes.judge_json(exchange(message('{"city": "Par', "length")))


def tool_call(arguments: dict[str, Any], name: str = "get_weather") -> Exchange:
    call = {"function": {"name": name, "arguments": json.dumps(arguments)}}
    return exchange(message(None, "tool_calls", tool_calls=[call]))


def test_tool_calls_must_obey_the_schema() -> None:
    assert probes.judge_tool_call(tool_call({"city": "Paris"}))
    with pytest.raises(jsonschema.ValidationError):
        probes.judge_tool_call(tool_call({"location": "Paris"}))
    with pytest.raises(Unmet, match="called 'weather'"):
        probes.judge_tool_call(tool_call({"city": "Paris"}, "weather"))
    with pytest.raises(Unmet, match="0 tool calls"):
        probes.judge_tool_call(exchange(message('<tool_call>{"city": "Paris"}')))


def test_usage_and_refusal() -> None:
    assert probes.judge_usage(exchange({"usage": {"prompt_tokens": 9}}), 9)
    with pytest.raises(Unmet, match="10 prompt tokens, 9 were sent"):
        probes.judge_usage(exchange({"usage": {"prompt_tokens": 10}}), 9)
    assert probes.judge_refusal(exchange("{}", 400))
    with pytest.raises(Unmet, match="answered with 200"):
        probes.judge_refusal(exchange(message("Paris")))


def test_the_failed_row_keeps_request_and_response() -> None:
    probe = probes.Probe("chat", probes.CHAT, {"model": "m"}, probes.judge_chat)
    row = probes._row(probe, exchange("", model="m"))
    assert not row["passed"]
    assert row["detail"].startswith("JSONDecodeError")
    assert row["request"] == {"path": probes.CHAT, "model": "m"}
    assert row["response"] == ""


def test_a_tool_probe_only_where_tools_are_parsed() -> None:
    names = [p.name for p in probes.probes("m", [1, 2], tools=False)]
    assert "tool_call" not in names
    assert len(set(names)) == len(names)
    assert "tool_call" in [p.name for p in probes.probes("m", [1, 2], tools=True)]
