"""A permutation test that is exact, finds a biased sampler, and says how often it would."""

import numpy as np
import pytest

from onboard.evals import sampling
from onboard.evals.sampling import ALPHA, bias, favourites, permutation_test, power

FEW = {"permutations": 199, "alpha": 0.05}


def distributions(prompts: int, tokens: int, seed: int = 0) -> np.ndarray:
    """Next-token probabilities [prompts, tokens, 30], as peaked as a model's at temperature 0.7."""
    logits = np.random.default_rng(seed).normal(0, 2, size=(prompts, tokens, 30)) / 0.7
    weights = np.exp(logits)
    shares: np.ndarray = weights / weights.sum(-1, keepdims=True)
    return shares


def drawn(shares: np.ndarray, answers: int, random: np.random.Generator) -> np.ndarray:
    """Tokens [prompts, answers, tokens] by inverting the cumulative distribution."""
    uniform = random.random((shares.shape[0], answers, shares.shape[1], 1))
    tokens: np.ndarray = (uniform > shares.cumsum(-1)[:, None]).sum(-1)
    return tokens


def test_by_hand() -> None:
    """Of the 6 splits of a a | b b, the observed one and its mirror are the most unequal."""
    plain, other = np.array([[[1], [1]]]), np.array([[[2], [2]]])
    assert permutation_test(plain, other, 5999) == pytest.approx(2 / 6, abs=0.02)
    assert permutation_test(plain, plain, 99) == 1.0


def test_rare_tokens_count_as_one() -> None:
    common, rare = np.zeros((1, 50, 1), int), np.arange(1, 51).reshape(1, 50, 1)
    assert sampling._indicators(np.concatenate([common, rare], axis=1)).sum(0).tolist() == [50, 50]


def test_tokens_that_nothing_repeats_tell_nothing() -> None:
    assert permutation_test(np.array([[[1], [2]]]), np.array([[[3], [4]]]), 99) == 1.0


def test_a_permutation_p_value_is_never_zero() -> None:
    plain, other = np.zeros((1, 50, 1), int), np.ones((1, 50, 1), int)
    assert permutation_test(plain, other, 199) == 1 / 200


def test_equal_samplers_are_told_apart_as_often_as_alpha_says() -> None:
    shares, random = distributions(4, 2), np.random.default_rng(1)
    alarms = [
        permutation_test(drawn(shares, 40, random), drawn(shares, 40, random), 99, seed) <= 0.05
        for seed in range(200)
    ]
    assert 0.02 <= np.mean(alarms) <= 0.09  # 10 of 200 expected, standard deviation 3
    pool = drawn(shares, 400, random)
    assert 0.01 <= power(pool, 40, shift=0, trials=200, **FEW) <= 0.09


def test_a_biased_sampler_is_found_at_the_gate_s_limit() -> None:
    """Total variation 0.1 towards one token, at the size of the stage's own measurement."""
    shares, random = distributions(10, sampling.TOKENS), np.random.default_rng(2)
    pool = drawn(shares, 2 * sampling.ANSWERS, random)
    assert power(pool, sampling.ANSWERS, shift=0.1, alpha=ALPHA, trials=20) >= 0.9


def test_power_grows_with_the_bias() -> None:
    pool = drawn(distributions(4, 3), 200, np.random.default_rng(3))
    found = [power(pool, 60, shift=shift, trials=60, **FEW) for shift in (0.0, 0.1, 0.3)]
    assert found[0] < 0.2 < found[2]
    assert found == sorted(found)


def test_the_bias_is_as_large_as_it_says() -> None:
    tokens = np.array([[[7, 7]] * 6 + [[8, 8]] * 3 + [[9, 9]]] * 2)
    favourite, share = favourites(tokens)
    assert favourite.tolist() == [[7, 7], [7, 7]]
    assert share.tolist() == [[0.6, 0.6], [0.6, 0.6]]
    many = tokens.repeat(5000, axis=1)
    moved = bias(many, favourite, share, 0.1, np.random.default_rng(0))
    assert (moved[:, :, 0] == many[:, :, 0]).all()  # the first token is nobody's draft
    # 0.6 + 0.1, and what is left shrinks from 0.3 and 0.1 by a quarter.
    for token, expected in ((7, 0.7), (8, 0.225), (9, 0.075)):
        assert (moved[:, :, 1] == token).mean() == pytest.approx(expected, abs=0.01)


def test_no_more_is_moved_than_there_is() -> None:
    tokens = np.array([[[7, 7]] * 19 + [[8, 8]]])
    moved = bias(tokens, *favourites(tokens), 0.1, np.random.default_rng(0))
    assert set(moved[0, :, 1]) == {7}


def test_answers_that_end_are_filled_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "ANSWERS", 2)
    answers = [[1, 2, 3, 4, 5], [1], [], [6, 7, 8, 9]]
    assert sampling.table(answers) == [
        [[1, 2, 3, 4], [1, -1, -1, -1]],
        [[-1, -1, -1, -1], [6, 7, 8, 9]],
    ]
