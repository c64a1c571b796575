"""Runs in the engine's interpreter: prompt log-probabilities, and what became of every layer.

mixed_logprobs.py MODEL TOKEN_IDS_AS_JSON
"""

import json
import sys

from vllm import LLM, SamplingParams


def formats(model):
    """Return module -> "plain", "fp8" or "fp4" for linear layers and experts."""
    found = {}
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is None or "mbedding" in type(method).__name__:
            continue
        parts = [method, *vars(method).values()]
        if scheme := getattr(module, "scheme", None):  # of compressed-tensors
            parts += [scheme, *vars(scheme).values()]
        said = " ".join(type(part).__name__ for part in parts).lower()
        found[name] = next((form for form in ("fp8", "fp4") if form in said), "plain")
    return found


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
    found = [logprobs[token].logprob for token, logprobs in positions]
    print(json.dumps({"logprobs": found, "formats": engine.apply_model(formats)[0]}))
