"""Runs in the engine's interpreter: print the log-probability of every prompt token but the first.

prompt_logprobs.py MODEL TOKEN_IDS_AS_JSON
"""

import json
import sys

from vllm import LLM, SamplingParams

if __name__ == "__main__":
    model, prompt = sys.argv[1], json.loads(sys.argv[2])
    engine = LLM(
        model,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=2,
        max_num_batched_tokens=64,
    )
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1, detokenize=False)
    (answer,) = engine.generate([{"prompt_token_ids": prompt}], sampling)
    positions = zip(prompt[1:], answer.prompt_logprobs[1:], strict=True)
    print(json.dumps([logprobs[token].logprob for token, logprobs in positions]))
