"""KL against hand-worked numbers, an independent implementation, and the model's own logits."""

from __future__ import annotations

from math import log, tanh
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from onboard.errors import InputError
from onboard.evals.hidden import batches, bf16_noise, check_head, last_hidden, prepare_noise
from onboard.evals.kl import Head, compare, kl_divergence, top_tokens

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
}


def twin(family: str, **changes: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES, **changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    return model


def independent_kl(p_logits: Tensor, q_logits: Tensor) -> np.ndarray[Any, Any]:
    """The definition in float64, from probabilities."""
    p, q = (np.exp(x.double().numpy()) for x in (p_logits, q_logits))
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    return np.asarray((p * np.log(p / q)).sum(-1))


def test_kl_of_a_distribution_worked_out_by_hand() -> None:
    p = torch.tensor([[0.5, 0.25, 0.25]]).log()
    q = torch.tensor([[0.25, 0.25, 0.5]]).log()
    # .5 ln 2 + .25 ln 1 + .25 ln .5 = .25 ln 2
    assert kl_divergence(p, q).item() == pytest.approx(0.25 * log(2), rel=1e-6)


logits = st.lists(st.floats(-20, 20, width=32), min_size=5, max_size=5).map(torch.tensor)


@given(logits, logits, st.floats(-50, 50))
def test_kl_invariants(p: Tensor, q: Tensor, shift: float) -> None:
    p, q = p[None], q[None]
    kl = kl_divergence(p, q)
    assert kl >= 0
    assert kl_divergence(p, p) == 0
    torch.testing.assert_close(kl_divergence(p + shift, q - shift), kl, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(kl.numpy(), independent_kl(p, q), rtol=1e-3, atol=1e-5)


def random_head(**settings: Any) -> Head:
    return Head(torch.randn(40, 8), 37, **settings)


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_compare_is_the_same_for_every_chunk_and_matches_the_definition(chunk: int) -> None:
    torch.manual_seed(0)
    reference = (torch.randn(11, 8), random_head(softcap=5.0))
    candidate = (torch.randn(11, 8), random_head(scale=0.5))
    targets = torch.randint(37, (11,))
    stats = compare(reference, candidate, targets, chunk)
    p_logits = 5.0 * torch.tanh(reference[0] @ reference[1].weight[:37].T / 5.0)
    q_logits = 0.5 * (candidate[0] @ candidate[1].weight[:37].T)
    np.testing.assert_allclose(stats.kl, independent_kl(p_logits, q_logits), rtol=1e-4)
    p, q = p_logits.softmax(-1), q_logits.softmax(-1)
    rows = torch.arange(11)
    torch.testing.assert_close(stats.delta_p, q[rows, targets] - p[rows, targets])
    torch.testing.assert_close(stats.nll_reference, -p[rows, targets].log())
    torch.testing.assert_close(stats.nll_candidate, -q[rows, targets].log())
    torch.testing.assert_close(stats.confidence, p.max(-1).values)
    assert torch.equal(stats.agrees, (p.argmax(-1) == q.argmax(-1)).float())


def test_padded_vocabulary_rows_take_no_part() -> None:
    weight = torch.randn(40, 8)
    spoiled = weight.clone()
    spoiled[37:] = 1e4
    hidden, targets = torch.randn(5, 8), torch.zeros(5, dtype=torch.long)
    stats = compare((hidden, Head(weight, 37)), (hidden, Head(spoiled, 37)), targets)
    assert stats.kl.max() == 0
    assert Head(spoiled, 37).logits(hidden).shape == (5, 37)


def test_softcap_and_scale_by_hand() -> None:
    head = Head(torch.tensor([[2.0], [-1.0]]), 2, torch.tensor([0.5, 0.0]), 3.0, 10.0)
    # (1 * 2 + .5) * 3 = 7.5 and -3, capped at ten times tanh of a tenth
    expected = [10 * tanh(0.75), 10 * tanh(-0.3)]
    assert head.logits(torch.ones(1, 1))[0].tolist() == pytest.approx(expected)


def test_top_tokens() -> None:
    head = Head(torch.tensor([[1.0], [3.0], [2.0]]), 3)
    ids, probabilities = top_tokens(torch.ones(1, 1), head, 2)
    assert ids.tolist() == [[1, 2]]
    assert probabilities[0].tolist() == pytest.approx([0.66524, 0.24473], abs=1e-5)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("gemma2", {"final_logit_softcapping": 3.0}),
        ("granite", {"logits_scaling": 8.0}),
        ("cohere", {"logit_scale": 0.25}),
    ],
)
def test_head_gives_the_models_own_logits(family: str, changes: dict[str, Any]) -> None:
    model = twin(family, **changes)
    head = Head.of(model, 90)
    ids = list(range(3, 15))
    check_head(model, head, ids)
    own = model(torch.tensor([ids])).logits[0, :-1, :90]
    torch.testing.assert_close(head.logits(last_hidden(model, [ids])), own, rtol=1e-4, atol=1e-4)


def test_a_head_that_misses_something_is_refused() -> None:
    model = twin("gemma2", final_logit_softcapping=3.0)
    head = Head(model.get_output_embeddings().weight.detach(), 96)
    with pytest.raises(InputError, match=r"logits recomputed .* differ"):
        check_head(model, head, list(range(12)))


def test_hidden_states_do_not_depend_on_what_else_is_in_the_batch() -> None:
    model = twin("llama")
    documents = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14, 15, 16, 17, 18, 19]]
    together = last_hidden(model, documents)
    alone = torch.cat([last_hidden(model, [ids]) for ids in documents])
    assert together.shape == (4 + 1 + 7, 32)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_bf16_noise_is_small_and_leaves_the_model_as_it_was() -> None:
    model, ids = twin("llama"), list(range(20))
    head = Head.of(model, 96)
    exact = last_hidden(model, [ids])
    prepare_noise(model)
    with bf16_noise():
        noisy = last_hidden(model, [ids])
    noise = compare((exact, head), (noisy, head), torch.tensor(ids[1:])).kl
    assert 0 < noise.mean() < 0.05
    assert torch.equal(last_hidden(model, [ids]), exact)


def test_batches_do_not_depend_on_the_order_of_the_rows() -> None:
    rows = [{"id": str(i), "ids": [0] * (1 + i % 4)} for i in range(10)]
    assert batches(rows, 4) == batches(rows[::-1], 4)
    assert [len(batch.rows) for batch in batches(rows, 4)] == [4, 4, 2]
    first = batches([{"id": "a", "ids": [1, 2, 3]}, {"id": "b", "ids": [4, 5, 6, 7]}], 2)[0]
    assert first.targets.tolist() == [2, 3, 5, 6, 7]
