"""Load a checkpoint's tokenizer, and compare two. A plan imports this module; ``load``, for models,
imports libraries that take seconds and print lines of their own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from qbench.checkpoints import fla
from qbench.errors import CheckpointError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from qbench.checkpoints.find import Checkpoint

# What tokenizers of one vocabulary differ in: spaces, lines, digits, composed and other characters.
TEXTS = (
    "The quick brown fox, aged 1234 years, isn't over 3.5 dogs.", " leading", "trailing  ",
    "two\n\nlines\n", "\n", "tab\tand\r\nend", "a  b   c    d", " = Title = \n",
    "caf\u00e9 cafe\u0301 \ufb01 \u212b \u2460 \u2019\u2014\u00a0x", "MiXeD CASE ab12CD 000",
    "\u4e2d\u6587 \u65e5\u672c\u8a9e \ud55c\uad6d\uc5b4 \u0627\u0644\u0639\u0631\u0628\u064a\u0629",
    "\u0939\u093f\u0928\u094d\u0926\u0940 \U0001f600\u200d\U0001f525",
    "def f(x):\n    return x ** 2  # y", "<s> </s> <|endoftext|> [INST]",
)  # fmt: skip


def load_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    """Return a checkpoint's tokenizer. No remote code runs. Raises CheckpointError if transformers
    cannot load it."""
    try:
        ours = fla.recognizes(checkpoint.config)
        if ours and (checkpoint.folder / "tokenizer.json").is_file():
            return PreTrainedTokenizerFast.from_pretrained(checkpoint.folder)
        return AutoTokenizer.from_pretrained(checkpoint.folder, trust_remote_code=False)
    except Exception as error:  # whatever a broken file makes of the libraries
        raise CheckpointError(
            f"checkpoint {checkpoint.source}: no usable tokenizer ({first_line(error)}); put a "
            "tokenizer.json that transformers loads into its folder (its own code is never run)"
        ) from error


def puts_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the tokenizer begins a text with BOS by default."""
    return tokenizer.encode("a")[:1] == [tokenizer.bos_token_id]


def tokenizer_difference(checkpoint: Checkpoint, other: Checkpoint) -> str | None:
    """Return in words how the tokenizers of ``checkpoint`` and ``other`` differ: in vocabulary and
    merges (of fast tokenizers, however they are written), or else in the tokens of TEXTS without
    special ones; None if they do not."""
    first, second = load_tokenizer(checkpoint), load_tokenizer(other)
    if first.is_fast and second.is_fast:
        models = (json.loads(each.backend_tokenizer.to_str())["model"] for each in (first, second))
        words, others = ((model.get("vocab"), model.get("merges")) for model in models)
        if words != others:
            return f"has other words or merges than {other.source}'s"
    for text in TEXTS:
        ids, others = (t(text, add_special_tokens=False)["input_ids"] for t in (first, second))
        if ids != others:
            return f"makes {ids[:8]} of {text!r:.40}, and {other.source}'s {others[:8]}"
    return None
