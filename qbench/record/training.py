"""How a checkpoint was trained, as it is written beside its weights. Imports no torch."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from qbench.record.environment import Environment
from qbench.record.written import Digest, Line, Name, Written

FILE = "training.json"


class TrainingSession(Written):
    """One stretch from a start, or a resumption, to an end."""

    first_step: int
    last_step: int
    seconds: float
    processes: int  # GPUs, one each
    code: Digest  # of qbench's own modules that a training runs
    environment: Environment


class Sample(Written):
    """One look at the model on the held-out texts."""

    step: int
    loss: float  # nats a token
    sink_rate: float  # share of (text, head) whose mean weight on the first token exceeds 0.3
    sink_rate_gu: float  # the same by Gu et al. 2024
    kurtosis: float
    largest: float  # |x| of the hidden states


class Trained(Written):
    """What of a checkpoint's training its cells' records keep."""

    recipe: Name
    normalizer: Line
    seed: int
    attention: Line
    in_common: dict[str, Any]  # what the runs of a pair must have in common, by part


class TrainedOn(Written):
    """What the token files say of themselves."""

    digest: Digest
    tokens: int
    documents: int
    tokenizer: Line
    sources: tuple[Line, ...]
    licences: Line = ""


class Training(Written):
    """One run. Of a pair ``in_common`` is the same: they differ in their normalizers alone."""

    schema_version: Literal[1] = 1
    kind: Literal["training"] = "training"
    name: Name  # of the recipe
    normalizer: Line
    seed: Annotated[int, Field(ge=0)]
    settings: dict[str, Any]  # all that shapes a run but its normalizer and seed
    settings_digest: Digest  # of these, the data, the normalizer and the seed
    data: TrainedOn
    attention: Line  # what attends, e.g. "softpick/triton"
    kernels: tuple[Line, ...]  # of attention, as a profile of one step named them
    compiled: Line  # torch.compile's mode, or "no"
    parameters: int
    steps: int
    tokens: int  # seen
    final_loss: float | None  # mean training loss of the last logged steps, nats a token
    best_step: int | None
    best_loss: float | None  # on the held-out texts
    watched: tuple[Sample, ...] = ()
    sessions: tuple[TrainingSession, ...] = ()
    finished: datetime

    @property
    def summary(self) -> Trained:
        return Trained(
            recipe=self.name,
            normalizer=self.normalizer,
            seed=self.seed,
            attention=self.attention,
            in_common=self.in_common,
        )

    @property
    def in_common(self) -> dict[str, Any]:
        """What the runs of a pair must have in common, by part."""
        return {
            **{f"settings.{part}": value for part, value in self.settings.items()},
            "seed": self.seed,
            "data": self.data.digest,
            "steps": self.steps,
            "code": sorted({session.code for session in self.sessions}),
            "processes": sorted({session.processes for session in self.sessions}),
            "hardware": sorted({session.environment.hardware for session in self.sessions}),
            "torch": sorted({one.environment.versions.get("torch", "") for one in self.sessions}),
        }
