"""Read and check a training recipe: everything that needs no data. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from qbench.attention.normalizers import NORMALIZERS
from qbench.errors import RecipeError, shown
from qbench.recipe import (
    MOST_TOKENS,
    Flag,
    Seed,
    Strict,
    Text,
    Whole,
    absolute,
    problem_lines,
    read_yaml,
    require_no_removed,
)
from qbench.records import Name


class Compute(Strict):
    """``bfloat16``: float32 weights and optimizer, passes in bfloat16 under autocast with a
    bfloat16 residual stream. ``deterministic``: the same bits from the same start, which resuming
    rests on. ``compile``: torch.compile's mode, or false; none with CUDA graphs of its own, since a
    compiled step is captured as a whole."""

    precision: Literal["bfloat16", "float32"] = "bfloat16"
    attention: Literal["auto", "reference", "triton"] = "auto"
    compile: Literal["default", "max-autotune-no-cudagraphs"] | Literal[False] = "default"
    deterministic: Flag = True


GATES = {"+head-gate": "head", "+element-gate": "element"}
MOST_STEPS = 10**8
# of a running mean; with 1 it never begins
Decay = Annotated[float, Field(strict=True, ge=0, lt=1)]
Positive = Annotated[float, Field(strict=True, gt=0)]


def split_gate(name: str) -> tuple[str, str | None]:
    """Return the attention function and what its gate multiplies: ("softmax", "head") for the
    ``name`` ``softmax+head-gate``, ("softmax", None) for ``softmax``."""
    normalizer, plus, gate = name.partition("+")
    return normalizer, GATES.get(plus + gate)


class OwnParameter(Strict):
    """A parameter of an attention function. ``start``: the initial value of each head; ``trained``:
    whether it is trained. None: as the attention function defines it."""

    start: Annotated[float, Field(strict=True, ge=-1e4, le=1e4)] | None = None
    trained: Flag | None = None


class Shape(Strict):
    """A Llama-style decoder: pre-norm, rotary positions, SwiGLU, no biases. ``intermediate`` None:
    flash-linear-attention's rule, 2/3 of 4 · hidden rounded up to 256. ``positions``: the longest
    context that the checkpoint states; None: that of training. ``rope_theta`` None: no rotary
    embedding. ``parameters``: of the normalizers, by the names of ``qbench list normalizers``;
    those that they can do without are there only if named."""

    hidden: Whole = Field(ge=8, le=2**16)
    layers: Whole = Field(ge=1, le=1024)
    heads: Whole = Field(ge=1, le=1024)
    kv_heads: Whole | None = Field(None, ge=1, le=1024)  # None: as many as heads
    intermediate: Whole | None = Field(None, ge=8, le=2**20)
    vocabulary: Whole = Field(ge=8, le=2**22)
    context: Whole = Field(ge=8, le=MOST_TOKENS)  # tokens of a training sequence
    positions: Whole | None = Field(None, ge=8, le=MOST_TOKENS)
    rope_theta: Positive | None = 10_000.0
    parameters: dict[str, OwnParameter] = Field({})
    norm_eps: Positive = 1e-6
    tied: Flag = False
    # standard deviation of every weight matrix
    init: Annotated[float, Field(strict=True, gt=0, le=1)] = 0.02

    @model_validator(mode="after")
    def _agrees(self) -> Shape:
        """Refuse heads that do not divide the width, and a context longer than the positions."""
        shared = self.kv_heads or self.heads
        if self.hidden % self.heads or self.hidden // self.heads % 2 or self.heads % shared:
            raise ValueError(
                f"hidden {self.hidden}, heads {self.heads}, kv_heads {shared}: hidden / heads "
                "must be an even whole number, and heads / kv_heads a whole number"
            )
        if self.positions is not None and self.positions < self.context:
            raise ValueError(
                f"positions {self.positions} are fewer than context {self.context}; raise positions"
            )
        return self


class Data(Strict):
    """``tokens``: the folder that ``qbench tokenize`` wrote. Sequences are cut from its documents
    in a row, without masks between them; ``bos_first`` puts a BOS before each sequence."""

    tokens: Text
    bos_first: Flag = False


class Batch(Strict):
    """``tokens`` of one step over all devices; ``sequences`` that a device reads at once. Gradients
    of several passes are added up to a step."""

    tokens: Whole = Field(ge=8)
    sequences: Whole = Field(ge=1, le=2**16)


class Optimizer(Strict):
    name: Literal["adamw"] = "adamw"
    learning_rate: Positive
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: Annotated[float, Field(strict=True, ge=0)] = 0.1
    decay_vectors: Flag = False  # whether norms decay too
    clip: Positive = 1.0  # largest gradient norm


class Schedule(Strict):
    """Linear warm-up, then cosine decay (or none) to ``floor`` times the peak."""

    warmup_steps: Annotated[Whole, Field(ge=0, le=MOST_STEPS)]
    decay: Literal["cosine", "none"] = "cosine"
    floor: Annotated[float, Field(strict=True, ge=0, le=1)] = 0.1


class Evaluation(Strict):
    """Every ``every`` steps ``samples`` held-out texts of ``length`` tokens, BOS counted, are read
    as ``qbench analyze`` reads them. ``length`` None: 512, or the context. Training stops if the
    loss is ``diverged`` nats above its lowest."""

    every: Annotated[Whole, Field(ge=1, le=MOST_STEPS)] = 250
    samples: Annotated[Whole, Field(ge=1, le=10_000)] = 16
    length: Annotated[Whole, Field(ge=8, le=MOST_TOKENS)] | None = None
    diverged: Positive = 2.0  # nats above the lowest mean loss: training stops


class TrainingRecipe(Strict):
    """What to train. ``TrainingRecipe.load`` reads one; paths are relative to its file."""

    name: Name
    model: Shape
    normalizers: tuple[str, ...] = Field(min_length=1)
    seeds: tuple[Seed, ...] = Field((0,), min_length=1)
    data: Data
    tokens: Annotated[Whole, Field(ge=1, le=10**15)]  # of one run
    batch: Batch
    optimizer: Optimizer
    schedule: Schedule
    compute: Compute = Compute()
    watch: Evaluation = Evaluation()
    log_every: Annotated[Whole, Field(ge=1, le=MOST_STEPS)] = 10
    save_every: Annotated[Whole, Field(ge=1, le=MOST_STEPS)] = 500  # steps between checkpoints

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        normalizers: Sequence[str] = (),
        seeds: Sequence[int] = (),
        tokens: int | None = None,
        data: Path | None = None,
        sequences: int | None = None,
    ) -> TrainingRecipe:
        """Read and check the recipe in ``path``; the other arguments replace its values if they are
        given: ``normalizers`` and ``seeds`` of the runs, ``tokens`` of one run, ``data`` the folder
        of token files, ``sequences`` that a device reads at once. Raises RecipeError, with one line
        per problem."""
        path = Path(path)
        source = read_yaml(path)
        if "checkpoints" in source.values:
            raise RecipeError(
                f"{source.at(('checkpoints',))}: checkpoints: it is a recipe of `qbench run`; one "
                "of `qbench train` has model, normalizers and data, as those in recipes/train"
            )
        require_no_removed(source)
        if isinstance(text := source.values.get("data"), dict) and "tokens" in text:
            text["tokens"] = absolute(Path(os.path.realpath(source.path)).parent, text["tokens"])
        for value, *place in (
            (list(normalizers), "normalizers"),
            (list(seeds), "seeds"),
            (tokens, "tokens"),
            (data and os.path.realpath(data), "data", "tokens"),
            (sequences, "batch", "sequences"),
        ):
            if value:
                source.replace(value, *place)
        try:
            return cls.model_validate(source.values)
        except ValidationError as error:
            raise RecipeError(*problem_lines(source, error, cls)) from None

    @field_validator("normalizers")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        """Refuse unknown attention functions and gates."""
        for name in value:
            normalizer, plus, gate = name.partition("+")
            if normalizer not in NORMALIZERS or (plus and plus + gate not in GATES):
                names = ", ".join(NORMALIZERS)
                gates = " or ".join(GATES)
                raise ValueError(
                    f"unknown normalizer {shown(name)}; known: {names}; each also with {gates}"
                )
        return value

    @field_validator("normalizers", "seeds")
    @classmethod
    def _once(cls, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Refuse values that are listed twice."""
        for index, value in enumerate(values):
            if value in values[:index]:
                raise ValueError(f"{value} is listed twice; leave one out")
        return values

    @model_validator(mode="after")
    def _has_parameters(self) -> TrainingRecipe:
        """Refuse parameters that no listed attention function has."""
        functions = [split_gate(name)[0] for name in self.normalizers]
        parameters = [NORMALIZERS[name].parameters for name in functions]
        attributes = dict.fromkeys(parameter.attribute for each in parameters for parameter in each)
        for name in self.model.parameters:
            if name not in attributes:
                raise ValueError(
                    f"model.parameters: none of {', '.join(self.normalizers)} has {shown(name)}; "
                    f"known: {', '.join(attributes) or 'none'}"
                )
        if self.model.rope_theta is None and any("+" in name for name in self.normalizers):
            raise ValueError(
                "model.rope_theta: a gate needs a rotary embedding; set a number, or leave the "
                "gate out"
            )
        return self

    @model_validator(mode="after")
    def _fits(self) -> TrainingRecipe:
        """Refuse sizes of batch, context, tokens and watch that do not fit together."""
        if self.batch.tokens % self.model.context:
            raise ValueError(
                f"batch.tokens {self.batch.tokens} must be a multiple of model.context "
                f"{self.model.context}"
            )
        if self.global_batch_size % self.batch.sequences:
            raise ValueError(
                f"batch.sequences {self.batch.sequences} must divide the {self.global_batch_size} "
                "sequences of a step (batch.tokens / model.context)"
            )
        if self.tokens < self.batch.tokens:
            raise ValueError(
                f"tokens {self.tokens} are fewer than batch.tokens {self.batch.tokens}, one step; "
                "raise tokens"
            )
        if self.watched_length > self.model.context:
            raise ValueError(
                f"watch.length {self.watch.length} is more than model.context "
                f"{self.model.context}; lower it"
            )
        return self

    @property
    def steps(self) -> int:
        """Return the number of optimizer steps of a run; a last part of a step is left out."""
        return self.tokens // self.batch.tokens

    @property
    def global_batch_size(self) -> int:
        """Return the number of sequences of one step, over all devices."""
        return self.batch.tokens // self.model.context

    @property
    def watched_length(self) -> int:
        """Return how many tokens of each held-out text are watched."""
        return self.watch.length or min(512, self.model.context)

    def runs(self) -> list[tuple[str, int]]:
        """Return (normalizer, seed) of every run, seed by seed: pairs are complete early."""
        return [(normalizer, seed) for seed in self.seeds for normalizer in self.normalizers]

    def settings(self) -> dict[str, Any]:
        """Return everything that determines a run's weights except token files, attention function
        and seed, for its record: the runs of a pair share it. How often a run is logged, saved and
        evaluated is left out, since it changes no weight."""
        unsaid = () if self.model.parameters else ("parameters",)  # as before there were any
        settings = self.model_dump(
            mode="json",
            include={"model", "tokens", "batch", "optimizer", "schedule", "compute", "data"},
            exclude={"data": {"tokens"}, "model": set(unsaid)},
        )
        # As records and states of earlier versions have it, which are compared with it.
        settings["optimizer"]["muon_learning_rate"] = None
        settings["compute"] |= {"graphs": "auto", "travel": "float32"}
        return settings
