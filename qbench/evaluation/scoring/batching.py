"""Encode requests as token ids, as lm-eval's HFLM does, but each string once; group them into
batches: padded ones, which are HFLM's own, or packs without padding.

Scores depend on the order, padding and grouping of padded batches. Several may still go through a
model as one (``join``): attention sees each in its own shape, all else takes each token once, also
those of a beginning that texts share. Packs have about the same number of tokens each.

A *pack* is one row of the tokens of many inputs, sorted by length, roughly, then by their tokens. A
beginning that several neighbours share stands there once: few-shot examples, a context, the first
words of two choices. The row is cut into *segments* where inputs part. A segment attends to what
comes before it in its inputs and to itself, and its positions go on from there::

    Question: … Answer:      positions 0 … n−1
      the heart              positions n …
      a lung                 positions n …
"""

from __future__ import annotations

import itertools
import os
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from qbench.errors import EvaluationError
from qbench.files import digest
from qbench.records import DifferenceFromExact


@dataclass(frozen=True, eq=False)
class Requests:
    """Token ids to score: the R requests of one call of the language model, with the batches that
    were planned of them before.

    ``tokens`` int32 [N] are those of one request after another, ``lengths`` [R] how many each has:
    first its context, ``contexts`` [R] tokens, then its continuation, which is scored. ``owners``
    [R] are indexes of the lm-eval requests that they belong to; one has several of these if it is
    cut into rolling ``windows``.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    contexts: np.ndarray
    owners: np.ndarray
    windows: bool = False
    _plans: dict[Any, list[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def starts(self) -> np.ndarray:
        """Return where the tokens of each begin [R]."""
        return np.cumsum(self.lengths) - self.lengths

    @cached_property
    def scored(self) -> np.ndarray:
        """Return how many tokens of each are scored [R]: those of the continuation."""
        return self.lengths - self.contexts

    def token_bytes(self, firsts: np.ndarray, counts: np.ndarray) -> list[bytes]:
        """Return tokens as bytes, four for each, which sort as they do: from each of ``firsts`` on
        as many as ``counts`` says."""
        ids = self.tokens.astype(">u4").tobytes()
        ends = (4 * (firsts + counts)).tolist()
        return [ids[first:end] for first, end in zip((4 * firsts).tolist(), ends, strict=True)]

    def take(self, indexes: Sequence[int]) -> Requests:
        """Return the requests ``indexes``, as those of a call of their own."""
        lengths = self.lengths[indexes]
        tokens = self.tokens[_ranges(self.starts[indexes], lengths)]
        owners = self.owners[indexes]
        return Requests(tokens, lengths, self.contexts[indexes], owners, self.windows)

    def plan(self, batching: Padding | Packing) -> list[Any]:
        """Return ``batching.plan`` of the requests; twice the same object."""
        if batching not in self._plans:
            self._plans[batching] = batching.plan(self)
        return self._plans[batching]


def to_requests(
    parts: Iterable[tuple[Sequence[int], Sequence[int], int]], *, windows: bool = False
) -> Requests:
    """Return a request per (context ids, continuation ids, owner) of ``parts``."""
    tokens, sizes = list[int](), list[tuple[int, int, int]]()
    for context, continuation, owner in parts:
        tokens += context
        tokens += continuation
        sizes.append((len(context), len(continuation), owner))
    contexts, scored, owners = np.asarray(sizes, dtype=np.int64).reshape(-1, 3).T
    ids = np.frombuffer(array("I", tokens), dtype=np.int32)  # a quarter of NumPy's time for a list
    return Requests(ids, contexts + scored, contexts, owners, windows)


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
    """What was scored or generated so far. ``tokens`` are those of the batches that were scored,
    padding included; ``truncated`` requests were longer than the context and lost their oldest
    tokens, ``truncated_shares`` are their shares by task; ``graph_error`` says why a step of
    decoding could not be captured as a CUDA graph. ``differences`` of tasks scored fast;
    ``exact_tasks``: why others were scored exactly; ``transformers_generation``: why a task's
    answers came from transformers.
    """

    requests: int = 0
    batches: int = 0
    tokens: int = 0
    truncated: int = 0
    truncated_shares: dict[str, float] = field(default_factory=dict)
    halvings: int = 0
    graph_error: str | None = None
    differences: list[DifferenceFromExact] = field(default_factory=list)
    exact_tasks: dict[str, str] = field(default_factory=dict)
    transformers_generation: dict[str, str] = field(default_factory=dict)

    def add_requests(self, task: str, count: int, truncated: int, max_length: int) -> None:
        """Add a task's ``count`` requests, of which ``truncated`` were cut to ``max_length``
        tokens. Raises EvaluationError if all were."""
        self.requests += count
        self.truncated += truncated
        if truncated == count > 0:
            raise EvaluationError(
                f"{task}: all {count} requests are longer than evaluation.max_length {max_length} "
                "and would lose their beginnings; raise max_length, or leave the task out"
            )
        if truncated:
            self.truncated_shares[task] = truncated / count

    def add(self, other: Counts) -> None:
        """Add what ``other`` counted."""
        for name in self.__slots__:
            if more := getattr(other, name):
                held = getattr(self, name)
                setattr(self, name, held | more if isinstance(more, dict) else held + more)


def check_tokens(prompts: Iterable[Sequence[int]], rows: int) -> None:
    """Raise EvaluationError for a token id in ``prompts`` that is ``rows`` (those of the model's
    embedding) or more: on a GPU it would end the process."""
    most = max((max(tokens, default=0) for tokens in prompts), default=0)
    if most >= rows:
        raise EvaluationError(
            f"the tokenizer gives token id {most}, but the model embeds only {rows} ids; put the "
            "model's own tokenizer into its folder"
        )


THREADS = "TOKENIZERS_PARALLELISM"
DIGEST = "qbench_digest"  # attribute of a tokenizer
KEPT_CHARACTERS = 40_000_000  # of texts whose requests a process keeps, about 10 million tokens
_kept: dict[Hashable, tuple[Requests, int]] = {}  # and the characters of each
_encoding = threading.RLock()


def encode(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, special_tokens: bool
) -> list[list[int]]:
    """Return the token ids of each text, in order; equal texts are encoded once.
    ``special_tokens``: with those that the tokenizer adds."""
    if not texts:
        return []
    unique = list(dict.fromkeys(texts))
    with _encoding:
        kept = os.environ.get(THREADS, "false")
        os.environ[THREADS] = "true"  # it is off because of forks, and none happens here
        try:
            ids = _encode(tokenizer, unique, special_tokens)
        finally:
            os.environ[THREADS] = kept
    by_text = dict(zip(unique, ids, strict=True))
    return [by_text[text] for text in texts]


def _encode(tokenizer: Any, texts: list[str], special_tokens: bool) -> list[list[int]]:
    """Return what ``tokenizer`` makes of ``texts``. A usual one's backend is called by itself:
    transformers takes three times as long in Python."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if (
        backend is not None
        and type(tokenizer)._encode_plus is PreTrainedTokenizerFast._encode_plus
        and backend.truncation is backend.padding is None
        and backend.encode_special_tokens == tokenizer.split_special_tokens
    ):
        encoded = backend.encode_batch_fast(texts, add_special_tokens=special_tokens)
        encoded.reverse()  # freed one by one: all at once take 30 ms, in which no thread runs
        return [encoded.pop().ids for _ in texts]
    return tokenizer(
        texts, add_special_tokens=special_tokens, return_attention_mask=False, verbose=False
    )["input_ids"]


def encode_texts(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    add_bos: bool | None,
    prefix_id: int,
) -> list[list[int]]:
    """Return the token ids of each of ``texts`` as HFLM makes them: with the special tokens that
    the tokenizer adds, unless ``add_bos`` is False or the text begins with the text of the prefix
    token ``prefix_id``. None and True do the same."""
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
    """Return the ids of context and continuation for each pair of such texts, split where lm-eval
    splits them. ``add_bos`` and ``prefix_id`` are those of ``encode_texts``.

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
    encoded_endings = iter(encode(tokenizer, endings, special_tokens=False))
    encoded = []
    for context, ending in pairs:
        if context != "":
            head = next(contexts)
            ids = (head, next(wholes)[len(head) :])
        else:
            rest = next(encoded_endings)
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


def requests_of(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[tuple[str, ...]],
    *,
    add_bos: bool | None,
    prefix_id: int | None = None,
    window: int | None = None,
) -> Requests:
    """Return the requests of pairs (context, continuation), or, with ``window``, of whole texts
    (text,), cut into rolling windows of so many tokens. ``add_bos`` and ``prefix_id`` (None: as
    lm-eval chooses it) are those of ``encode_texts``. The last ones are kept for equal arguments,
    also of another tokenizer that does the same. Raises EvaluationError as ``encode_pairs``."""
    if prefix_id is None:
        bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        prefix_id = eos if bos is None else bos
    same = vars(tokenizer).get(DIGEST, tokenizer)
    if same is tokenizer and tokenizer.is_fast:
        same = digest(tokenizer.backend_tokenizer.to_str().encode())
        vars(tokenizer)[DIGEST] = same
    key = (type(tokenizer), same, tuple(texts), add_bos, prefix_id, window)
    with _encoding:
        if key in _kept:
            _kept[key] = _kept.pop(key)  # the last to go
            return _kept[key][0]
        if window is None:
            pairs = encode_pairs(tokenizer, texts, add_bos=add_bos, prefix_id=prefix_id)
            requests = to_requests((*pair, i) for i, pair in enumerate(pairs))
        else:
            whole = [text for (text,) in texts]
            encoded = encode_texts(tokenizer, whole, add_bos=add_bos, prefix_id=prefix_id)
            parts = (
                (*make_disjoint_window(each), owner)
                for owner, ids in enumerate(encoded)
                for each in get_rolling_token_windows(ids, prefix_id, window, context_len=1)
            )
            requests = to_requests(parts, windows=True)
        _kept[key] = requests, characters(texts)
        while len(_kept) > 1 and sum(count for _, count in _kept.values()) > KEPT_CHARACTERS:
            del _kept[next(iter(_kept))]
    return requests


def forget_requests() -> None:
    """Drop the requests that ``requests_of`` keeps."""
    with _encoding:
        _kept.clear()


def characters(texts: Iterable[tuple[str, ...]]) -> int:
    """Return how many characters ``texts`` have together."""
    return sum(map(len, itertools.chain.from_iterable(texts)))


@dataclass(frozen=True, slots=True)
class Group:
    """Requests with the same model input, as indexes in the list of all. The input has ``length``
    tokens.
    """

    request_indices: list[int]
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Padding:
    """Batches of ``batch_size`` distinct inputs, or ``window_batch_size`` rolling windows; of as
    many of either as ``batch_tokens`` hold, padding included, if that is given.

    Rotary angles of longrope and dynamic scaling, and which keys a top-k chooses, depend on the
    longest text of a batch. ``rope_limit`` is the number of tokens beyond which they change: no
    batch mixes lengths on both sides of it, and with ``one_length`` (dynamic, top-k) no batch
    beyond it mixes lengths at all.
    """

    max_length: int
    batch_size: int
    window_batch_size: int
    batch_tokens: int | None = None
    rope_limit: int | None = None
    one_length: bool = False

    def plan(self, requests: Requests) -> list[PaddedBatch]:
        """Return padded batches in HFLM's order, the longest requests first; requests with the same
        input share a row. Rolling windows are taken in input order, a batch at a time, and sorted
        within it; not if ``batch_tokens`` is given."""
        size, count, batches = self.batch_size, len(requests), list[PaddedBatch]()
        parts = [range(count)]
        if requests.windows and self.batch_tokens is None:
            size = self.window_batch_size
            parts = [range(first, min(first + size, count)) for first in range(0, count, size)]

        def angles(group: Group) -> int:
            """Return a number that is equal for inputs that may share a batch."""
            if self.rope_limit is None or group.length <= self.rope_limit:
                return 0
            return group.length if self.one_length else 1

        inputs = requests.token_bytes(requests.starts, requests.lengths - 1)
        for part in parts:
            by_input: dict[bytes, list[int]] = {}
            for i in part:
                by_input.setdefault(inputs[i], []).append(i)
            groups = [
                Group(by_input[ids], min(self.max_length, len(ids) // 4))
                for ids in sorted(by_input, key=lambda ids: (-len(ids), ids))
            ]
            for _, alike in itertools.groupby(groups, angles):
                left = list(alike)
                while left:
                    length = left[0].length  # the longest come first
                    if self.batch_tokens is not None:
                        size = max(1, self.batch_tokens // length)
                    batches.append(PaddedBatch(left[:size], length))
                    del left[:size]
        return batches


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """Inputs of ``groups``, padded on the right to ``length`` tokens."""

    groups: list[Group]
    length: int

    def split(self) -> tuple[Self, Self] | None:
        """Return two halves, of the same length; None if there is a single group."""
        half = (len(self.groups) + 1) // 2
        parts = self.groups[:half], self.groups[half:]
        return tuple(replace(self, groups=part) for part in parts) if parts[1] else None

    @property
    def tokens(self) -> int:
        """Return how many tokens a forward takes, padding included."""
        return len(self.groups) * self.length

    @property
    def requests(self) -> int:
        """Return how many requests it scores."""
        return sum(len(group.request_indices) for group in self.groups)

    def collate(self, requests: Requests) -> Batch:
        """Return the ids [groups, length], padded on the right with 0, and what their hidden states
        score; ``requests``: all that were planned."""
        ids = np.zeros((len(self.groups), self.length), dtype=np.int64)  # HFLM pads with id 0
        last = requests.starts + requests.lengths - 1  # which is no input
        for row, group in zip(ids, self.groups, strict=True):
            end = last[group.request_indices[0]]
            row[: group.length] = requests.tokens[end - group.length : end]
        members = np.concatenate([group.request_indices for group in self.groups])
        ends = [i * self.length + group.length for i, group in enumerate(self.groups)]
        counts, scored = [len(g.request_indices) for g in self.groups], requests.scored[members]
        hidden = _ranges(np.repeat(ends, counts) - scored, scored)
        return Batch(ids=ids, **_scored_by(requests, members, hidden))


def _scored_by(requests: Requests, members: np.ndarray, hidden: np.ndarray) -> dict[str, Any]:
    """Return the fields of a Batch that map its hidden states to the tokens that they score.
    ``members``: indexes of requests; ``hidden``: for one after the other the indexes of its hidden
    states. One that several requests share is listed once."""
    used = np.bincount(hidden) > 0
    counts = requests.scored[members]
    first = np.cumsum(requests.scored)[members] - counts
    tokens = requests.tokens[_ranges((requests.starts + requests.contexts)[members], counts)]
    return {
        "rows": np.flatnonzero(used),
        "scored": Scored(
            np.cumsum(used)[hidden] - 1, _ranges(first, counts), tokens.astype(np.int64)
        ),
        "request_indices": members,
        "counts": counts,
    }


def _ranges(firsts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return int64 numbers, for each of ``firsts`` so many from it on as ``counts`` says."""
    before = np.cumsum(counts) - counts
    return np.arange(counts.sum()) + np.repeat(firsts - before, counts)


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinedBatch(Batch):
    """Padded batches of ``shapes`` (B, L) as one: ``ids`` [N] are those of one after another."""

    shapes: tuple[tuple[int, int], ...]

    def share(
        self, multiple: int, least: int, limit: Callable[[tuple[int, int]], int]
    ) -> SharedTokens:
        """Return the tokens with each beginning that texts share taken once: texts of other batches
        share at most the first ``limit(shape)`` of a text's. Those left are a ``multiple``, and
        ``least`` or more."""
        counts, lengths = np.transpose(self.shapes)
        limits = np.asarray([limit(shape) for shape in self.shapes])
        batch_of = np.repeat(np.arange(len(counts)), counts)  # of each text
        text, position = np.nonzero(np.arange(lengths.max()) < lengths[batch_of][:, None])
        batch = batch_of[text]
        texts = np.zeros((len(batch_of), lengths.max()), dtype=np.int64)
        texts[text, position] = self.ids + np.where(position < limits[batch], 0, batch + 1 << 32)
        order = np.lexsort(texts.T[::-1])
        texts = texts[order]
        alike = np.zeros(texts.shape, dtype=bool)  # whether the text before begins as far alike
        np.logical_and.accumulate(texts[1:] == texts[:-1], axis=1, out=alike[1:])
        first = np.maximum.accumulate(np.where(alike, 0, np.arange(len(texts))[:, None]))
        beginnings = first[np.argsort(order)[text], position] * lengths.max() + position
        _, places, tokens = np.unique(beginnings, return_index=True, return_inverse=True)
        repeats = np.flatnonzero(batch != batch[places][tokens])
        count = max(least, len(places))
        places = np.pad(places, (0, count + -count % multiple - len(places)))
        return SharedTokens(
            ids=self.ids[None, places],
            positions=position[None, places],
            shapes=self.shapes,
            tokens=tokens,
            places=places,
            repeats=repeats,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedTokens:
    """The N tokens of a ``JoinedBatch`` as one row of T: ``ids`` [1, T] at ``positions`` [1, T].
    ``tokens`` [N] are indexes of these, ``places`` [T] where each lies first in the N, ``repeats``
    where one lies again, in another batch."""

    ids: np.ndarray
    positions: np.ndarray
    shapes: tuple[tuple[int, int], ...]
    tokens: np.ndarray
    places: np.ndarray
    repeats: np.ndarray


def join(batches: Sequence[Batch]) -> JoinedBatch:
    """Return padded ``batches`` as one."""
    sizes = [batch.ids.size for batch in batches]
    starts = np.cumsum(sizes) - sizes
    rows = [batch.rows + start for batch, start in zip(batches, starts, strict=True)]
    shifts = np.repeat(np.cumsum([0, *map(len, rows[:-1])]), [len(b.scored.row) for b in batches])
    row, index, token = (
        np.concatenate([getattr(batch.scored, name) for batch in batches])
        for name in ("row", "index", "token")
    )
    return JoinedBatch(
        ids=np.concatenate([batch.ids for batch in batches], axis=None),
        shapes=tuple(batch.ids.shape for batch in batches),
        rows=np.concatenate(rows),
        scored=Scored(row + shifts, index, token),
        request_indices=np.concatenate([batch.request_indices for batch in batches]),
        counts=np.concatenate([batch.counts for batch in batches]),
    )


RATIO = 4  # tokens of a pack's inputs, for each token of the pack
WORTH = 16  # one token in so many must be saved by sharing: keys are copied for each segment


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch(Batch):
    """A pack of T tokens: ``ids`` [1, T] at ``positions`` [1, T]. ``cu_seqlens_q`` [S + 1] are the
    cumulative lengths of its segments, ``cu_seqlens_k`` of the keys that they see; ``keys`` [K] the
    tokens that these are, one segment after another, None where each sees just itself."""

    positions: np.ndarray
    cu_seqlens_q: np.ndarray
    cu_seqlens_k: np.ndarray
    keys: np.ndarray | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """Packs of at most ``batch_tokens`` tokens, whose inputs have at most ``RATIO`` times as many.
    A longer input gets its own."""

    max_length: int
    batch_tokens: int

    def plan(self, requests: Requests) -> list[Pack]:
        """Return packs of ``requests``: the inputs of the longest contexts first, in steps of a
        factor of two, in lexicographic order within a step."""
        whole = requests.lengths - 1
        sizes = np.minimum(whole, self.max_length)
        begins = requests.starts + whole - sizes
        texts = requests.token_bytes(begins, sizes)
        # those of about the same length together, and all of one context
        contexts, longest = requests.token_bytes(requests.starts, requests.contexts), Counter()
        for context, size in zip(contexts, sizes.tolist(), strict=True):
            longest[context] = max(longest[context], size)
        bits = np.asarray([longest[context].bit_length() for context in contexts])
        order = sorted(range(len(texts)), key=lambda i: (-bits[i], texts[i]))
        new = np.asarray([True, *(texts[a] != texts[b] for a, b in itertools.pairwise(order))])
        firsts = np.asarray(order)[new]
        sizes, begins = sizes[firsts], begins[firsts]
        common = _common(requests.tokens, begins, sizes)
        common[1:][np.diff(bits[firsts]) != 0] = 0
        if WORTH * common.sum() < sizes.sum():
            common[:] = 0
        inputs = Pack(
            begins=begins, sizes=sizes, common=common, request_indices=np.asarray(order),
            inputs=np.cumsum(new) - 1,
        )  # fmt: skip
        totals, bounds = np.cumsum([sizes - common, sizes], axis=1), [0]
        most = self.batch_tokens * np.asarray([1, RATIO])
        while (first := bounds[-1]) < len(sizes):
            before = totals[:, first - 1] if first else 0
            most_here = before + most - [common[first], 0]  # it shares nothing with those before
            fits = map(np.searchsorted, totals, most_here, itertools.repeat("right"))
            bounds.append(max(first + 1, int(min(fits))))
        return [inputs.part(first, end) for first, end in itertools.pairwise(bounds)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    """I inputs as ``Packing.plan`` orders them: ``begins`` [I] is where their tokens begin in those
    of all requests, ``sizes`` [I] how many they are, ``common`` [I] how many of them the input
    before has too and are shared. ``request_indices`` [R] are ordered by their input, ``inputs``
    [R]."""

    begins: np.ndarray
    sizes: np.ndarray
    common: np.ndarray
    request_indices: np.ndarray
    inputs: np.ndarray

    def part(self, first: int, end: int) -> Pack:
        """Return the inputs from ``first`` on before ``end``."""
        common = self.common[first:end].copy()
        common[0] = 0
        members = slice(*np.searchsorted(self.inputs, (first, end)))
        return Pack(
            begins=self.begins[first:end], sizes=self.sizes[first:end], common=common,
            request_indices=self.request_indices[members], inputs=self.inputs[members] - first,
        )  # fmt: skip

    def split(self) -> tuple[Pack, Pack] | None:
        """Return two halves; None if there is a single input."""
        count = len(self.sizes)
        if count == 1:
            return None
        return self.part(0, (count + 1) // 2), self.part((count + 1) // 2, count)

    @property
    def tokens(self) -> int:
        """Return how many tokens the row has."""
        return int((self.sizes - self.common).sum())

    @property
    def requests(self) -> int:
        """Return how many requests it scores."""
        return len(self.request_indices)

    def collate(self, requests: Requests) -> PackedBatch:
        """Return the pack as a row of ids [1, T], with segments and what hidden states score;
        ``requests``: all that were planned."""
        inputs, ends, parents = _segments(self.sizes, self.common)
        begins = np.concatenate(([0], ends[:-1]))  # where each segment begins in its inputs
        first = np.diff(inputs, prepend=-1) > 0  # of an input
        begins[first] = self.common
        lengths = ends - begins
        keys, cu_seqlens_k = None, np.cumsum([0, *ends], dtype=np.int32)
        if self.common.any():
            # each segment with those before it in its inputs, from their beginning on
            segment = above = np.arange(len(ends))
            pairs = []
            while len(above):
                pairs.append((segment, above))
                inside = parents[above] >= 0
                segment, above = segment[inside], parents[above[inside]]
            segment, above = np.concatenate(pairs, axis=1)
            above = above[np.lexsort((begins[above], segment))]
            keys = _ranges((np.cumsum(lengths) - lengths)[above], lengths[above])
        scored = requests.scored[self.request_indices]
        last = np.flatnonzero(np.diff(inputs, append=len(self.sizes)))[self.inputs]
        hidden = _ranges(cu_seqlens_k[last + 1] - scored, scored)
        sources = _ranges(self.begins + self.common, self.sizes - self.common)
        return PackedBatch(
            ids=requests.tokens[sources].astype(np.int64)[None],
            positions=_ranges(begins, lengths)[None],
            cu_seqlens_q=np.cumsum([0, *lengths], dtype=np.int32),
            cu_seqlens_k=cu_seqlens_k,
            keys=keys,
            **_scored_by(requests, self.request_indices, hidden if keys is None else keys[hidden]),
        )


def _common(tokens: np.ndarray, begins: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return how many ``tokens`` each input has in common with the one before it, from its first on
    [I]; 0 for the first. ``begins``, ``sizes`` [I]: where it begins in ``tokens``, its length."""
    common = [0]
    both, begins = np.minimum(sizes[1:], sizes[:-1]).tolist(), begins.tolist()
    for (before, after), most in zip(itertools.pairwise(begins), both, strict=True):
        off = tokens[before : before + most] != tokens[after : after + most]
        first = int(off.argmax())
        common.append(first if off[first] else most)
    return np.asarray(common)


def _segments(sizes: np.ndarray, common: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the segments of a pack's inputs in the order of its row, int64 [S] each: the input
    that adds it; its end, counted from that input's beginning, which is where a later one parts
    from it, or its own; the segment before it in the input, -1 at the beginning."""
    ends, path, parted = list[list[int]](), list[int](), list[int]()
    shares = common.tolist()
    for i, (size, shared) in enumerate(zip(sizes.tolist(), shares, strict=True)):
        while path and shares[path[-1]] >= shared:
            path.pop()
        parted.append(path[-1] if path else -1)
        if path and shared not in ends[path[-1]]:
            ends[path[-1]].append(shared)
        ends.append([size])
        path.append(i)
    counts = [len(each) for each in ends]
    firsts = list(itertools.accumulate(counts, initial=0))
    parents = np.arange(firsts[-1]) - 1
    parents[firsts[:-1]] = [
        -1 if other < 0 else firsts[other] + sorted(ends[other]).index(shared)
        for other, shared in zip(parted, shares, strict=True)
    ]
    return (
        np.repeat(np.arange(len(ends)), counts),
        np.asarray([end for each in ends for end in sorted(each)]),
        parents,
    )


BatchPlan = PaddedBatch | Pack  # requests of one forward pass; ``collate`` makes its input
