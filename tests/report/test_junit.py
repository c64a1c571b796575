"""junit.xml: one case per gate, per probe and per stage, parsed as a CI server would."""

from __future__ import annotations

from collections.abc import Callable
from xml.etree import ElementTree

from onboard.pipeline import Run
from onboard.report.render import write_report

MakeRun = Callable[..., Run]


def suites(run: Run) -> dict[str, ElementTree.Element]:
    write_report(run, run.dir / "report")
    root = ElementTree.parse(run.dir / "report" / "junit.xml").getroot()
    assert root.tag == "testsuites"
    assert int(root.attrib["tests"]) == len(list(root.iter("testcase")))
    return {suite.attrib["name"]: suite for suite in root}


def counts(suite: ElementTree.Element) -> tuple[int, int, int]:
    return tuple(int(suite.attrib[name]) for name in ("tests", "failures", "skipped"))  # type: ignore[return-value]


def test_counts_of_a_run_that_passed(make_run: MakeRun) -> None:
    run = make_run()
    found = suites(run)
    assert counts(found["gates"]) == (len(run.gates), 0, 0)
    assert counts(found["probes"]) == (6, 0, 0)
    assert counts(found["stages"]) == (9, 0, 0)


def test_counts_of_a_run_that_failed(failed_run: Run) -> None:
    found = suites(failed_run)
    assert counts(found["gates"]) == (len(failed_run.gates), 1, 0)
    assert counts(found["probes"]) == (0, 0, 0)
    assert counts(found["stages"]) == (9, 0, 3)
    failure = found["gates"].find("testcase/failure")
    assert failure is not None
    assert failure.attrib["message"] == "kl_mean = 0.3127, limit ≤ 0.0001"
    skipped = found["stages"].find("testcase[@name='features']/skipped")
    assert skipped is not None
    assert skipped.attrib["message"] == "gate fidelity.kl_mean failed"


def test_override_passes_with_its_reason(make_run: MakeRun) -> None:
    run = make_run(
        recipe={"fidelity": {"gates": {"kl_mean": 0.3}}},
        overrides={"fidelity.kl_mean": "release board"},
    )
    gates = suites(run)["gates"]
    assert counts(gates) == (len(run.gates), 0, 0)
    note = gates.find("testcase[@name='kl_mean']/system-out")
    assert note is not None
    assert note.text == "kl_mean = 0.3127, limit ≤ 0.3; overridden: release board"


def test_failed_probe_with_characters_that_xml_cannot_hold(make_run: MakeRun) -> None:
    probe = {
        "name": "chat",
        "passed": False,
        "detail": "empty body \x00\x1b \ud800 <&>",
        "request": {},
        "response": "",
        "seconds": 1.0,
    }
    probes = suites(make_run(files={"smoke": {"probes.json": [probe]}}))["probes"]
    assert counts(probes) == (1, 1, 0)
    failure = probes.find("testcase/failure")
    assert failure is not None
    assert failure.attrib["message"] == "empty body \ufffd\ufffd \ufffd <&>"
