"""Generated text: decoding of many prompts at once, by continuous batching; greedy, or sampled with
a seed per answer.

A KV cache of slots is taken once. All slots end at the same column, so that a step writes one
column and each slot's first column says all that a mask has to::

    column   0 1 2 3 4 5 6 7 8 end
    slot 0   . . . p p p p a a          p prompt, a answer, . not attended to
    slot 1   p p p p p p a a a
    slot 2   . . . . . p p p p          a new prompt, where an answer was finished

Longer prompts come first, so that a later one fits before ``end``. Where the columns are used up,
the slots move to the left. On a GPU with our kernels a step is captured once as a CUDA graph, which
takes first columns and ``end`` from the device; elsewhere it is launched as it is.
"""

from __future__ import annotations

import inspect
import itertools
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from torch import Tensor
from transformers import AttentionInterface, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qbench.attention.quantized_kv import needs_sequences, one_scale
from qbench.attention.transformers import Mask
from qbench.checkpoints.find import moving_rope
from qbench.errors import EvaluationError, first_line
from qbench.evaluation.scoring.batching import Counts, check_tokens, encode_texts
from qbench.progress import Advance
from qbench.streaming import is_sharded, stream_of

CACHE_SHARE = 0.3  # of a GPU's memory: keys and values of prompts decoded at once
CACHE_BYTES = 1 << 30  # the same elsewhere
PROMPT_TOKENS = {"cuda": 32_768, "cpu": 4_096}  # read at once
CHUNK = 8_192  # tokens of each prompt that go through the model together
LOOK_EVERY = {"cuda": 8, "cpu": 1}  # steps between two looks at the new tokens: each waits
SPARE_COLUMNS = 1 / 4  # of the longest prompt with its answer: how seldom slots move to the left
REFILL = 1 / 8  # of the slots: prompts are read side by side, not one after another
ON_DEVICE = "qbench-slots"  # the attention of a captured step
# Keys of generation_config.json that change nothing in greedy decoding: lm-eval overrides them,
# this module obeys them (``eos_token_id``, ``max_new_tokens``), or they say how one would sample.
NO_EFFECT = frozenset({
    "eos_token_id", "bos_token_id", "pad_token_id", "max_length", "max_new_tokens", "use_cache",
    "do_sample", "temperature", "top_k", "top_p", "top_h", "min_p", "typical_p", "epsilon_cutoff",
    "eta_cutoff", "transformers_version", "_from_model_config", "output_attentions",
    "output_hidden_states",
})  # fmt: skip
# The same of a task's generation_kwargs. Its other keys override generation_config.json in lm-eval.
TASK_KEYS = frozenset({
    "until", "max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens", "do_sample",
    "temperature", "top_k", "top_p", "top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff",
})  # fmt: skip

NOT_FINITE = (
    "logits of generated tokens are NaN or infinite, which no scoring mode can fix; look at the "
    "model's weights, its quantizer and its dtype"
)

Finished = Callable[[int, list[int]], bool]  # of a prompt's index and its answer so far


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """Token ids, and the most tokens that the answer may have. At a ``temperature`` above 0 tokens
    are drawn, by ``seed`` and position only: the other prompts of a batch do not matter.
    """

    ids: Sequence[int]
    limit: int
    temperature: float = 0.0
    seed: int = 0


def generate(
    hflm: HFLM,
    requests: Sequence[Any],
    *,
    progress: Advance | None = None,
    counts: Counts | None = None,
    runtime: Callable[..., list[list[int]]] | None = None,
) -> list[str]:
    """Return the greedy answers to lm-eval's requests as texts. Model and ``generation_kwargs``
    must suit (see :func:`unsupported_by_slots`).

    Stop strings, limits and truncation of long prompts are HFLM's; in float32 on a CPU so are the
    answers. Requests are counted in ``counts``. ``runtime`` decodes in place of :func:`decode`.
    Raises EvaluationError if logits are not numbers, an answer has no room, all prompts would be
    cut, or the tokenizer has no EOS token.
    """
    counts = counts or Counts()

    prompts, stops = _prompts(hflm, requests, counts)
    ends = end_tokens(hflm.model.generation_config, hflm.tokenizer)
    windows = [_window(hflm.tokenizer, stop) for stop in stops]

    def finished(index: int, tokens: list[int]) -> bool:
        """Return whether ``tokens``, the answer to prompt ``index`` so far, ends with an end token
        or holds a stop string. Its length is limited elsewhere."""
        if tokens[-1] in ends:
            return True
        latest = hflm.tokenizer.decode(tokens[-windows[index] :])
        if not any(stop in latest for stop in stops[index] if stop):
            return False
        return _settled(hflm.tok_decode(tokens), stops[index])

    answers = (runtime or partial(decode, ends=ends, counts=counts))(
        hflm.model, prompts, finished=finished, longest=hflm.max_length, progress=progress
    )
    return [
        postprocess_generated_text(hflm.tok_decode(answer), stop=stop, think_end_token=None)
        for answer, stop in zip(answers, stops, strict=True)
    ]


def _prompts(
    hflm: HFLM, requests: Sequence[Any], counts: Counts
) -> tuple[list[Prompt], list[list[str]]]:
    """Return the prompts as token ids, truncated as by HFLM, and the stop strings of each."""
    kwargs = [normalize_gen_kwargs(request.args[1], hflm.max_gen_toks) for request in requests]
    if requests and hflm.eot_token_id is None:
        task = requests[0].task_name
        raise EvaluationError(
            f"{task}: the checkpoint's tokenizer has no EOS token, which ends answers; name one in "
            "tokenizer_config.json"
        )
    eos = hflm.tok_decode(hflm.eot_token_id, skip_special_tokens=False)
    encoded = encode_texts(
        hflm.tokenizer,
        [request.args[0] for request in requests],
        add_bos=hflm.add_bos_token,
        prefix_id=hflm.prefix_token_id,
    )
    max_new_tokens = hflm.model.generation_config.max_new_tokens  # which transformers obeys first
    prompts, truncated = [], 0
    for ids, settings in zip(encoded, kwargs, strict=True):
        limit = settings["max_gen_toks"]
        if limit >= hflm.max_length:
            raise EvaluationError(
                f"answers of up to {limit} tokens do not fit into evaluation.max_length "
                f"{hflm.max_length}; raise max_length, or lower max_gen_toks in the task's "
                "definition"
            )
        truncated += len(ids) > hflm.max_length - limit
        ids = ids[limit - hflm.max_length :] or [hflm.prefix_token_id]
        prompts.append(Prompt(ids=ids, limit=max_new_tokens or limit))
    if requests:
        counts.add_requests(requests[0].task_name, len(requests), truncated, hflm.max_length)
    return prompts, [handle_stop_sequences(settings.get("until"), eos=eos) for settings in kwargs]


def unsupported_by_slots(model: Any, kwargs: Sequence[Mapping[str, Any]]) -> str | None:
    """Return why transformers' ``generate`` must answer, through HFLM; None if slots can.

    Slots support no requests whose ``generation_kwargs``, listed in ``kwargs``, sample or set what
    slots do not obey, as generation_config.json may. They support no model whose blocks lie on
    several GPUs or whose rotary angles depend on the batch. Nor do they if a layer keeps more than
    keys and values of all tokens, or rounds them depending on the other slots.
    """
    if any(normalize_gen_kwargs(dict(settings))["do_sample"] for settings in kwargs):
        return "the task samples"
    unlike = {name for settings in kwargs for name, value in settings.items() if value is not None}
    unlike -= TASK_KEYS
    config = model.generation_config.to_diff_dict()
    if config.get("cache_implementation") != "quantized":
        config.pop("cache_implementation", None)
    unlike |= config.keys() - NO_EFFECT
    if unlike:
        return f"it sets {', '.join(sorted(unlike))}"
    if is_sharded(model):
        return "its blocks lie on several GPUs"
    if moving := moving_rope(model.config.to_dict()):
        return f"{moving} rotary angles depend on the batch"
    if one_scale(model):
        return "its KV cache has one scale for all answers of a batch"
    plain = all(
        type(settings) is DynamicLayer for settings in DynamicCache(config=model.config).layers
    )
    if plain and "position_ids" in inspect.signature(model.forward).parameters:
        return None
    return f"{type(model).__name__} keeps more than keys and values"


def at_once(model: Any, length: int) -> int:
    """Return how many prompts are decoded at once if prompt and answer have ``length`` tokens
    together. It depends only on the device and the model's shape, not on free memory: scores may
    move with the size of a batch."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token = 2 * config.num_hidden_layers * heads * width * model.dtype.itemsize
    memory = float(CACHE_BYTES)
    if model.device.type == "cuda":
        memory = CACHE_SHARE * torch.cuda.get_device_properties(model.device).total_memory
    return max(1, int(memory // (token * length)))


def decode(
    model: Any,
    prompts: Sequence[Prompt],
    *,
    ends: Collection[int] = (),
    finished: Finished | None = None,
    longest: int | None = None,
    progress: Advance | None = None,
    counts: Counts | None = None,
) -> list[list[int]]:
    """Return the answer's token ids for each prompt.

    An answer ends at its limit, with one of ``ends`` (kept as its last token), or when
    ``finished(prompt's index, tokens so far)`` returns true. That is called every few tokens, so
    the answer may go on a little beyond. ``longest``: how many tokens of prompt and answer the
    model has positions for. Work is counted in ``counts``. If memory is short, fewer prompts are
    decoded at once. Raises EvaluationError if logits are not numbers, or a single prompt does not
    fit the device.
    """
    counts = counts or Counts()
    check_tokens((prompt.ids for prompt in prompts), len(model.get_input_embeddings().weight))
    answers: list[list[int]] = [[] for _ in prompts]
    waiting = sorted(range(len(prompts)), key=lambda i: -len(prompts[i].ids))
    batch = min(len(prompts), at_once(model, max(len(p.ids) + p.limit for p in prompts)))
    # Batches of equal size: a step takes as long for the last one as for any other.
    batch = -(-len(prompts) // -(-len(prompts) // batch))
    while waiting:
        run = _Decoding(model, prompts, answers, waiting, batch, longest, ends, finished)
        try:
            run.all(progress)
        except RuntimeError as error:
            if not should_reduce_batch_size(error):
                raise
            if batch == 1:
                raise EvaluationError(
                    f"out of memory on one prompt of {max(len(p.ids) for p in prompts)} tokens; "
                    "use a GPU with more memory"
                ) from error
        # Outside the handler, whose traceback keeps tensors.
        waiting = run.unfinished()
        counts.graph_error = counts.graph_error or run.graph_error
        if waiting:
            counts.halvings += 1
            del run
            clear_device_cache(garbage_collection=True)
            batch = max(1, batch // 2)
    return answers


def add_noise(logits: Tensor, seed: Tensor, position: Tensor, temperature: Tensor) -> Tensor:
    """Return logits [N, V] whose largest is a draw from softmax(logits / temperature), by the
    Gumbel-max trick; rows at temperature 0 are unchanged.

    ``seed`` [N], ``position`` [N] and the token's id are hashed to the noise (``lowbias32`` of
    Wellons 2018), so that a draw depends on nothing else. ``temperature`` is float32 [N].
    """
    tokens = torch.arange(logits.shape[-1], device=logits.device)
    row = _hash32(_hash32(seed) + position)
    bits = _hash32(_hash32(tokens)[None] ^ row[:, None])
    uniform = ((bits >> 9).float() + 0.5) / 2**23  # 0 and 1 excluded, exact in float32
    gumbel = -torch.log(-torch.log(uniform))
    return torch.addcmul(logits.float(), gumbel, temperature[:, None])


def _hash32(x: Tensor) -> Tensor:
    """Return the hashes of int64 numbers, 32 bits each."""
    mask = 0xFFFFFFFF
    x = x & mask
    x = (x ^ (x >> 16)) * 0x7FEB352D & mask
    x = (x ^ (x >> 15)) * 0x846CA68B & mask
    return x ^ (x >> 16)


@cache
def cache_argument(model_class: type) -> str:
    """Return the name of the KV cache argument in the forward of ``model_class``: ``cache`` since
    transformers 5.24, ``past_key_values`` before."""
    named = inspect.signature(model_class.forward).parameters
    return "cache" if "cache" in named else "past_key_values"


def _last_logits(model: Any, ids: Tensor, cache: DynamicCache, **options: Any) -> Tensor:
    """Return logits [N, V] after the last of ``ids`` [N, T]; ``cache`` is extended."""
    options |= {cache_argument(type(model)): cache, "use_cache": True, "logits_to_keep": 1}
    return model(input_ids=ids, **options).logits[:, -1]


class _Columns:
    """The columns of the KV cache. ``end`` is the column that the next step writes, ``column`` [1]
    the same on the device while a captured step runs. While prompts are read, ``reading`` are their
    slots, ``first`` is their first column, and ``end`` the next one to be written.
    """

    def __init__(self, slots: int, capacity: int) -> None:
        self.slots, self.capacity, self.end, self.first = slots, capacity, 0, 0
        self.column: Tensor | None = None
        self.reading: slice | Tensor | None = None


class SlotLayer(DynamicLayer):
    """A layer's keys and values [slots, H, capacity, D] in memory that is allocated once."""

    def __init__(self, at: _Columns) -> None:
        super().__init__()
        self.at = at

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values [slots, H, T, D] at ``self.at``; return those to attend to:
        while prompts are read those of their slots, with ``at.column`` all memory (a mask hides
        columns that are not written), else all slots up to ``at.end``."""
        at = self.at
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = (
                new.new_zeros(at.slots, new.shape[1], at.capacity, new.shape[3])
                for new in (key_states, value_states)
            )
        if at.reading is not None:
            last = at.end + key_states.shape[2]
            self.keys[at.reading, :, at.end : last] = key_states
            self.values[at.reading, :, at.end : last] = value_states
            if at.end == at.first:
                return key_states, value_states
            seen = (at.reading, slice(None), slice(at.first, last))
            return self.keys[seen], self.values[seen]
        if at.column is not None:
            self.keys.index_copy_(2, at.column, key_states)
            self.values.index_copy_(2, at.column, value_states)
            return self.keys, self.values
        self.keys[:, :, at.end] = key_states[:, :, 0]
        self.values[:, :, at.end] = value_states[:, :, 0]
        return self.keys[:, :, : at.end + 1], self.values[:, :, : at.end + 1]

    def get_seq_length(self, *args: Any) -> int:
        """Return the column that is written next, counted from the first column of the prompts
        being read, if any are."""
        return self.at.end if self.at.reading is None else self.at.end - self.at.first

    def shift(self, columns: int) -> None:
        """Drop the first ``columns`` columns: the others move to the left; the last ``columns``
        keep stale values."""
        for kept in (self.keys, self.values):
            kept[:, :, : -columns or None] = kept[:, :, columns:].clone()


class _Decoding:
    """The state of prompts that are decoded in slots."""

    def __init__(
        self,
        model: Any,
        prompts: Sequence[Prompt],
        answers: list[list[int]],
        waiting: Sequence[int],
        batch: int,
        longest: int | None,
        ends: Collection[int],
        finished: Finished | None,
    ) -> None:
        self.model, self.prompts, self.answers = model, prompts, answers
        self.ends, self.finished = ends, finished
        self.device = model.device
        self.waiting = deque(waiting)
        self.active: dict[int, int] = {}  # index of the prompt by slot
        most = max(len(prompts[i].ids) + prompts[i].limit for i in waiting)
        self.last_position = max(longest or 0, most) - 1
        room = most + LOOK_EVERY[self.device.type] + round(SPARE_COLUMNS * most)
        self.at = _Columns(min(batch, len(self.waiting)), room)
        self.cache = DynamicCache(config=model.config)
        self.cache.layers = [SlotLayer(self.at) for _ in self.cache.layers]
        slots = self.at.slots
        self.ids = torch.zeros(slots, 1, dtype=torch.long, device=self.device)
        self.positions = torch.zeros_like(self.ids)
        self.finite = torch.ones(slots, dtype=torch.bool, device=self.device)
        self.first = torch.zeros(slots, dtype=torch.long, device=self.device)  # token's column
        self.samples = any(prompt.temperature for prompt in prompts)
        self.seed = torch.zeros_like(self.first)
        self.temperature = torch.zeros(slots, device=self.device)
        self.column = torch.zeros(1, dtype=torch.long, device=self.device)
        self.graphs = takes_graphs(model)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.graph_error: str | None = None
        self.seq_bounds: Tensor | None = None  # which the graph reads

    def unfinished(self) -> list[int]:
        """Return the indexes of prompts without an answer, longest first; their partial answers are
        dropped."""
        started = list(self.active.values())
        for index in started:
            self.answers[index] = []
        return sorted([*started, *self.waiting], key=lambda i: -len(self.prompts[i].ids))

    @torch.inference_mode()
    def all(self, progress: Advance | None) -> None:
        """Answer every waiting prompt."""
        before = len(self.prompts) - len(self.waiting)
        while self.waiting or self.active:
            free = [slot for slot in range(self.at.slots) if slot not in self.active]
            if self.waiting and (not self.active or len(free) >= REFILL * self.at.slots):
                self._fill(free)
            else:
                self._look(self._steps(), list(self.active))
            done = len(self.prompts) - len(self.waiting) - len(self.active)
            if progress is not None and done > before:
                progress(done, len(self.prompts))
            before = done

    def _fill(self, free: list[int]) -> None:
        """Read prompts into free slots and decode the first token of each answer."""
        if not self.active:
            self.at.end = len(self.prompts[self.waiting[0]].ids)
        at_most = PROMPT_TOKENS[self.device.type]
        while free and self.waiting:
            width = len(self.prompts[self.waiting[0]].ids)
            count = min(len(free), len(self.waiting), max(1, at_most // width))
            slots, free = free[:count], free[count:]
            new = {slot: self.waiting.popleft() for slot in slots}
            self.active |= new
            for slot, index in new.items() if self.samples else ():
                self.seed[slot] = self.prompts[index].seed
                self.temperature[slot] = self.prompts[index].temperature
            tokens = self._read([self.prompts[index].ids for index in new.values()], slots)
            self._look([tokens], slots)

    def _read(self, prompts: list[Sequence[int]], slots: list[int]) -> Tensor:
        """Read ``prompts``, longest first, into ``slots`` of the cache, padded on the left; return
        the current token of every slot of the cache, the first after its prompt in ``slots``."""
        width = len(prompts[0])
        missing = [width - len(ids) for ids in prompts]
        ids = [[0] * count + list(row) for count, row in zip(missing, prompts, strict=True)]
        columns = torch.arange(width, device=self.device)[None]
        first = torch.tensor(missing, device=self.device)[:, None]
        seen = (columns >= first).long() if any(missing) else None
        positions, tokens = (columns - first).clamp(min=0), torch.tensor(ids, device=self.device)
        where = torch.tensor(slots, device=self.device)
        joined = slots[-1] - slots[0] == len(slots) - 1
        self.at.reading = slice(slots[0], slots[-1] + 1) if joined else where
        self.at.first = self.at.end - width
        for start in range(0, width, CHUNK):
            self.at.end, end = self.at.first + start, start + CHUNK
            logits = _last_logits(
                self.model, tokens[:, start:end], self.cache, position_ids=positions[:, start:end],
                attention_mask=None if seen is None else seen[:, :end],
            )  # fmt: skip
        self.at.reading, self.at.end = None, self.at.first + width
        self.finite[where] = torch.isfinite(logits).all(-1)
        self.ids[where] = self._choose(logits, where, width - 1 - first)
        self.positions[where] = width - first
        self.first[where] = self.at.end - width + first[:, 0]
        return self.ids[:, 0].clone()

    def _look(self, new_tokens: Sequence[Tensor], slots: Sequence[int]) -> None:
        """Copy the tokens of these steps, [slots of the cache] each, from the device, append them
        to the answers of ``slots``, and end finished answers."""
        steps = torch.stack(list(new_tokens)).tolist()
        finite = self.finite.tolist()
        for slot in slots:
            index = self.active[slot]
            answer = self.answers[index]
            if not finite[slot]:
                raise EvaluationError(NOT_FINITE)
            limit = self.prompts[index].limit - len(answer)
            fresh = [tokens[slot] for tokens in steps][:limit]
            end = next((i for i, token in enumerate(fresh) if token in self.ends), None)
            answer += fresh if end is None else fresh[: end + 1]
            over = end is not None or len(fresh) == limit
            if over or (self.finished is not None and self.finished(index, answer)):
                del self.active[slot]

    def _steps(self) -> list[Tensor]:
        """Decode until the next look or the last limit; return each step's tokens [slots]."""
        left = max(self.prompts[i].limit - len(self.answers[i]) for i in self.active.values())
        count = min(LOOK_EVERY[self.device.type], left)
        if self.at.end + count > self.at.capacity:
            # Move the slots to the left by the columns that none of them uses any more
            columns = int(self.first[list(self.active)].min())
            for layer in self.cache.layers:
                layer.shift(columns)
            self.first.sub_(columns).clamp_(min=0)
            self.at.end -= columns
        if self.graph is None and self.graphs:
            self.graph, self.graphs = self._capture(), False
        new_tokens = []
        self.column.fill_(self.at.end)
        padded = self.graph is None and bool(self.first.any())
        mask = None
        for _ in range(count):
            if self.graph is not None:
                self.graph.replay()
            else:
                if padded:  # the columns that each slot attends to
                    columns = torch.arange(self.at.end + 1, device=self.device)[None]
                    mask = (columns >= self.first[:, None]).long()
                self._step(mask)
            self.at.end += 1
            new_tokens.append(self.ids[:, 0].clone())
        return new_tokens

    def _step(self, mask: Tensor | None, **options: Any) -> None:
        """Decode one token for every slot, on the device."""
        options |= {"attention_mask": mask, "position_ids": self.positions}
        logits = _last_logits(self.model, self.ids, self.cache, **options)
        self.finite &= torch.isfinite(logits).all(-1)
        self.ids.copy_(self._choose(logits, slice(None), self.positions))
        self.positions.add_(1).clamp_(max=self.last_position)

    def _choose(self, logits: Tensor, slots: slice | Tensor, position: Tensor) -> Tensor:
        """Return the next token [N, 1] of each of ``slots``, the likeliest or drawn; ``position``
        [N, 1]: that of the latest token."""
        if self.samples:
            drawn = self.seed[slots], position[:, 0], self.temperature[slots]
            logits = add_noise(logits, *drawn)
        return logits.argmax(-1, keepdim=True)

    def _capture(self) -> torch.cuda.CUDAGraph | None:
        """Return a decoding step captured as a CUDA graph; None if that fails (``graph_error`` says
        why) and steps must be launched kernel by kernel, with the same results."""
        step, state = self._device_step(), (self.ids, self.positions, self.finite)
        before = [tensor.clone() for tensor in state]
        graph, stream = torch.cuda.CUDAGraph(), _capture_stream(self.device)
        try:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):  # compiles, and allocates what libraries keep
                    self.column.fill_(self.at.end)
                    step()
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(graph, stream=stream):
                step()
        except RuntimeError as error:
            if should_reduce_batch_size(error):
                raise
            self.graph_error = first_line(error)
            return None
        finally:
            for tensor, old in zip(state, before, strict=True):
                tensor.copy_(old)
        return graph

    def _device_step(self) -> Callable[[], None]:
        """Return a step that reads everything that changes from device memory: attention gets all
        columns of the cache, and ``seq_bounds`` limit it to the valid ones."""
        config, attention = self.model.config, self.model.config._attn_implementation
        self.seq_bounds = seq_bounds = torch.zeros(
            self.at.slots, 6, dtype=torch.int32, device=self.device
        )
        seq_bounds[:, 0] = torch.arange(self.at.slots, device=self.device)
        seq_bounds[:, 2] = 1
        mask = Mask(dense=_no_mask, no_dense_mask=True, seq_bounds=seq_bounds)

        def step() -> None:
            seq_bounds[:, 3] = self.first
            seq_bounds[:, 4] = self.column + 1
            seq_bounds[:, 5] = self.column
            config._attn_implementation, self.at.column = ON_DEVICE, self.column
            try:
                self._step(None, qbench_mask=mask, qbench_attention=attention)
            finally:
                config._attn_implementation, self.at.column = attention, None
            self.column.add_(1)

        return step


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return one stream per device: cuBLAS keeps memory of its own for every stream."""
    return torch.cuda.Stream(device)


def takes_graphs(model: Any) -> bool:
    """Return whether a step may be captured as a graph: on a GPU with our kernels, all blocks
    there, without a quantized cache that must ask on the host where sequences begin."""
    attention = model.config._attn_implementation or ""
    ours = attention.startswith("qbench-") and attention.endswith("-triton")
    apart = needs_sequences(model) or stream_of(model) is not None
    return model.device.type == "cuda" and ours and not apart


def _no_mask() -> Tensor:
    raise AssertionError("seq_bounds say all there is to say")


def _attend_slots(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    qbench_mask: Mask,
    qbench_attention: str,
    **options: Any,
) -> tuple[Tensor, Any]:
    """Attend with our mask ``qbench_mask``, by the attention named ``qbench_attention``."""
    function = ALL_ATTENTION_FUNCTIONS[qbench_attention]
    return function(module, query, key, value, qbench_mask, **options)


AttentionInterface.register(ON_DEVICE, _attend_slots)


def end_tokens(generation_config: Any, tokenizer: Any) -> set[int]:
    """Return the ids that end an answer: the tokenizer's EOS and those of
    generation_config.json."""
    eos = generation_config.eos_token_id
    several = eos if isinstance(eos, list) else [eos]
    return {token for token in (*several, tokenizer.eos_token_id) if token is not None}


@torch.inference_mode()
def decode_by_transformers(
    model: Any, prompts: Sequence[Prompt], *, ends: Collection[int], batch_size: int
) -> list[list[int]]:
    """Return the token ids that :func:`decode` returns, by transformers' ``generate``, for models
    that slots do not support. An answer ends at its limit or with one of ``ends``. At most
    ``batch_size`` prompts of one length share a batch, without padding."""
    check_tokens((prompt.ids for prompt in prompts), len(model.get_input_embeddings().weight))
    answers: list[list[int]] = [[] for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i].ids))
    for _, alike in itertools.groupby(order, lambda i: (len(prompts[i].ids), prompts[i].limit)):
        same = list(alike)
        for start in range(0, len(same), batch_size):
            indexes = same[start : start + batch_size]
            ids, seed, temperature = (
                torch.tensor([get(prompts[i]) for i in indexes], device=model.device)
                for get in (lambda p: list(p.ids), lambda p: p.seed, lambda p: float(p.temperature))
            )

            def draw(read: Tensor, logits: Tensor, seed=seed, temperature=temperature) -> Tensor:
                position = torch.full_like(seed, read.shape[1] - 1)
                return add_noise(logits, seed, position, temperature)

            rows = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, use_cache=True,
                max_new_tokens=prompts[indexes[0]].limit, eos_token_id=sorted(ends) or None,
                pad_token_id=0, logits_processor=[draw] if temperature.any() else None,
            )[:, ids.shape[1] :].tolist()  # fmt: skip
            for index, row in zip(indexes, rows, strict=True):
                end = next((i for i, token in enumerate(row) if token in ends), len(row))
                answers[index] = row[: end + 1]
    return answers


def _window(tokenizer: Any, stops: Sequence[str]) -> int:
    """Return how many of the latest tokens may hold a stop string that appeared since the last
    look. Two are added, as by HFLM: an answer may spell it in other tokens."""
    longest = max(len(tokenizer.encode(stop, add_special_tokens=False)) for stop in stops)
    return longest + 2 + max(LOOK_EVERY.values())


def _settled(text: str, stops: Sequence[str]) -> bool:
    """Return whether ``text`` ends by a stop string that no later text can replace by an earlier
    one: another stop string may have begun before it and be incomplete."""
    cuts = [text.find(stop) for stop in stops if stop and stop in text]
    if not cuts:
        return False
    return not any(
        len(text) - start < len(stop) and stop.startswith(text[start:])
        for stop in stops
        for start in range(max(0, len(text) - len(stop) + 1), min(cuts))
    )


def generate_by_hflm(hflm: HFLM, requests: Sequence[Any], counts: Counts) -> list[str]:
    """Return HFLM's answers as texts, in order; add to ``counts`` the requests and the prompts that
    HFLM cuts. Raises EvaluationError if transformers refuses the settings of generation, if answers
    do not fit into max_length, if all prompts would be cut, or if logits of a new token are not
    numbers."""
    _prompts(hflm, requests, counts)
    broken: list[Tensor] = []

    def look(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        not_finite = ~torch.isfinite(output.logits[:, -1]).all()
        broken[:] = [broken[0] | not_finite if broken else not_finite]

    try:
        with hflm.model.register_forward_hook(look):
            texts = hflm.generate_until(list(requests), disable_tqdm=True)
    except (AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise EvaluationError(
            "transformers cannot generate with what generation_config.json and the task's "
            f"generation_kwargs set: {type(error).__name__}: {first_line(error)}; correct them"
        ) from error
    if broken and bool(broken[0]):
        raise EvaluationError(NOT_FINITE)
    return texts
