"""The KL of a written checkpoint on the selection documents, by which methods are chosen.

The evaluation documents take no part: what they say in the fidelity stage was not optimised.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from onboard.checkpoint.models import Runner, compute_dtype, open_candidate, open_reference
from onboard.evals.bootstrap import document_bootstrap
from onboard.evals.hidden import Batch, batches, last_hidden, vocabulary
from onboard.evals.kl import Head, compare
from onboard.quantize.layers import save_whole

BATCH = 4  # documents
RESAMPLES, SEED = 2000, 0

Progress = Callable[[str, int, int, str], None]


@dataclass(frozen=True)
class Measured:
    """KL(source || checkpoint) in nats: sums over a document's tokens, and their numbers."""

    sums: tuple[float, ...]
    counts: tuple[int, ...]

    @property
    def kl(self) -> float:
        return sum(self.sums) / sum(self.counts)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% interval of the mean a token, over documents."""
        return document_bootstrap(self.sums, self.counts, RESAMPLES, SEED)


@dataclass(frozen=True)
class Selection:
    """The documents, the source's states on them (in `folder`), and what a candidate needs."""

    root: Path
    adaptation: Mapping[str, Any]
    rows: Sequence[dict[str, Any]]
    folder: Path
    progress: Progress

    def known(self, checkpoint: Path) -> Measured | None:
        """Return what was measured of a checkpoint earlier."""
        record = _record(checkpoint)
        if not record.exists():
            return None
        found = json.loads(record.read_text())
        return Measured(tuple(found["sums"]), tuple(found["counts"]))

    def measure(self, checkpoint: Path) -> Measured:
        """Return the KL of a checkpoint, and keep it in a file beside it."""
        counts = [len(row["ids"]) - 1 for batch in self._batches for row in batch.rows]
        found = Measured(tuple(self._sums(checkpoint)), tuple(counts))
        partial = _record(checkpoint).with_suffix(".partial")
        partial.write_text(json.dumps(asdict(found)))
        partial.rename(_record(checkpoint))
        return found

    @property
    def _batches(self) -> list[Batch]:
        return batches(list(self.rows), BATCH)

    def _sums(self, checkpoint: Path) -> list[float]:
        states = self._reference()
        runner = open_candidate(checkpoint, self.adaptation, compute_dtype())
        head = Head.of(runner.model, vocabulary(self.root))
        source_head = Head(**{**vars(head), "weight": states["head"].to(head.weight)})

        def compared(batch: Batch) -> Callable[[], list[float]]:
            def run() -> list[float]:
                hidden = last_hidden(runner.model, batch.ids, runner.fresh_cache())
                sides = (states[str(batch.number)], source_head), (hidden, head)
                kl, ends = compare(*sides, batch.targets).kl, 0
                sums = []
                for ids in batch.ids:
                    begin, ends = ends, ends + len(ids) - 1
                    sums.append(float(kl[begin:ends].sum()))
                return sums

            return run

        found = runner.run([compared(batch) for batch in self._batches], self._count("candidate"))
        return [total for sums in found for total in sums]

    def _reference(self) -> dict[str, Tensor]:
        """Return the source's last hidden states by batch, and its head."""
        path = self.folder / "selection.safetensors"
        if not path.exists():
            runner = open_reference(self.root, compute_dtype())
            passes = [self._states(runner, batch) for batch in self._batches]
            found = runner.run(passes, self._count("reference"))
            states = {str(n): hidden for n, hidden in enumerate(found)}
            head = Head.of(runner.model, vocabulary(self.root)).weight.cpu()
            save_whole(path, states | {"head": head})
        held: dict[str, Tensor] = load_file(path)
        return held

    def _states(self, runner: Runner, batch: Batch) -> Callable[[], Tensor]:
        return lambda: last_hidden(runner.model, batch.ids)

    def _count(self, what: str) -> Callable[[int, int], None]:
        return lambda done, total: self.progress(f"selection, {what}", done, total, "layers")


def _record(checkpoint: Path) -> Path:
    return checkpoint.with_suffix(".kl.json")
