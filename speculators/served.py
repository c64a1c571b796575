"""The target's answers as a server gives them, where the target is too large to answer here.

The server is asked by token ids and answers in token ids, greedily. Its hidden states are not
asked for: they are taken here, by a prefill of prompt and answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath

import torch

from onboard.checkpoint.models import Runner
from onboard.engines.client import Client, Exchange
from onboard.errors import EnvironmentFault, InputError
from onboard.evals.lossless import NEAR_TIE_NATS
from onboard.speculators.capture import Answer, prefill
from onboard.speculators.head import Head

MODELS, COMPLETIONS = "/v1/models", "/v1/completions"
REPRODUCED_MIN = 0.95  # of the answers' tokens; other kernels of the same weights cost < 0.02
# What a server would else take from generation_config.json, and what asks for ids.
GREEDY = {"temperature": 0, "repetition_penalty": 1.0, "return_token_ids": True}
GO_ON = "see to the server and run the same command again; answers that came are kept"


@dataclass(frozen=True)
class Endpoint:
    """A server, and the id under which it serves the target."""

    client: Client
    model: str


def connect(url: str, names: Collection[str], warn: Callable[[str], None]) -> Endpoint:
    """Find the target among the models of a server, by any of its `names`.

    A server of one model may call it as it likes: that is said, and its answers are checked.
    Raises EnvironmentFault where the server does not list its models, InputError where several
    are served and none is called as the target.
    """
    client = Client(url.rstrip("/").removesuffix("/v1"))
    try:
        served = [str(model["id"]) for model in json.loads(client.get(MODELS))["data"]]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise EnvironmentFault(
            f"features.answers: {client.url}{MODELS} does not list models: {e!r}",
            "start the server, or correct the URL",
        ) from e
    called = [name for name in served if {name, PurePath(name).name} & set(names)]
    if not called and len(served) != 1:
        raise InputError(
            f"features.answers: {client.url} serves {', '.join(served) or 'no model'}; expected "
            f"the target under one of the names {', '.join(sorted(names))}",
            "serve the target alone, or under its name (--served-model-name)",
        )
    if not called:
        warn(
            f"{client.url} serves {served[0]}, which may be the target under another name: its "
            "answers are held against the target's own"
        )
    return Endpoint(client, (called or served)[0])


def ask(
    endpoint: Endpoint, prompts: Sequence[Sequence[int]], stop: Collection[int], max_new_tokens: int
) -> list[list[int]]:
    """Return the ids of greedy answers to prompts of ids, all asked at once.

    Each ends at a token of `stop`. Raises EnvironmentFault where the server refuses one, was given
    another prompt than was sent, or returns no ids.
    """
    requests = [
        {
            "model": endpoint.model,
            "prompt": list(prompt),
            "max_tokens": max_new_tokens,
            "stop_token_ids": sorted(stop),
            **GREEDY,
        }
        for prompt in prompts
    ]
    exchanges = endpoint.client.post_all(COMPLETIONS, requests, len(requests))
    return [_ids(exchange, stop) for exchange in exchanges]


def _ids(exchange: Exchange, stop: Collection[int]) -> list[int]:
    try:
        body = exchange.json
        choice, read = body["choices"][0], (body.get("usage") or {}).get("prompt_tokens")
    except (ValueError, KeyError, IndexError, AttributeError, TypeError) as e:
        raise EnvironmentFault(
            f"features.answers: the server failed on a training prompt: {e}", GO_ON
        ) from e
    sent = len(exchange.request["prompt"])
    if read not in (None, sent):
        raise EnvironmentFault(
            f"features.answers: the server read {read} tokens of a prompt of {sent}: it adds or "
            "cuts tokens",
            "serve it without truncation and without added special tokens",
        )
    tokens = choice.get("token_ids")
    if not isinstance(tokens, list):
        raise EnvironmentFault(
            "features.answers: the server returns no token ids (`return_token_ids`)",
            "serve the target with vLLM 0.10.2 or newer",
        )
    last = next((i for i, token in enumerate(tokens) if token in stop), len(tokens))
    return tokens[: last + 1]


def groups(lengths: Sequence[int], tokens: int) -> Iterator[slice]:
    """Yield stretches of texts that together have up to `tokens` tokens, or one text that has more.

    What is in a group depends on the lengths alone, whatever the machine's memory: the same shards
    come out of a run that was interrupted.
    """
    start = held = 0
    for number, length in enumerate(lengths):
        if held and held + length > tokens:
            yield slice(start, number)
            start, held = number, 0
        held += length
    if held:
        yield slice(start, len(lengths))


def with_states(
    runner: Runner,
    prompts: Sequence[Sequence[int]],
    tokens: Sequence[Sequence[int]],
    progress: Callable[[int, int], None],
) -> list[Answer]:
    """Return the answers with hidden states; a model that does not fit is read once for all."""
    ids = [torch.tensor([*p, *t[:-1]]) for p, t in zip(prompts, tokens, strict=True)]
    states = prefill(runner, ids, progress)
    return [
        Answer(fed, seen, len(prompt), list(given))
        for fed, seen, prompt, given in zip(ids, states, prompts, tokens, strict=True)
    ]


def check_vocabulary(target: Head, tokens: Sequence[Sequence[int]]) -> None:
    """Raise InputError where an answer has a token that the target does not."""
    highest, rows = max((max(t) for t in tokens if t), default=0), len(target.embedding)
    if highest >= rows:
        raise InputError(
            f"features.answers: an answer holds the token {highest}, the target has {rows}: the "
            "server serves another model",
            "serve the very checkpoint that features.target names",
        )


def check_answers(target: Head, answers: Sequence[Answer], endpoint: Endpoint) -> int:
    """Return how many of the answers' tokens the target would have given too.

    It would where a token's logit, from the states before the final norm, is at most 0.15 nats
    behind the best one: kernels differ so much. Raises InputError where that holds for less than
    95% of the tokens.
    """
    same = sum(reproduced(target, answer) for answer in answers)
    total = sum(len(answer.tokens) for answer in answers)
    if same < REPRODUCED_MIN * total:
        raise InputError(
            f"features.answers: the target itself gives {same} of the {total} tokens that "
            f"{endpoint.model} at {endpoint.client.url} answered, expected at least "
            f"{REPRODUCED_MIN:.0%}: other weights, or no greedy sampling",
            "serve the very checkpoint that features.target names: `onboard serve` for a bundle's",
        )
    return same


def reproduced(target: Head, answer: Answer) -> int:
    """Count the answer's tokens that are the target's best, or nearly tie with it."""
    rows = slice(answer.prompt_length - 1, answer.prompt_length - 1 + len(answer.tokens))
    logits = target.logits(answer.states[rows, -1].to(target.gain.device))
    given = torch.tensor(answer.tokens, device=logits.device, dtype=torch.int64)
    behind = logits.amax(-1) - logits.gather(1, given[:, None])[:, 0]
    return int((behind <= NEAR_TIE_NATS).sum())
