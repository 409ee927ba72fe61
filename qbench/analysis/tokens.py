"""Texts as token ids, all of one length."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qbench.analysis.settings import AnalysisSettings
from qbench.errors import DataError
from qbench.records import AnalyzedText


@dataclass(frozen=True, kw_only=True, eq=False)
class Tokens:
    """``ids`` [N, T] int64, and what they are."""

    ids: Tensor
    text: AnalyzedText


def read_tokens(settings: AnalysisSettings, tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """The first texts that are long enough, at most ``settings.samples``; each is BOS, where
    that is asked for, and its first tokens. No text is joined with another.

    Raises DataError where no text is long enough, or for a BOS that the tokenizer has not.
    """
    if settings.bos and tokenizer.bos_token_id is None:
        raise DataError("its tokenizer has no BOS token to begin a text with; say --no-bos")
    begin = [tokenizer.bos_token_id] if settings.bos else []
    room = settings.length - len(begin)
    rows: list[list[int]] = []
    short = longest = 0
    for text in settings.source.texts():
        if len(rows) == settings.samples:
            break
        # verbose=False: texts longer than the model's context are no mistake here
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        longest = max(longest, len(ids))
        if len(ids) >= room:
            rows.append(begin + list(ids[:room]))
        else:
            short += 1
    if not rows:
        raise DataError(
            f"{settings.source.name}: its longest text has {longest} tokens, {room} were asked "
            "for; lower --length"
        )
    ids = torch.tensor(rows, dtype=torch.int64)
    return Tokens(
        ids=ids,
        text=AnalyzedText(
            source=settings.source.name,
            digest=settings.source.digest,
            tokens=hashlib.sha256(ids.numpy().astype("<i8").tobytes()).hexdigest(),
            samples=len(rows),
            left_out=short,
            length=settings.length,
            bos=settings.bos,
        ),
    )
