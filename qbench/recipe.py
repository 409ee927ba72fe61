"""A recipe: YAML → Recipe. Every validation of user input that needs no model. No torch."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    InstanceOf,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from qbench.attention.implementation import NATIVE
from qbench.attention.normalizers import NORMALIZERS
from qbench.errors import QbenchError, RecipeError, RecipeProblems, shown
from qbench.evaluation.settings import FEWSHOT_SEED, Tolerance
from qbench.overrides import Overrides
from qbench.plugins import load_packages
from qbench.quantizers import QuantizationConfig, config_of, unquantized_dtype
from qbench.quantizers.texts import HUB_FILE
from qbench.recipe_fields import (
    MOST_TOKENS,
    FilePath,
    Flag,
    Seed,
    Strict,
    Text,
    Whole,
    problem,
    problem_lines,
)
from qbench.recipe_override import folder_of, group_checkpoints, source_of
from qbench.recipe_plugins import PluginFiles, load_plugins
from qbench.recipe_source import Source
from qbench.recipe_tasks import Files, Task
from qbench.records import NAME, Name

LABEL = re.compile(NAME)
MOST_BATCH = 2**16  # requests
MOST_DOCUMENTS = 10**9


class CheckpointSource(Strict):
    """Where a checkpoint lies, and what it must be."""

    path: Text
    revision: Text | None = None
    normalizer: str | None = None

    @field_validator("normalizer")
    @classmethod
    def _known(cls, value: str | None) -> str | None:
        known = (*NORMALIZERS, NATIVE)
        if value is not None and value not in known:
            raise ValueError(f"unknown normalizer {shown(value)}; known: {', '.join(known)}")
        return value


class CalibrationSource(Strict):
    """Text that calibrated quantizers see: ``samples`` documents of ``length`` tokens each."""

    path: Text  # JSON Lines with a "text" field, or hf://datasets/<owner>/<name>/<file>
    samples: Whole = Field(128, ge=1, le=10**6)
    length: Whole = Field(2048, ge=8, le=MOST_TOKENS)
    seed: Seed = 0


class Evaluation(Strict):
    """Numerics of scoring; all of it is part of every cell's key."""

    softmax_dtype: Literal["float32", "model"] = "float32"
    add_bos: Flag = False
    max_length: Whole | None = Field(None, ge=2, le=MOST_TOKENS)  # None: the checkpoint's own
    batch_size: int | Literal["auto"] = "auto"
    limit: Whole | None = Field(None, ge=1, le=MOST_DOCUMENTS)
    seed: Seed = 0
    fewshot_seed: Seed = FEWSHOT_SEED  # draws few-shot examples
    scoring: Literal["auto", "exact", "fast", "lm-eval"] = "auto"
    tolerance: Tolerance = Tolerance()  # of fast scoring's difference from exact
    attention: Literal["auto", "reference", "triton", "native"] = "auto"
    damage: Flag = True

    @field_validator("batch_size", mode="before")
    @classmethod
    def _known_size(cls, value: Any) -> Any:
        if value != "auto" and not (type(value) is int and 1 <= value <= MOST_BATCH):
            raise ValueError(
                f"auto, or a whole number from 1 to {MOST_BATCH} (it is {shown(value)})"
            )
        return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One column of the grid: a quantizer under a label that is unique in its recipe."""

    label: str
    quantization: InstanceOf[QuantizationConfig]


class Recipe(Strict):
    """What to run. ``Recipe.load`` reads one; relative paths are relative to its file."""

    name: Name
    plugins: PluginFiles = ()  # ``load`` loads them
    checkpoints: dict[Name, CheckpointSource] = Field(min_length=1)
    baseline: Name | None = None  # the checkpoint that Δ is taken against; None: the first
    # several trainings of one kind: a group's name → its checkpoints
    replicates: dict[Name, Annotated[tuple[Name, ...], Field(min_length=2)]] = Field(
        default_factory=dict
    )
    # of quantized cells; None: that of the unquantized quantizer, which damage is against
    compute_dtype: Literal["bfloat16", "float16", "float32"] | None = None
    quantizers: tuple[Column, ...]
    tasks: tuple[Task, ...] = Field(min_length=1)
    calibration: CalibrationSource | None = None
    data: FilePath | None = None
    skip_missing: Flag = False  # tasks that the data folder lacks are left out, and named
    definitions: FilePath | None = None  # of further lm-eval tasks
    evaluation: Evaluation = Evaluation()
    folder: Path = Path()  # of the recipe file

    @classmethod
    def load(cls, path: str | Path | None, overrides: Overrides | None = None) -> Recipe:
        """Read and check a recipe, parts of it replaced by ``overrides``. Without a ``path`` these
        say all of it: checkpoints, quantizers and tasks.

        Raises RecipeError, one line a problem.
        """
        load_packages()
        path = Path(path) if path is not None else None
        source = source_of(path, overrides or Overrides())
        if {"model", "normalizers"} <= source.values.keys():
            raise RecipeError(f"{path}: it is a training recipe; say qbench train {path}")
        folder = folder_of(path)
        load_plugins(source, folder)
        group_checkpoints(source, folder)
        try:
            recipe = cls.model_validate({**source.values, "folder": folder})
        except ValidationError as error:
            raise RecipeProblems(problem_lines(source, error, _known_keys)) from None
        recipe._check_files(source)
        return recipe

    @field_validator("checkpoints", mode="before")
    @classmethod
    def _expand_checkpoints(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {k: {"path": v} if isinstance(v, str) else v for k, v in value.items()}
        return value

    @field_validator("tasks", mode="before")
    @classmethod
    def _expand_tasks(cls, value: Any) -> Any:
        if isinstance(value, list):
            return [{"name": task} if isinstance(task, str) else task for task in value]
        return value

    @field_validator("quantizers", mode="wrap")
    @classmethod
    def _parse_quantizers(cls, value: Any, _: Any, known: ValidationInfo) -> Any:
        if not isinstance(value, list) or not value:
            raise ValueError("must be a list, such as [bf16, gptq-4bit]")
        dtype = known.data.get("compute_dtype") or unquantized_dtype(value)
        return tuple(_column(index, entry, dtype) for index, entry in enumerate(value))

    @field_validator("folder", "data", "definitions", mode="after")
    @classmethod
    def _expand_user(cls, value: Path | None) -> Path | None:
        try:
            return value.expanduser() if value else value
        except RuntimeError as error:  # ~nobody
            raise ValueError(str(error)) from None

    @field_validator("replicates")
    @classmethod
    def _groups(
        cls, value: dict[str, tuple[str, ...]], known: ValidationInfo
    ) -> dict[str, tuple[str, ...]]:
        checkpoints = known.data.get("checkpoints", {})
        seen: set[str] = set()
        for group, members in value.items():
            if group in checkpoints:
                raise problem((group,), "is the name of a checkpoint too; name the group otherwise")
            for member in members:
                if checkpoints and member not in checkpoints:
                    raise problem((group,), f"{member} is none of the checkpoints")
                if member in seen:
                    raise problem((group,), f"{member} stands there twice")
                seen.add(member)
        return value

    @model_validator(mode="after")
    def _unique(self) -> Recipe:
        if self.baseline not in (None, *self.checkpoints, *self.replicates):
            known = ", ".join([*self.checkpoints, *self.replicates])
            raise problem(("baseline",), f"{self.baseline} is no checkpoint; there is {known}")
        labels = [column.label for column in self.quantizers]
        for what, names, remedy in (
            ("quantizers", labels, "; give one a label"),
            ("tasks", [task.name for task in self.tasks], ""),
        ):
            for number, name in enumerate(names):
                if name in names[:number]:
                    raise problem((what, number), f"{name} stands there twice{remedy}")
        calibrated = [c.label for c in self.quantizers if c.quantization.needs_calibration]
        if calibrated and self.calibration is None:
            raise problem(
                ("quantizers", labels.index(calibrated[0])),
                f"{calibrated[0]} needs calibration text; "
                "add calibration: {path: FILE.jsonl} or --calibration FILE",
            )
        return self

    @property
    def compared(self) -> tuple[str, ...]:
        """The checkpoints' names, the one that Δ is taken against, or its group, first."""
        first = self.replicates.get(self.baseline or "", (self.baseline,))
        return tuple(sorted(self.checkpoints, key=lambda name: name not in first))

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """``replicates``, the group that Δ is taken against first."""
        order = {name: index for index, name in enumerate(self.compared)}
        return dict(sorted(self.replicates.items(), key=lambda group: order[group[1][0]]))

    def resolve(self, path: Path) -> Path:
        """``path`` as the recipe means it: relative to the recipe's folder."""
        return Path(os.path.realpath(self.folder / path))

    def _check_files(self, source: Source) -> None:
        for what in ("data", "definitions"):
            folder = getattr(self, what)
            if folder is not None and not os.path.isdir(self.resolve(folder)):
                raise RecipeError(
                    f"{source.at((what,))}: {what}: no such folder: {self.resolve(folder)}"
                )
        text = self.calibration
        if text is None or text.path.startswith(HUB_FILE):
            return
        if not os.path.isfile(self.resolve(Path(text.path))):
            raise RecipeError(
                f"{source.at(('calibration', 'path'))}: calibration.path: no such file: "
                f"{self.resolve(Path(text.path))}; "
                "name a JSON Lines file with a text field, here or with --calibration"
            )


def _column(index: int, entry: Any, compute_dtype: str) -> Column:
    if not isinstance(entry, str | dict):
        raise problem((index,), f"a quantizer is a name, or {{name: …}}, not {shown(entry)}")
    options = {"name": entry} if isinstance(entry, str) else dict(entry)
    label = options.pop("label", None)
    if label is not None and not (isinstance(label, str) and LABEL.fullmatch(label)):
        raise problem((index,), f"label {shown(label)}: letters, digits and . _ + - only")
    try:
        quantization = config_of(options, compute_dtype=compute_dtype)
    except QbenchError as error:
        raise problem((index,), str(error)) from None
    label = label or options.get("name") or quantization.name
    if not LABEL.fullmatch(label):
        raise problem((index,), f"{label} is too long a name; give it a label")
    return Column(label=label, quantization=quantization)


def _known_keys(location: tuple[int | str, ...]) -> str:
    kinds = {
        "checkpoints": CheckpointSource,
        "calibration": CalibrationSource,
        "tasks": Task,
        "evaluation": Evaluation,
    }
    kind = kinds.get(str(location[0]), Recipe) if len(location) > 1 else Recipe
    names = list(kind.model_fields)
    if location[0] == "tasks" and location[2:3] == ("files",) and len(location) > 3:
        names = list(Files.model_fields)
    if location[:2] == ("evaluation", "tolerance") and len(location) > 2:
        names = [field.name for field in fields(Tolerance)]
    return "known: " + ", ".join(name for name in names if name != "folder")
