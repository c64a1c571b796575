"""Put the written weights and the source's tokenizer, template and licence into one directory."""

from __future__ import annotations

from pathlib import Path

from onboard.checkpoint.clone import clone
from onboard.source import root
from onboard.store import Artifact


def assemble(quantize: Artifact, source: Artifact, destination: Path) -> None:
    """Fill `destination` with a checkpoint that an engine serves.

    Files are reflinked or copied, never hardlinked: a change to one must not reach the store.
    """
    destination.mkdir(parents=True, exist_ok=True)
    origin = root(source)
    kept = [*source.json("tokenizer.json"), *source.json("other.json")]
    files = [origin / entry["name"] for entry in kept]
    files += [p for p in sorted((quantize.path / "checkpoint").iterdir()) if p.is_file()]
    for file in files:
        if file.suffix != ".md":  # the source's model card is not ours
            clone(file, destination / file.name)
