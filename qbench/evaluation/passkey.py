"""Passkey retrieval, a task of our own: a number in a long text of no meaning is asked for.

The set-up is that of Mohtashami and Jaggi 2023 (Landmark Attention, arXiv 2305.16300, section 4.2).
The softpick paper uses it too (section 7.7, tables 5 and 7). A prompt is a description, filler, a
line with the key, filler, and the question; what the model says next, greedily decoded, must be the
key to the digit. Here all prompts of a task have the same number of tokens, so that they are
decoded side by side without padding, and the key has always five digits.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qbench.errors import DataError, RecipeError, shown
from qbench.files import digest
from qbench.passkey import DIGITS, DOCUMENTS, KEYS, SHORTEST, depth, task_length

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KIND = "passkey"
# The published prompt, word for word: scores on another one would be those of another task.
DESCRIPTION = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize "
    "them. I will quiz you about the important information there."
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
KEY_LINE = "The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "What is the pass key? The pass key is"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompts:
    """``ids`` [N][length] tokens, all alike long, and ``keys`` [N] as text; ``answers`` [N]: how
    many tokens each key takes as the answer."""

    ids: list[list[int]]
    keys: list[str]
    answers: list[int]


@dataclass(frozen=True, slots=True)
class Passkey:
    """The documents of one length, in the shape in which lm-eval's tasks show theirs."""

    length: int

    @property
    def OUTPUT_TYPE(self) -> str:
        return KIND

    def aggregation(self) -> dict[str, Any]:
        return {}  # means

    def higher_is_better(self) -> dict[str, bool]:
        return {}  # all are

    @property
    def eval_docs(self) -> list[dict[str, Any]]:
        return [
            {"key": key(self.length, index), "depth": depth(index), "length": self.length}
            for index in range(DOCUMENTS)
        ]


def key(length: int, document: int) -> str:
    """The key of a document: the same in every run and for every checkpoint."""
    return str(random.Random(f"{KIND} {length} {document}").randint(*KEYS))


def definition_digest(length: int) -> str:
    """Of all that decides what is asked, but for the tokenizer."""
    parts = [KIND, DESCRIPTION, FILLER, KEY_LINE, QUESTION, Passkey(length).eval_docs]
    return digest(json.dumps(parts).encode())


def require_length(name: str) -> int:
    """Tokens of a prompt of the task ``name``. Raises RecipeError where it is too short."""
    length = task_length(name)
    assert length is not None
    if length < SHORTEST:
        raise RecipeError(
            f"tasks: {name}: a prompt of {length} tokens has no room for the task; use "
            f"passkey_{SHORTEST} or longer"
        )
    return length


def prompts(
    task: Passkey, tokenizer: PreTrainedTokenizerBase, *, limit: int | None, add_bos: bool
) -> Prompts:
    """The first ``limit`` documents in tokens. Filler is repeated and cut at a token, so that
    each prompt has ``task.length`` tokens, BOS counted where it is added.

    Raises DataError for a tokenizer that needs more tokens for the rest alone.
    """
    found = Prompts(ids=[], keys=[], answers=[])
    begin = [tokenizer.bos_token_id] if add_bos else []
    head = begin + _encode(tokenizer, DESCRIPTION + "\n")
    tail = _encode(tokenizer, "\n" + QUESTION, after=".")
    for document in task.eval_docs[:limit]:
        line = _encode(tokenizer, "\n" + KEY_LINE.format(key=document["key"]) + "\n", after=".")
        room = task.length - len(head) - len(line) - len(tail)
        if room < 0:
            raise DataError(
                f"passkey_{task.length}: its tokenizer takes {task.length - room} tokens for the "
                "prompt without filler; use a longer one"
            )
        before = round(room * document["depth"])
        filler = list(itertools.islice(_filler(tokenizer), max(before, room - before)))
        ids = [*head, *filler[:before], *line, *filler[: room - before], *tail]
        assert len(ids) == task.length, shown(document)
        found.ids.append(ids)
        found.keys.append(document["key"])
        whole = _encode(tokenizer, f"\n{QUESTION} {document['key']}", after=".")
        found.answers.append(len(whole) - len(tail))
    return found


def score(answer: str, wanted: str) -> dict[str, float]:
    """Is the answer the key, and what share of its digits stand in their places?"""
    said = answer.strip()
    digits = sum(a == b for a, b in zip(said, wanted, strict=False))
    return {"exact_match": float(said == wanted), "acc_digits": digits / DIGITS}


def _filler(tokenizer: PreTrainedTokenizerBase) -> Iterator[int]:
    """Tokens of the filler, again and again."""
    yield from _encode(tokenizer, FILLER, after=".\n")
    again = _encode(tokenizer, " " + FILLER, after=".")
    while True:
        yield from again


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, *, after: str = "") -> list[int]:
    """Tokens that ``text`` has where it follows ``after``: some tokenizers put a space before
    whatever they are given."""
    before = list(tokenizer.encode(after, add_special_tokens=False)) if after else []
    found = list(tokenizer.encode(after + text, add_special_tokens=False))
    if found[: len(before)] != before:  # the two grew together
        return list(tokenizer.encode(text, add_special_tokens=False))
    return found[len(before) :]
