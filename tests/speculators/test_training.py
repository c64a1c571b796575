from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from onboard.errors import EnvironmentFault, InputError
from onboard.recipe import Draft, Speculate
from onboard.speculators.acceptance import hits, replay, walk
from onboard.speculators.batches import Batch, batches, endless, packed
from onboard.speculators.eagle3 import Eagle3
from onboard.speculators.fit import LOG, Work, fit
from onboard.speculators.losses import LOSSES, forward_kl, lk, lk_hybrid, reverse_kl
from onboard.speculators.shape import DraftConfig
from onboard.speculators.shards import Place, places_of, split, write_shard
from onboard.speculators.training import Objective, learning_rate, train
from onboard.speculators.vocabulary import Vocabulary

from .conftest import TOY_CONFIG, VOCAB, toy_document, toy_head, write_toy_features

PARAMS = Speculate(
    draft_vocab_size=VOCAB, epochs=4, batch_size=4, warmup_steps=3, checkpoint_steps=5
)
VOCABULARY = Vocabulary(torch.arange(VOCAB), VOCAB)


def fresh() -> Eagle3:
    config = DraftConfig.of_target(TOY_CONFIG, VOCAB)
    return Eagle3.initial(config, toy_head(), VOCABULARY, seed=0)


def state_bytes(draft: Eagle3) -> bytes:
    return b"".join(p.detach().numpy().tobytes() for p in draft.parameters())


class Killed(Exception):
    pass


def judge(
    documents: list[Any], kept: Vocabulary = VOCABULARY, draft: Eagle3 | None = None, **params: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of documents and the gradient of the draft's `fc`."""
    draft, params = draft or fresh(), {"ttt_steps": 3, **params}
    section = Speculate(draft_vocab_size=len(kept), **params)
    objective = Objective(draft, toy_head(), kept, section)
    batch = Batch.of(documents, "cpu", section.row_tokens)
    value = objective(batch, batch.counts(3)).value
    return value.detach(), torch.autograd.grad(value, draft.fc.weight)[0]


def run(
    scratch: Path, places: list[Place], die_at: int | None = None, params: Speculate = PARAMS
) -> Any:
    draft = fresh()

    def progress(done: int, total: int) -> None:
        if done == die_at:
            raise Killed

    log = train(draft, toy_head(), VOCABULARY, places, places[:2], params, scratch, progress)
    return state_bytes(draft), log


def test_training_learns_a_target_that_can_be_learned(toy_places: list[Place]) -> None:
    trained, held_out = split(toy_places)
    draft, params = fresh(), PARAMS.model_copy(update={"epochs": 15, "learning_rate": 1e-2})
    before = replay(draft, VOCABULARY, held_out, 3)
    scratch = toy_places[0].shard.parent
    log = train(
        draft, toy_head(), VOCABULARY, trained, held_out, params, scratch, lambda done, total: None
    )
    after = replay(draft, VOCABULARY, held_out, 3)
    assert log[-1]["loss"] < log[0]["loss"] / 2
    uniform = math.log(VOCAB) * (1 + 0.8 + 0.64)  # of a target that is sure, over three steps
    assert log[-1]["loss"] < uniform / 2
    assert after.length > max(2.5, before.length)
    assert after.accepted == sorted(after.accepted, reverse=True)
    lengths = [row["held_out_length"] for row in log if "held_out_length" in row]
    assert len(lengths) == params.looks
    assert lengths[-1] == pytest.approx(after.length, abs=1e-3)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("die_at", [3, 5, 13])
def test_an_interrupted_training_ends_in_the_same_bytes(
    toy_places: list[Place], tmp_path: Path, die_at: int, optimizer: str
) -> None:
    params = PARAMS.model_copy(update={"optimizer": optimizer})
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    expected = run(whole, toy_places, params=params)
    with pytest.raises(Killed):
        run(cut, toy_places, die_at, params)
    assert run(cut, toy_places, params=params) == expected


def test_a_training_shot_dead_ends_in_the_same_bytes(
    toy_places: list[Place], tmp_path: Path
) -> None:
    """kill -9 from inside a separate process, between two checkpoints."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    script = (
        "import os, signal, torch\n"
        "from pathlib import Path\n"
        "from tests.speculators import test_training as t\n"
        "from onboard.speculators.shards import places_of\n"
        f"places = list(places_of(Path({str(toy_places[0].shard)!r}), "
        "[f'doc{i}' for i in range(24)]))\n"
        "shoot = lambda done, total: done == 8 and os.kill(os.getpid(), signal.SIGKILL)\n"
        "t.train(t.fresh(), t.toy_head(), t.VOCABULARY, places, places[:2], t.PARAMS, "
        f"Path({str(cut)!r}), shoot)\n"
    )
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", script], cwd=root, env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    assert (cut / "training.pt").exists()
    assert run(cut, toy_places) == run(whole, toy_places)


def test_an_empty_mask_is_an_error(tmp_path: Path) -> None:
    documents = [toy_document(i) for i in range(4)]
    empty = [replace(d, mask=torch.zeros_like(d.mask)) for d in documents]
    write_shard(tmp_path / "shard.safetensors", empty)
    places = list(places_of(tmp_path / "shard.safetensors", list("abcd")))
    with pytest.raises(InputError, match="mask is empty"):
        run(tmp_path, places)


def hybrid_by_hand(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    overlap = torch.minimum(p, q).sum()
    weight = (-3 * overlap).exp()
    return weight * (p * (p / q).log()).sum() + (1 - weight) * (1 - overlap)


@pytest.mark.parametrize("loss", list(LOSSES))
def test_loss_by_hand(loss: str) -> None:
    """Two documents of different length against a loop over every start and step."""
    draft, head, kept = fresh(), toy_head(), Vocabulary(torch.arange(0, VOCAB, 2), VOCAB)
    draft.lm_head.weight.data = head.output[kept.kept].float()
    by_hand = {
        "forward_kl": lambda p, q: (p * (p / q).log()).sum(),
        "reverse_kl": lambda p, q: (q * (q / p).log()).sum(),
        "lk": lambda p, q: -torch.minimum(p, q).sum().log(),
        "lk_hybrid": hybrid_by_hand,
    }[loss]
    documents = [toy_document(1, 12), toy_document(2, 9)]
    expected = 0.0
    for step in range(3):
        terms = []
        for d in documents:
            hidden = list(draft.unroll(d.ids[None, 1:], d.aux[None, :-1].float(), 3))[step][0]
            for start in range(len(d.ids) - 1 - step):
                if d.mask[start + 1] and d.mask[start + 1 + step]:
                    state = head.normalize(d.last[start + 1 + step])
                    target = (head.output[kept.kept].float() @ state).softmax(-1)
                    guess = (head.output[kept.kept].float() @ draft.norm(hidden[start])).softmax(-1)
                    terms.append(float(by_hand(target, guess).detach()))
        expected += 0.5**step * sum(terms) / len(terms)
    found, _ = judge(documents, kept, draft, step_decay=0.5, loss=loss)
    assert float(found) == pytest.approx(expected, rel=1e-4)


def test_losses_of_two_coins() -> None:
    """p = (3/4, 1/4), q = (1/2, 1/2): they share 3/4, and the KLs are ln(27/16)/4, ln(4/3)/2."""
    p, q = torch.tensor([[0.75, 0.25]]).log(), torch.tensor([[0.5, 0.5]]).log()
    assert float(forward_kl(p, q)) == pytest.approx(math.log(27 / 16) / 4, rel=1e-5)
    assert float(reverse_kl(p, q)) == pytest.approx(math.log(4 / 3) / 2, rel=1e-5)
    assert float(lk(p, q)) == pytest.approx(-math.log(0.75), rel=1e-5)
    weight = math.exp(-2.25)
    hybrid = weight * math.log(27 / 16) / 4 + (1 - weight) / 4
    assert float(lk_hybrid(p, q)) == pytest.approx(hybrid, rel=1e-5)
    for loss in LOSSES.values():
        assert float(loss(p, p)) == pytest.approx(0, abs=1e-6)


def test_padding_changes_no_loss() -> None:
    short, long = toy_document(3, 9), toy_document(4, 24)
    long_unmasked = replace(long, mask=torch.zeros_like(long.mask))
    alone, padded = judge([short]), judge([short, long_unmasked])
    assert float(padded[0]) == pytest.approx(float(alone[0]), rel=1e-5)
    assert torch.allclose(padded[1], alone[1], atol=1e-6)


@pytest.mark.parametrize("row_tokens", [10, 30, 200])
def test_packing_changes_neither_loss_nor_gradient(row_tokens: int) -> None:
    documents = [toy_document(n, length) for n, length in enumerate((9, 24, 12, 17, 8))]
    apart, together = judge(documents), judge(documents, row_tokens=row_tokens)
    assert float(together[0]) == pytest.approx(float(apart[0]), rel=1e-5)
    assert torch.allclose(together[1], apart[1], atol=1e-5)


def test_rows_hold_each_document_once_and_no_more_than_they_may() -> None:
    documents = [toy_document(n % VOCAB, 8 + n % 13) for n in range(40)]
    rows = packed(documents, 40)
    assert sorted(id(d) for row in rows for d in row) == sorted(map(id, documents))
    assert all(sum(len(d.ids) - 1 for d in row) <= 40 for row in rows)
    assert len(rows) < 20
    assert [len(row) for row in packed(documents[:3], 2)] == [1, 1, 1]


def test_batches_go_on_where_they_were() -> None:
    lengths = [5 + i % 11 for i in range(23)]
    order = endless(lengths, 4, 7, 0)
    first = [next(order) for _ in range(20)]
    for step in (0, 3, 6, 13):
        again = endless(lengths, 4, 7, step)
        assert [next(again) for _ in range(20 - step)] == first[step:]


def test_two_processes_lose_what_one_loses(toy_places: list[Place], tmp_path: Path) -> None:
    """Batches of 4 over 24 documents, and a last one that only one process has a part of."""
    write_toy_features(tmp_path / "features", toy_places)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TOY_CONFIG))
    logs = []
    for processes in (1, 2):
        params = PARAMS.model_copy(update={"batch_size": 7, "processes": processes, "epochs": 2})
        work = Work(tmp_path / "features", config, params, Draft(), tmp_path / str(processes))
        fit(work, lambda done, total: None)
        logs.append([json.loads(line) for line in (work.folder / LOG).read_text().splitlines()])
    one, two = logs
    assert [row["tokens"] for row in one] == [row["tokens"] for row in two]
    assert [row["loss"] for row in one] == pytest.approx([row["loss"] for row in two], rel=1e-4)
    assert one[-1]["held_out_length"] == pytest.approx(two[-1]["held_out_length"], abs=0.05)


def test_processes_that_end_badly_say_why(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TOY_CONFIG))
    params = PARAMS.model_copy(update={"processes": 2})
    with pytest.raises(EnvironmentFault, match=r"2 processes ended with 1: .*index\.json"):
        fit(Work(tmp_path, config, params, Draft(), tmp_path / "work"), lambda done, total: None)


def test_an_epoch_visits_every_document_once() -> None:
    lengths = [5 + i % 11 for i in range(103)]
    order = batches(lengths, 4, seed=1, epoch=0)
    assert sorted(i for batch in order for i in batch) == list(range(103))
    assert order == batches(lengths, 4, seed=1, epoch=0)
    assert order != batches(lengths, 4, seed=1, epoch=1)


def test_learning_rate_warms_up_and_falls_to_a_twentieth() -> None:
    params = Speculate(learning_rate=1.0, warmup_steps=10)
    rates = [learning_rate(step, 100, params) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == pytest.approx(0.5 * (1 + math.cos(0.09 * math.pi)))
    assert rates[-1] == pytest.approx(0.05)


def test_walk_by_hand() -> None:
    """Accept one then miss, accept none, accept all three."""
    found = torch.tensor(
        [
            [1, 0, 1],  # one accepted: next start is 2
            [1, 1, 1],
            [0, 1, 1],  # none: next is 3
            [1, 1, 1],  # three: next is 7, past the end
            [1, 1, 0],
            [1, 0, 0],
            [0, 0, 0],
        ]
    ).bool()
    assert walk(found) == [1, 0, 3]


def test_hits_beyond_the_text_count_as_misses() -> None:
    found = hits(fresh(), VOCABULARY, toy_document(1, 10, prompt=4), 3)
    assert found.shape == (6, 3)
    assert not found[5].any()
    assert not found[4, 1:].any()


def test_split_depends_on_ids_alone(toy_places: list[Place]) -> None:
    trained, held_out = split(toy_places)
    assert (len(trained), len(held_out)) == (22, 2)
    again = split(list(reversed(toy_places)))[1]
    assert {p.id for p in again} == {p.id for p in held_out}
    with pytest.raises(InputError, match="1 usable answer"):
        split(toy_places[:1])
