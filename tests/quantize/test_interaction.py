"""Pair terms: found where they are real, dropped where they are noise."""

from __future__ import annotations

import json

import numpy as np
import pytest
from numpy.typing import NDArray

from onboard.quantize.allocation import Limit, Problem, Unit, choose
from onboard.quantize.interaction import estimate, kind_of

BLOCKS = (("self_attn.q_proj", "attention"), ("self_attn.o_proj", "attention"),
          ("mlp.gate_proj", "mlp"), ("mlp.experts", "expert"))  # fmt: skip
UNITS = [
    Unit(f"model.layers.{layer}.{name}", (f"model.layers.{layer}.{name}",), 160, role)
    for layer in range(6)
    for name, role in BLOCKS
]


def gram(documents: int, tokens: int, together: float, seed: int = 0) -> NDArray[np.float64]:
    """Independent effects, but that q/k/v and o of a layer share a part `together` of theirs."""
    random = np.random.default_rng(seed)
    effects = random.normal(size=(documents, tokens, len(UNITS)))
    common = random.normal(size=(documents, tokens, 6))
    for n, name in ((0, common), (1, common)):
        rest = (1 - together**2) ** 0.5
        effects[:, :, n::4] = together * name + rest * effects[:, :, n::4]
    return np.einsum("dta,dtb->dab", effects, effects) / tokens


def test_pairs_are_told_apart() -> None:
    q, o, gate, experts = UNITS[:4]
    assert kind_of(q, o) == "same block, attention"
    assert kind_of(o, gate) == "same layer"
    assert kind_of(gate, experts) == "experts and their layer"
    assert kind_of(q, UNITS[5]) == "adjacent layers"
    assert kind_of(q, UNITS[9]) == "distant layers"


def test_a_real_term_is_found_and_hardly_shrunk() -> None:
    found = estimate(gram(12, 400, together=0.7), UNITS)
    kinds = {kind.name: kind for kind in found.kinds}
    block = kinds["same block, attention"]
    assert block.used
    assert block.pairs == 6
    assert block.cosine_mean == pytest.approx(0.49, abs=0.05)
    assert block.reliability > 0.95
    assert found.pairs[0, 1] == pytest.approx(0.49, abs=0.1)
    assert np.array_equal(found.pairs, found.pairs.T)
    assert not found.pairs.diagonal().any()


def test_noise_is_not_used() -> None:
    found = estimate(gram(8, 200, together=0.0), UNITS)
    far = next(kind for kind in found.kinds if kind.name == "distant layers")
    assert not far.used
    assert abs(far.agreement) < 0.2
    assert abs(far.cosine_mean) < 0.02
    assert not found.pairs[0, 9]


def test_documents_that_cannot_be_split_give_no_terms() -> None:
    found = estimate(gram(1, 200, together=0.7), UNITS)
    assert not found.used
    assert not found.pairs.any()


def test_halves_are_seeded_and_the_summary_is_json() -> None:
    first, again = (estimate(gram(8, 50, 0.7), UNITS, halves=5, seed=3) for _ in range(2))
    assert first.kinds == again.kinds
    said = json.loads(json.dumps(first.describe()))
    assert said["used"] is True
    assert said["halves"] == 5
    assert {"name", "pairs", "cosine_mean", "cosine_sd", "correlation", "agreement",
            "reliability", "used"} == set(said["kinds"][0])  # fmt: skip


def test_spearman_brown_on_halves_that_are_known() -> None:
    """Two documents, so a half is one: cosines (.6, 0) and (0, .6) agree in nothing."""
    units = [UNITS[0], UNITS[1], UNITS[4]]
    one, two = np.eye(3), np.eye(3)
    one[0, 1] = one[1, 0] = two[0, 1] = two[1, 0] = 0.4
    found = estimate(np.stack([one, two]), units, halves=4)
    block = next(kind for kind in found.kinds if kind.name == "same block, attention")
    assert (block.agreement, block.reliability) == (pytest.approx(1), pytest.approx(1))
    two[0, 1] = two[1, 0] = -0.4
    found = estimate(np.stack([one, two]), units, halves=4)
    block = next(kind for kind in found.kinds if kind.name == "same block, attention")
    assert block.agreement == pytest.approx(-1)
    assert block.reliability == 0
    assert not found.used


def test_terms_that_are_real_lower_the_true_cost_of_a_choice() -> None:
    """The sums alone cannot tell units whose errors add up from those whose do not."""
    truth = gram(400, 200, together=0.95, seed=1).mean(0)
    sample = gram(8, 200, together=0.95, seed=2)
    alone = (sample.mean(0).diagonal() / 2).tolist()
    kl = {"nvfp4": alone, "fp8": [0.0] * len(UNITS)}
    limit = Limit("bits", 6.25)
    costs = []
    for pairs in (None, estimate(sample, UNITS).pairs):
        point = choose(Problem(tuple(UNITS), kl, pairs), limit).point
        low = np.array([format == "nvfp4" for format in point.formats], float)
        costs.append(float(low @ truth @ low) / 2)
    assert costs[1] < 0.9 * costs[0]
