"""The verdict for a CI server: one JUnit test case per gate, per probe and per skipped stage."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

from onboard.report.formats import limit, number

# Everything that XML 1.0 cannot hold, even escaped.
FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(facts: Mapping[str, Any], probes: Sequence[Mapping[str, Any]]) -> str:
    """Return the XML of `facts` (see `facts.gather`) and of the engine probes.

    A failed gate is a failure, an overridden one passes with the reason in `system-out`, a stage
    that did not run is skipped.
    """
    root = ElementTree.Element("testsuites", name=f"onboard {_clean(facts['name'])}")
    gates = _suite(root, "gates")
    for gate in facts["gates"]:
        _gate(gates, gate)
    engine = _suite(root, "probes")
    for probe in probes:
        case = _case(engine, "probe", probe["name"], probe.get("seconds"))
        if not probe["passed"]:
            detail = _clean(str(probe.get("detail") or "failed"))
            ElementTree.SubElement(case, "failure", message=detail)
    stages = _suite(root, "stages")
    for stage in facts["stages"]:
        case = _case(stages, "stage", stage["stage"], stage["seconds"])
        if stage["status"] == "skipped":
            ElementTree.SubElement(case, "skipped", message=_clean(stage["reason"] or "not run"))
    for suite in root:
        _count(suite)
    _count(root)
    ElementTree.indent(root)
    return ElementTree.tostring(root, "unicode", xml_declaration=True) + "\n"


def _gate(suite: ElementTree.Element, gate: Mapping[str, Any]) -> None:
    case = _case(suite, f"gate.{gate['stage']}", gate["name"])
    shown = "not measured" if gate["value"] is None else number(gate["value"], 4)
    fact = f"{gate['name']} = {shown}, limit {limit(gate)}"
    if not gate["stands"]:
        ElementTree.SubElement(case, "failure", message=fact)
    elif gate["override"]:
        note = ElementTree.SubElement(case, "system-out")
        note.text = f"{fact}; overridden: {_clean(gate['override'])}"


def _suite(root: ElementTree.Element, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(root, "testsuite", name=name)


def _case(
    suite: ElementTree.Element, group: str, name: str, seconds: float | None = None
) -> ElementTree.Element:
    case = ElementTree.SubElement(suite, "testcase", classname=_clean(group), name=_clean(name))
    if seconds is not None:
        case.set("time", f"{seconds:.3f}")
    return case


def _count(element: ElementTree.Element) -> None:
    cases = list(element.iter("testcase"))
    element.set("tests", str(len(cases)))
    element.set("failures", str(sum(case.find("failure") is not None for case in cases)))
    element.set("errors", "0")
    element.set("skipped", str(sum(case.find("skipped") is not None for case in cases)))


def _clean(text: str) -> str:
    return FORBIDDEN.sub("\ufffd", text)
