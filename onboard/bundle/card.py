"""README.md of a bundle: the model card, with the front matter that the Hugging Face Hub reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from jinja2 import ChainableUndefined, Environment, FileSystemLoader

from onboard.pipeline import Run
from onboard.report import formats
from onboard.report.facts import gather

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def card(run: Run) -> str:
    """Return the card of `run` as Markdown."""
    facts = gather(run)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=ChainableUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    for write in (formats.number, formats.percent, formats.size, formats.limit):
        environment.filters[write.__name__] = write
    environment.filters["line"] = _line
    matter = yaml.safe_dump(front_matter(facts), sort_keys=False, allow_unicode=True)
    return environment.get_template("card.md.j2").render(
        matter=matter,
        facts=facts,
        m=facts["metrics"],
        speculator=facts["speculator"],
        engine=facts["provenance"]["engine"] or {},
    )


def front_matter(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the card's metadata; `base_model` only where the original has a Hub id."""
    model, speculator = facts["model"], facts["speculator"]
    licence = (model["licence"] or "other").lower()
    base = {"base_model": model["base_model"], "base_model_relation": "quantized"}
    return {
        **(base if HUB_ID.fullmatch(model["base_model"] or "") else {}),
        "license": licence,
        "pipeline_tag": "text-generation",
        "library_name": "vllm",
        "tags": ["nvfp4", "fp4", "quantized", "modelopt", "vllm"]
        + (["eagle3", "speculative-decoding"] if speculator and speculator["ships"] else []),
    }


def _line(text: Any) -> str:
    """Return text that stays inside one table cell."""
    return " ".join(str(text).split()).replace("|", "\\|")
