"""The smoke stage on recorded answers: agreement, loops, acceptance, resume."""

import json
from pathlib import Path
from typing import Any

import pytest

from onboard.engines import server
from onboard.errors import EnvironmentFault, InputError
from onboard.evals import smoke
from onboard.recipe import Smoke

PROMPT = {"id": "p", "domain": "chat", "messages": [{"role": "user", "content": "Hi"}], "ids": [1]}


def answer(ids: list[int], loop: str | None = None, histogram: Any = (2, 1)) -> dict[str, Any]:
    return {
        "ids": ids,
        "text": str(ids),
        "candidates": [{str(i): -0.5, "99": -0.6} for i in ids],
        "histogram": list(histogram),
        "loop": loop,
    }


def row(plain: list[int], fast: list[int], loop: str | None = None, **more: Any) -> dict[str, Any]:
    return smoke.sample(PROMPT, answer(plain), answer(plain), answer(fast, loop, **more))


def phase(rows: int) -> dict[str, Any]:
    probe = {"passed": True}
    return {"probes": [probe, probe], "greedy": [answer([1, 2, 3])] * rows, "seconds": 2.0}


def test_numbers_of_a_small_run() -> None:
    samples = [
        row([1, 2, 3], [1, 2, 3]),
        row([1, 2, 3], [1, 99, 4]),  # 0.1 nats behind
        row([1, 2, 3], [1, 2, 4]),  # out of nowhere
        row([7, 7, 7], [7, 7, 7], loop="token 7", histogram=[0, 9]),
    ]
    found = smoke.metrics(phase(4), phase(4), samples)
    assert [s["agreement"] for s in samples] == ["equal", "near-tie", "diverged", "equal"]
    assert samples[1]["position"] == 1
    assert samples[1]["gap"] == pytest.approx(0.1)
    assert found["divergences"] == 1
    assert found["exempt"] == 1
    assert found["near_tie_share"] == 0.25
    assert found["looped_excluded"] == 1
    # The looping answer accepted everything; without it, one of three drafts was accepted.
    assert found["acceptance_length"] == pytest.approx(4 / 3)
    assert found["acceptance_rate_0"] == pytest.approx(1 / 3)
    assert found["tokens_per_s"] == 6.0
    assert found["probes_failed"] == 0


def test_where_everything_loops_there_is_no_acceptance_to_pass_a_gate() -> None:
    found = smoke.metrics(phase(1), phase(1), [row([7], [7], loop="token 7")])
    assert "acceptance_length" not in found
    assert found["looped_excluded"] == 1


def test_long_prompts_are_left_out_with_a_word(bench: Any) -> None:
    rows = [{**PROMPT, "ids": [1] * n} for n in (10, 64, 65)]
    bench.put("data", evaluation_prompts__jsonl=rows)
    job = bench.job("smoke", Smoke(max_model_len=96, max_tokens=32))
    assert [len(r["ids"]) for r in smoke.usable_prompts(job)] == [10, 64]
    assert bench.warnings == ["1 evaluation prompts are longer than 64 tokens"]


def test_no_prompt_fits(bench: Any) -> None:
    bench.put("data", evaluation_prompts__jsonl=[{**PROMPT, "ids": [1] * 99}])
    with pytest.raises(InputError, match=r"none of the 1 evaluation prompts.*max_model_len = 96"):
        smoke.usable_prompts(bench.job("smoke", Smoke(max_model_len=96, max_tokens=32)))


def test_a_finished_phase_is_not_measured_again(bench: Any) -> None:
    job = bench.job("smoke", Smoke())
    (job.scratch / "plain.json").write_text(json.dumps({"seconds": 1.0}))

    def never(speculative: bool) -> server.Launch:
        raise AssertionError("the engine was started again")

    assert smoke.phase(job, "plain", never, lambda client: {}) == {"seconds": 1.0}


class Recorded:
    """What a server answered, in the order asked."""

    def __init__(self, metrics: list[str]) -> None:
        self.metrics = metrics

    def get(self, path: str) -> str:
        assert path == "/metrics"
        return self.metrics.pop(0)


COUNTERS = """\
vllm:spec_decode_num_drafts_total{{engine="0"}} {drafts}
vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}
"""


@pytest.mark.parametrize(
    ("drafts", "accepted", "complaint"),
    [(0, 0, "never drafted a token"), (9, 1, "counts 9 drafts.*its answers count 3 and 1")],
)
def test_a_speculator_that_does_nothing_or_miscounts(
    bench: Any, monkeypatch: pytest.MonkeyPatch, drafts: int, accepted: int, complaint: str
) -> None:
    monkeypatch.setattr(smoke, "answer", lambda *args: ([answer([1, 2])], 1.0))
    before = COUNTERS.format(drafts=5, accepted=2)
    after = COUNTERS.format(drafts=5 + drafts, accepted=2 + accepted)
    with pytest.raises(EnvironmentFault, match=complaint):
        smoke.measure_speculative(
            bench.job("smoke", Smoke()),
            Recorded([before, after]),  # type: ignore[arg-type]
            [PROMPT],
        )


def test_the_bundle_is_laid_out_once(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def assemble(quantize: Any, source: Any, destination: Path) -> None:
        destination.mkdir(parents=True)
        (destination / "config.json").write_text("{}")

    monkeypatch.setattr(smoke, "assemble", assemble)
    for stage in ("quantize", "source", "speculate"):
        bench.put(stage)
    job = bench.job("smoke", Smoke())
    (job.scratch / "bundle.tmp" / "checkpoint").mkdir(parents=True)  # an interrupted earlier run
    bundle = smoke.lay_out(job)
    assert (bundle / "checkpoint" / "config.json").read_text() == "{}"
    assert (bundle / "speculator" / "vllm").readlink() == bench.artifacts["speculate"].path / "vllm"
    monkeypatch.setattr(smoke, "assemble", None)
    assert smoke.lay_out(job) == bundle
