"""Greedy answers of a causal LM, with the hidden states that an EAGLE-3 draft reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor
from transformers import DynamicCache

from onboard.checkpoint.models import Runner
from onboard.checkpoint.skeleton import decoder_of
from onboard.errors import InputError
from onboard.hardware import device_kind

FINAL_NORMS = ("norm", "final_layernorm", "final_norm", "norm_f", "ln_f")


def aux_layers(num_layers: int) -> tuple[int, int, int]:
    """Return the three indices into HF `hidden_states` (0 = embedding, i = input of layer i).

    2, n//2, n-3 is the default of EAGLE-3 in every engine. Below seven layers these coincide
    (engines drop repeated indices), so the last three boundaries stand in: n-2, n-1, n.
    """
    if num_layers < 2:
        raise InputError(f"EAGLE-3 reads three layer boundaries; the target has {num_layers} layer")
    if num_layers < 7:
        return num_layers - 2, num_layers - 1, num_layers
    return 2, num_layers // 2, num_layers - 3


def final_norm(model: Any) -> Any:
    """Return the norm between the last layer and the head of a transformers causal LM."""
    decoder = decoder_of(model)
    for name in FINAL_NORMS:
        if (norm := getattr(decoder, name, None)) is not None:
            return norm
    raise InputError(
        f"{type(decoder).__name__}: no final norm under any of the names {', '.join(FINAL_NORMS)}"
    )


class Capture:
    """Keep three layer boundaries and the final norm's INPUT of every forward pass inside `with`.

    HF's own `hidden_states[-1]` is the norm's output: it would train the draft on the wrong side.
    A `device` takes each state there at once, which leaves the model's own device its memory.
    """

    def __init__(self, model: Any, device: str | None = None) -> None:
        self.device = device
        decoder, norm = decoder_of(model), final_norm(model)
        boundaries = [*decoder.layers, norm]
        self.modules = [*(boundaries[i] for i in aux_layers(len(decoder.layers))), norm]
        self.states: dict[greenlet, list[Tensor | None]] = defaultdict(self._empty)  # by pass
        self.handles: list[Any] = []

    def __enter__(self) -> Capture:
        for slot, module in enumerate(self.modules):
            hook = self._keep(slot)
            self.handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self.handles:
            handle.remove()

    def _empty(self) -> list[Tensor | None]:
        return [None] * len(self.modules)

    def _keep(self, slot: int) -> Any:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            state = args[0] if args else kwargs["hidden_states"]
            moved = state if self.device is None else state.to(self.device, torch.bfloat16)
            self.states[getcurrent()][slot] = moved

        return hook

    def take(self) -> Tensor:
        """Return this pass's last states, bf16 [B, T, 4, H]: three aux boundaries, then last."""
        held = self.states.pop(getcurrent(), self._empty())
        states = [state for state in held if state is not None]
        assert len(states) == len(self.modules), "the model ran without passing a hooked module"
        return torch.stack([state.to(torch.bfloat16) for state in states], dim=2)


def prefill(
    runner: Runner,
    documents: Sequence[Tensor],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Tensor]:
    """Return the states of whole documents, ids i64 [T] -> bf16 [T, 4, H] on the CPU.

    Each document is a pass of its own: a layer at a time where the model does not fit in memory.
    `progress` then counts layers.
    """

    def alone(ids: Tensor) -> Callable[[], Tensor]:
        def run() -> Tensor:
            fed = ids[None].to(device_kind())
            runner.model(input_ids=fed, use_cache=False, logits_to_keep=1)
            return capture.take()[0].cpu()

        return run

    with Capture(runner.model, None if runner.resident else "cpu") as capture:
        return runner.run([alone(ids) for ids in documents], progress)


@dataclass(frozen=True)
class Answer:
    """One prompt with its answer.

    `ids` i64 [T] are the tokens the target was fed, so the last generated token is not among
    them; `tokens` are all generated ones. `states` bf16 [T, 4, H] as `Capture.take` gives them.
    """

    ids: Tensor
    states: Tensor
    prompt_length: int
    tokens: list[int]


@torch.inference_mode()
def answer(
    model: Any, prompts: Sequence[Sequence[int]], stop: Collection[int], max_new_tokens: int
) -> list[Answer]:
    """Return greedy answers of up to `max_new_tokens`, each ending at a token of `stop`.

    The prompts form one left-padded batch, which an answer leaves when it ends; hidden states come
    from the generating pass itself.
    """
    device, width = model.device, max(map(len, prompts))
    padding = torch.tensor([width - len(prompt) for prompt in prompts], device=device)
    fresh = torch.tensor(
        [[prompt[0]] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device
    )
    mask = (torch.arange(width + max_new_tokens, device=device) >= padding[:, None]).long()
    stops = torch.tensor(sorted(stop), device=device)
    rows = torch.arange(len(prompts), device=device)  # of the answers that go on
    cache = DynamicCache(config=model.config)
    tokens: list[list[int]] = [[] for _ in prompts]
    states: list[list[Tensor]] = [[] for _ in prompts]
    with Capture(model) as capture:
        for end in range(width, width + max_new_tokens):
            positions = torch.arange(end - fresh.shape[1], end, device=device) - padding[:, None]
            output = model(
                input_ids=fresh,
                attention_mask=mask[:, :end],
                position_ids=positions.clamp(min=0),
                cache=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            fresh = output.logits[:, -1:].argmax(-1)
            captured = capture.take().cpu()
            for row, token, state in zip(rows.tolist(), fresh[:, 0].tolist(), captured, strict=True):
                tokens[row].append(token)
                states[row].append(state)
            going = (~torch.isin(fresh[:, 0], stops)).nonzero()[:, 0]
            if not len(going):
                break
            if len(going) < len(rows):
                cache.reorder_cache(going)
                fresh, mask, padding, rows = (t[going] for t in (fresh, mask, padding, rows))
    return [
        Answer(
            torch.tensor([*prompt, *said[:-1]]),
            torch.cat(seen)[width - len(prompt) :],
            len(prompt),
            said,
        )
        for prompt, said, seen in zip(prompts, tokens, states, strict=True)
    ]
