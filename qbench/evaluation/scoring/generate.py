"""Generated tokens: HFLM's texts, and greedy answers to prompts that are all alike long."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from qbench.errors import EvaluationError
from qbench.evaluation.scoring.logits import free_cached_memory, is_out_of_memory


def generate(hflm: HFLM, requests: list[Any], disable_tqdm: bool) -> list[str]:
    """HFLM's generated texts. Raises EvaluationError where a step's logits are not numbers:
    the likeliest of them would be a token like any other."""
    with _finite(hflm.model):
        return hflm.generate_until(requests, disable_tqdm=disable_tqdm)


@contextlib.contextmanager
def _finite(model: torch.nn.Module) -> Iterator[None]:
    """Checks the logits of each step's last token. The verdict stays on the device until the
    end, so that no step waits for it."""
    broken: Tensor | None = None

    def look(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        nonlocal broken
        found = ~torch.isfinite(output.logits[:, -1]).all()
        broken = found if broken is None else broken | found

    hook = model.register_forward_hook(look)
    try:
        yield
    finally:
        hook.remove()
    if broken is not None and bool(broken):
        raise EvaluationError(
            "logits of generated tokens are NaN or infinite, which no scoring mode can mend; "
            "look at the model's weights, its quantizer and its dtype"
        )


CACHE_BYTES = {"cuda": 8 << 30, "cpu": 1 << 30}  # keys and values of prompts decoded at once
PROMPT_TOKENS = {"cuda": 131_072, "cpu": 4_096}  # read at once


class ReservedLayer(DynamicLayer):
    """A layer's keys and values in memory that is taken once, for ``room`` tokens: a step writes
    its own ones, and copies none of those before."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room, self.length = room, 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self.length == 0:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = (
                states.new_empty(*states.shape[:2], self.room, states.shape[3])
                for states in (key_states, value_states)
            )
        before, self.length = self.length, self.length + key_states.shape[2]
        assert self.length <= self.room
        self.keys[:, :, before : self.length] = key_states
        self.values[:, :, before : self.length] = value_states
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def get_seq_length(self, *args: Any) -> int:
        return self.length


def reserved_cache(model: Any, room: int) -> DynamicCache:
    """A cache for ``room`` tokens; layers that keep something else than all keys and values stay
    as transformers has them."""
    cache = DynamicCache(config=model.config)
    cache.layers = [
        ReservedLayer(room) if type(layer) is DynamicLayer else layer for layer in cache.layers
    ]
    return cache


@torch.inference_mode()
def greedy(
    model: Any,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """The ``tokens`` likeliest tokens after each of ``prompts``, all of one length, each the
    likeliest after those before it; no token ends an answer early.

    Raises EvaluationError where logits are not numbers, or for one prompt that does not fit the
    device.
    """
    if not prompts:
        return []
    device = model.device
    length = len(prompts[0])
    batch = min(len(prompts), at_once(model, length + tokens))
    # Batches alike large, for the last one costs as much time a step as any other.
    batch = -(-len(prompts) // -(-len(prompts) // batch))
    found: list[list[int]] = []
    while len(found) < len(prompts):
        ids = torch.tensor(prompts[len(found) : len(found) + batch], device=device)
        try:
            answers = _decode(model, ids, tokens)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if batch == 1:
                raise EvaluationError(
                    f"out of memory on one prompt of {length} tokens; use a larger device"
                ) from error
            answers = None
        if answers is None:  # outside the handler, whose traceback keeps tensors
            batch //= 2
            free_cached_memory(device)
            continue
        found += answers
        if progress is not None:
            progress(len(found), len(prompts))
    return found


def at_once(model: Any, length: int) -> int:
    """How many prompts are decoded at once; from the device type and the model's shape alone, for
    scores may move with the size of a batch."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token = 2 * config.num_hidden_layers * heads * width * model.dtype.itemsize
    kind = model.device.type
    return max(1, min(CACHE_BYTES[kind] // (token * length), PROMPT_TOKENS[kind] // length))


def _decode(model: Any, ids: Tensor, tokens: int) -> list[list[int]]:
    cache = reserved_cache(model, ids.shape[1] + tokens)
    chosen: list[Tensor] = []
    finite = torch.ones((), dtype=torch.bool, device=ids.device)
    for _ in range(tokens):
        # The cache knows where a token stands: all rows are alike long.
        logits = model(
            input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits[:, -1]
        finite &= torch.isfinite(logits).all()
        ids = logits.argmax(-1, keepdim=True)
        chosen.append(ids)
    # The verdict waits until the end, so that no step waits for it.
    if not bool(finite):
        raise EvaluationError(
            "logits of generated tokens are NaN or infinite, which no scoring mode can mend; "
            "look at the model's weights, its quantizer and its dtype"
        )
    return torch.cat(chosen, dim=1).tolist()
