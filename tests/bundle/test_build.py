"""The bundle: its layout, its manifest, and that no interruption breaks an earlier one."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from onboard.bundle import build as module
from onboard.bundle.build import build_bundle
from onboard.bundle.verify import verify
from onboard.errors import EnvironmentFault, InputError
from onboard.pipeline import Run
from onboard.store import file_digest

MakeRun = Callable[..., Run]


def tree(folder: Path) -> dict[str, bytes]:
    files = (p for p in folder.rglob("*") if p.is_file())
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in files}


def manifest(bundle: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((bundle / "manifest.json").read_text())
    return value


def test_layout(make_run: MakeRun, tmp_path: Path) -> None:
    bundle = build_bundle(make_run(), tmp_path / "bundles" / "smol")
    assert set(tree(bundle)) == {
        "README.md",
        "LICENSE",
        "NOTICE",
        "manifest.json",
        "checkpoint/LICENSE",
        "checkpoint/NOTICE",
        "checkpoint/config.json",
        "checkpoint/generation_config.json",
        "checkpoint/hf_quant_config.json",
        "checkpoint/model-00001-of-00001.safetensors",
        "checkpoint/tokenizer.json",
        "checkpoint/tokenizer_config.json",
        "speculator/vllm/config.json",
        "speculator/vllm/model.safetensors",
        "speculator/sglang/config.json",
        "speculator/sglang/model.safetensors",
        "serve/commands.json",
        "serve/vllm.sh",
        "serve/vllm-speculative.sh",
        "report/index.html",
        "report/report.json",
        "report/junit.xml",
    }
    assert [p.name for p in bundle.parent.iterdir()] == ["smol"]  # nothing of the build is left


WHY = "the lower 95% bound of its acceptance length is 1, not above 1"
OUT = {"ships": False, "reasons": [WHY], "criteria": [], "use": "plain", "why": ""}
STAYS_OUT = {"smoke": {"ship.json": OUT}}


def test_layout_without_a_speculator(make_run: MakeRun, tmp_path: Path) -> None:
    """A head that does not clear the limit stays out, and everything in the bundle says so."""
    run = make_run(files=STAYS_OUT)
    assert run.passed, "a decision, not a gate"
    bundle = build_bundle(run, tmp_path / "b")
    names = set(tree(bundle))
    assert not {name for name in names if name.startswith("speculator/")}
    assert {name for name in names if name.startswith("serve/")} == {
        "serve/commands.json",
        "serve/vllm.sh",
    }
    assert set(json.loads((bundle / "serve" / "commands.json").read_text())) == {
        "engine", "version", "mode", "dtype", "environment", "use", "plain",
    }  # fmt: skip
    said = manifest(bundle)
    assert said["speculator"] == OUT
    assert set(said["commands"]["serve"]) == {"plain"}
    card = (bundle / "README.md").read_text()
    assert f"**No speculator ships.** One was trained and stays out: {WHY}." in card
    assert "--draft" not in card
    assert "eagle3" not in yaml.safe_load(card.split("---\n")[1])["tags"]
    assert WHY in (bundle / "report" / "index.html").read_text()
    verify(bundle)
    before = tree(bundle)
    assert tree(build_bundle(run, bundle)) == before


def test_a_bundle_with_its_speculator_says_so(make_run: MakeRun, tmp_path: Path) -> None:
    bundle = build_bundle(make_run(), tmp_path / "b")
    assert manifest(bundle)["speculator"]["ships"] is True
    assert set(manifest(bundle)["commands"]["serve"]) == {"plain", "speculative"}
    card = (bundle / "README.md").read_text()
    assert "onboard serve . --draft none" in card
    assert "No speculator ships" not in card
    assert "Acceptance length at temperature 0.7 | 1.43, 95% interval [1.36, 1.51]" in card
    verify(bundle)


def test_mtp_layers_that_help_more_are_served(make_run: MakeRun, tmp_path: Path) -> None:
    good = {"ships": True, "reasons": [], "criteria": []}
    ship = {**good, "mtp": good, "use": "mtp", "why": "acceptance length 1.4 against 2.1"}
    argv = ["{python}", "-m", "engine", "{bundle}/checkpoint"]
    engine = {"engine": "vllm", "version": "1", "mode": "native", "dtype": "auto"}
    engine["commands"] = {name: [*argv, name] for name in ("plain", "speculative", "mtp")}  # type: ignore[assignment]
    own = {"acceptance": {}, "speed": [], "head_longer": None}
    files = {"smoke": {"ship.json": ship, "engine.json": engine, "mtp.json": own}}
    bundle = build_bundle(make_run(files=files), tmp_path / "b")
    commands = json.loads((bundle / "serve" / "commands.json").read_text())
    assert commands["use"] == "mtp"
    assert commands["mtp"][-1] == "mtp"
    script = (bundle / "serve" / "vllm-mtp.sh").read_text()
    assert "# Serve the checkpoint with its own MTP layers" in script
    card = (bundle / "README.md").read_text()
    assert "The model's own MTP layers draft by default: acceptance length 1.4 against 2.1." in card
    assert "the MTP layers</strong>" in (bundle / "report" / "index.html").read_text()


def test_a_speculator_that_was_not_measured_stays_out(make_run: MakeRun, tmp_path: Path) -> None:
    bundle = build_bundle(make_run(files={"smoke": {"ship.json": None}}), tmp_path / "b")
    assert not (bundle / "speculator").exists()
    assert manifest(bundle)["speculator"]["reasons"] == ["it was not measured in an engine"]


def test_manifest_says_what_it_was_made_from(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    bundle = build_bundle(run, tmp_path / "b")
    said = manifest(bundle)
    assert said["schema"] == 1
    assert said["verdict"] == "pass"
    assert said["source"]["revision"] == "0.1.2"
    assert said["stages"]["quantize"]["digest"] == run.artifacts["quantize"].digest
    assert said["engine"] == {
        "engine": "vllm",
        "version": "0.32.0",
        "mode": "cpu-emulation W4A4",
        "dtype": "float32",
    }
    assert said["packages"]["torch"] == "2.13.0"
    assert said["commands"]["run"] == ["onboard", "run", "smollm2-135m"]
    assert said["seeds"]["speculate"] == 0
    assert len(said["gates"]) == len(run.gates)
    assert said["files"].keys() == tree(bundle).keys() - {"manifest.json"}


def test_overrides_and_adoptions_are_in_manifest_and_card(
    make_run: MakeRun, tmp_path: Path
) -> None:
    run = make_run(
        recipe={"fidelity": {"gates": {"kl_mean": 0.3}}},
        overrides={"fidelity.kl_mean": "release board"},
        adopted={"calibrate": "a log message"},
    )
    bundle = build_bundle(run, tmp_path / "b")
    assert manifest(bundle)["overrides"] == {"fidelity.kl_mean": "release board"}
    assert manifest(bundle)["adoptions"] == {"calibrate": "a log message"}
    card = (bundle / "README.md").read_text()
    assert "**overridden:** release board" in card
    assert "`calibrate`: a log message" in card


def test_no_bundle_of_a_failed_run(failed_run: Run, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="did not pass"):
        build_bundle(failed_run, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_a_bundle_never_shares_bytes_with_the_store(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    bundle = build_bundle(run, tmp_path / "b")
    shard = "checkpoint/model-00001-of-00001.safetensors"
    for name in (shard, "speculator/vllm/model.safetensors", "LICENSE"):
        assert (bundle / name).stat().st_nlink == 1
        (bundle / name).write_bytes(b"edited")
    quantize = run.artifacts["quantize"]
    assert file_digest(quantize.path / shard) == quantize.digest_of(shard)


def test_rebuilding_the_same_content_changes_nothing(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    bundle = build_bundle(run, tmp_path / "b")
    before = tree(bundle)
    later = Run("20261130-000000-1", run.recipe, run.store, run.artifacts, run.outcomes, run.gates)
    monkeypatch.setattr(module, "_fill", lambda *_: pytest.fail("built again"))
    build_bundle(later, bundle)
    assert tree(bundle) == before


@pytest.mark.parametrize("damage", ["missing", "longer", "added"])
def test_a_damaged_bundle_is_built_again(make_run: MakeRun, tmp_path: Path, damage: str) -> None:
    run = make_run()
    bundle = build_bundle(run, tmp_path / "b")
    before = tree(bundle)
    config = bundle / "checkpoint/config.json"
    match damage:
        case "missing":
            config.unlink()
        case "longer":
            config.write_text("{}" * 100)
        case "added":
            (bundle / "checkpoint/extra.bin").touch()
    build_bundle(run, bundle)
    assert tree(bundle) == before


def test_two_builds_give_the_same_bytes(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    assert tree(build_bundle(run, tmp_path / "a")) == tree(build_bundle(run, tmp_path / "b"))


def test_an_interrupted_build_leaves_the_earlier_bundle_whole(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    bundle = build_bundle(run, tmp_path / "bundles" / "b")
    before = tree(bundle)
    run.gates.pop()  # other content, so that it is built again
    with monkeypatch.context() as patch:
        patch.setattr(module, "publish", _killed)
        with pytest.raises(KeyboardInterrupt):
            build_bundle(run, bundle)
    assert tree(bundle) == before
    assert [p.name for p in bundle.parent.iterdir()] == ["b"]
    build_bundle(run, bundle)
    assert tree(bundle) != before
    verify(bundle)


def test_leftovers_of_a_killed_build_do_not_reach_the_next(
    make_run: MakeRun, tmp_path: Path
) -> None:
    leftover = tmp_path / ".b.building" / "checkpoint" / "half.safetensors"
    leftover.parent.mkdir(parents=True)
    leftover.touch()
    bundle = build_bundle(make_run(), tmp_path / "b")
    verify(bundle)
    assert not leftover.exists()


def test_a_folder_that_is_no_bundle_is_not_touched(make_run: MakeRun, tmp_path: Path) -> None:
    place = tmp_path / "home"
    place.mkdir()
    (place / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match="holds no bundle; nothing was touched"):
        build_bundle(make_run(), place)
    assert tree(place) == {"thesis.txt": b"years of work"}


def test_store_bytes_that_changed_after_the_commit_stop_the_build(
    make_run: MakeRun, tmp_path: Path
) -> None:
    run = make_run()
    shard = run.artifacts["quantize"].path / "checkpoint/model-00001-of-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    with pytest.raises(EnvironmentFault, match=r"model-00001-of-00001\.safetensors"):
        build_bundle(run, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_no_secret_in_any_file(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "correct-horse-battery"
    monkeypatch.setenv("HF_TOKEN", secret)
    run = make_run(
        files={
            "smoke": {
                "engine.json": {
                    "engine": "vllm",
                    "version": "0.32.0",
                    "mode": secret,
                    "dtype": "float32",
                    "commands": {"plain": ["{python}", "--port", "{port}", "{bundle}"]},
                    "environment": {"HF_TOKEN": secret, "OMP_NUM_THREADS": "1"},
                }
            }
        },
        command=("onboard", "run", "--set", f"a={secret}"),
    )
    bundle = build_bundle(run, tmp_path / "b")
    for name, data in tree(bundle).items():
        assert secret.encode() not in data, name


def test_card_front_matter(make_run: MakeRun, tmp_path: Path) -> None:
    location = {
        "root": "model",
        "model": "someone/model-7b",
        "revision": "0" * 40,
        "kind": "hub",
        "licence": "Apache-2.0",
    }
    run = make_run(files={"source": {"location.json": location}})
    card = (build_bundle(run, tmp_path / "b") / "README.md").read_text()
    matter = yaml.safe_load(card.split("---\n")[1])
    assert matter["base_model"] == "someone/model-7b"
    assert matter["base_model_relation"] == "quantized"
    assert matter["license"] == "apache-2.0"
    assert {"nvfp4", "eagle3"} <= set(matter["tags"])
    assert "0.313 nats per token, 95% interval [0.274, 0.356]" in card


def test_a_local_source_keeps_its_path_to_itself(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(recipe={"source": {"model": "/data/secret-project/model-7b"}})
    location = run.artifacts["source"].path / "location.json"
    said = json.loads(location.read_text()) | {"kind": "directory"}
    location.write_text(json.dumps(said | {"model": "/data/secret-project/model-7b"}))
    bundle = build_bundle(run, tmp_path / "b")
    for name, data in tree(bundle).items():
        assert b"secret-project" not in data, name
    assert manifest(bundle)["source"]["id"] == "model-7b"


def test_scripts_run_the_very_command(make_run: MakeRun, tmp_path: Path) -> None:
    bundle = build_bundle(make_run(), tmp_path / "with space" / "b")
    probe = tmp_path / "python"
    probe.write_text('#!/bin/sh\nprintf "%s\\n" "$OMP_NUM_THREADS" "$@"\n')
    probe.chmod(0o755)
    done = subprocess.run(
        [bundle / "serve" / "vllm-speculative.sh", "--extra", "a b"],
        env={**os.environ, "PYTHON": str(probe), "PORT": "8123"},
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    draft = {
        "method": "eagle3",
        "model": f"{bundle}/speculator/vllm",
        "num_speculative_tokens": 3,
    }
    threads, *argv = done.stdout.splitlines()
    assert threads == "1"
    assert argv[:4] == [
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        f"{bundle}/checkpoint",
    ]
    assert argv[argv.index("--port") + 1] == "8123"
    assert json.loads(argv[argv.index("--speculative-config") + 1]) == draft
    assert argv[-2:] == ["--extra", "a b"]


def test_commands_for_onboard_serve_keep_their_placeholders(
    make_run: MakeRun, tmp_path: Path
) -> None:
    bundle = build_bundle(make_run(), tmp_path / "b")
    said = json.loads((bundle / "serve" / "commands.json").read_text())
    assert said["plain"][:5] == [
        "{python}", "-m", "vllm.entrypoints.openai.api_server", "--model", "{bundle}/checkpoint",
    ]  # fmt: skip
    assert said["environment"] == {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    assert str(tmp_path) not in json.dumps(said)


def _killed(*_: Any) -> None:
    raise KeyboardInterrupt
