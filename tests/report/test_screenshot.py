"""The page in a real browser: it renders, and its own policy blocks nothing it needs."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from onboard.errors import EnvironmentFault, InputError
from onboard.pipeline import Run
from onboard.report import screenshot as module
from onboard.report.render import write_report
from onboard.report.screenshot import browser, screenshot

needs_browser = pytest.mark.skipif(browser() is None, reason="chromium is not installed")


@needs_browser
def test_picture_of_a_report(make_run: Callable[..., Run], tmp_path: Path) -> None:
    run = make_run()
    write_report(run, tmp_path)
    screenshot(tmp_path / "index.html", tmp_path / "report.png", 1280, 2200)
    data = (tmp_path / "report.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(data[16:20]) == 1280
    assert int.from_bytes(data[20:24]) == 2200
    assert len(data) > 50_000  # more than an empty page


@needs_browser
def test_browser_logs_no_blocked_resource(make_run: Callable[..., Run], tmp_path: Path) -> None:
    run = make_run()
    write_report(run, tmp_path)
    done = subprocess.run(
        [str(browser()), "--headless=new", "--no-sandbox", "--disable-gpu",
         "--enable-logging=stderr",
         f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom",
         (tmp_path / "index.html").as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "Content Security Policy" not in done.stderr
    assert "Sign-off" in done.stdout


def test_missing_browser_says_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "index.html").write_text("<p>hello</p>")
    monkeypatch.setattr(module, "browser", lambda: None)
    with pytest.raises(EnvironmentFault, match="no Chromium"):
        screenshot(tmp_path / "index.html", tmp_path / "a.png")


def test_missing_page(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such report"):
        screenshot(tmp_path / "index.html", tmp_path / "a.png")
