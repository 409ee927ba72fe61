"""Passkey retrieval: which tasks those are, and where in a prompt a document hides its key.

No torch: what reads results asks it too.
"""

from __future__ import annotations

import re

GROUP = "passkey"
TASK = re.compile(r"passkey_([1-9][0-9]{0,6})")
SHORTEST = 256  # tokens of the shortest prompt that the group has
TIMES_TRAINED = 4  # the longest one, in lengths of training
DOCUMENTS = 200  # as many as the softpick paper's scores in steps of 0.5 % need
DIGITS = 5
KEYS = (10_000, 99_999)  # the smallest and the largest
CHANCE = {"exact_match": 1 / (KEYS[1] - KEYS[0] + 1), "acc_digits": 0.1}  # of guessed digits


def task_name(length: int) -> str:
    return f"{GROUP}_{length}"


def task_length(name: str) -> int | None:
    """Tokens of a prompt of the task ``name``; None where it is not of these."""
    found = TASK.fullmatch(name)
    return int(found[1]) if found else None


def task_lengths(trained: int) -> list[int]:
    """Lengths of the group's tasks, doubled from the shortest one to ``TIMES_TRAINED`` times the
    ``trained`` context."""
    longest = TIMES_TRAINED * trained
    lengths = [SHORTEST]
    while 2 * lengths[-1] <= longest:
        lengths.append(2 * lengths[-1])
    return lengths


def depth(document: int) -> float:
    """Where the key of a document stands: 0 is the beginning, 1 the end.

    Van der Corput's sequence in base 2 (0, ½, ¼, ¾, ⅛, …): the first documents of any number are
    spread evenly, so that a limit leaves out no depth.
    """
    fraction, weight = 0.0, 0.5
    while document:
        fraction += weight * (document & 1)
        document, weight = document >> 1, weight / 2
    return fraction
