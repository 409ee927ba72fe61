"""Load a checkpoint's tokenizer, and compare two. Apart from models: a plan needs it, and loading
models imports libraries that take seconds and print lines of their own."""

from __future__ import annotations

import json
from pathlib import Path
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
    """Load the tokenizer of a checkpoint's folder. No remote code runs. Raises CheckpointError."""
    try:
        ours = fla.recognizes(checkpoint.config)
        if ours and (checkpoint.folder / "tokenizer.json").is_file():
            return PreTrainedTokenizerFast.from_pretrained(checkpoint.folder)
        return AutoTokenizer.from_pretrained(checkpoint.folder, trust_remote_code=False)
    except Exception as error:  # whatever a broken file makes of the libraries
        raise CheckpointError(
            f"checkpoint {checkpoint.source}: no usable tokenizer ({first_line(error)})"
        ) from error


def puts_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the tokenizer begins a text with BOS unless it is told not to."""
    return tokenizer.encode("a")[:1] == [tokenizer.bos_token_id]


def other_tokens(
    checkpoint: Checkpoint, other: Checkpoint
) -> tuple[str, list[int], list[int]] | None:
    """Return one of TEXTS that the tokenizers of two checkpoints cut into other tokens, special
    ones aside, with the first ids of each from where they differ; None if there is none."""
    first, second = load_tokenizer(checkpoint), load_tokenizer(other)
    for text in TEXTS:
        ids, others = (
            each(text, add_special_tokens=False)["input_ids"] for each in (first, second)
        )
        if ids != others:
            pairs = enumerate(zip(ids, others, strict=False))
            start = next((i for i, (a, b) in pairs if a != b), min(len(ids), len(others)))
            return f"{text!r:.40}", ids[start:][:8], others[start:][:8]
    return None


def other_rules(file: Path, other: Path) -> list[str]:
    """Return the parts of two tokenizer.json files that cut words and differ: the vocabulary, the
    merges, what normalizes and splits texts. How a part is written does not count."""
    first, second = (json.loads(path.read_text(encoding="utf-8")) for path in (file, other))
    parts = {
        "vocabulary": lambda t: (t.get("model") or {}).get("vocab"),
        "merges": lambda t: [
            m if isinstance(m, str) else " ".join(m)
            for m in (t.get("model") or {}).get("merges", ())
        ],
    }
    return [name for name, part in parts.items() if part(first) != part(second)]
