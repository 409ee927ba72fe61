"""What the unquantized cell keeps, so that others can be held against its distributions: the LM
head's input of every scored token, and the head.

A row takes hidden size × bytes of the dtype (768 bytes at the bundled 27M pair's 384 in bfloat16,
2 kB at 340M parameters), where its log-probabilities would take 64 kB and more. Rows of a task are
gathered in host memory and written as a part, a safetensors file that is read memory-mapped and
named by its SHA-256. The index, a safetensors file without tensors, names the parts; beside it lies
its SHA-256, as ``sha256sum -c`` reads it. Checking reads each file once, at about 0.5 to 2 GB/s.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qbench.errors import EvaluationError, ResultsError
from qbench.evaluation.base_file import (
    ABOUT,
    Parts,
    locked,
    part_file,
    stated,
    verify_part,
    write_checksum,
)
from qbench.evaluation.scoring.digested import save_digested
from qbench.evaluation.scoring.logits import Projection
from qbench.evaluation.scoring.requests import Scored
from qbench.files import clean_temporaries, temporary

ARRAYS = ("document", "request", "length", "token", "rows")
IN_FLIGHT = 2  # copies from a GPU that nobody waits for yet


@dataclass(frozen=True, slots=True)
class TaskRows:
    """One task's rows. N scored tokens, those of one request side by side.

    ``document``, ``request``, ``length`` int64 [requests]: lm-eval's document and request numbers
    and how many tokens are scored; ``token`` int32 [N] their ids; ``rows`` [N, H].
    """

    document: Tensor
    request: Tensor
    length: Tensor
    token: Tensor
    rows: Tensor


@dataclass(frozen=True, slots=True)
class BaseRows:
    """The rows of the cell ``key`` by task, with its LM head: ``weight`` [V, H], ``bias`` [V]."""

    key: str
    tasks: dict[str, TaskRows]
    weight: Tensor
    bias: Tensor | None

    def save(self, path: Path) -> None:
        """The index ``path`` and its parts. Raises ResultsError where they cannot be written."""
        head = save_head(path, self.key, self.weight, self.bias) if self.tasks else None
        tasks = {name: save_task(path, self.key, name, one) for name, one in self.tasks.items()}
        save_index(path, self.key, Parts(head=head, tasks=tasks))

    @classmethod
    def load(cls, path: Path, key: str) -> BaseRows:
        """Raises ResultsError where a file is not there, damaged, or another cell's."""
        parts = stated(path, key)
        rows = cls.with_head(path, key, parts.head)
        rows.add(path, parts)
        return rows

    @classmethod
    def with_head(cls, path: Path, key: str, digest: str | None) -> BaseRows:
        """Without any task. Raises ResultsError as ``load``."""
        if digest is None:
            return cls(key, {}, torch.empty(0), None)
        found = _read(path, digest, {"key": key})
        return cls(key, {}, found["weight"], found.get("bias"))

    def add(self, path: Path, parts: Parts) -> None:
        """The tasks of ``parts`` that are not here yet. Raises ResultsError as ``load``."""
        for task, digest in parts.tasks.items():
            if digest is not None and task not in self.tasks:
                found = _read(path, digest, {"key": self.key, "task": task})
                self.tasks[task] = TaskRows(*(found[name] for name in ARRAYS))


def save_task(path: Path, key: str, task: str, rows: TaskRows) -> str:
    """A part beside the index ``path``, which does not name it yet; its SHA-256. It appears whole
    or not at all. Raises ResultsError where it cannot be written."""
    tensors = {name: getattr(rows, name) for name in ARRAYS}
    return _write_part(path, tensors, {"key": key, "task": task})


def save_head(path: Path, key: str, weight: Tensor, bias: Tensor | None) -> str:
    """As ``save_task``."""
    tensors = {"weight": weight} | ({} if bias is None else {"bias": bias})
    return _write_part(path, tensors, {"key": key})


def save_index(path: Path, key: str, parts: Parts) -> None:
    """Appears whole or not at all; parts that an earlier index alone named go. Raises ResultsError
    where it cannot be written."""
    making, before = temporary(path), Parts()
    with _writing(path, making):
        digest = save_digested({}, making, {ABOUT: json.dumps({"key": key} | asdict(parts))})
        with suppress(ResultsError):
            before = stated(path, key)
        with locked(path):
            making.replace(path)
            write_checksum(path, digest)
        for old in {*before.digests} - {*parts.digests}:
            part_file(path, old).unlink(missing_ok=True)


def _write_part(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> str:
    making = temporary(path)
    with _writing(path, making):
        clean_temporaries(path.parent)
        digest = save_digested(tensors, making, {ABOUT: json.dumps(about)})
        making.replace(part_file(path, digest))
        return digest


@contextmanager
def _writing(path: Path, making: Path) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ResultsError(
            f"{path}: cannot be written: {error}; make room there, or leave damage out with "
            "evaluation.damage: false"
        ) from error
    finally:
        making.unlink(missing_ok=True)


def _read(path: Path, digest: str, about: Mapping[str, str]) -> dict[str, Tensor]:
    from safetensors import safe_open

    part = verify_part(path, digest)
    with safe_open(part, framework="pt") as file:
        if json.loads(file.metadata()[ABOUT]) != about:
            raise ResultsError(f"{part}: of another cell or task than it is said to be")
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@dataclass(frozen=True, slots=True)
class Call:
    """The scored tokens of one call of the language model, which is about one task: those of
    request r have the indexes from ``starts[r]`` on."""

    task: str
    document: np.ndarray
    request: np.ndarray
    length: np.ndarray
    starts: np.ndarray

    @classmethod
    def of(cls, instances: Sequence[Any], lengths: Sequence[int]) -> Call | None:
        """None for a call without requests."""
        names = {instance.task_name for instance in instances}
        if len(names) > 1:
            raise EvaluationError(f"damage takes one task a call, not {', '.join(sorted(names))}")
        if not names:
            return None
        length = np.asarray(lengths, dtype=np.int64)
        return cls(
            task=names.pop(),
            document=np.asarray([instance.doc_id for instance in instances], dtype=np.int64),
            request=np.asarray([instance.idx for instance in instances], dtype=np.int64),
            length=length,
            starts=np.cumsum(length) - length,
        )

    @property
    def tokens(self) -> int:
        return int(self.length.sum())

    def indexes(self, scored: Scored) -> np.ndarray:
        return self.starts[scored.request] + scored.index


@dataclass(slots=True)
class _Kept:
    """Rows of the call at work, in host memory, and copies that are still under way."""

    call: Call
    rows: Tensor
    token: np.ndarray
    in_flight: deque[tuple[torch.cuda.Event, Tensor, Scored]] = field(default_factory=deque)

    def put(self, rows: Tensor, scored: Scored) -> None:
        indexes = torch.from_numpy(self.call.indexes(scored))
        self.rows[indexes] = rows[torch.from_numpy(scored.row)]

    def settle(self, at_most: int) -> None:
        while len(self.in_flight) > at_most:
            event, rows, scored = self.in_flight.popleft()
            event.synchronize()
            self.put(rows, scored)


class Recorder:
    """An observer that keeps the unquantized model's rows."""

    def __init__(self) -> None:
        self._tasks: dict[str, TaskRows] = {}
        self._head: torch.nn.Linear | None = None
        self._kept: _Kept | None = None

    def base(self, key: str) -> BaseRows:
        """All that is kept: nothing where every task generates and no token was scored; answers
        that quantization changed are still told then."""
        return BaseRows(key, dict(self._tasks), *(self.head() or (torch.empty(0), None)))

    def head(self) -> tuple[Tensor, Tensor | None] | None:
        """Weight [V, H] and bias [V] of the LM head; None before any token was scored."""
        if self._head is None:
            return None
        weight, bias = self._head.weight, self._head.bias
        return (
            weight.detach().cpu().contiguous(),
            None if bias is None else bias.detach().cpu(),
        )

    def take(self, task: str) -> TaskRows | None:
        """The rows of ``task``, kept here no longer; None where none of its tokens were scored."""
        return self._tasks.pop(task, None)

    def begin(
        self, instances: Sequence[Any], lengths: Sequence[int], head: torch.nn.Module
    ) -> None:
        if type(head) is not torch.nn.Linear:
            raise EvaluationError(
                f"damage needs an LM head that is a linear layer, not {type(head).__name__}; "
                "say evaluation.damage: false"
            )
        self._head, self._kept = head, None
        if (call := Call.of(instances, lengths)) is not None:
            rows = torch.zeros(call.tokens, head.in_features, dtype=head.weight.dtype)
            self._kept = _Kept(call, rows, np.zeros(call.tokens, dtype=np.int32))

    def batch(self, scored: Scored, hidden: Tensor, projection: Projection) -> None:
        """Of a GPU the rows come by copies beside its work; each is waited for when the second
        one after it is under way."""
        kept = self._kept
        assert kept is not None
        kept.token[kept.call.indexes(scored)] = scored.token
        if hidden.device.type != "cuda":
            kept.put(hidden, scored)
            return
        rows = torch.empty(hidden.shape, dtype=hidden.dtype, pin_memory=True)
        rows.copy_(hidden, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        kept.in_flight.append((event, rows, scored))
        kept.settle(IN_FLIGHT)

    def end(self) -> None:
        kept = self._kept
        if kept is None:
            return
        kept.settle(0)
        call = kept.call
        self._tasks[call.task] = TaskRows(
            *(torch.from_numpy(a) for a in (call.document, call.request, call.length, kept.token)),
            kept.rows,
        )
        self._kept = None
