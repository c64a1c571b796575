"""AutoRound's NVFP4 without activations, run on a CPU; see peer.py for the command line.

`iters-0` searches scales weighted by the activations (its "optimized RTN"), `iters-N` learns the
rounding with N signed gradient steps a decoder layer.
"""

from __future__ import annotations

from auto_round import AutoRound  # type: ignore[import-not-found]
from transformers import AutoTokenizer

from tests.quality import peer
from tests.quality.peer import Task


def quantize(task: Task) -> None:
    _, iterations = task.method.split("-")
    rounder = AutoRound(
        peer.load(task.model),
        AutoTokenizer.from_pretrained(task.model),
        scheme="NVFP4",
        act_bits=16,
        act_data_type="float",
        iters=int(iterations),
        dataset=task.batches(1),
        nsamples=len(task.ids),
        seqlen=len(task.ids[0]),
        batch_size=peer.BATCH,
        seed=peer.SEED,
        device_map="cpu",
        enable_torch_compile=False,
    )
    with task.timed("seconds"):
        rounder.quantize()
    with task.timed("export_seconds"):
        rounder.save_quantized(str(task.export), format="llm_compressor")


if __name__ == "__main__":
    peer.main(quantize, ("auto-round",))
