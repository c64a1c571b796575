"""Does speculation change what is sampled? The first tokens of many answers, with and without it.

Rejection sampling of drafts leaves the target's distribution as it is (Leviathan et al. 2023,
arXiv 2211.17192, appendix A.1); an engine that accepts a draft too often does not. Both sides
answer the same prompts at the same temperature, each with its own draws, and a permutation test
says whether the tokens could come from one distribution. How large a change it would have found
is measured too: a test that cannot fail shows nothing.

Tokens are int arrays [prompts, answers, tokens]; an answer that ended is filled up with ENDED.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onboard.evals.answers import TEMPERATURE, request

ANSWERS = 200  # to each prompt, on each side
TOKENS = 4  # of each answer; nothing is drafted for the first
ENDED = -1
PERMUTATIONS = 4999
ALPHA = 0.001  # p-values below it fail the gate
COMMON = 0.03  # of the answers at a place: rarer tokens are counted together
SHIFT = 0.1  # of probability, towards one token: the bias whose detection `power` measures
POWER_PERMUTATIONS = 1999  # the least p-value, 1 in 2000, is below ALPHA
POWER_TRIALS = 200
TIE = 1e-9  # relative: equal statistics may differ by rounding

Tokens = NDArray[np.int64]
Labels = NDArray[np.float32]


@dataclass(frozen=True)
class Sampling:
    """The content of `sampling.json`; `power` is that of finding `shift` at `alpha`."""

    prompts: int
    answers: int
    tokens: int
    p_value: float
    power: float
    shift: float = SHIFT
    alpha: float = ALPHA

    @property
    def metrics(self) -> dict[str, float]:
        return {"sampling_p_value": self.p_value, "sampling_power": self.power}

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def requests(prompts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Return ANSWERS requests per prompt of token ids, prompt after prompt."""
    return [request(ids, TOKENS, TEMPERATURE) for ids in prompts for _ in range(ANSWERS)]


def table(answers: Sequence[Sequence[int]]) -> list[list[list[int]]]:
    """Return the token ids of answers to `requests`, [prompts, ANSWERS, TOKENS], filled up."""
    rows = [[*ids, *[ENDED] * TOKENS][:TOKENS] for ids in answers]
    return [rows[start : start + ANSWERS] for start in range(0, len(rows), ANSWERS)]


def compare(plain: Any, speculative: Any) -> Sampling:
    """Judge two tables of tokens by a permutation test, and the test by its power on their mix."""
    first, second = np.asarray(plain, np.int64), np.asarray(speculative, np.int64)
    prompts, answers, tokens = first.shape
    found = power(np.concatenate([first, second], axis=1), answers)
    return Sampling(prompts, answers, tokens, permutation_test(first, second), found)


def permutation_test(
    plain: Tokens, other: Tokens, permutations: int = PERMUTATIONS, seed: int = 0
) -> float:
    """Return the p-value of "both were drawn from the same distributions".

    The statistic is the two-sample chi-square of token counts, summed over prompts and positions.
    Under the hypothesis the answers can change sides; whole answers do, so that what a token owes
    to those before it does no harm, and the test is exact (Phipson & Smyth 2010: the observed
    split counts as one of the permutations).
    """
    assert plain.shape == other.shape, f"{plain.shape} and {other.shape}"
    return _p_value(plain, other, _splits(2 * plain.shape[1], permutations, seed))


def power(
    tokens: Tokens,
    answers: int,
    shift: float = SHIFT,
    alpha: float = ALPHA,
    trials: int = POWER_TRIALS,
    permutations: int = POWER_PERMUTATIONS,
    seed: int = 0,
) -> float:
    """Return how often a biased sampler's p-value is below `alpha`, by simulation.

    Both sides draw `answers` from `tokens` with replacement; then one moves `shift` of the
    probability to one token (`bias`). A shift of 0 gives the rate of false alarms.
    """
    random = np.random.default_rng(seed)
    splits = _splits(2 * answers, permutations, seed)
    favourite, share = favourites(tokens)
    found = 0
    for _ in range(trials):
        picks = random.integers(tokens.shape[1], size=(len(tokens), 2 * answers, 1))
        drawn = np.take_along_axis(tokens, picks, axis=1)
        biased = bias(drawn[:, answers:], favourite, share, shift, random)
        found += _p_value(drawn[:, :answers], biased, splits) < alpha
    return found / trials


def favourites(tokens: Tokens) -> tuple[Tokens, NDArray[np.float64]]:
    """Return the most frequent token of every prompt and position, and its share: [P, tokens].

    It stands in for what the draft proposes, which no answer tells: a trained head mostly proposes
    the target's own first choice.
    """
    count = tokens.shape[1]
    best = [np.unique(column, return_counts=True) for column in _columns(tokens)]
    shape = tokens.shape[0], tokens.shape[2]
    favourite = np.array([values[counts.argmax()] for values, counts in best]).reshape(shape)
    share = np.array([counts.max() / count for _, counts in best]).reshape(shape)
    return favourite, share


def bias(
    tokens: Tokens,
    favourite: Tokens,
    share: NDArray[np.float64],
    shift: float,
    random: np.random.Generator,
) -> Tokens:
    """Return `tokens` as a sampler would draw them that is `shift` off in total variation.

    `favourite` and `share`, its probability, are [prompts, tokens]. Other tokens become the
    favourite with probability shift / (1 - share), all of them where less than `shift` is left.
    The first position stays as it is.
    """
    chance = np.minimum(1.0, shift / np.maximum(1 - share, 1e-12))
    chance[:, 0] = 0
    moved = random.random(tokens.shape) < chance[:, None, :]
    return np.where(moved, favourite[:, None, :], tokens)


def _p_value(plain: Tokens, other: Tokens, splits: Labels) -> float:
    seen = _indicators(np.concatenate([plain, other], axis=1))
    total = seen.sum(axis=0, dtype=np.float64)
    first = (splits @ seen).astype(np.float64)
    statistics = ((2 * first - total) ** 2 / total).sum(axis=1)
    as_large = statistics >= statistics[0] * (1 - TIE)
    return float(as_large.mean())


def _indicators(tokens: Tokens) -> Labels:
    """Return [answers, K]: which token an answer has at each place, the rare ones as one.

    Many cells with hardly a count would add noise and no evidence.
    """
    parts = []
    for column in _columns(tokens):
        values, counts = np.unique(column, return_counts=True)
        named = column[:, None] == values[counts >= COMMON * len(column)]
        parts.append(np.column_stack([named, ~named.any(axis=1)]))
    seen = np.concatenate(parts, axis=1)
    return seen[:, seen.any(axis=0)].astype(np.float32)


def _columns(tokens: Tokens) -> Tokens:
    """Return the answers' tokens at each prompt and position: [prompts * tokens, answers]."""
    return tokens.transpose(0, 2, 1).reshape(-1, tokens.shape[1])


def _splits(answers: int, permutations: int, seed: int) -> Labels:
    """Return [1 + permutations, answers] of 1 on the first side: as observed, then shuffled.

    One shuffle serves all prompts: answers are independent, so that any of them may change sides
    together.
    """
    labels = np.zeros((1 + permutations, answers), np.float32)
    labels[:, : answers // 2] = 1
    labels[1:] = np.random.default_rng(seed).permuted(labels[1:], axis=1)
    return labels
