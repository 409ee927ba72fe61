"""Next-token distributions of the unquantized model, kept compactly, and measuring against them.

For every scored token the base keeps the ``top`` largest log-probabilities (float16) with their
ids, and the target token's log-probability (float32). Everything else of the distribution is one
class, the tail. The Kullback-Leibler divergence over these classes is at most the full one
(log-sum inequality); how much is lost is measured on some rows that are kept whole.

The kept probabilities are rounded, so p is taken to be exactly what is kept, with the tail as the
rest to 1. The error of that is of second order: relative 5e-4 in p changes KL by about 5e-4 of
Σ p ln(p/q), not by 5e-4 of the entropy.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qbench.errors import EvaluationError, ResultsError
from qbench.evaluation.scoring.rows import Scored, to_device

TOP = 24  # 2.4 % of the bytes of a whole row in float16 at 8,192 entries, 0.6 % at 32,000
WHOLE = 32  # rows of each call that are kept whole, evenly spaced
TINY = 1e-9  # smallest tail mass: float32 cannot tell a smaller one from rounding


@dataclass(frozen=True, slots=True)
class TaskBase:
    """One task's distributions. N scored tokens, those of one request side by side.

    ``document``, ``request``, ``length`` [requests]: lm-eval's document and request numbers and
    how many tokens are scored; ``ids`` and ``log_probabilities`` [N, top], largest first;
    ``target`` [N]; ``whole_place`` [W] tokens that are also kept whole, ``whole`` [W, vocabulary].
    """

    document: np.ndarray
    request: np.ndarray
    length: np.ndarray
    ids: np.ndarray
    log_probabilities: np.ndarray
    target: np.ndarray
    whole_place: np.ndarray
    whole: np.ndarray


@dataclass(frozen=True, slots=True)
class Base:
    """The distributions of one cell by task. ``key`` names the cell."""

    key: str
    tasks: dict[str, TaskBase]

    def save(self, path: Path) -> None:
        """One safetensors file; appears whole or not at all."""
        from safetensors.numpy import save

        from qbench.store import write_atomically

        tensors = {
            f"{number}.{name}": np.ascontiguousarray(getattr(base, name))
            for number, base in enumerate(self.tasks.values())
            for name in TaskBase.__slots__
        }
        names = {str(number): task for number, task in enumerate(self.tasks)}
        write_atomically(path, save(tensors, metadata={"key": self.key} | names))

    @classmethod
    def load(cls, path: Path, key: str) -> Base:
        """Raises ResultsError where the file is another cell's or cannot be read."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="numpy") as file:
                names = dict(file.metadata() or {})
                if names.pop("key", None) != key:
                    raise ResultsError(f"{path}: of another cell than {key[:16]}; run that again")
                tasks = {
                    task: TaskBase(
                        **{n: file.get_tensor(f"{number}.{n}") for n in TaskBase.__slots__}
                    )
                    for number, task in sorted(names.items(), key=lambda item: int(item[0]))
                }
        except (OSError, SafetensorError) as error:
            raise ResultsError(f"{path}: {error}; run the unquantized cell again") from error
        return cls(key, tasks)


@dataclass(slots=True)
class _Call:
    """Slots of one call's scored tokens: those of request r begin at ``starts[r]``."""

    task: str
    document: np.ndarray
    request: np.ndarray
    length: np.ndarray
    starts: np.ndarray
    tensors: dict[str, Tensor] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return int(self.length.sum())

    def slots(self, scored: Scored) -> np.ndarray:
        return self.starts[scored.request] + scored.place


class _Watching:
    """What recording and measuring share: one task a call, kept by slot, so that a batch that
    is repeated after an out-of-memory writes the same places again."""

    def __init__(self) -> None:
        self._call: _Call | None = None

    def begin(self, instances: Sequence[Any], lengths: Sequence[int]) -> None:
        names = {instance.task_name for instance in instances}
        if len(names) > 1:
            raise EvaluationError(f"damage takes one task a call, not {', '.join(sorted(names))}")
        self._call = None
        if not instances:
            return
        length = np.asarray(lengths, dtype=np.int64)
        self._call = _Call(
            task=names.pop(),
            document=np.asarray([instance.doc_id for instance in instances], dtype=np.int64),
            request=np.asarray([instance.idx for instance in instances], dtype=np.int64),
            length=length,
            starts=np.cumsum(length) - length,
        )


class Recorder(_Watching):
    """An observer that keeps the distributions of the unquantized model."""

    def __init__(self, *, top: int = TOP, whole: int = WHOLE) -> None:
        super().__init__()
        self._top, self._whole = top, whole
        self._tasks: dict[str, TaskBase] = {}

    def base(self, key: str) -> Base:
        return Base(key, dict(self._tasks))

    def observe(self, scored: Scored, log_probabilities: Tensor) -> None:
        call = self._call
        assert call is not None
        if not call.tensors:
            self._allocate(call, log_probabilities)
        device = log_probabilities.device
        kept = call.tensors
        slots = call.slots(scored)
        row, slot, token = to_device(np.stack((scored.row, slots, scored.token)), device)
        values, ids = log_probabilities.topk(kept["ids"].shape[1], dim=-1)
        kept["ids"][slot] = ids[row].to(torch.int32)
        kept["log_probabilities"][slot] = values[row].to(torch.float16)
        kept["target"][slot] = log_probabilities[row, token].float()
        places = _whole_places(call.tokens, self._whole)
        chosen = np.flatnonzero(np.isin(slots, places))
        if chosen.size:
            where = to_device(np.searchsorted(places, slots[chosen]), device)
            rows = to_device(scored.row[chosen], device)
            kept["whole"][where] = log_probabilities[rows].to(torch.float16)

    def end(self) -> None:
        call = self._call
        if call is None or not call.tensors:
            return
        kept = {name: tensor.cpu().numpy() for name, tensor in call.tensors.items()}
        small = kept["whole"].shape[1] <= 1 << 16
        self._tasks[call.task] = TaskBase(
            document=call.document,
            request=call.request,
            length=call.length,
            ids=kept["ids"].astype(np.uint16) if small else kept["ids"],
            log_probabilities=kept["log_probabilities"],
            target=kept["target"],
            whole_place=_whole_places(call.tokens, self._whole),
            whole=kept["whole"],
        )
        call.tensors.clear()

    def _allocate(self, call: _Call, like: Tensor) -> None:
        vocabulary, device = like.shape[1], like.device
        top = min(self._top, vocabulary)
        whole = len(_whole_places(call.tokens, self._whole))
        call.tensors = {
            "ids": torch.zeros(call.tokens, top, dtype=torch.int32, device=device),
            "log_probabilities": torch.zeros(call.tokens, top, dtype=torch.float16, device=device),
            "target": torch.zeros(call.tokens, device=device),
            "whole": torch.zeros(whole, vocabulary, dtype=torch.float16, device=device),
        }


@dataclass(frozen=True, slots=True)
class Measured:
    """One task's tokens [N]: ``kl`` in nats, ``agrees`` on the likeliest token, ``change`` of the
    target's log-probability in nats; ``document`` that the token belongs to. ``whole_kl`` and
    ``compact_kl`` [W]: the same rows with and without the whole base distribution."""

    kl: np.ndarray
    agrees: np.ndarray
    change: np.ndarray
    document: np.ndarray
    whole_kl: np.ndarray
    compact_kl: np.ndarray


class Meter(_Watching):
    """An observer that measures a quantized model's distributions against a base."""

    def __init__(self, base: Base) -> None:
        super().__init__()
        self._base = base
        self._origin = np.zeros(0, dtype=np.int64)
        self.measured: dict[str, Measured] = {}

    def begin(self, instances: Sequence[Any], lengths: Sequence[int]) -> None:
        super().begin(instances, lengths)
        call = self._call
        if call is None:
            return
        base = self._base.tasks.get(call.task)
        if base is None:
            raise EvaluationError(
                f"{call.task}: the unquantized cell kept no distributions of it; run that again"
            )
        starts: dict[Hashable, tuple[int, int]] = {
            (document, request): (start, length)
            for document, request, start, length in zip(
                base.document.tolist(),
                base.request.tolist(),
                (np.cumsum(base.length) - base.length).tolist(),
                base.length.tolist(),
                strict=True,
            )
        }
        origin = []
        for document, request, length in zip(
            call.document.tolist(), call.request.tolist(), call.length.tolist(), strict=True
        ):
            start, known = starts.get((document, request), (0, -1))
            if known != length:
                raise EvaluationError(
                    f"{call.task}: document {document}, request {request} has {length} scored "
                    f"tokens, in the unquantized cell {max(known, 0)}; run that again"
                )
            origin.append(start)
        # The base may hold requests in another order: its rows in the order of this call's slots.
        self._origin = np.repeat(np.asarray(origin) - call.starts, call.length) + np.arange(
            call.tokens
        )

    def observe(self, scored: Scored, log_probabilities: Tensor) -> None:
        call = self._call
        assert call is not None
        device = log_probabilities.device
        if not call.tensors:
            self._allocate(call, device)
        kept = call.tensors
        slots = call.slots(scored)
        row, slot, token = to_device(np.stack((scored.row, slots, scored.token)), device)
        kept["kl"][slot] = _divergence(
            kept["base"][slot].float(), log_probabilities[row[:, None], kept["ids"][slot].long()]
        )
        kept["agrees"][slot] = log_probabilities.argmax(dim=-1)[row] == kept["ids"][slot, 0]
        kept["change"][slot] = log_probabilities[row, token].float() - kept["target"][slot]
        base = self._base.tasks[call.task]
        order = np.argsort(base.whole_place)
        places = base.whole_place[order]
        chosen = np.flatnonzero(np.isin(self._origin[slots], places))
        if chosen.size:
            where = order[np.searchsorted(places, self._origin[slots[chosen]])]
            whole = to_device(base.whole[where], device).float().log_softmax(dim=-1)
            other = log_probabilities[to_device(scored.row[chosen], device)].float()
            place = to_device(where, device)
            kept["whole_kl"][place] = (whole.exp() * (whole - other)).sum(dim=-1)
            kept["compact_kl"][place] = kept["kl"][slot[to_device(chosen, device)]]

    def end(self) -> None:
        call = self._call
        if call is None or not call.tensors:
            return
        names = ("kl", "agrees", "change", "whole_kl", "compact_kl")
        found = {name: call.tensors[name].cpu().numpy() for name in names}
        seen = ~np.isnan(found["whole_kl"])
        self.measured[call.task] = Measured(
            kl=found["kl"],
            agrees=found["agrees"],
            change=found["change"],
            document=np.repeat(call.document, call.length),
            whole_kl=found["whole_kl"][seen],
            compact_kl=found["compact_kl"][seen],
        )
        call.tensors.clear()

    def _allocate(self, call: _Call, device: torch.device) -> None:
        base = self._base.tasks[call.task]
        nowhere = np.full(len(base.whole_place), np.nan, dtype=np.float32)
        call.tensors = {
            "ids": to_device(base.ids[self._origin].astype(np.int32), device),
            "base": to_device(base.log_probabilities[self._origin], device),
            "target": to_device(base.target[self._origin], device),
            "kl": torch.full((call.tokens,), torch.nan, device=device),
            "agrees": torch.zeros(call.tokens, dtype=torch.bool, device=device),
            "change": torch.full((call.tokens,), torch.nan, device=device),
            "whole_kl": to_device(nowhere, device).clone(),
            "compact_kl": to_device(nowhere, device).clone(),
        }


def _divergence(base: Tensor, other: Tensor) -> Tensor:
    """KL(base ‖ other) [M] in nats from log-probabilities [M, top] of the same tokens and the
    tail as one class. Base probabilities that rounding put above 1 in sum are scaled down."""
    other = other.float()
    base = base - base.exp().sum(dim=-1, keepdim=True).clamp(min=1.0).log()
    p_tail = (1.0 - base.exp().sum(dim=-1)).clamp(min=TINY)
    q_tail = (1.0 - other.exp().sum(dim=-1)).clamp(min=TINY)
    kept = (base.exp() * (base - other)).sum(dim=-1)
    return kept + p_tail * (p_tail.log() - q_tail.log())


def _whole_places(tokens: int, count: int) -> np.ndarray:
    """Evenly spaced slots, each once, ascending."""
    return np.unique(np.linspace(0, tokens - 1, min(tokens, count)).astype(np.int64))
