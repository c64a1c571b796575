"""Arguments survive the shell, whatever is in them."""

from __future__ import annotations

import subprocess

import pytest

from onboard.bundle.serving import shell_word


@pytest.mark.parametrize(
    ("word", "seen"),
    [
        ("{bundle}/checkpoint", "/b c/checkpoint"),
        ('{"model": "{bundle}/speculator/vllm"}', '{"model": "/b c/speculator/vllm"}'),
        ("{port}", "8000"),
        ("it's $HOME `id` \\ \"", "it's $HOME `id` \\ \""),
        ("{bundle}{port}", "/b c8000"),
        ("{unknown}", "{unknown}"),
        ("", ""),
        ("a\nb", "a\nb"),
    ],
)
def test_shell_word(word: str, seen: str) -> None:
    script = f"bundle='/b c'; port=8000; python=p; printf %s {shell_word(word)}"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == seen
