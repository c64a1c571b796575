"""The training masks compute what sequential drafting computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onboard.errors import InputError
from onboard.recipe import Draft
from onboard.speculators.attention import Sight, fused, in_parts
from onboard.speculators.eagle3 import Eagle3, draft_sequentially, within
from onboard.speculators.shape import DraftConfig
from onboard.speculators.vocabulary import Vocabulary

from .conftest import TOY_CONFIG, VOCAB, WIDTH, toy_head

STEPS = 4


SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "two layers": {"layers": 2},
    "window": {"window": 3},
    "two windowed layers": {"layers": 2, "window": 2},
    "other heads": {"heads": 2, "kv_heads": 1, "head_dim": 12, "intermediate_size": 20},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_output": {"norm_output": True},
    "fc_norm": {"fc_norm": True},
    "P-EAGLE": {"family": "peagle", "layers": 2},
    "EAGLE-3.1": {"norm_before_residual": True, "norm_output": True, "fc_norm": True, "window": 5},
}


def draft(**shape: Any) -> Eagle3:
    """A draft whose norms are no ones, so that leaving one out shows."""
    config = DraftConfig.of_target(TOY_CONFIG, 16, Draft(**shape))
    vocabulary = Vocabulary(torch.arange(0, VOCAB, 3), VOCAB)
    made = Eagle3.initial(config, toy_head(), vocabulary, seed=3)
    generator = torch.Generator().manual_seed(4)
    for parameter in made.parameters():
        if parameter.ndim == 1:
            parameter.data.copy_(0.5 + torch.rand(len(parameter), generator=generator))
    return made


def sample(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, (batch, length), generator=generator)
    return ids, torch.randn(batch, length, 3, WIDTH, generator=generator)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_ttt_equals_a_sequential_draft(shape: dict[str, Any]) -> None:
    model, (ids, aux) = draft(**shape), sample(1, 14)
    with torch.no_grad():
        unrolled = [model.logits(h)[0] for h in model.unroll(ids, aux, STEPS)]
    for start in range(14 - STEPS):
        context, forced = ids[0, : start + 1], ids[0, start + 1 : start + STEPS]
        sequential = draft_sequentially(model, context, aux[0, : start + 1], forced)
        for step in range(STEPS):
            difference = (unrolled[step][start] - sequential[step]).abs().max()
            assert difference < 1e-4, (start, step)


@pytest.mark.parametrize("shape", list(SHAPES.values())[1:], ids=list(SHAPES)[1:])
def test_every_choice_of_shape_changes_the_logits(shape: dict[str, Any]) -> None:
    ids, aux = sample(1, 14)
    with torch.no_grad():
        plain = [m.logits(h) for m in [draft()] for h in m.unroll(ids, aux, 2)]
        other = [m.logits(h) for m in [draft(**shape)] for h in m.unroll(ids, aux, 2)]
    assert not torch.allclose(plain[1], other[1], atol=1e-3)


@pytest.mark.parametrize("window", [None, 1, 2, 7])
@pytest.mark.parametrize("step", range(3))
def test_the_fused_mask_attends_as_the_parts_do(step: int, window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    starts = torch.tensor([[0, 3, 9, 9, 11], [2, 5, 6, 10, 1]])
    documents = torch.tensor([[0] * 5 + [1] * 7, [0] * 12])
    sight = Sight(starts, documents, window)

    def draw(heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(2, heads, tokens, 16, generator=generator)

    q, first = draw(4, 5), (draw(2, 12), draw(2, 12))
    own = [(draw(2, 5), draw(2, 5)) for _ in range(step)]
    parts, whole = in_parts(q, first, own, sight), fused(q, first, own, sight)
    assert (parts - whole).abs().max() < 1e-4


def test_places_within_documents() -> None:
    rows = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 0, -1, -1, -1, -1]])
    assert within(rows).tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 0, 1, 2, 3]]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_documents_in_one_row_are_as_in_rows_of_their_own(shape: dict[str, Any]) -> None:
    model, (ids, aux) = draft(**shape), sample(1, 14)
    documents = torch.tensor([[0] * 8 + [1] * 6])
    with torch.no_grad():
        together = list(model.unroll(ids, aux, 3, documents=documents))
        first = list(model.unroll(ids[:, :8], aux[:, :8], 3))
        second = list(model.unroll(ids[:, 8:], aux[:, 8:], 3))
    for step in range(3):
        assert torch.allclose(together[step][:, : 8 - step], first[step][:, : 8 - step], atol=1e-5)
        assert torch.allclose(
            together[step][:, 8 : 14 - step], second[step][:, : 6 - step], atol=1e-5
        )


def test_chosen_starts_give_what_all_starts_give() -> None:
    model, (ids, aux) = draft(), sample(2, 11)
    starts = torch.tensor([[3, 4, 9], [0, 7, 2]])
    with torch.no_grad():
        every = list(model.unroll(ids, aux, 3))
        chosen = list(model.unroll(ids, aux, 3, starts))
    for all_starts, some in zip(every, chosen, strict=True):
        for row in range(2):
            known = starts[row] < 9  # later ones have no teacher left
            expected = all_starts[row, starts[row]]
            assert torch.allclose(some[row][known], expected[known], atol=1e-5)


def test_a_document_sees_neither_its_neighbours_nor_its_future_nor_padding() -> None:
    model, (ids, aux) = draft(), sample(2, 12)
    other_ids, other_aux = ids.clone(), aux.clone()
    other_ids[1], other_aux[1] = 0, 9.0  # another document
    other_ids[0, 8:], other_aux[0, 8:] = 0, 9.0  # what comes later, or padding
    with torch.no_grad():
        first = list(model.unroll(ids, aux, STEPS))
        second = list(model.unroll(other_ids, other_aux, STEPS))
    for step in range(STEPS):
        known = 8 - step  # starts whose teacher tokens all lie before the change
        assert torch.equal(first[step][0, :known], second[step][0, :known])
        assert not torch.allclose(first[step][0, known:], second[step][0, known:])


def test_gradient_of_one_document_stays_inside_it() -> None:
    model, (ids, aux) = draft(), sample(2, 6)
    aux.requires_grad_(True)
    sum(h[0].sum() for h in model.unroll(ids, aux, STEPS)).backward()  # type: ignore[union-attr]
    assert aux.grad is not None
    assert aux.grad[0].abs().sum() > 0
    assert aux.grad[1].abs().sum() == 0


def test_what_a_parallel_draft_says_depends_on_no_drafted_token() -> None:
    model, (ids, aux) = draft(family="peagle"), sample(1, 9)
    with torch.no_grad():
        one = draft_sequentially(model, ids[0], aux[0], torch.tensor([1, 2]))
        other = draft_sequentially(model, ids[0], aux[0], torch.tensor([7, 9]))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert not torch.allclose(one[0], one[1], atol=1e-3)


def test_only_the_draft_itself_trains() -> None:
    frozen = {n for n, p in draft().named_parameters() if not p.requires_grad}
    assert frozen == {"embed_tokens.weight", "lm_head.weight"}


@pytest.mark.parametrize(
    ("change", "heads", "kv_heads", "head_dim"),
    [
        ({}, 4, 2, 8),
        ({"head_dim": None}, 4, 2, 8),  # hidden size over heads
        ({"num_key_value_heads": None}, 4, 4, 8),
        ({"kv_lora_rank": 16, "head_dim": 64, "hidden_size": 1024}, 8, 2, 128),
        ({"kv_lora_rank": 16}, 1, 1, 32),
        ({"num_attention_heads": None, "hidden_size": 384}, 3, 3, 128),
    ],
)
def test_heads_whatever_attention_the_target_has(
    change: dict[str, Any], heads: int, kv_heads: int, head_dim: int
) -> None:
    config = DraftConfig.of_target({**TOY_CONFIG, **change}, 16)
    found = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    assert found == (heads, kv_heads, head_dim)


@pytest.mark.parametrize(
    ("change", "theta"),
    [
        ({"rope_parameters": None, "rope_theta": 5e5}, 5e5),
        ({"rope_parameters": {"rope_theta": 8e6}}, 8e6),
        (
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_theta": 1e4},
                    "full_attention": {"rope_theta": 1e6},
                }
            },
            1e6,
        ),
        ({"rope_parameters": None}, 1e4),
    ],
)
def test_rope_theta_flat_or_nested(change: dict[str, Any], theta: float) -> None:
    assert DraftConfig.of_target({**TOY_CONFIG, **change}, 16).rope_theta == theta


def test_a_multimodal_config_is_read_from_its_text_part() -> None:
    assert DraftConfig.of_target({"text_config": TOY_CONFIG}, 16).hidden_size == WIDTH


def test_a_config_without_a_width_names_the_key() -> None:
    with pytest.raises(InputError, match="hidden_size"):
        DraftConfig.of_target({"vocab_size": 8}, 16)
