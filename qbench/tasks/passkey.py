"""Build and score prompts of passkey retrieval: a five-digit key hidden in filler text.

The set-up is that of Mohtashami and Jaggi 2023 (Landmark Attention, arXiv 2305.16300, section 4.2).
The softpick paper uses it too (section 7.7, tables 5 and 7). lm-eval calls ``documents`` with the
entries of the definition's ``metadata``; ``tokenizer`` is the checkpoint's folder, as in RULER.
"""

import random

from datasets import Dataset
from transformers import AutoTokenizer

DOCUMENTS = 200  # as many as the softpick paper's scores in steps of 0.5 % need
DIGITS = 5
# The published prompt, word for word: scores on another one would be those of another task.
DESCRIPTION = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize "
    "them. I will quiz you about the important information there."
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
KEY_LINE = "The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "What is the pass key? The pass key is"


def documents(*, length: int, tokenizer: str | None = None, **_) -> dict[str, Dataset]:
    """Return the split ``test`` of 200 prompts, each of ``length`` tokens without BOS.

    Raises ValueError if the prompt without filler has more tokens.
    """
    if tokenizer is None:
        raise ValueError("passkey retrieval needs a tokenizer to count the tokens of its prompts")
    encoder = AutoTokenizer.from_pretrained(tokenizer)
    filler = encoder.encode(" ".join([FILLER] * (length // 8 + 2)), add_special_tokens=False)
    rows = []
    for number in range(DOCUMENTS):
        draw = random.Random(f"passkey {length} {number}")
        key = str(draw.randint(10 ** (DIGITS - 1), 10**DIGITS - 1))
        rows.append({"key": key, "prompt": prompt(encoder, filler, key, length, depth(number))})
    return {"test": Dataset.from_list(rows)}


def depth(document: int) -> float:
    """Return the position of a document's key in the text, from 0, the beginning, to 1, the end.

    Van der Corput's sequence in base 2 (0, ½, ¼, ¾, ⅛, …): the first documents of any number are
    spread evenly, so that a limit leaves out no depth.
    """
    fraction, weight = 0.0, 0.5
    while document:
        fraction += weight * (document & 1)
        document, weight = document >> 1, weight / 2
    return fraction


def prompt(tokenizer, filler: list[int], key: str, length: int, place: float) -> str:
    """Return description, filler, the line with the key at ``place`` (0 to 1), filler and question,
    ``length`` tokens in all. ``filler``: token ids, of which the first are used."""

    def build(tokens: int) -> str:
        before = round(tokens * place)
        first, second = (tokenizer.decode(filler[:n]) for n in (before, tokens - before))
        line = KEY_LINE.format(key=key)
        return f"{DESCRIPTION}\n{first}\n{line}\n{second}\n{QUESTION}"

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    room = length - count(build(0))
    if room < 0:
        raise ValueError(
            f"the tokenizer takes {length - room} tokens for a prompt without filler, more than "
            f"the {length} of this task; use a longer task"
        )
    text = build(room)
    for _ in range(4):  # text that was cut within a word may be encoded in another number of tokens
        if (missing := length - count(text)) == 0:
            break
        room += missing
        text = build(room)
    return text


def process_results(document: dict, results: list[str]) -> dict[str, float]:
    """Return ``exact_match``, whether the answer begins with the key, and ``acc_digits``, the share
    of the key's digits in the right positions."""
    answer, key = results[0].strip()[:DIGITS], document["key"]
    digits = sum(a == b for a, b in zip(answer, key, strict=False))
    return {"exact_match": float(answer == key), "acc_digits": digits / DIGITS}
