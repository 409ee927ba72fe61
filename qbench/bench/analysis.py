"""What an analysis costs: one pass over a text by its parts, and passkey retrieval's decoding
beside transformers' ``generate``. Of random weights: none of it depends on what a model says."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from qbench import text
from qbench.analysis.attention import measure_weights
from qbench.analysis.capture import (
    attention_observed,
    decoder_layers,
    inputs_observed,
    states_observed,
)
from qbench.analysis.hidden import States
from qbench.analysis.inputs import Inputs
from qbench.analysis.measure import measure
from qbench.analysis.text import BATCH_TOKENS
from qbench.attention.transformers import attend
from qbench.errors import EvaluationError
from qbench.evaluation.scoring.generate import at_once, greedy
from qbench.machine import environment
from qbench.quantizers.linear import linears

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# hidden size, layers, heads, key heads, intermediate size, vocabulary; 7b: Llama 3 8B's but for the
# vocabulary
SHAPES = {
    "340m": (1024, 24, 16, 16, 2816, 32_000),
    "7b": (4096, 32, 32, 8, 14_336, 32_000),
    "tiny": (64, 2, 2, 2, 128, 512),
}
DECODED = 6  # tokens of an answer: the five digits and a space
CHECKED = 16_384  # tokens of a prompt, at most, that is decoded in float32 too


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """``seconds`` of ``what``; ``peak_gib`` of the GPU's memory, 0 on a CPU; new tokens by second
    where answers are generated."""

    what: str
    normalizer: str
    seconds: float
    peak_gib: float
    detail: str = ""
    tokens_per_second: float | None = None


class Signs:
    """A tokenizer of random ids: every twentieth is a full stop."""

    bos_token_id = 1

    def decode(self, ids: list[int]) -> str:
        return "." if ids[0] % 20 == 0 else "word"

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [2 + ord(letter) % 400 for letter in text]


def random_model(shape: str, normalizer: str, device: str) -> PreTrainedModel:
    """A Llama of random weights, bfloat16, attending with ``normalizer``."""
    width, layers, heads, kv_heads, inner, vocabulary = SHAPES[shape]
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, intermediate_size=inner, vocab_size=vocabulary,
        max_position_embeddings=4096, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with torch.device(device):
        model = LlamaForCausalLM(config)
    model = model.to(torch.bfloat16).eval().requires_grad_(False)
    model.config.qbench_normalizer = normalizer
    attend(model, normalizer=normalizer)
    return model


def bench_analysis(
    *, shape: str, device: str, samples: int, length: int, prompts: int, prompt: int
) -> dict[str, Any]:
    """One pass over ``samples`` random texts of ``length`` tokens for softmax and softpick, and
    ``prompts`` prompts of ``prompt`` tokens decoded both ways. Raises EvaluationError where the
    two do not say the same in float32 of the prompts' first ``CHECKED`` tokens."""

    def rows(model: PreTrainedModel, normalizer: str) -> Iterator[Row]:
        yield from _pass(model, normalizer, samples, length)
        yield from _decoding(model, normalizer, prompts, prompt)

    sizes = {"samples": samples, "length": length, "prompts": prompts, "prompt": prompt}
    return measured(shape, device, ("softmax", "softpick"), rows, sizes)


def measured(
    shape: str,
    device: str,
    normalizers: Sequence[str],
    rows: Callable[[PreTrainedModel, str], Iterable[Row]],
    sizes: dict[str, int],
) -> dict[str, Any]:
    """What ``rows`` gives of a random model of each normalizer, one after the other, as JSON."""
    found = []
    for normalizer in normalizers:
        found += [asdict(row) for row in rows(random_model(shape, normalizer, device), normalizer)]
    about = environment(device, ()).model_dump(mode="json")
    return {"shape": shape, **sizes, "environment": about, "rows": found}


def table(found: dict[str, Any]) -> str:
    rows = [
        [row["what"], row["normalizer"], f"{row['seconds']:.2f}",
         "" if row["tokens_per_second"] is None else f"{row['tokens_per_second']:,.0f}",
         f"{row['peak_gib']:.1f}", row["detail"]]
        for row in found["rows"]
    ]  # fmt: skip
    head = ["What", "Normalizer", "Seconds", "Tokens/s", "Peak GiB", ""]
    if all(row["tokens_per_second"] is None for row in found["rows"]):
        head, rows = head[:3] + head[4:], [row[:3] + row[4:] for row in rows]
    return text.table(head, rows, align="ll" + "r" * (len(head) - 3) + "l")


def _pass(model: PreTrainedModel, normalizer: str, samples: int, length: int) -> Iterator[Row]:
    """The whole of it, and of an eighth of the texts each part alone."""
    kind = model.device.type
    batch = max(1, BATCH_TOKENS[kind] // length)
    names = list(linears(model))
    ids = torch.randint(3, model.config.vocab_size, (samples, length))
    measure(model, ids[:batch], tokenizer=Signs(), linears=names, batch=batch)  # warm-up
    with clock(kind) as lap:
        measure(model, ids, tokenizer=Signs(), linears=names, batch=batch)
    yield Row(
        what="analysis", normalizer=normalizer, **lap(), detail=f"{samples} × {length} tokens"
    )
    some = ids[: max(batch, samples // 8)].to(model.device)
    states = [States() for _ in decoder_layers(model)]
    modules = {name: model.get_submodule(name) for name in names}
    parts: dict[str, Callable[[], Any]] = {
        "of it: the model": nullcontext,
        "of it: attention": lambda: attention_observed(
            model, lambda layer, call: measure_weights(call)
        ),
        "of it: hidden states": lambda: states_observed(
            decoder_layers(model), lambda layer, seen: states[layer].add(seen, layer=layer, first=0)
        ),
        "of it: inputs (shared ones each time)": lambda: inputs_observed(
            modules, lambda name, given: Inputs.of(given)
        ),
    }
    for what, within in parts.items():
        with clock(kind) as lap, torch.inference_mode(), within():
            for first in range(0, len(some), batch):
                model(input_ids=some[first : first + batch], use_cache=False)
        scale = samples / len(some)
        spent = lap()
        yield Row(
            what=what, normalizer=normalizer, seconds=spent["seconds"] * scale,
            peak_gib=spent["peak_gib"], detail="with the model; of an eighth of the texts, times 8",
        )  # fmt: skip


def _decoding(model: PreTrainedModel, normalizer: str, prompts: int, length: int) -> Iterator[Row]:
    kind = model.device.type
    ids = torch.randint(3, model.config.vocab_size, (prompts, length)).tolist()

    def one_by_one(prompts: list[list[int]]) -> list[list[int]]:
        return [
            model.generate(
                torch.tensor([one], device=model.device),
                attention_mask=torch.ones(1, len(one), dtype=torch.long, device=model.device),
                max_new_tokens=DECODED, min_new_tokens=DECODED, do_sample=False, pad_token_id=0,
            )[0, len(one):].tolist()
            for one in prompts
        ]  # fmt: skip

    greedy(model, ids, DECODED)
    with clock(kind) as lap:
        ours = greedy(model, ids, DECODED)
    batch = at_once(model, length + DECODED)
    yield Row(
        what="passkey, ours", normalizer=normalizer, **lap(),
        detail=f"{prompts} × {length} tokens, {DECODED} decoded, at most {batch} side by side",
    )  # fmt: skip
    one_by_one(ids[:2])
    with clock(kind) as lap:
        theirs = one_by_one(ids)
    same = sum(a == b for a, b in zip(ours, theirs, strict=True))
    yield Row(
        what="passkey, transformers' generate, batch 1", normalizer=normalizer, **lap(),
        detail=f"{same} of {prompts} answers the same in bfloat16",
    )  # fmt: skip
    few = [one[:CHECKED] for one in ids[:4]]
    wide = model.float()
    if greedy(wide, few, DECODED) != one_by_one(few):
        raise EvaluationError("greedy decoding in float32 is not what transformers' generate gives")


@contextmanager
def clock(kind: str) -> Iterator[Callable[[], dict[str, float]]]:
    """Gives a function that, called after the body, says its seconds and peak memory."""
    on_gpu = kind == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    spent: dict[str, float] = {}
    yield lambda: spent
    if on_gpu:
        torch.cuda.synchronize()
    spent["seconds"] = time.perf_counter() - begun
    spent["peak_gib"] = torch.cuda.max_memory_allocated() / 1024**3 if on_gpu else 0.0
