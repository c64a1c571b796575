"""Runs in the engine's interpreter: answer prompts with a draft, and keep what it read and said.

record_drafts.py TARGET DRAFT PROMPTS OUT

PROMPTS is a JSON list of token id lists. OUT, safetensors, gets of the n-th call of the drafter:
`n.tokens` i64 [T] and `n.positions` i64 [T] of the target's tokens, `n.states` f32 [T, 3H] of the
target, `n.last` i64 [] the index of the token that it drafts after, `n.next` i64 [] the token the
target chose there, and `n.drafts` i64 [K]. One request runs at a time.
"""

import json
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from vllm import LLM, SamplingParams
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

CALLS: list[dict[str, Any]] = []


def record() -> None:
    """Wrap the drafter; a call outside a request, which only warms up, is kept too."""
    real = SpecDecodeBaseProposer.propose

    def propose(self: Any, **given: Any) -> Any:
        last = given["token_indices_to_sample"]
        tokens = given["target_token_ids"]
        call = {
            "tokens": tokens.long().clone(),
            "positions": given["target_positions"].long().clone(),
            "states": given["target_hidden_states"].float().clone(),
            "last": (last[0] if last is not None else tokens.new_tensor(len(tokens) - 1)).long(),
            "next": given["next_token_ids"][0].long().clone(),
        }
        drafts = real(self, **given)
        CALLS.append(call | {"drafts": drafts[0].long().clone()})
        return drafts

    SpecDecodeBaseProposer.propose = propose


if __name__ == "__main__":
    target, draft, prompts, out = sys.argv[1:]
    record()
    family = json.loads((Path(draft) / "config.json").read_text())["speculators_model_type"]
    engine = LLM(
        target,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=1,
        max_num_batched_tokens=128,
        enable_prefix_caching=False,
        speculative_config={
            "method": "eagle3",
            "model": draft,
            "num_speculative_tokens": 3,
            "parallel_drafting": family == "peagle",
        },
    )
    CALLS.clear()
    sampling = SamplingParams(max_tokens=12, temperature=0, detokenize=False, ignore_eos=True)
    asked = json.loads(Path(prompts).read_text())
    for ids in asked:
        engine.generate([{"prompt_token_ids": ids}], sampling)
    save_file(
        {f"{n}.{k}": v.contiguous().cpu() for n, call in enumerate(CALLS) for k, v in call.items()},
        out,
    )
    print(json.dumps({"calls": len(CALLS)}))
