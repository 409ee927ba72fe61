"""Encode what is to be scored as token ids, as lm-eval's HFLM does, but in batches and each string
once.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from transformers import PreTrainedTokenizerBase

from qbench.errors import EvaluationError


@dataclass(frozen=True, slots=True)
class Request:
    """Token ids to score. ``tokens`` are context and continuation, ``context`` is how many of them
    are context. ``owner`` is the index of the lm-eval request that it belongs to, which has several
    of these if it is cut into rolling windows. ``first`` is the index of its first scored token
    among all of the call.
    """

    tokens: list[int]
    context: int
    owner: int
    first: int = 0

    @property
    def scored(self) -> int:
        return len(self.tokens) - self.context

    def inputs(self, max_length: int) -> list[int]:
        """Return the model's input: all but the last token, the oldest dropped if there are too
        many.
        """
        return self.tokens[-(max_length + 1) : -1]


@dataclass(frozen=True, slots=True)
class Scored:
    """What rows of log-probabilities score, one entry per scored token: int64 arrays [M].

    ``row`` is the index among the rows that come with it (a row may serve several requests).
    ``index`` is the token's among all that the call of the language model scores, request after
    request, ``token`` its id.
    """

    row: np.ndarray
    index: np.ndarray
    token: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The input of one forward pass, token ``ids`` [B, L], and what its B · L hidden states score.

    ``rows`` [R] are the hidden states that go through the LM head, ``scored`` the M tokens that
    they score, its rows counted within ``rows``. ``request_indices`` [K] say which requests,
    ``counts`` [K] how many entries of ``scored`` belong to each, in order.
    """

    ids: np.ndarray
    rows: np.ndarray
    scored: Scored
    request_indices: np.ndarray
    counts: np.ndarray


@dataclass(slots=True)
class Counts:
    """What was scored or generated so far. ``tokens`` are those computed for log-likelihoods,
    padding included; ``truncated`` requests were longer than the context and lost their oldest
    tokens, ``truncated_shares`` are their shares by task; ``graph_error`` says why a step of
    decoding could not be captured as a CUDA graph.
    """

    requests: int = 0
    batches: int = 0
    tokens: int = 0
    truncated: int = 0
    truncated_shares: dict[str, float] = field(default_factory=dict)
    halvings: int = 0
    graph_error: str | None = None

    def add_requests(self, task: str, count: int, truncated: int, max_length: int) -> None:
        """Count requests of a task. Raises EvaluationError if all of them are truncated."""
        self.requests += count
        self.truncated += truncated
        if truncated == count > 0:
            raise EvaluationError(
                f"{task}: all {count} requests are longer than evaluation.max_length {max_length} "
                "and would lose their beginnings; raise it, or leave the task out"
            )
        if truncated:
            self.truncated_shares[task] = truncated / count


def check_tokens(prompts: Iterable[Sequence[int]], rows: int) -> None:
    """Raise EvaluationError for a token that has no row among the ``rows`` of the model's
    embedding: on a GPU that would end the process.
    """
    most = max((max(tokens, default=0) for tokens in prompts), default=0)
    if most >= rows:
        raise EvaluationError(
            f"its tokenizer gives token {most}, and the model embeds {rows}: the tokenizer belongs "
            "to another model"
        )


def check_lengths(requests: Sequence[Request], max_length: int) -> None:
    """Raise EvaluationError for a continuation that is longer than the context, at which HFLM would
    stop with a bare assertion.
    """
    for request in requests:
        if request.scored > max_length:
            raise EvaluationError(
                f"a continuation of {request.scored} tokens does not fit into "
                f"evaluation.max_length {max_length}; raise max_length"
            )


THREADS = "TOKENIZERS_PARALLELISM"


def encode(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, special_tokens: bool
) -> list[list[int]]:
    """Return the token ids of each text, in order; equal texts are encoded once."""
    if not texts:
        return []
    unique = list(dict.fromkeys(texts))
    if tokenizer.is_fast:
        # Encode without the offsets and masks that transformers asks for, in a third of the time
        inner = tokenizer.backend_tokenizer
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = tokenizer.split_special_tokens
        kept = os.environ.get(THREADS, "false")
        os.environ[THREADS] = "true"  # it is off for the sake of forks, and none happens here
        try:
            encodings = inner.encode_batch_fast(unique, add_special_tokens=special_tokens)
        finally:
            os.environ[THREADS] = kept
        ids = [encoding.ids for encoding in encodings]
    else:
        ids = [tokenizer.encode(text, add_special_tokens=special_tokens) for text in unique]
    by_text = dict(zip(unique, ids, strict=True))
    return [by_text[text] for text in texts]


def encode_texts(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    add_bos: bool | None,
    prefix_id: int,
) -> list[list[int]]:
    """Return token ids as HFLM makes them: with the special tokens that the tokenizer adds, unless
    ``add_bos`` is False or the text begins with the prefix token's text."""
    prefix = tokenizer.decode(prefix_id)
    if add_bos is False or not prefix:
        return encode(tokenizer, texts, special_tokens=False)
    bare = {text for text in texts if text.startswith(prefix)}
    with_bos = iter(encode(tokenizer, [t for t in texts if t not in bare], special_tokens=True))
    without = iter(encode(tokenizer, [t for t in texts if t in bare], special_tokens=False))
    return [next(without) if text in bare else next(with_bos) for text in texts]


def encode_pairs(
    tokenizer: PreTrainedTokenizerBase,
    pairs: Sequence[tuple[str, str]],
    *,
    add_bos: bool | None,
    prefix_id: int,
) -> list[tuple[list[int], list[int]]]:
    """Return (context, continuation) texts as ids of both, split where lm-eval splits them.

    The whole text is encoded and cut after as many ids as the context alone has, with the context's
    trailing spaces moved to the continuation. An empty context becomes the prefix token (BOS, else
    EOS), unless the continuation begins with it already.

    Raises EvaluationError for a request without a context or continuation token, which HFLM stops
    at with a bare assertion.
    """
    filled = [(context, ending) for context, ending in pairs if context != ""]
    both = encode_texts(
        tokenizer,
        [context + ending for context, ending in filled] + [c.rstrip() for c, _ in filled],
        add_bos=add_bos,
        prefix_id=prefix_id,
    )
    wholes, contexts = iter(both[: len(filled)]), iter(both[len(filled) :])
    endings = [ending for context, ending in pairs if context == ""]
    alone = iter(encode(tokenizer, endings, special_tokens=False))
    encoded = []
    for context, ending in pairs:
        if context != "":
            head = next(contexts)
            ids = (head, next(wholes)[len(head) :])
        else:
            rest = next(alone)
            starts = rest[:1] == [prefix_id]
            ids = (rest[:1], rest[1:]) if starts else ([prefix_id], rest)
        if not all(ids):
            part = "continuation" if ids[0] else "context"
            raise EvaluationError(
                f"request {context[-40:]!r} + {ending[:40]!r}: no token in the {part}, "
                "so there is nothing to score; correct the task's prompt"
            )
        encoded.append(ids)
    return encoded
