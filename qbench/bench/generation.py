"""Time generating answers by greedy decoding and by HFLM, and reading them, with random weights."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from lm_eval.api.instance import Instance
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from qbench import bench
from qbench.attention.transformers import set_attention
from qbench.bench import Row, timed
from qbench.errors import EvaluationError
from qbench.evaluation.answers import AnswerPrompt, read_answers
from qbench.evaluation.kl_observer import BaselineWriter, KLObserver
from qbench.evaluation.scoring import Observer, Scorer
from qbench.evaluation.scoring.generate import at_once
from qbench.evaluation.settings import SAMPLE, ScoringSettings, batch_tokens
from qbench.machine import environment

# hidden size, layers, heads, key heads, intermediate size, vocabulary; 7b: Llama 3 8B's but for the
# vocabulary
SHAPES = {
    "135m": (576, 30, 9, 3, 1536, 49_152),
    "340m": (1024, 24, 16, 16, 2816, 32_000),
    "7b": (4096, 32, 32, 8, 14_336, 32_000),
    "tiny": (64, 2, 2, 2, 128, 512),
}
CHECKED = 4  # prompts whose float32 answers are compared
HFLM_BATCHES = 2  # that are timed; HFLM takes as long for each


def random_model(shape: str, normalizer: str, device: str) -> PreTrainedModel:
    """Return a Llama of ``shape``, a key of SHAPES, with random bfloat16 weights on ``device``,
    that attends with ``normalizer``. Seeds torch's generators."""
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
    set_attention(model, normalizer=normalizer)
    return model


def bench_generation(
    *,
    shape: str,
    device: str,
    prompts: int,
    length: int,
    tokens: int,
    batch_size: int,
    normalizers: Sequence[str],
    log: Callable[[str], None],
) -> dict[str, Any]:
    """Time ``prompts`` prompts of ``length`` tokens, each continued by ``tokens`` new ones, with
    qbench's greedy decoding and with lm-eval's HFLM in batches of ``batch_size``, for a random
    bfloat16 model of ``shape``, a key of SHAPES, per attention function in ``normalizers``; and
    reading these answers in packs, for hidden states and for KL divergences. ``log`` is called with
    one line per row. Returns the sizes, the environment and the rows. Raises EvaluationError if the
    two decoders' answers differ in float32."""

    def rows(model: PreTrainedModel) -> Iterator[Row]:
        vocabulary, kind = model.config.vocab_size, model.device.type
        model.generation_config.eos_token_id = None
        scorer = _scorer(model, _tokenizer(vocabulary), length + tokens, batch_size)
        requests = _requests(prompts, length, tokens, vocabulary)

        def row(what: str, spent: Row, detail: str) -> Row:
            rate = prompts * tokens / spent["seconds"]
            return {"what": what, **spent, "detail": detail, "tokens_per_second": rate}

        scorer.generate_until(requests[:2])
        ours, spent = timed(kind, lambda: scorer.generate_until(requests))
        slots = min(prompts, at_once(model, length + tokens))
        yield row("qbench", spent, f"at most {slots} side by side")

        our_seconds, answered = spent["seconds"], _encoded(scorer, requests, ours)
        observer: Any = BaselineWriter()
        for what in ("reading the answers", "reading them for KL"):
            reader = _scorer(model, scorer.hflm.tokenizer, length + tokens, batch_size, observer)
            if isinstance(observer, BaselineWriter):  # the other one reads what this one has read
                read_answers(reader, *[part[:2] for part in answered])
            _, spent = timed(kind, partial(read_answers, reader, *answered))
            detail = f"{1 + spent['seconds'] / our_seconds:.2f} × with generating them"
            yield row(what, spent, detail)
            if isinstance(observer, BaselineWriter):
                observer = KLObserver(observer.hidden_states())

        by_hflm = partial(scorer.hflm.generate_until, disable_tqdm=True)
        by_hflm(_requests(2, length, 2, vocabulary))
        some = requests[: HFLM_BATCHES * batch_size]
        theirs, spent = timed(kind, lambda: by_hflm(some))
        spent["seconds"] *= prompts / len(some)
        same = sum(a == b for a, b in zip(ours, theirs, strict=False))
        detail = f"{spent['seconds'] / our_seconds:.1f} × the time; {len(some)} prompts timed; "
        detail += f"{same} of {len(some)} answers the same in bfloat16"
        yield row(f"lm-eval's HFLM, batch {batch_size}", spent, detail)

        few = _requests(min(CHECKED, prompts), min(length, 100), min(tokens, 16), vocabulary)
        wide = _scorer(model.float(), scorer.hflm.tokenizer, length + tokens, batch_size)
        if wide.generate_until(few) != wide.hflm.generate_until(few, disable_tqdm=True):
            raise EvaluationError(
                f"bench generation: {normalizer}: answers generated in float32 differ from those "
                "of lm-eval's HFLM; report it"
            )

    measured = []
    for normalizer in normalizers:
        for row in rows(random_model(shape, normalizer, device)):
            measured.append({"normalizer": normalizer, **row})
            log(f"{normalizer}, {row['what']}: {row['seconds']:.2f} s")
    about = environment(device, ()).model_dump(mode="json")
    sizes = {"prompts": prompts, "length": length, "tokens": tokens}
    return {"shape": shape, **sizes, "environment": about, "rows": measured}


def table(result: dict[str, Any]) -> str:
    """Return the rows of :func:`bench_generation` as a Markdown table."""
    columns = {
        "What": ("what", ""), "Normalizer": ("normalizer", ""), "Seconds": ("seconds", ".2f"),
        "Tokens/s": ("tokens_per_second", ",.0f"), "Peak GiB": ("peak_gib", ".1f"),
        "": ("detail", ""),
    }  # fmt: skip
    return bench.table(result["rows"], columns)


def _scorer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    length: int,
    batch_size: int,
    observer: Observer | None = None,
) -> Scorer:
    """Return an exact scorer; with an ``observer`` a fast one, as cells have."""
    kind, config = model.device.type, model.config.to_dict()
    fast: dict[str, Any] = {"mode": "exact"}
    if observer is not None:
        fast = {
            "mode": "fast", "batch_tokens": batch_tokens(kind, config), "sample": SAMPLE[kind],
            "fallback": True,
        }  # fmt: skip
    settings = ScoringSettings(
        max_length=length, batch_size=batch_size, window_batch_size=1, **fast
    )
    return Scorer(model, tokenizer, settings, observer=observer)


def _encoded(
    scorer: Scorer, requests: Sequence[Any], answers: Sequence[str]
) -> tuple[list[AnswerPrompt], list[list[int]]]:
    """Return the prompts of ``requests`` and the token ids of ``answers``."""
    encode = scorer.hflm.tokenizer
    prompts = [
        AnswerPrompt(document=document, sample=0, text="", ids=encode(request.args[0])["input_ids"],
              target="")
        for document, request in enumerate(requests)
    ]  # fmt: skip
    return prompts, [encode(answer)["input_ids"] for answer in answers]


def _tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one word per id, and one more id that ends a text."""
    words = {f"w{i}": i for i in range(vocabulary)} | {"</s>": vocabulary}
    inner = Tokenizer(models.WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", pad_token="</s>")


def _requests(count: int, length: int, tokens: int, vocabulary: int) -> list[Any]:
    """Return ``count`` requests with prompts of ``length`` words and ``tokens`` new tokens."""
    draw = random.Random(0)
    return [
        Instance(
            request_type="generate_until",
            doc={},
            arguments=(
                " ".join(f"w{draw.randrange(3, vocabulary)}" for _ in range(length)),
                {"until": [], "max_gen_toks": tokens},
            ),
            idx=0,
            metadata=("generation", document, 1),
        )
        for document in range(count)
    ]
