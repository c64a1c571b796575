"""What the page shows, and what it must never hold."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from jinja2 import StrictUndefined

from onboard.pipeline import Run
from onboard.report.facts import gather
from onboard.report.render import _files, page, write_report

MakeRun = Callable[..., Run]
ATTACK = '<script>alert(1)</script><img src=x onerror="alert(2)">'
VOID = {"meta", "br"}


class Page(HTMLParser):
    """Tags, attributes and text of a page; fails on tags that do not nest."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(html.replace("<wbr>", ""))
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def html(run: Run) -> str:
    write_report(run, run.dir / "report")
    return (run.dir / "report" / "index.html").read_text()


def test_every_value_of_a_full_run_is_there(make_run: MakeRun) -> None:
    run = make_run()
    page(gather(run), _files(run), StrictUndefined)  # a typo in a template raises


def test_page_shows_gates_and_headline_figures(make_run: MakeRun) -> None:
    run = make_run()
    text = Page(html(run)).text
    for gate in run.gates:
        assert f"{gate.stage}.{gate.name}" in text
    for figure in ("0.313", "[0.274, 0.356]", "2.13e−5", "0.127", "76.4%", "1.54", "1.61"):
        assert figure in text
    assert "cpu-emulation W4A4" in text
    assert "Pass 20 of 20 gates" in text


def test_page_is_well_formed_and_self_contained(make_run: MakeRun) -> None:
    seen = Page(html(make_run()))
    assert not {"script", "link", "iframe", "img", "object", "embed", "form"} & set(seen.tags)
    names = {name for name, _ in seen.attributes}
    assert not {n for n in names if n.startswith("on")}
    assert not names & {"src", "srcset", "style", "action", "data"}
    assert all(value.startswith("#") for name, value in seen.attributes if name == "href")
    assert "http" not in " ".join(value for name, value in seen.attributes if name != "http-equiv")
    assert seen.tags.count("caption") == seen.tags.count("table") > 5
    assert seen.tags.count("svg") > 5
    assert sum(name == "aria-label" for name, _ in seen.attributes) > seen.tags.count("svg")


def test_policy_allows_only_the_page_s_own_style(make_run: MakeRun) -> None:
    source = html(make_run())
    style = re.search(r"<style>(.*?)</style>", source, re.DOTALL)
    assert style
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'sha256-{digest}'" in source
    assert "url(" not in style[1]
    assert "@import" not in style[1]


def test_model_text_is_escaped_everywhere(make_run: MakeRun) -> None:
    """Case 23: text with a script in samples, probes, tokens, names and reasons."""
    pairs = [[ATTACK, 0.9]]
    run = make_run(
        recipe={"summary": ATTACK, "fidelity": {"gates": {"kl_mean": 0.1}}},
        overrides={"fidelity.kl_mean": ATTACK},
        adopted={"calibrate": ATTACK},
        files={
            "fidelity": {
                "worst.json": [
                    {
                        "kl": 9.0,
                        "domain": ATTACK,
                        "document": "d",
                        "position": 1,
                        "context": ATTACK,
                        "true_token": ATTACK,
                        "source_top": pairs,
                        "candidate_top": pairs,
                    }
                ],
                "domains.json": [
                    {
                        "domain": ATTACK,
                        "documents": 1,
                        "tokens": 1,
                        "kl_mean": 0.1,
                        "kl_mean_lo": 0.1,
                        "kl_mean_hi": 0.1,
                        "top1": 1.0,
                        "ppl_ratio": 1.0,
                    }
                ],
            },
            "smoke": {
                "probes.json": [
                    {
                        "name": ATTACK,
                        "passed": False,
                        "detail": ATTACK,
                        "request": {"prompt": ATTACK},
                        "response": ATTACK,
                        "seconds": 0.1,
                    }
                ],
                "samples.jsonl": [
                    {
                        "id": ATTACK,
                        "domain": ATTACK,
                        "prompt": ATTACK,
                        "plain": ATTACK,
                        "speculative": ATTACK + "!",
                        "sampled": ATTACK,
                        "looped": False,
                        "agreement": "diverged",
                        "gap": 0.4,
                        "position": 2,
                    }
                ],
            },
        },
    )
    source = html(run)
    assert "<script" not in source
    assert "<img" not in source
    assert source.count("&lt;script&gt;") > 10
    Page(source)


def test_hidden_characters_are_spelt_out(make_run: MakeRun) -> None:
    sample = {
        "id": "a",
        "domain": "chat",
        "prompt": "user\u202eresu",  # right-to-left override
        "plain": "a\x00b\x1b[31m",
        "speculative": "half \ud800",  # JSON can hold half a surrogate pair
        "sampled": "",
        "looped": False,
        "agreement": "equal",
        "gap": None,
        "position": None,
    }
    source = html(make_run(files={"smoke": {"samples.jsonl": [sample]}}))
    assert "user⟨202E⟩resu" in source
    assert "a⟨0000⟩b⟨001B⟩[31m" in source
    assert "half ⟨D800⟩" in source


def test_text_with_every_kind_of_line_end(make_run: MakeRun) -> None:
    sample = {"id": "a", "domain": "chat", "prompt": "one\u2028two\x85three", "plain": "x"}
    rows = (json.dumps(sample, ensure_ascii=False) + "\n").encode()
    source = html(make_run(files={"smoke": {"samples.jsonl": rows}}))
    assert "one\u2028two⟨0085⟩three" in source


def test_acceptance_and_speed_are_shown_for_both_kinds_of_answers(make_run: MakeRun) -> None:
    run = make_run()
    source, text = html(run), Page(html(run)).text
    for words in (
        "Ships : the lower 95% bound of its acceptance length is 1.462, above 1; speed was not",
        "1.43 tokens per target step, 95% interval [1.36, 1.51]",
        "permutation test p = 0.417",
        "is 0.100 off in total variation fails this test (p < 0.00100) with probability 0.970",
        "3 tokens drafted at 9.6 MB each and 116.5 MB read per token",
        "11.2 → 9.93",
        "0.887 1.23",
        "1 greedy and 0 sampled ones with the speculator are left out",
    ):
        assert words in text
    chart = r'aria-label="{}.*?</svg>'
    domains = re.search(chart.format("Acceptance length in the engine by domain"), source)
    positions = re.search(chart.format("Share of drafts accepted at each position"), source)
    assert domains
    assert positions
    for chart_, labels in (
        (domains[0], ("code", "code, sampled", "all", "all, sampled")),
        (positions[0], ("token 1", "token 1, sampled", "token 3, sampled")),
    ):
        for label in labels:
            assert f">{label}</text>" in chart_
    assert domains[0].index(">chat, sampled<") < domains[0].index(">code<")


def test_what_a_draft_learned_and_a_sweep_tried_are_shown(make_run: MakeRun) -> None:
    run = make_run()
    page = html(run)
    assert "Estimated acceptance length by tokens trained on" in page
    table = page[page.index("<h3>Sweep</h3>") :]
    table = table[: table.index("</table>")]
    assert '<th scope="col">window</th>' in table
    assert '<th scope="col">layers</th>' not in table, "all drafts have the same"
    assert table.index('class="chosen"') < table.index("all") < table.index("512")


def test_a_speculator_that_stays_out_is_in_the_first_lines(make_run: MakeRun) -> None:
    reason = "the lower 95% bound of its acceptance length is 1, not above 1"
    decision = {"ships": False, "reasons": [reason], "criteria": []}
    run = make_run(files={"smoke": {"ship.json": decision}})
    text = Page(html(run)).text
    assert f"The bundle ships without the speculator: {reason}." in text
    assert f"Stays out : {reason}" in text
    assert gather(run)["speculator"] == decision
    assert "ships without" not in Page(html(make_run())).text


def test_acceptance_without_any_healthy_answer(make_run: MakeRun) -> None:
    nothing = {"prompts": 0, "domains": [], "positions": [], "looped": ["a"]}
    acceptance = {"greedy": nothing, "sampled": nothing}
    run = make_run(files={"smoke": {"acceptance.json": acceptance, "sampling.json": None}})
    facts = gather(run)
    for name in list(facts["metrics"]):
        if name.startswith("acceptance_"):
            del facts["metrics"][name]
    source = page(facts, _files(run))
    assert "not measured in the engine" in source
    assert "permutation test" not in source


CHOICE = ("ladder.json", "allocation.json", "distillation.json")


def test_the_choice_of_the_rounding_is_shown(make_run: MakeRun) -> None:
    text = Page(html(make_run())).text
    for words in (
        "How the weights were rounded",
        "QAD, chosen",
        "target 0.0500",
        "25 min 04 s · 116.5 MB",
        "6 bits per weight, scales included",
        "chosen: 5.82 bits per weight",
        "NVFP4 42.5% of the weights",
        "lm_head in BF16",
        "the choice was not better on held-out documents with them",
        "2 swaps tried on the measured joint KL, 1 kept",
        "0.0621 → 0.0487",
        "held-out KL fell no further, after 320 steps",
    ):
        assert words in text


@pytest.mark.parametrize("kept", CHOICE)
def test_each_part_of_the_choice_stands_alone(make_run: MakeRun, kept: str) -> None:
    run = make_run(files={"quantize": {name: None for name in CHOICE if name != kept}})
    source = page(gather(run), _files(run), StrictUndefined)
    headings = {"ladder.json": "Ladder of methods", "allocation.json": "Formats under a budget"}
    for name in CHOICE:
        heading = headings.get(name, "<h3>Distillation")
        assert (heading in source) == (name == kept)
    assert list(gather(run)["rounding"]) == [kept.removesuffix(".json")]


def test_nothing_is_said_of_a_choice_that_was_not_made(make_run: MakeRun) -> None:
    run = make_run(files={"quantize": dict.fromkeys(CHOICE)})
    source = html(run)
    assert "How the weights were rounded" not in source
    assert "#rounding" not in source
    assert gather(run)["rounding"] == {}


def test_names_in_the_choice_are_escaped(make_run: MakeRun) -> None:
    group = {
        "name": ATTACK,
        "modules": [f"model.layers.0.{ATTACK}.q_proj"],
        "parameters": 1,
        "format": ATTACK,
        "kl": {ATTACK: 0.1},
    }
    allocation = {
        "limit": {"name": "kl_max", "value": 0.1},
        "groups": [group, {**group, "modules": [ATTACK]}],
        "swaps": [
            {"up": [ATTACK], "down": ATTACK, "kl_before": 1, "kl_after": None, "accepted": False}
        ],
    }
    rung = {"method": ATTACK, "kl": 0.1, "chosen": True}
    files = {"allocation.json": allocation, "ladder.json": {"rungs": [rung], "documents": 2}}
    source = html(make_run(files={"quantize": files}))
    assert "<script" not in source
    assert "<img" not in source
    Page(source)


def test_an_fp8_cache_is_named_where_it_was_measured(make_run: MakeRun) -> None:
    run = make_run()
    words = "FP8 KV cache included: what attention reads"
    assert words in Page(html(run)).text
    facts = gather(run)
    facts["metrics"].pop("kv_cache_fp8")
    assert "FP8 KV cache" not in page(facts, _files(run), StrictUndefined)


def test_failed_run_names_the_gate_and_what_did_not_run(failed_run: Run) -> None:
    text = Page(html(failed_run)).text
    assert "Fail fidelity.kl_mean is 0.3127; the limit is ≤ 0.0001." in text
    assert "Speculator not run: needs features." in text
    assert "Engine not run: needs speculate." in text
    assert "✗ failed" in text


def test_overrides_and_adoptions_are_printed(make_run: MakeRun) -> None:
    run = make_run(
        recipe={"fidelity": {"gates": {"kl_mean": 0.3}}},
        overrides={"fidelity.kl_mean": "release board, 28 November"},
        adopted={"calibrate": "only a log message changed"},
    )
    assert run.passed
    text = Page(html(run)).text
    assert "Pass, with 1 override" in text
    assert text.count("release board, 28 November") == 2  # banner and gate table
    assert "only a log message changed" in text


def test_failed_probe_is_shown_with_request_and_response(make_run: MakeRun) -> None:
    probe = {
        "name": "json_schema",
        "passed": False,
        "detail": "'age' is a required property",
        "request": {"messages": [{"role": "user", "content": "Describe Ada"}]},
        "response": {"choices": [{"message": {"content": '{"name": "Ada"}'}}]},
        "seconds": 2.0,
    }
    run = make_run(
        files={"smoke": {"probes.json": [probe]}}, metrics={"smoke": {"probes_failed": 1}}
    )
    text = Page(html(run)).text
    assert "'age' is a required property" in text
    assert "Describe Ada" in text
    assert '\\"name\\": \\"Ada\\"' in text


@pytest.mark.parametrize("stage", ["adapt", "quantize", "fidelity", "speculate", "smoke"])
def test_report_is_written_whatever_is_missing(make_run: MakeRun, stage: str) -> None:
    Page(html(make_run(skipped={stage: "needs something"})))


def test_report_is_written_without_any_artifact(tmp_path: Path, make_run: MakeRun) -> None:
    run = make_run()
    run.artifacts.clear()
    run.gates.clear()
    run.outcomes.clear()
    assert "not part of this run" in html(run)


def test_report_json_holds_the_facts(make_run: MakeRun) -> None:
    run = make_run()
    html(run)
    facts = json.loads((run.dir / "report" / "report.json").read_text())
    assert facts["verdict"] == "pass"
    assert facts["metrics"]["kl_mean"] == 0.3127
    assert [rung["method"] for rung in facts["rounding"]["ladder"]["rungs"]][-1] == "qad"
    assert facts["rounding"]["allocation"]["groups"][0]["modules"] == 3  # how many, not which
    assert facts["rounding"]["distillation"]["kl_after"] == 0.0487
    assert len(facts["gates"]) == len(run.gates)
    assert facts["provenance"]["engine"]["mode"] == "cpu-emulation W4A4"
    assert facts["provenance"]["seeds"] == {"data": 0, "fidelity": 0, "speculate": 0}
    assert {d["licence"] for d in facts["provenance"]["data"]} >= {"MIT", "Apache-2.0"}


def test_two_reports_of_one_run_are_equal(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    for name in ("one", "two"):
        write_report(run, tmp_path / name)
    for name in ("index.html", "report.json", "junit.xml"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
