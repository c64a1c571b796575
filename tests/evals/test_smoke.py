"""The smoke stage on recorded answers: agreement, loops, acceptance, speed, decision, resume."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from onboard.engines import server
from onboard.engines.client import Exchange
from onboard.engines.environment import Engine
from onboard.errors import EnvironmentFault, InputError
from onboard.evals import results, smoke
from onboard.recipe import Smoke

PROMPT = {"id": "p", "domain": "chat", "messages": [{"role": "user", "content": "Hi"}], "ids": [1]}


def answer(ids: list[int], loop: str | None = None, histogram: Any = (2, 1)) -> dict[str, Any]:
    return {
        "ids": ids,
        "text": str(ids),
        "seconds": 0.5,
        "candidates": [{str(i): -0.5, "99": -0.6} for i in ids],
        "histogram": list(histogram),
        "loop": loop,
    }


def row(plain: list[int], fast: list[int], loop: str | None = None, **more: Any) -> dict[str, Any]:
    fast_answer = answer(fast, loop, **more)
    return results.sample(PROMPT, answer(plain), answer(plain), fast_answer, fast_answer)


def phase(rows: int) -> dict[str, Any]:
    probe = {"passed": True}
    said = answer([1, 2, 3])
    again = [said["candidates"][:-1]] * rows
    return {"probes": [probe, probe], "greedy": [said] * rows, "seconds": 2.0, "again": again}


def test_numbers_of_a_small_run() -> None:
    samples = [
        row([1, 2, 3], [1, 2, 3]),
        row([1, 2, 3], [1, 99, 4]),  # 0.1 nats behind
        row([1, 2, 3], [1, 2, 4]),  # out of nowhere
        row([7, 7, 7], [7, 7, 7], loop="token 7", histogram=[0, 9]),
    ]
    found = results.metrics(phase(4), phase(4), samples)
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
    found = results.metrics(phase(1), phase(1), [row([7], [7], loop="token 7")])
    assert "acceptance_length" not in found
    assert found["looped_excluded"] == 1
    assert found["looped_excluded_sampled"] == 1


def test_the_users_own_traffic_is_counted_and_not_shown() -> None:
    said = {**answer([1, 2], loop="word 'secret' 4 times in a row"), "text": "a secret"}
    prompt = {**PROMPT, "messages": [{"role": "user", "content": "my secret"}]}
    shown = results.sample(prompt, said, said, said, said)
    private = results.sample({**prompt, "private": True}, said, said, said, said)
    assert "secret" in shown["prompt"]
    assert "secret" not in json.dumps(private)
    assert private["looped"]
    counted = [results.metrics(phase(1), phase(1), [row]) for row in (shown, private)]
    assert counted[0] == counted[1]


def test_a_probe_shows_no_private_prompt(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    probed: list[Any] = []
    monkeypatch.setattr(smoke.probes, "probes", lambda model, ids, tools: probed.append(ids))
    monkeypatch.setattr(smoke.probes, "ask", lambda *args: [])
    monkeypatch.setattr(smoke, "answer", lambda *args, **kwargs: ([], 1.0))
    monkeypatch.setattr(smoke, "paces", lambda *args: [])
    monkeypatch.setattr(smoke.answers, "read_again", lambda *args: [])
    secret = {**PROMPT, "ids": [7, 7], "private": True}
    for prompts in ([secret, PROMPT], [secret]):
        smoke.measure_plain(bench.job("smoke", Smoke(), again=True), None, prompts)  # type: ignore[arg-type]
    assert probed == [PROMPT["ids"], smoke.NEUTRAL]


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
        smoke.measure_drafting(
            bench.job("smoke", Smoke()),
            Recorded([before, after]),  # type: ignore[arg-type]
            "speculative",
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


class Scripted:
    """An engine of recorded answers: two tokens each, and with the speculator one draft of three.

    `asked` keeps what was sent, and how much at once.
    """

    def __init__(self, speculative: bool) -> None:
        self.speculative = speculative
        self.drafts = 7  # of before
        self.asked: list[tuple[dict[str, Any], int]] = []

    def get(self, path: str) -> str:
        assert path == "/metrics"
        return COUNTERS.format(drafts=self.drafts, accepted=2 * self.drafts)

    def post(self, path: str, request: dict[str, Any]) -> Exchange:
        assert path == "/detokenize"
        return Exchange(path, request, 200, json.dumps({"prompt": f"t{request['tokens'][0]}"}), 0.1)

    def post_all(
        self,
        path: str,
        requests: Sequence[dict[str, Any]],
        concurrency: int,
        finished: Callable[[int], None],
    ) -> list[Exchange]:
        assert path == "/v1/completions"
        self.asked += [(request, concurrency) for request in requests]
        finished(len(requests))
        return [self.answer(path, request) for request in requests]

    def answer(self, path: str, request: dict[str, Any]) -> Exchange:
        choice: dict[str, Any] = {"token_ids": [5, 6], "text": "five six", "logprobs": None}
        if "logprobs" in request:
            likely = [{f"token_id:{token}": -0.1} for token in (5, 6)]
            choice["logprobs"] = {"top_logprobs": likely}
        if "prompt_logprobs" in request:
            seen = [{str(token): {"logprob": -0.1}} for token in request["prompt"][1:]]
            choice["prompt_logprobs"] = [None, *seen]
        body: dict[str, Any] = {"choices": [choice]}
        if self.speculative:
            self.drafts += 1
            counts = {"acceptance_histogram": [0, 0, 1, 0]}
            body["metrics"] = {"speculative_decoding": counts}
        return Exchange(path, request, 200, json.dumps(body), 0.25)


PROMPTS = [{**PROMPT, "id": f"p{i}", "ids": [i]} for i in range(3)]
PARAMS = Smoke(max_num_seqs=4, concurrencies=(1, 4), sampling_checks=2)


@pytest.fixture
def measured(bench: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, Any, Any]:
    """Return what both phases measured of scripted engines, and the engines."""
    monkeypatch.setattr(smoke.sampling, "ANSWERS", 3)
    monkeypatch.setattr(smoke.probes, "ask", lambda *args: [{"passed": True}])
    job = bench.job("smoke", PARAMS)
    engines = Scripted(False), Scripted(True)
    plain = smoke.measure_plain(job, engines[0], PROMPTS)  # type: ignore[arg-type]
    fast = smoke.measure_drafting(job, engines[1], "speculative", PROMPTS)  # type: ignore[arg-type]
    return plain, fast, *engines


def test_both_kinds_of_answers_come_with_their_drafts(measured: Any) -> None:
    _, fast, _, _ = measured
    for kind in ("greedy", "sampled"):
        assert [row["histogram"] for row in fast[kind]] == [[0, 0, 1, 0]] * 3
        assert [row["loop"] for row in fast[kind]] == [None] * 3


def test_both_engines_sample_the_same_prompts(measured: Any) -> None:
    _, _, *engines = measured
    sampled = [
        [r["prompt"] for r, _ in e.asked if r["temperature"] and "logprobs" in r] for e in engines
    ]
    assert sampled[0] == sampled[1] == [[0], [1], [2]]


def test_no_request_has_a_seed(measured: Any) -> None:
    """vLLM's CPU engine dies of one where a prompt is read in parts."""
    _, _, *engines = measured
    assert not [r for engine in engines for r, _ in engine.asked if "seed" in r]


def test_the_plain_engine_reads_its_own_answers_again(measured: Any) -> None:
    plain, _, engine, other = measured
    again = [r["prompt"] for r, _ in engine.asked if "prompt_logprobs" in r]
    assert again == [[0, 5], [1, 5], [2, 5]]  # not their last tokens
    assert plain["again"] == [[{"5": -0.1}]] * 3
    assert not [r for r, _ in other.asked if "prompt_logprobs" in r]


def test_what_the_engine_itself_would_change_is_no_fault_of_speculation() -> None:
    """With 4-bit inputs an answer alone and in a batch differ by tokens 0.9 nats behind."""
    said = {**answer([1, 2, 3]), "candidates": [{"1": -0.1}, {"2": -0.2, "7": -1.1}, {"3": -0.1}]}
    again = [{"1": -0.1}, {"2": -0.9, "7": -0.8}]
    plain = {**phase(2), "greedy": [said] * 2, "sampled": [said] * 2, "again": [again] * 2}
    fast = {**phase(2), "greedy": [answer([1, 7, 4]), said], "sampled": [said] * 2}
    samples = results.samples_of([PROMPT] * 2, plain, fast)
    found = results.metrics(plain, fast, samples)
    assert (found["divergences"], found["exempt"], found["changed_unaided"]) == (0, 1, 2)
    assert found["noise_nats"] == pytest.approx(1.0)
    assert found["near_tie_share"] == 0
    steady = {**plain, "again": [said["candidates"][:2]] * 2}
    samples = results.samples_of([PROMPT] * 2, steady, fast)
    assert results.metrics(steady, fast, samples)["divergences"] == 1


def test_every_concurrency_is_timed_on_greedy_answers(measured: Any) -> None:
    plain, fast, *engines = measured
    for engine in engines:
        greedy = [r for r in engine.asked if not r[0]["temperature"] and r[0]["max_tokens"] > 1]
        widths = [width for _, width in greedy]
        assert widths.count(1) == 6
        assert widths.count(4) == 16 + 3 + (1 if engine.speculative else 0)  # main, warm-up
    for side in (plain, fast):
        assert [row["concurrency"] for row in side["paces"]] == [1, 4]
        assert [row["answers"] for row in side["paces"]] == [6, 16]
        assert [row["seconds_per_token"] for row in side["paces"]] == [0.125, 0.125]


def test_an_answer_that_the_engine_refused(bench: Any) -> None:
    class Refusing(Scripted):
        def answer(self, path: str, request: dict[str, Any]) -> Exchange:
            return Exchange(path, request, 500, "out of memory", 0.1)

    engine: Any = Refusing(False)
    with pytest.raises(EnvironmentFault, match=r"failed on an evaluation prompt.*out of memory"):
        smoke.answer(bench.job("smoke", PARAMS), engine, PROMPTS, "plain: greedy")


def test_checks_of_sampling(measured: Any) -> None:
    plain, fast, *engines = measured
    checked = [
        [r for r, _ in engine.asked if r["temperature"] and "logprobs" not in r]
        for engine in engines
    ]
    assert [len(requests) for requests in checked] == [6, 6]
    assert plain["first_tokens"] == fast["first_tokens"] == [[[5, 6, -1, -1]] * 3] * 2


def tensors(path: Path, **shapes: Sequence[int]) -> None:
    """Write a safetensors file of bf16 zeros; `__` in a name is a dot."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * shape[0] * shape[1]
        header[name.replace("__", ".")] = {
            "dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end],
        }  # fmt: skip
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


@pytest.fixture
def writing(measured: Any, bench: Any) -> Any:
    """Return a function that writes what was measured, the MTP phase's row with it, if any."""
    plain, fast, _, _ = measured
    for side in (plain, fast):
        side |= {"modes": ["cpu-emulation"], "threads": "1", "startup_seconds": 1.0}
    roles = {"embed": "embed", "mlp": "mlp"}
    adaptation = {
        "tensors": {f"{name}.weight": {"role": role} for name, role in roles.items()},
        "experts": None,
    }
    bench.put("adapt", adaptation__json=adaptation)
    for stage in ("quantize", "speculate"):
        bench.put(stage)
    target = bench.artifacts["quantize"].path / "checkpoint" / "model.safetensors"
    tensors(target, embed__weight=(10, 4), mlp__weight=(30, 4))
    draft = bench.artifacts["speculate"].path / "vllm" / "model.safetensors"
    tensors(draft, embed_tokens__weight=(10, 4), fc__weight=(8, 4))
    (draft.parent / "config.json").write_text('{"speculators_model_type": "eagle3"}')
    engine = Engine("vllm", "0.32.0", Path("python"))
    served = results.Served(engine, {}, {"plain": ["a"], "speculative": ["b"], "mtp": ["c"]})

    def write(mtp: dict[str, Any] | None = None) -> Path:
        job = bench.job("smoke", PARAMS, again=True)
        phases = {"plain": plain, "speculative": fast} | ({} if mtp is None else {"mtp": mtp})
        results.write(job, served, phases, PROMPTS)
        return Path(job.out)

    return write


def test_what_the_stage_writes(writing: Any) -> None:
    out = writing()
    found = json.loads((out / "metrics.json").read_text())
    assert found["acceptance_length"] == found["acceptance_length_sampled"] == 3.0
    # 3 tokens a step; drafting one reads 64 bytes of 320 (the embedding is the output head too).
    assert found["speedup_expected_1"] == found["speedup_expected_4"] == pytest.approx(3 / 1.6)
    assert found["sampling_p_value"] == 1.0
    assert found["sampling_power"] == 0.0  # three answers of one mind show nothing
    assert all(isinstance(value, int | float) for value in found.values())
    ship = json.loads((out / "ship.json").read_text())
    assert ship["ships"] is True
    assert ship["use"] == "speculative"
    assert [criterion["met"] for criterion in ship["criteria"]] == [True, None]
    timed = json.loads((out / "speed.json").read_text())
    assert (timed["draft_bytes"], timed["target_bytes"], timed["drafted"]) == (64, 320, 3)
    facts = json.loads((out / "engine.json").read_text())
    assert set(facts["commands"]) == {"plain", "speculative"}
    rows = (out / "samples.jsonl").read_text().splitlines()
    assert json.loads(rows[0])["drafts_sampled"] == [0, 0, 1, 0]
    assert not (out / "mtp.json").exists()


@pytest.mark.parametrize(
    ("histogram", "length", "use"), [((0, 0, 0, 1), 4.0, "mtp"), ((0, 1, 0, 0), 2.0, "speculative")]
)
def test_mtp_layers_are_measured_beside_the_head(
    measured: Any, writing: Any, histogram: tuple[int, ...], length: float, use: str
) -> None:
    _, fast, _, _ = measured
    rows = {
        kind: [{**row, "histogram": list(histogram)} for row in fast[kind]]
        for kind in ("greedy", "sampled")
    }
    own = {**fast, **rows, "modes": ["cpu-emulation"], "threads": "1", "startup_seconds": 1.0}
    out = writing(own)
    found = json.loads((out / "metrics.json").read_text())
    assert found["mtp_acceptance_length"] == length
    assert found["mtp_divergences"] == 0
    content = json.loads((out / "mtp.json").read_text())
    gap = 3.0 - length
    assert content["head_longer"] == {"value": gap, "lo": gap, "hi": gap, "prompts": 3}
    assert [row["concurrency"] for row in content["speed"]] == [1, 4]
    ship = json.loads((out / "ship.json").read_text())
    assert (ship["ships"], ship["mtp"]["ships"], ship["use"]) == (True, True, use)
    assert "mtp" in json.loads((out / "engine.json").read_text())["commands"]


def test_mtp_layers_that_the_engine_cannot_run_are_a_result(writing: Any) -> None:
    out = writing({"failed": "NotImplementedError: not here"})
    assert json.loads((out / "mtp.json").read_text()) == {"failed": "NotImplementedError: not here"}
    ship = json.loads((out / "ship.json").read_text())
    assert ship["mtp"]["reasons"] == ["the engine does not run it: NotImplementedError: not here"]
    assert (ship["mtp"]["ships"], ship["use"]) == (False, "speculative")
    assert "mtp" not in json.loads((out / "engine.json").read_text())["commands"]
    assert "mtp_divergences" not in json.loads((out / "metrics.json").read_text())


def test_a_phase_that_fails_is_told(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> None:
        raise EnvironmentFault("the engine ended\nTraceback: much more")

    monkeypatch.setattr(smoke, "phase", fails)
    found = smoke.attempt(bench.job("smoke", PARAMS), "mtp", fails, fails)  # type: ignore[arg-type]
    assert found == {"failed": "the engine ended"}
    assert bench.warnings == ["the engine does not run the model's MTP layers: the engine ended"]
