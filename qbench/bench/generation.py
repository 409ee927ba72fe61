"""Generated answers: batched greedy decoding beside lm-eval's HFLM, of random weights."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lm_eval.api.instance import Instance
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from qbench.bench.analysis import Row, clock, measured
from qbench.errors import EvaluationError
from qbench.evaluation.scoring import Scorer
from qbench.evaluation.scoring.generate import at_once
from qbench.evaluation.settings import ScoringSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from qbench.evaluation.scoring import Scorer

CHECKED = 4  # prompts whose float32 answers are compared
HFLM_BATCHES = 2  # that are timed; HFLM takes as long for each


def bench_generation(
    *,
    shape: str,
    device: str,
    prompts: int,
    length: int,
    tokens: int,
    batch_size: int,
    normalizers: Sequence[str],
) -> dict[str, Any]:
    """``prompts`` prompts of ``length`` tokens with ``tokens`` new ones each, in bfloat16. Raises
    EvaluationError where the two ways do not say the same in float32."""

    def rows(model: PreTrainedModel, normalizer: str) -> list[Row]:
        return _rows(model, normalizer, prompts, length, tokens, batch_size)

    sizes = {"prompts": prompts, "length": length, "tokens": tokens}
    return measured(shape, device, normalizers, rows, sizes)


def _rows(
    model: PreTrainedModel,
    normalizer: str,
    prompts: int,
    length: int,
    tokens: int,
    batch_size: int,
) -> list[Row]:
    vocabulary, kind = model.config.vocab_size, model.device.type
    model.generation_config.eos_token_id = None
    scorer = _scorer(model, _tokenizer(vocabulary), length + tokens, batch_size)
    asked = _requests(prompts, length, tokens, vocabulary)

    scorer.generate_until(asked[:2])
    with clock(kind) as lap:
        ours = scorer.generate_until(asked)
    spent = lap()
    total = prompts * tokens
    slots = min(prompts, at_once(model, length + tokens))
    rows = [
        Row(
            what="qbench", normalizer=normalizer, **spent,
            tokens_per_second=total / spent["seconds"], detail=f"at most {slots} side by side",
        )
    ]  # fmt: skip
    timed = min(prompts, HFLM_BATCHES * batch_size)
    scorer.hflm.generate_until(_requests(2, length, 2, vocabulary), disable_tqdm=True)
    with clock(kind) as lap:
        theirs = scorer.hflm.generate_until(asked[:timed], disable_tqdm=True)
    theirs_spent = lap()
    seconds = theirs_spent["seconds"] * prompts / timed
    same = sum(a == b for a, b in zip(ours, theirs, strict=False))
    rows.append(
        Row(
            what=f"lm-eval's HFLM, batch {batch_size}", normalizer=normalizer, seconds=seconds,
            tokens_per_second=total / seconds, peak_gib=theirs_spent["peak_gib"],
            detail=f"{seconds / spent['seconds']:.1f} × the time; {timed} prompts timed; "
            f"{same} of {timed} answers the same in bfloat16",
        )
    )  # fmt: skip
    few = _requests(min(CHECKED, prompts), min(length, 100), min(tokens, 16), vocabulary)
    wide = _scorer(model.float(), scorer.hflm.tokenizer, length + tokens, batch_size)
    if wide.generate_until(few) != wide.hflm.generate_until(few, disable_tqdm=True):
        raise EvaluationError("generated answers in float32 are not what lm-eval's HFLM gives")
    return rows


def _scorer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, length: int, batch_size: int
) -> Scorer:
    settings = ScoringSettings(
        mode="exact", max_length=length, batch_size=batch_size, window_batch_size=1
    )
    return Scorer(model, tokenizer, settings)


def _tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """A word for each id. What ends a text is one more, so that no answer says it."""
    words = {f"w{i}": i for i in range(vocabulary)} | {"</s>": vocabulary}
    inner = Tokenizer(models.WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", pad_token="</s>")


def _requests(count: int, length: int, tokens: int, vocabulary: int) -> list[Any]:
    """``count`` prompts of ``length`` words, and ``tokens`` as their limit."""
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
