"""Answers of a served model to rendered prompts: greedy or sampled, timed, looked at for loops."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from onboard.engines import vllm
from onboard.engines.client import Client, Exchange
from onboard.errors import EnvironmentFault
from onboard.evals.loops import find_loop
from onboard.evals.probes import COMPLETIONS

Row = dict[str, Any]

CANDIDATES = 5  # log-probabilities kept at each position
TEMPERATURE = 0.7  # of sampled answers


def request(ids: Sequence[int], max_tokens: int, temperature: float = 0) -> Row:
    """Return the request for one answer to a prompt of token ids.

    It has no seed: vLLM 0.32 on a CPU dies of one where a prompt is read in parts ("CPU Generator
    does not use offset"). The engine draws with a generator of its own.
    """
    return {
        "model": vllm.MODEL,
        "prompt": ids,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "return_token_ids": True,
    }


def with_candidates(request: Mapping[str, Any]) -> Row:
    """Return the request that also asks for the log-probabilities of the likeliest tokens."""
    return {**request, "logprobs": CANDIDATES, "return_tokens_as_token_ids": True}


def ask(
    client: Client, requests: Sequence[Row], width: int, finished: Callable[[int], None]
) -> tuple[list[Row], float]:
    """Send the requests, `width` at a time; return the answers and the seconds of all together.

    An answer has `ids`, `text`, its own `seconds` from request to last token, where asked for
    `candidates` (per position, id -> log-probability) and, where the engine speculates, the
    `histogram` of its drafts by accepted tokens. Raises EnvironmentFault where one failed.
    """
    finished(0)
    began = time.monotonic()
    exchanges = client.post_all(COMPLETIONS, requests, width, finished)
    seconds = time.monotonic() - began
    return [_answer(exchange) for exchange in exchanges], seconds


def _body(exchange: Exchange) -> Row:
    try:
        body: Row = exchange.json
    except ValueError as e:
        raise EnvironmentFault(f"the engine failed on an evaluation prompt: {e}") from e
    return body


def _answer(exchange: Exchange) -> Row:
    body = _body(exchange)
    choice = body["choices"][0]
    speculation = (body.get("metrics") or {}).get("speculative_decoding") or {}
    return {
        "ids": choice["token_ids"],
        "text": choice["text"],
        "seconds": exchange.seconds,
        "candidates": [
            {token.removeprefix("token_id:"): value for token, value in top.items()}
            for top in (choice.get("logprobs") or {}).get("top_logprobs", [])
        ],
        "histogram": speculation.get("acceptance_histogram", []),
    }


def read_again(
    client: Client,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Row],
    width: int,
    finished: Callable[[int], None],
) -> list[list[dict[str, float]]]:
    """Let the engine read its answers in one piece each, as it reads a prompt.

    Returns per answer `candidates` as `ask` does, of all its positions but the last.
    """
    requests = [
        {**request([*ids, *row["ids"][:-1]], max_tokens=1), "prompt_logprobs": CANDIDATES}
        for ids, row in zip(prompts, answers, strict=True)
    ]
    finished(0)
    exchanges = client.post_all(COMPLETIONS, requests, width, finished)
    return [
        [
            {token: entry["logprob"] for token, entry in top.items()}
            for top in _body(exchange)["choices"][0]["prompt_logprobs"][len(ids) :]
        ]
        for ids, exchange in zip(prompts, exchanges, strict=True)
    ]


def mark_loops(client: Client, answers: Sequence[Row]) -> None:
    """Set `loop` of every answer: how it loops, or None."""

    @cache
    def decode(token: int) -> str:
        request = {"model": vllm.MODEL, "tokens": [token]}
        return str(client.post("/detokenize", request).json["prompt"])

    for row in answers:
        row["loop"] = find_loop(row["ids"], row["text"], decode)
