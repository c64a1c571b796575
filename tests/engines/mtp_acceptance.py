"""Runs in the engine's interpreter: answer with a model's own MTP layers drafting three tokens.

mtp_acceptance.py MODEL; prints `{"drafts": ..., "accepted": ...}`.
"""

import json
import sys

from vllm import LLM, SamplingParams

PROMPTS = [[5, 6, 7, 8], [40, 3, 21], [100, 101, 250, 7, 9]]

if __name__ == "__main__":
    engine = LLM(
        sys.argv[1],
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=2,
        max_num_batched_tokens=128,
        disable_log_stats=False,
        speculative_config={"method": "mtp", "num_speculative_tokens": 3},
    )
    sampling = SamplingParams(max_tokens=40, temperature=0, detokenize=False, ignore_eos=True)
    engine.generate([{"prompt_token_ids": ids} for ids in PROMPTS], sampling)
    found = {metric.name: metric for metric in engine.get_metrics()}
    counts = {
        "drafts": found["vllm:spec_decode_num_drafts"].value,
        "accepted": found["vllm:spec_decode_num_accepted_tokens"].value,
    }
    print(json.dumps(counts))
