from __future__ import annotations

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

from onboard.errors import InputError
from onboard.recipe import Speculate
from onboard.speculators.acceptance import hits, replay, walk
from onboard.speculators.eagle3 import DraftConfig, Eagle3
from onboard.speculators.shards import Place, split
from onboard.speculators.training import Batch, batches, learning_rate, train, ttt_loss
from onboard.speculators.vocabulary import Vocabulary

from .conftest import TOY_CONFIG, VOCAB, toy_document, toy_head

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


def run(scratch: Path, places: list[Place], die_at: int | None = None) -> Any:
    draft = fresh()

    def progress(done: int, total: int) -> None:
        if done == die_at:
            raise Killed

    log = train(draft, toy_head(), VOCABULARY, places, PARAMS, scratch, progress)
    return state_bytes(draft), log


def test_training_learns_a_target_that_can_be_learned(toy_places: list[Place]) -> None:
    trained, held_out = split(toy_places)
    draft, params = fresh(), PARAMS.model_copy(update={"epochs": 15, "learning_rate": 1e-2})
    before = replay(draft, VOCABULARY, held_out, 3)
    scratch = toy_places[0].shard.parent
    log = train(draft, toy_head(), VOCABULARY, trained, params, scratch, lambda done, total: None)
    after = replay(draft, VOCABULARY, held_out, 3)
    assert log[-1]["loss"] < log[0]["loss"] / 2
    uniform = math.log(VOCAB) * (1 + 0.8 + 0.64)  # of a target that is sure, over three steps
    assert log[-1]["loss"] < uniform / 2
    assert after.length > max(2.5, before.length)
    assert after.accepted == sorted(after.accepted, reverse=True)


@pytest.mark.parametrize("die_at", [3, 5, 13])
def test_an_interrupted_training_ends_in_the_same_bytes(
    toy_places: list[Place], tmp_path: Path, die_at: int
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    expected = run(whole, toy_places)
    with pytest.raises(Killed):
        run(cut, toy_places, die_at)
    assert run(cut, toy_places) == expected


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
        f"t.train(t.fresh(), t.toy_head(), t.VOCABULARY, places, t.PARAMS, Path({str(cut)!r}), "
        "shoot)\n"
    )
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", script], cwd=root, env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    assert (cut / "training.pt").exists()
    assert run(cut, toy_places) == run(whole, toy_places)


def test_an_empty_mask_is_an_error() -> None:
    document = toy_document(1)
    empty = replace(document, mask=torch.zeros_like(document.mask))
    with pytest.raises(InputError, match="mask is empty"):
        ttt_loss(fresh(), toy_head(), VOCABULARY, Batch.of([empty], "cpu"), 3, 0.8)


def test_loss_by_hand() -> None:
    """Two documents of different length against a loop over every start and step."""
    draft, head, kept = fresh(), toy_head(), Vocabulary(torch.arange(0, VOCAB, 2), VOCAB)
    draft.lm_head.weight.data = head.output[kept.kept].float()
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
                    terms.append(float((target * (target / guess).log()).sum().detach()))
        expected += 0.5**step * sum(terms) / len(terms)
    loss = ttt_loss(draft, head, kept, Batch.of(documents, "cpu"), 3, 0.5)
    assert float(loss.value.detach()) == pytest.approx(expected, rel=1e-4)


def test_padding_changes_no_loss() -> None:
    short, long = toy_document(3, 9), toy_document(4, 24)
    junk = Batch.of([short, long], "cpu")
    alone = ttt_loss(fresh(), toy_head(), VOCABULARY, Batch.of([short], "cpu"), 3, 0.8)
    long_unmasked = replace(junk, mask=torch.stack((junk.mask[0], torch.zeros(23).bool())))
    padded = ttt_loss(fresh(), toy_head(), VOCABULARY, long_unmasked, 3, 0.8)
    assert float(padded.value.detach()) == pytest.approx(float(alone.value.detach()), rel=1e-5)


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
