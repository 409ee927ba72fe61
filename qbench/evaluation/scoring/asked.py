"""What lm-eval asks a model, as token ids: known from the tokenizer alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lm_eval.api.model import LM
from transformers import PreTrainedTokenizerBase

from qbench.evaluation.scoring.requests import Encoded, encode_pairs, encode_texts


class Known(Exception):
    """All that can be known without a model is known by now."""


@dataclass(slots=True)
class Ids:
    """Token ids of requests, each found by its object, which is kept: another could be made at
    its place in memory. ``pairs`` are (context, continuation), ``texts`` whole texts;
    ``prefix_id`` stands where there is no context."""

    prefix_id: int | None = None
    pairs: dict[int, tuple[Any, Encoded]] = field(default_factory=dict)
    texts: dict[int, tuple[Any, list[int]]] = field(default_factory=dict)

    def of_pairs(self, requests: Sequence[Any], prefix_id: int) -> list[Encoded] | None:
        """None where those of one request are not known."""
        return self._of(self.pairs, requests, prefix_id)

    def of_texts(self, requests: Sequence[Any], prefix_id: int) -> list[list[int]] | None:
        return self._of(self.texts, requests, prefix_id)

    def _of(self, known: dict[int, Any], requests: Sequence[Any], prefix_id: int) -> Any:
        if prefix_id != self.prefix_id or not all(id(one) in known for one in requests):
            return None
        return [known[id(one)][1] for one in requests]


class Nobody(LM):
    """Stands for a language model until its first requests, which raise ``Known``: the task's
    ``instances`` are all of them."""

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> Any:
        raise Known

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> Any:
        raise Known

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> Any:
        raise Known


class Asked(Nobody):
    """Puts token ids of its first requests into ``ids``."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, add_bos: bool, ids: Ids) -> None:
        super().__init__()
        self._tokenizer, self._add_bos, self._ids = tokenizer, add_bos, ids
        bos = tokenizer.bos_token_id
        ids.prefix_id = tokenizer.eos_token_id if bos is None else bos  # as HFLM chooses

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> Any:
        arguments = [one.args for one in requests]
        found = encode_pairs(
            self._tokenizer, arguments, add_bos=self._add_bos, prefix_id=self._ids.prefix_id
        )
        self._ids.pairs.update(_by_object(requests, found))
        raise Known

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> Any:
        texts = [one.args[0] for one in requests]
        found = encode_texts(
            self._tokenizer, texts, add_bos=self._add_bos, prefix_id=self._ids.prefix_id
        )
        self._ids.texts.update(_by_object(requests, found))
        raise Known


def _by_object(requests: Sequence[Any], found: Sequence[Any]) -> dict[int, tuple[Any, Any]]:
    return {id(one): (one, ids) for one, ids in zip(requests, found, strict=True)}
