"""What an analysis costs: one pass over a text by its parts, and passkey retrieval's decoding
beside transformers' ``generate``. Of random weights: none of it depends on what a model says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from qbench import bench
from qbench.analysis.attention import measure_weights
from qbench.analysis.capture import (
    attention_observed,
    decoder_layers,
    inputs_observed,
    states_observed,
)
from qbench.analysis.hidden import Inputs, States
from qbench.analysis.measure import measure
from qbench.analysis.text import BATCH_TOKENS
from qbench.attention.transformers import attend
from qbench.bench import Row, timed
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


class Signs:
    """A tokenizer of random ids: every twentieth is a full stop."""

    def decode(self, ids: list[int]) -> str:
        return "." if ids[0] % 20 == 0 else "word"


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
    attend(model, normalizer=normalizer)
    return model


def bench_analysis(
    *,
    shape: str,
    device: str,
    samples: int,
    length: int,
    prompts: int,
    prompt: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """One pass over ``samples`` random texts of ``length`` tokens for softmax and softpick, and
    ``prompts`` prompts of ``prompt`` tokens decoded both ways. Raises EvaluationError where the
    two do not say the same in float32 of the prompts' first ``CHECKED`` tokens."""

    def rows(model: PreTrainedModel) -> Iterator[Row]:
        yield from _pass(model, samples, length)
        yield from _decoding(model, prompts, prompt)

    sizes = {"samples": samples, "length": length, "prompts": prompts, "prompt": prompt}
    return measured(shape, device, ("softmax", "softpick"), rows, sizes, say)


def measured(
    shape: str,
    device: str,
    normalizers: Sequence[str],
    rows: Callable[[PreTrainedModel], Iterable[Row]],
    sizes: dict[str, int],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """What ``rows`` gives of a random model of each normalizer, one after the other, as JSON.
    ``say`` gets a line of each."""
    found = []
    for normalizer in normalizers:
        for row in rows(random_model(shape, normalizer, device)):
            found.append({"normalizer": normalizer, **row})
            say(f"{normalizer}, {row['what']}: {row['seconds']:.2f} s")
    about = environment(device, ()).model_dump(mode="json")
    return {"shape": shape, **sizes, "environment": about, "rows": found}


def table(found: dict[str, Any]) -> str:
    columns = {
        "What": ("what", ""), "Normalizer": ("normalizer", ""), "Seconds": ("seconds", ".2f"),
        "Tokens/s": ("tokens_per_second", ",.0f"), "Peak GiB": ("peak_gib", ".1f"),
        "": ("detail", ""),
    }  # fmt: skip
    if not any("tokens_per_second" in row for row in found["rows"]):
        del columns["Tokens/s"]
    return bench.table(found["rows"], columns)


def _pass(model: PreTrainedModel, samples: int, length: int) -> Iterator[Row]:
    """The whole of it, and of an eighth of the texts each part alone."""
    kind = model.device.type
    batch = max(1, BATCH_TOKENS[kind] // length)
    names = list(linears(model))
    ids = torch.randint(3, model.config.vocab_size, (samples, length))
    whole = partial(measure, model, tokenizer=Signs(), linears=names, batch=batch)
    whole(ids[:batch])  # warm-up
    _, spent = timed(kind, lambda: whole(ids))
    yield {"what": "analysis", **spent, "detail": f"{samples} × {length} tokens"}
    some = ids[: max(batch, samples // 8)].to(model.device)
    times = samples / len(some)
    layers = decoder_layers(model)
    states = [States() for _ in layers]
    modules = {name: model.get_submodule(name) for name in names}
    parts: dict[str, AbstractContextManager[None]] = {
        "of it: the model": nullcontext(),
        "of it: attention": attention_observed(model, lambda layer, call: measure_weights(call)),
        "of it: hidden states": states_observed(
            layers, lambda layer, seen: states[layer].add(seen, layer=layer, first=0)
        ),
        "of it: inputs (shared ones each time)": inputs_observed(
            modules, lambda name, given: Inputs.of(given)
        ),
    }

    @torch.inference_mode()
    def run(within: AbstractContextManager[None]) -> None:
        with within:
            for first in range(0, len(some), batch):
                model(input_ids=some[first : first + batch], use_cache=False)

    for what, within in parts.items():
        _, spent = timed(kind, partial(run, within))
        spent["seconds"] *= times
        yield {"what": what, **spent, "detail": f"with the model; {len(some)} texts, × {times:g}"}


def _decoding(model: PreTrainedModel, prompts: int, length: int) -> Iterator[Row]:
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
    ours, spent = timed(kind, lambda: greedy(model, ids, DECODED))
    slots = min(prompts, at_once(model, length + DECODED))
    detail = f"{prompts} × {length} tokens, {DECODED} decoded, at most {slots} side by side"
    yield {"what": "passkey, ours", **spent, "detail": detail}
    one_by_one(ids[:2])
    theirs, spent = timed(kind, lambda: one_by_one(ids))
    same = sum(a == b for a, b in zip(ours, theirs, strict=True))
    detail = f"{same} of {prompts} answers the same in bfloat16"
    yield {"what": "passkey, transformers' generate, batch 1", **spent, "detail": detail}
    few = [one[:CHECKED] for one in ids[:4]]
    wide = model.float()
    if greedy(wide, few, DECODED) != one_by_one(few):
        raise EvaluationError("greedy decoding in float32 is not what transformers' generate gives")
