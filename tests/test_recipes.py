"""Recipes: every shipped one parses, and what is misspelt is named with its nearest key."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from onboard import recipe
from onboard.architectures import QUANTIZABLE
from onboard.data.readers import READERS
from onboard.errors import InputError
from onboard.recipe import RECIPES, Limit, Recipe, Section, merge, parse, read, resolve

FILES = sorted(path.stem for path in RECIPES.glob("*.yaml"))
SOURCE: dict[str, Any] = {"source": {"model": "acme/tiny"}}


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", FILES)
def test_every_shipped_file_parses(name: str) -> None:
    parsed = parse(merge(SOURCE, read(RECIPES / f"{name}.yaml")), name)
    assert set(parsed.adapt.quantize or ()) <= {role.value for role in QUANTIZABLE}
    for corpus in parsed.data.corpora:
        origins = [corpus.reader, corpus.dataset, corpus.jsonl]
        assert len([origin for origin in origins if origin]) == 1
        assert corpus.reader is None or corpus.reader in READERS
        assert corpus.dataset is None or corpus.licence != "unknown"


def test_the_models_that_were_promised_are_there() -> None:
    promised = "smollm2-135m glm-5.2 kimi-k3 deepseek-v4 minimax-m3 gpt-oss-120b qwen3.5-397b"
    assert recipe.names() == sorted([*promised.split(), "llama-3.1-8b"])
    assert recipe.DEFAULT in recipe.names()


@pytest.mark.parametrize("name", recipe.names())
def test_every_recipe_covers_all_domains_and_limits_what_matters(name: str) -> None:
    parsed = resolve(name)
    assert parsed.summary
    assert {c.domain for c in parsed.data.corpora} == {"code", "chat", "math", "tools", "prose"}
    gates = {f"{stage}.{gate}" for stage, gate, _ in parsed.bounds()}
    assert gates >= {
        "adapt.unknown_tensors",
        "data.overlapping_documents",
        "quantize.weights_quantized_share",
        "fidelity.kl_mean_hi",
        "smoke.probes_failed",
    }
    assert (parsed.smoke.ship.acceptance_length_lo or 0) > 1


@pytest.mark.parametrize("name", recipe.names())
def test_the_engine_knows_the_parsers(name: str) -> None:
    packages = Path(__file__).parent.parent / ".venv-engine/lib/python3.11/site-packages/vllm"
    if not packages.is_dir():
        pytest.skip("no engine environment")
    smoke = resolve(name).smoke
    tools = (packages / "tool_parsers/__init__.py").read_text()
    reasoning = (packages / "reasoning/__init__.py").read_text()
    assert smoke.tool_call_parser is None or f'"{smoke.tool_call_parser}": (' in tools
    assert smoke.reasoning_parser is None or f'"{smoke.reasoning_parser}": (' in reasoning


def test_the_listing_has_what_a_person_chooses_by() -> None:
    rows = recipe.listing()
    assert rows[0]["name"] == recipe.DEFAULT
    assert rows[0]["default"] is True
    assert [row["name"] for row in rows[1:]] == sorted(row["name"] for row in rows[1:])
    glm = next(row for row in rows if row["name"] == "glm-5.2")
    assert glm["model"] == "zai-org/GLM-5.2"
    assert glm["quantizes"] == ["expert"]
    assert glm["gates"]["fidelity.kl_mean"] == "<= 0.06"


def test_resolving_imports_neither_torch_nor_transformers() -> None:
    code = "import sys; from onboard.recipe import listing; listing(); print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers"} & set(out.stdout.split())


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("quantize.sampels=3", "recipe: unknown key quantize.sampels; valid keys here: method"),
        ("quantize.methd=rtn", "unknown key quantize.methd; did you mean quantize.method?"),
        ("fidelty.seed=1", "unknown key fidelty; did you mean fidelity?"),
        ("fidelity.gates.kl_men=1", "fidelity.gates.kl_men; did you mean fidelity.gates.kl_mean?"),
        ("data.seed=x", "recipe: data.seed: Input should be a valid integer"),
        (
            "quantize.method=floor",
            "recipe: quantize.method: Input should be 'rtn', 'sweep'",
        ),
        ("data.seed", "--set 'data.seed': expected section.key=value"),
    ],
)
def test_a_typo_is_an_error_that_names_the_key_and_the_nearest(
    assignment: str, message: str
) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        parse(SOURCE, "tiny", [assignment])


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (["smoke.concurrencies=[1, 9]"], "concurrencies: 9 is more than max_num_seqs 8"),
        (["smoke.max_num_seqs=2"], "concurrencies: 4 is more than max_num_seqs 2"),
        (["smoke.ship.concurrency=2"], "ship.concurrency: 2 is not measured"),
        (["smoke.concurrencies=[]"], "smoke.concurrencies: Tuple should have at least 1 item"),
        (["smoke.concurrencies=[0]"], "smoke.concurrencies.0: Input should be greater than 0"),
    ],
)
def test_speed_is_judged_where_it_is_measured(assignments: list[str], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        parse(SOURCE, "tiny", assignments)


def test_the_first_concurrency_is_judged_unless_another_is_named() -> None:
    assert parse(SOURCE, "tiny").smoke.judged_concurrency == 1
    assert parse(SOURCE, "tiny", ["smoke.concurrencies=[8]"]).smoke.judged_concurrency == 8
    assert parse(SOURCE, "tiny", ["smoke.ship.concurrency=4"]).smoke.judged_concurrency == 4


def test_sampled_tokens_are_judged_where_they_are_compared() -> None:
    assert "sampling_p_value" not in parse(SOURCE, "tiny").smoke.limits()
    asked = parse(SOURCE, "tiny", ["smoke.sampling_checks=10"])
    assert asked.smoke.limits()["sampling_p_value"] == Limit(">=", 0.001)
    assert ("smoke", "sampling_p_value", Limit(">=", 0.001)) in list(asked.bounds())


def test_a_typo_inside_a_list_of_corpora() -> None:
    data = {**SOURCE, "data": {"corpora": [{"domain": "code", "readr": "human_eval"}]}}
    with pytest.raises(InputError, match=r"corpora\.0\.readr; did you mean .*reader"):
        parse(data, "tiny")


def test_set_wins_and_null_switches_a_gate_off() -> None:
    parsed = parse(SOURCE, "tiny", ["fidelity.gates.kl_mean=0.0001", "adapt.keep=[a.*, b]"])
    assert parsed.fidelity.limits() == {"kl_mean": Limit("<=", 0.0001)}
    assert parsed.adapt.keep == ("a.*", "b")
    assert "unknown_tensors" in parsed.adapt.limits()
    assert parse(SOURCE, "tiny", ["adapt.gates.unknown_tensors=null"]).adapt.limits() == {}


def test_extends_prefers_a_sibling_then_a_shipped_recipe(tmp_path: Path) -> None:
    write(tmp_path, "mine", "extends: base\nsource: {model: a/b}\nfidelity: {seed: 7}")
    child = write(tmp_path, "child", "extends: mine\nfidelity: {gates: {kl_mean: 0.5}}")
    parsed = resolve(str(child))
    assert (parsed.name, parsed.source.model, parsed.fidelity.seed) == ("child", "a/b", 7)
    assert parsed.data.corpora == resolve("a/b").data.corpora
    assert parsed.fidelity.gates.kl_mean == 0.5


def test_a_circle_of_extends(tmp_path: Path) -> None:
    write(tmp_path, "a", "extends: b")
    write(tmp_path, "b", "extends: a")
    with pytest.raises(InputError, match="goes round in a circle"):
        read(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends: nothing", "extends 'nothing', but there is no nothing.yaml"),
        ("- a\n- b", "expected a mapping of sections, found list"),
        ("a: [1", "not valid YAML"),
    ],
)
def test_a_broken_file(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        read(write(tmp_path, "broken", text))


def test_a_directory_and_a_hub_id_run_with_base(tmp_path: Path) -> None:
    by_folder, by_id = resolve(str(tmp_path)), resolve("Acme/Tiny-1B")
    assert by_folder.source.model == str(tmp_path)
    assert (by_id.name, by_id.source.model) == ("tiny-1b", "Acme/Tiny-1B")
    assert by_folder.data == by_id.data


@pytest.mark.parametrize("parent", recipe.PARENTS)
def test_a_parent_is_no_model(parent: str) -> None:
    assert parent not in recipe.names()
    with pytest.raises(InputError, match="is no recipe"):
        resolve(parent)


def test_a_misspelt_recipe_names_the_nearest() -> None:
    with pytest.raises(InputError, match="is no recipe") as error:
        resolve("glm-5.3")
    assert error.value.hint == "onboard run glm-5.2"


def test_a_limit_includes_its_value() -> None:
    assert Limit("<=", 0.5).holds(0.5)
    assert Limit(">=", 0.5).holds(0.5)
    assert not Limit("<=", 0.5).holds(0.5000001)
    assert not Limit(">=", 0.5).holds(float("nan"))
    assert not Limit("<=", 0.5).holds(float("nan"))


SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=4)
TREES = st.recursive(
    st.dictionaries(st.sampled_from("abc"), SCALARS, max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner | SCALARS, max_size=3),
)


@given(TREES, TREES)
def test_merging_keeps_what_is_not_said_and_the_last_word_wins(a: Any, b: Any) -> None:
    merged = merge(a, b)
    assert merged.keys() == a.keys() | b.keys()
    for key, value in merged.items():
        both = isinstance(a.get(key), dict) and isinstance(b.get(key), dict)
        assert value == (merge(a[key], b[key]) if both else b.get(key, a.get(key)))
    assert merge(merged, b) == merged


@given(st.text(min_size=1, max_size=12))
def test_no_unknown_key_is_ever_ignored(key: str) -> None:
    for section in ("", "quantize", "smoke"):
        holder: type[Section] = type(getattr(parse(SOURCE, "t"), section)) if section else Recipe
        if key in holder.model_fields:
            continue
        data: dict[str, Any] = {section: {key: 1}} if section else {key: 1}
        with pytest.raises(InputError):
            parse({**SOURCE, **data}, "t")


@given(st.floats(0, 1), st.integers(2, 500))
def test_a_recipe_survives_being_written_down(limit: float, documents: int) -> None:
    assignments = [f"fidelity.gates.kl_mean={limit!r}", f"data.evaluation_documents={documents}"]
    parsed = parse(SOURCE, "tiny", assignments)
    again = parse(yaml.safe_load(yaml.safe_dump(parsed.model_dump(mode="json"))), "tiny")
    assert again == parsed


def test_the_shipped_recipes_name_no_machine() -> None:
    text = "".join(path.read_text() for path in RECIPES.glob("*.yaml"))
    assert os.path.expanduser("~") not in text  # noqa: PTH111
    assert "localhost" not in text
