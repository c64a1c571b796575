"""What is stored is what the model computed, on the right side of the final norm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from onboard.checkpoint.models import Runner, load_reference, open_reference
from onboard.errors import InputError
from onboard.speculators import head
from onboard.speculators.capture import Answer, Capture, answer, aux_layers, prefill
from onboard.speculators.features import (
    batch_invariance_error,
    check_head,
    document_of,
    state_error,
    stop_tokens,
    zero_rows,
)
from tests.conftest import SMALL

from .conftest import TWINS, prompts

PROMPTS = [p["ids"] for p in prompts(6)]


@pytest.fixture(params=TWINS)
def runner(request: pytest.FixtureRequest) -> Runner:
    opened = open_reference(request.getfixturevalue(request.param), torch.float32, resident=True)
    _with_gain(opened.model)
    return opened


@pytest.fixture
def model(runner: Runner) -> Any:
    return runner.model


def _with_gain(model: Any) -> Any:
    """A fresh norm has gain one, which hides on which side of it a state was taken."""
    model.model.norm.weight.data = torch.linspace(0.2, 3, 64)
    return model


@pytest.mark.parametrize(
    ("layers", "expected"),
    [(2, (0, 1, 2)), (4, (2, 3, 4)), (6, (4, 5, 6)), (7, (2, 3, 4)), (30, (2, 15, 27))],
)
def test_aux_layers(layers: int, expected: tuple[int, ...]) -> None:
    assert aux_layers(layers) == expected
    assert len(set(expected)) == 3  # engines drop repeated indices


def test_one_layer_is_too_few() -> None:
    with pytest.raises(InputError, match="three layer boundaries"):
        aux_layers(1)


def test_capture_takes_the_models_own_hidden_states(model: Any) -> None:
    ids = torch.tensor([PROMPTS[5]])
    with torch.inference_mode(), Capture(model) as capture:
        output = model(input_ids=ids, output_hidden_states=True)
        states = capture.take()[0]
    for slot, layer in enumerate(aux_layers(2)[:2]):
        assert torch.equal(states[:, slot], output.hidden_states[layer][0].to(torch.bfloat16))
    normed = model.model.norm(states[:, 3].float())
    assert torch.allclose(normed, output.hidden_states[-1][0], rtol=0.02, atol=0.02)
    assert torch.equal(states[:, 2], states[:, 3])  # hidden_states[n] before its norm


def test_hooks_go_away(model: Any) -> None:
    with Capture(model):
        pass
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_answers_are_the_models_greedy_ones(model: Any) -> None:
    stop = {17, 200}
    for prompt, given in zip(PROMPTS, answer(model, PROMPTS, stop, 12), strict=True):
        ids = list(prompt)
        while len(ids) - len(prompt) < 12 and not (len(ids) > len(prompt) and ids[-1] in stop):
            with torch.inference_mode():
                ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        assert given.tokens == ids[len(prompt) :]
        assert given.ids.tolist() == ids[:-1]
        assert given.states.shape == (len(given.ids), 4, 64)


@pytest.fixture(params=["full", "sliding", "linear"])
def keeper(request: pytest.FixtureRequest) -> Any:
    """A model with another kind of cache."""
    from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen3NextConfig

    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
              "linear_value_head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
              "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}  # fmt: skip
    config = {
        "full": LlamaConfig(**SMALL),
        "sliding": Gemma3TextConfig(**SMALL, sliding_window=4),
        "linear": Qwen3NextConfig(**{**SMALL, "num_hidden_layers": 4}, **linear),
    }[request.param]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def test_an_answer_that_ends_leaves_the_batch_and_changes_no_other(keeper: Any) -> None:
    whole = answer(keeper, PROMPTS, (), 12)
    stops = {whole[0].tokens[0], whole[1].tokens[4], whole[2].tokens[7]}
    lengths = set()
    for free, given in zip(whole, answer(keeper, PROMPTS, stops, 12), strict=True):
        end = next((i for i, token in enumerate(free.tokens) if token in stops), 11) + 1
        assert given.tokens == free.tokens[:end]
        assert given.ids.tolist() == free.ids[: free.prompt_length + end - 1].tolist()
        expected = free.states[: len(given.ids)].float()
        assert torch.allclose(given.states.float(), expected, rtol=0.02, atol=0.02)
        lengths.add(end)
    assert len(lengths) > 2


def test_a_batch_gives_what_each_prompt_alone_gives(runner: Runner) -> None:
    assert batch_invariance_error(runner, PROMPTS) < 0.005
    answers = answer(runner.model, PROMPTS, (), 8)
    assert state_error(runner, [document_of(given) for given in answers]) < 0.005


def test_states_of_a_streamed_prefill_are_the_whole_model_s(qwen3_moe_twin: Path) -> None:
    documents = [torch.tensor(ids) for ids in PROMPTS]
    whole, streamed = (
        prefill(open_reference(qwen3_moe_twin, torch.float32, resident), documents)
        for resident in (True, False)
    )
    for one, other in zip(whole, streamed, strict=True):
        assert torch.equal(one, other)


def test_a_shifted_row_is_a_large_state_error(runner: Runner) -> None:
    given = answer(runner.model, PROMPTS, (), 8)[0]
    shifted = Answer(given.ids, given.states.roll(1, 0), given.prompt_length, given.tokens)
    assert state_error(runner, [document_of(shifted)]) > 0.3


def test_head_reproduces_the_model_from_states_before_the_norm(model: Any) -> None:
    target = head.of_model(model)
    answers = answer(model, PROMPTS, (), 8)
    check_head(target, answers)
    after_norm = [
        Answer(a.ids, target.normalize(a.states), a.prompt_length, a.tokens) for a in answers
    ]
    with pytest.raises(InputError, match="norm, lm_head"):
        check_head(target, after_norm)


@pytest.mark.parametrize("scale", ["logit_scale", "logits_scaling"])
def test_logits_are_the_models_with_scale_and_softcap(llama_twin: Path, scale: str) -> None:
    model = _with_gain(load_reference(llama_twin, torch.float32))
    setattr(model.config, scale, 4.0)
    model.config.final_logit_softcapping = 3.0
    last = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    plain = model.lm_head(model.model.norm(last))
    expected = 3 * torch.tanh(plain * (4.0 if scale == "logit_scale" else 0.25) / 3)
    assert torch.allclose(head.of_model(model).logits(last), expected, atol=1e-3)


def test_a_gain_stored_less_one_is_read_as_the_gain(llama_twin: Path) -> None:
    """Gemma and Qwen3-Next keep w where the norm multiplies by 1 + w."""

    class OffsetNorm(torch.nn.Module):
        variance_epsilon = 1e-6

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.linspace(-0.5, 1, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return head.rms_norm(x, 1 + self.weight, 1e-6)

    model = load_reference(llama_twin, torch.float32)
    model.model.norm = OffsetNorm()
    assert torch.equal(head.of_model(model).gain, 1 + model.model.norm.weight)


def test_another_kind_of_norm_is_refused(llama_twin: Path) -> None:
    model = load_reference(llama_twin, torch.float32)
    model.model.norm = torch.nn.LayerNorm(64)
    with pytest.raises(InputError, match="LayerNorm is not an RMSNorm"):
        head.of_model(model)


def test_head_comes_back_from_disk(model: Any, tmp_path: Path) -> None:
    target = head.of_model(model)
    target.save(tmp_path)
    again = head.Head.load(tmp_path, vars(target.settings))
    last = torch.ones(2, 64)
    assert torch.equal(again.logits(last), target.logits(last))
    assert (again.output is again.embedding) == model.config.tie_word_embeddings


def test_zero_states_are_counted(model: Any) -> None:
    document = document_of(answer(model, PROMPTS[:1], (), 4)[0])
    assert zero_rows(document) == 0
    with torch.inference_mode():
        document.aux[1, 2] = 0
        document.last[0] = 0
    assert zero_rows(document) == 2


def test_stop_tokens_of_both_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    assert stop_tokens(tmp_path) == {2}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    assert stop_tokens(tmp_path) == {2, 7}
    (tmp_path / "config.json").write_text('{"eos_token_id": null}')
    (tmp_path / "generation_config.json").unlink()
    assert stop_tokens(tmp_path) == frozenset()
