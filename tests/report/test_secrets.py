"""Secrets of the machine never leave it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from onboard.pipeline import Run
from onboard.report.render import write_report
from onboard.report.secrets import REDACTED, command_without_secrets, scrubber

ENVIRONMENT = {
    "HF_TOKEN": "correct-horse-battery",
    "VLLM_API_KEY": "staple-staple",
    "PATH": "/usr/bin:/usr/local/bin",
    "MY_KEY": "short",
}


def test_values_of_secret_variables_are_removed() -> None:
    scrub = scrubber(ENVIRONMENT)
    value = {
        "log": ["x correct-horse-battery y", 3],
        "argv": "--key=staple-staple",
        "p": "/usr/bin",
    }
    assert scrub(value) == {
        "log": [f"x {REDACTED} y", 3],
        "argv": f"--key={REDACTED}",
        "p": "/usr/bin",
    }


@pytest.mark.parametrize(
    "secret",
    ["hf_" + "a1B2" * 8, "sk-proj-" + "x" * 24, "ghp_" + "Z9" * 12, "AKIA" + "ABCD1234" * 2],
)
def test_token_shapes_are_removed(secret: str) -> None:
    assert scrubber({})(f"Bearer {secret}") == f"Bearer {REDACTED}"


def test_password_in_an_address_is_removed() -> None:
    assert scrubber({})("see proxy://me:pass@host/x") == f"see proxy://{REDACTED}@host/x"


def test_names_decide_only_for_environment_variables() -> None:
    scrub = scrubber({})
    assert scrub({"VLLM_API_KEY": "abc", "true_token": "}(", "key": "0a1b"}) == {
        "VLLM_API_KEY": REDACTED,
        "true_token": "}(",
        "key": "0a1b",
    }


def test_home_directory_becomes_a_tilde() -> None:
    assert scrubber({})(f"{Path.home()}/models/x") == "~/models/x"


def test_options_that_hold_secrets() -> None:
    argv = ["serve", "--api-key", "abc", "--hf-token=def", "--max-tokens", "5"]
    assert command_without_secrets(argv) == [
        "serve", "--api-key", REDACTED, f"--hf-token={REDACTED}", "--max-tokens", "5",
    ]  # fmt: skip


def test_no_file_of_the_report_holds_a_secret(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", ENVIRONMENT["HF_TOKEN"])
    token = "hf_" + "q7W" * 10
    secret = ENVIRONMENT["HF_TOKEN"]
    run = make_run(
        command=("onboard", "run", "x", "--set", f"smoke.serve_args=[--api-key={token}]"),
        files={
            "smoke": {
                "probes.json": [
                    {
                        "name": "chat",
                        "passed": False,
                        "detail": f"401 for {secret}",
                        "request": {"headers": {"Authorization": f"Bearer {secret}"}},
                        "response": token,
                        "seconds": 1.0,
                    }
                ]
            }
        },
    )
    write_report(run, run.dir / "report")
    for file in (run.dir / "report").iterdir():
        text = file.read_text()
        assert secret not in text
        assert token not in text


def test_the_users_own_traffic_stays_in_the_store(
    make_run: Callable[..., Run], tmp_path: Path
) -> None:
    row = {"id": "p", "domain": "traffic", "text": "acme's order", "private": True}
    run = make_run(
        recipe={"data": {"traffic": {"/srv/acme/requests.jsonl": 1, "code": 1}}},
        files={
            "data": {"training_prompts.jsonl": [row], "evaluation_prompts.jsonl": [row]},
            "features": {"samples.jsonl": [row]},
        },
    )
    write_report(run, tmp_path / "report")
    for file in (tmp_path / "report").iterdir():
        assert "acme's order" not in file.read_text()
        assert "/srv/acme" not in file.read_text()
    assert '"requests.jsonl": 1' in (tmp_path / "report" / "report.json").read_text()
