"""Take a picture of a report: `python -m onboard.report.screenshot report/index.html out.png`."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from onboard.errors import EnvironmentFault, InputError, OnboardError

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def browser() -> str | None:
    """Return the path of an installed Chromium, or None."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


def screenshot(page: Path, image: Path, width: int = 1280, height: int = 2200) -> None:
    """Render `page` into `image`: PNG of width x height pixels, or the printed page as PDF.

    Raises EnvironmentFault without a browser or where it fails, InputError where there is no page.
    """
    if not page.is_file():
        raise InputError(f"{page}: no such report", "onboard run, then onboard report")
    program = browser()
    if program is None:
        raise EnvironmentFault("no Chromium found", "apt-get install -y chromium")
    image.parent.mkdir(parents=True, exist_ok=True)
    pdf = image.suffix == ".pdf"
    with tempfile.TemporaryDirectory(prefix="onboard-screenshot-") as profile:
        command = [
            program,
            "--headless=new",
            "--no-sandbox",  # containers run as root; the page has no script and fetches nothing
            "--disable-gpu",
            "--hide-scrollbars",
            "--no-pdf-header-footer",
            f"--user-data-dir={profile}",
            f"--window-size={width},{height}",
            f"--print-to-pdf={image}" if pdf else f"--screenshot={image}",
            page.resolve().as_uri(),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode != 0 or not image.is_file():
        raise EnvironmentFault(f"{program} could not draw {page}: {done.stderr.strip()[-300:]}")


def main(argv: list[str]) -> int:
    if len(argv) != 2:
        print("usage: python -m onboard.report.screenshot PAGE.html IMAGE.{png,pdf}")
        return 2
    try:
        screenshot(Path(argv[0]), Path(argv[1]))
    except OnboardError as e:
        print(f"{e.message}\n{e.hint or ''}".strip(), file=sys.stderr)
        return e.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
