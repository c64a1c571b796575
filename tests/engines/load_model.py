"""Runs in the engine's interpreter: load a checkpoint, generate three tokens, print them as JSON.

load_model.py MODEL DTYPE
"""

import json
import sys

from vllm import LLM, SamplingParams

if __name__ == "__main__":
    engine = LLM(
        sys.argv[1],
        skip_tokenizer_init=True,
        dtype=sys.argv[2],
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=2,
        max_num_batched_tokens=64,
    )
    sampling = SamplingParams(max_tokens=3, temperature=0, detokenize=False)
    (answer,) = engine.generate([{"prompt_token_ids": [5, 6, 7, 8]}], sampling)
    print(json.dumps(list(answer.outputs[0].token_ids)))
