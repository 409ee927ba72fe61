"""A recipe: YAML → Recipe. Every validation of user input that needs no model. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    InstanceOf,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from qbench.attention.normalizers import NORMALIZERS
from qbench.errors import DataError, QbenchError, RecipeError
from qbench.evaluation.settings import FEWSHOT_SEED
from qbench.evaluation.tolerance import Tolerance
from qbench.overrides import Overrides
from qbench.quantizers import QUANTIZERS, Quantizer, parse
from qbench.quantizers.texts import HUB_FILE
from qbench.recipe_source import is_folder, override_checkpoints, override_dtype, put, read
from qbench.record import NAME, Name

LABEL = re.compile(NAME)


class Strict(BaseModel):
    """Unknown keys are refused, values are not changed."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class CheckpointSource(Strict):
    """Where a checkpoint lies, and what it must be."""

    path: str
    revision: str | None = None
    normalizer: str | None = None

    @field_validator("normalizer")
    @classmethod
    def _known(cls, value: str | None) -> str | None:
        if value is not None and value not in NORMALIZERS:
            raise ValueError(f"unknown normalizer {value!r}; known: {', '.join(NORMALIZERS)}")
        return value


class CalibrationSource(Strict):
    """Text that calibrated quantizers see: ``samples`` documents of ``length`` tokens each."""

    path: str  # JSON Lines with a "text" field, or hf://datasets/<owner>/<name>/<file>
    samples: int = Field(128, ge=1)
    length: int = Field(2048, ge=8)
    seed: int = 0


class Task(Strict):
    """A task by its lm-eval name.

    ``files`` are the file stems that may stand for the task's evaluation split in a data
    folder, the first that exists is used; None: the split's own name alone.
    """

    name: str
    files: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    num_fewshot: int | None = Field(None, ge=0)


class Evaluation(Strict):
    """Numerics of scoring; all of it is part of every cell's key."""

    softmax_dtype: Literal["float32", "model"] = "float32"
    add_bos: bool = False
    max_length: int | None = Field(None, ge=2)  # None: the checkpoint's own
    batch_size: Annotated[int, Field(ge=1, strict=True)] | Literal["auto"] = "auto"
    limit: int | None = Field(None, ge=1)
    seed: int = Field(0, ge=0, lt=2**32)
    fewshot_seed: int = Field(FEWSHOT_SEED, ge=0, lt=2**32)  # draws few-shot examples
    scoring: Literal["auto", "exact", "fast", "lm-eval"] = "auto"
    tolerance: Tolerance = Tolerance()  # of fast scoring's difference from exact
    attention: Literal["auto", "reference", "triton"] = "auto"
    damage: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One column of the grid: a quantizer under a label that is unique in its recipe."""

    label: str
    quantizer: InstanceOf[Quantizer]


class Recipe(Strict):
    """What to run. ``Recipe.load`` reads one; relative paths are relative to its file."""

    name: Name
    checkpoints: dict[Name, CheckpointSource] = Field(min_length=1)
    compute_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"  # of quantized cells
    quantizers: tuple[Column, ...]
    tasks: tuple[Task, ...] = Field(min_length=1)
    calibration: CalibrationSource | None = None
    data: Path | None = None
    definitions: Path | None = None  # folder of further lm-eval task definitions
    evaluation: Evaluation = Evaluation()
    folder: Path = Path()  # of the recipe file

    @classmethod
    def load(cls, path: Path, overrides: Overrides | None = None) -> Recipe:
        """Read and check a recipe, parts of it replaced by ``overrides``.

        Raises RecipeError, one line a problem.
        """
        changed = overrides or Overrides()
        raw = read(path)
        sources = {
            name: str(Path(source).expanduser().resolve()) if is_folder(source) else source
            for name, source in changed.checkpoints.items()
        }
        override_checkpoints(path, raw, sources)
        if changed.data is not None:
            raw["data"] = str(changed.data.resolve())
        if changed.calibration is not None:
            put(path, raw, "calibration", "path", str(changed.calibration.resolve()))
        if changed.limit is not None:
            put(path, raw, "evaluation", "limit", changed.limit)
        if changed.scoring is not None:
            put(path, raw, "evaluation", "scoring", changed.scoring)
        if changed.dtype is not None:
            override_dtype(raw, changed.dtype)
        try:
            recipe = cls.model_validate({**raw, "folder": path.resolve().parent})
        except ValidationError as error:
            raise RecipeError("\n".join(_lines(path, error))) from None
        recipe._check_files(path)
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
        dtype = known.data.get("compute_dtype", "bfloat16")
        return tuple(_column(place, entry, dtype) for place, entry in enumerate(value))

    @field_validator("folder", "data", "definitions", mode="after")
    @classmethod
    def _expand_user(cls, value: Path | None) -> Path | None:
        try:
            return value.expanduser() if value else value
        except RuntimeError as error:  # ~nobody
            raise ValueError(str(error)) from None

    @model_validator(mode="after")
    def _unique(self) -> Recipe:
        for what, names in (
            ("quantizers", [column.label for column in self.quantizers]),
            ("tasks", [task.name for task in self.tasks]),
        ):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                remedy = "; give one a label" if what == "quantizers" else ""
                raise ValueError(f"{what}: {', '.join(twice)} stands there twice{remedy}")
        calibrated = [c.label for c in self.quantizers if c.quantizer.needs_calibration]
        if calibrated and self.calibration is None:
            raise ValueError(
                f"calibration: {calibrated[0]} needs calibration text; "
                "add calibration: {path: FILE.jsonl} or --calibration FILE"
            )
        return self

    def resolve(self, path: Path) -> Path:
        """``path`` as the recipe means it: relative to the recipe's folder."""
        return (self.folder / path).resolve()

    def _check_files(self, place: Path) -> None:
        for what in ("data", "definitions"):
            folder = getattr(self, what)
            if folder is not None and not self.resolve(folder).is_dir():
                raise RecipeError(f"{place}: {what}: no such folder: {self.resolve(folder)}")
        source = self.calibration
        if source is None or source.path.startswith(HUB_FILE):
            return
        if not self.resolve(Path(source.path)).is_file():
            raise RecipeError(
                f"{place}: calibration.path: no such file: {self.resolve(Path(source.path))}; "
                "name a JSON Lines file with a text field, here or with --calibration"
            )


def _column(place: int, entry: Any, compute_dtype: str) -> Column:
    if not isinstance(entry, str | dict):
        raise ValueError(f"[{place}]: a quantizer is a name, or {{name: …}}, not {entry!r}")
    options = {"name": entry} if isinstance(entry, str) else dict(entry)
    name, label = options.pop("name", None), options.pop("label", None)
    if not isinstance(name, str):
        raise ValueError(f"[{place}]: a quantizer is a name, or {{name: …, option: value}}")
    if label is not None and not (isinstance(label, str) and LABEL.fullmatch(label)):
        raise ValueError(f"[{place}]: label {label!r}: letters, digits and . _ + - only")
    if name in QUANTIZERS and "compute_dtype" in QUANTIZERS.get(name).options:
        options.setdefault("compute_dtype", compute_dtype)
    try:
        return Column(label=label or name, quantizer=parse(name, options))
    except QbenchError as error:
        raise ValueError(f"[{place}]: {error}") from None


def _lines(path: Path, error: ValidationError) -> list[str]:
    lines = []
    for problem in error.errors():
        place = "".join(
            f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"]
        ).lstrip(".")
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            message = "unknown key; " + _known_keys(problem["loc"])
        elif problem["type"] == "dataclass_type":
            message = f"must be a mapping; {_known_keys((*problem['loc'], ''))} (it is "
            message += f"{problem['input']!r})"
        elif problem["type"] not in ("value_error", "missing"):
            message += f" (it is {problem['input']!r})"
        separator = "" if message.startswith("[") else ": "
        lines.append(f"{path}: {place}{separator}{message}" if place else f"{path}: {message}")
    return lines


def _known_keys(place: tuple[int | str, ...]) -> str:
    kinds = {
        "checkpoints": CheckpointSource,
        "calibration": CalibrationSource,
        "tasks": Task,
        "evaluation": Evaluation,
    }
    kind = kinds.get(str(place[0]), Recipe) if len(place) > 1 else Recipe
    names = list(kind.model_fields)
    if place[:2] == ("evaluation", "tolerance") and len(place) > 2:
        names = [field.name for field in fields(Tolerance)]
    return "known: " + ", ".join(name for name in names if name != "folder")


def read_data_folder(folder: Path) -> list[str]:
    """Names of the tasks that a data folder holds files for. Raises DataError if none."""
    tasks = sorted({path.parent.name for path in folder.glob("*/*.jsonl")})
    if not tasks:
        raise DataError(f"{folder}: no <task>/<split>.jsonl here")
    return tasks
