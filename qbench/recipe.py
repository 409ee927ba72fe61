"""Read a recipe from YAML 1.2, with options in place of its parts, and check all that needs no
model. Each value has its line in the file, for messages.

Paths become absolute here: those of the file are relative to its folder, those of options to the
working folder. Imports no torch.
"""

from __future__ import annotations

import glob
import io
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import InitErrorDetails, PydanticCustomError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode

from qbench import removed
from qbench.attention import NATIVE
from qbench.attention.normalizers import NORMALIZERS
from qbench.checkpoints.find import HUB_ID
from qbench.errors import DataError, QbenchError, RecipeError, shown, validation_line
from qbench.evaluation.settings import FEWSHOT_SEED, AnswerSettings, Tolerance
from qbench.evaluation.tasks import PROMPTS
from qbench.files import NAME_RULE, reason, write_atomically
from qbench.plugins import load_file, loaded
from qbench.quantizers import QuantizationConfig, config_of, unquantized_dtype
from qbench.quantizers.config import UNQUANTIZED
from qbench.quantizers.published import Published
from qbench.quantizers.registry import split_commas
from qbench.quantizers.texts import HUB_FILE, find_text
from qbench.records import DIGEST, LINE, NAME, TASK, Line, Name, TaskName

TAG = "tag:yaml.org,2002:"
PATTERNS = {
    f"^{NAME}$": NAME_RULE,
    LINE: "one line of text",
    TASK: "the name of a task in one line, without / and \\",
    DIGEST: "a SHA-256, 64 hexadecimal digits",
}

Location = tuple[int | str, ...]  # as pydantic's ``loc``: ("checkpoints", "softmax", "path")


@dataclass(frozen=True, slots=True)
class Source:
    """Holds the ``values`` of a recipe and their lines in its file, counted from 1."""

    path: Path
    values: dict[str, Any]
    lines: dict[Location, int]

    def at(self, location: Location) -> str:
        """Return ``path:line`` of the innermost part of ``location`` that the file has; ``path``
        alone if it has none of it, or if that part was replaced."""
        for end in range(len(location), 0, -1):
            if location[:end] in self.lines:
                line = self.lines[location[:end]]
                return f"{self.path}:{line}" if line else str(self.path)
        return str(self.path)

    def replace(self, value: Any, *location: str) -> None:
        """Set the value at ``location``, a key, or a key and one within it: ``replace(10,
        "evaluation", "limit")``. Messages then name no line for it. Raises RecipeError if the outer
        key's value is not a mapping."""
        part, *key = location
        if key:
            before = self.values.get(part) or {}
            if not isinstance(before, dict):
                place = self.at((part,))
                raise RecipeError(f"{place}: {part}: must be a mapping (it is {shown(before)})")
            value = {**before, key[0]: value}
        self.values[part] = value
        self.lines[location] = 0


def bundled_recipes() -> Path:
    """Return the folder of the recipes that come with qbench: in the package, else beside it."""
    in_wheel = Path(__file__).parent / "bundled"
    return in_wheel if in_wheel.is_dir() else Path(__file__).parents[1] / "recipes"


def read_yaml(path: Path) -> Source:
    """Read the YAML of the recipe ``path``. If there is no such file and qbench comes with a recipe
    of that path, such as recipes/demo.yaml, read that and say so on standard error. Raises
    RecipeError if it cannot be read or is no mapping, and, with the line, if it is not YAML."""
    if path.parts[:1] == ("recipes",) and not os.path.lexists(path):
        bundled = bundled_recipes().joinpath(*path.parts[1:])
        if bundled.is_file():
            line = f"{path}: not in this folder; using the one that comes with qbench: {bundled}"
            print(line, file=sys.stderr)
            path = bundled
    yaml = YAML(typ="safe", pure=True)
    try:
        text = path.read_text("utf-8-sig")
    except FileNotFoundError:
        raise RecipeError(
            f"{path}: no such recipe; `qbench list recipes` names those that come with qbench"
        ) from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not UTF-8 text ({error.reason}); save it as UTF-8") from None
    except (OSError, ValueError) as error:
        raise RecipeError(f"{path}: cannot be read ({reason(error)}); name a YAML file") from None
    try:
        root = yaml.compose(text)
        if not isinstance(root, MappingNode):
            raise RecipeError(
                f"{path}: not a mapping; write the keys name, checkpoints, quantizers and tasks"
            )
        lines = dict(_lines(path, root, ()))
        return Source(path, yaml.constructor.construct_document(root), lines)
    except RecursionError:
        raise RecipeError(f"{path}: nested too deeply; write fewer levels") from None
    except (YAMLError, ValueError, KeyError) as error:  # !!int foo, a date in the 13th month
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        words = [getattr(error, name, None) for name in ("context", "problem", "reason")]
        message = " ".join(" ".join(filter(None, words)).split()) or " ".join(str(error).split())
        place = f"{path}:{mark.line + 1}" if mark else path
        raise RecipeError(f"{place}: cannot be read: {message}; correct the YAML") from None


def require_no_removed(source: Source) -> None:
    """Raise RecipeError if the recipe has removed keys, naming what took their place."""
    if gone := [
        f"{source.at(location)}: {key} was removed: {removed.KEYS[key]}"
        for location in source.lines
        if (key := ".".join(part for part in location if isinstance(part, str))) in removed.KEYS
    ]:
        raise RecipeError(*gone)


def problem_lines(source: Source, error: ValidationError, kind: type) -> list[str]:
    """Return one line per problem of ``error``: file, line, key and message. A list that is too
    short only because its items are wrong has none. ``kind``: the recipe's class."""
    lines = []
    within = {p["loc"][:end] for p in error.errors() for end in range(len(p["loc"]))}
    for problem in error.errors():
        if problem["type"] == "too_short" and problem["loc"] in within:
            continue  # pydantic counts only valid items; the invalid ones are listed
        location = "".join(
            f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"]
        ).lstrip(".")
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            keys = _known_keys(kind, problem["loc"][:-1])
            message = f"unknown key; {keys}"
        elif problem["type"] in ("dataclass_type", "model_type", "dict_type"):
            message = f"must be a mapping; {_known_keys(kind, problem['loc'])} (it is "
            message += f"{shown(problem['input'])})"
        elif problem["type"] == "string_pattern_mismatch":
            allowed = PATTERNS[problem["ctx"]["pattern"]]
            message = f"must be {allowed} (it is {shown(problem['input'])})"
        elif problem["type"] not in ("value_error", "missing", "recipe"):
            message += f" (it is {shown(problem['input'])})"
        key = f"{location}: " if location else ""  # a problem of the whole recipe has none
        lines.append(f"{source.at(problem['loc'])}: {key}{message}")
    return [" ".join(line.split("\n")) for line in lines]


def _known_keys(kind: Any, location: Location) -> str:
    """Return the keys that the mapping at ``location`` of a recipe of this ``kind`` may have."""
    for part in location:
        if part in kind.__pydantic_fields__:
            kind = _mapping(kind.__pydantic_fields__[part].annotation) or kind
    keys = [
        key
        for key, field in kind.__pydantic_fields__.items()
        if not any(isinstance(mark, SkipJsonSchema) for mark in field.metadata)
    ]
    return "known: " + ", ".join(keys)


def _mapping(annotation: Any) -> Any:
    """Return the first class with fields in a type hint; None if it has none."""
    if hasattr(annotation, "__pydantic_fields__"):
        return annotation
    return next(filter(None, map(_mapping, get_args(annotation))), None)


def _lines(path: Path, node: Node, location: Location) -> Iterator[tuple[Location, int]]:
    """Yield (location, line) of every key and list item below ``node``; for an alias the line of
    its anchor. Raises RecipeError for a key that is not text."""
    if isinstance(node, SequenceNode):
        for number, part in enumerate(node.value):
            yield (*location, number), part.start_mark.line + 1
            yield from _lines(path, part, (*location, number))
    for key, value in node.value if isinstance(node, MappingNode) else ():
        line = key.start_mark.line + 1
        if key.tag not in (f"{TAG}str", f"{TAG}merge"):
            raise RecipeError(f"{path}:{line}: a key is not text; put quotes around it")
        yield (*location, key.value), line
        yield from _lines(path, value, (*location, key.value))


LABEL = re.compile(NAME)
ON_HUB = re.compile(rf"({HUB_ID.pattern})(/[^/]+\.gguf)?", re.ASCII)
MOST_BATCH = 2**16  # requests
MOST_DOCUMENTS = 10**9
MOST_TOKENS = 2**24  # of one text
NAME_CHARACTERS = 64
SHAPES = {"checkpoints": dict, "quantizers": list, "tasks": list, "plugins": list}
PATHS = ("data", "definitions", "calibration")  # fields of Overrides
FROM_OPTIONS = Path("options")  # the place in messages without a recipe


# --- what fields are made of


Whole = Annotated[int, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Seed = Annotated[Whole, Field(ge=0, lt=2**32)]
Text = Annotated[Line, Field(min_length=1)]


def _is_folder(path: Path) -> Path:
    """Return ``path``. Raises ValueError if it is not a folder."""
    if not os.path.isdir(path):  # Path.is_dir raises for a name that is too long
        raise ValueError(f"no such folder: {path}; correct the path")
    return path


def _is_text(path: str) -> str:
    """Return ``path``. Raises ValueError unless it is a file or an address of the hub."""
    if not path.startswith(HUB_FILE) and not os.path.isfile(path):
        raise ValueError(
            f"no such file: {path}; name a JSON Lines file with a text field, here or with "
            "--calibration"
        )
    return path


Folder = Annotated[Path, AfterValidator(_is_folder)]


def _short(key: str, short: type = str) -> BeforeValidator:
    """Return a validator that turns a ``short`` value into the mapping {``key``: value}."""
    return BeforeValidator(lambda value: {key: value} if isinstance(value, short) else value)


class Strict(BaseModel):
    """A base for mappings of recipes: unknown keys are refused, values cannot be changed."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def problem(location: Location, message: str) -> ValidationError:
    """Return the error for a problem at ``location`` within the value that is validated."""
    kind = PydanticCustomError("recipe", "{message}", {"message": message})
    details = InitErrorDetails(type=kind, loc=location, input=None)
    return ValidationError.from_exception_data("Recipe", [details])


# --- the recipe


class CheckpointSource(Strict):
    """Says where a checkpoint is, and which attention function it was trained with."""

    path: Text
    """A folder, or a hub id."""
    revision: Text | None = None
    """Of a hub id: a branch, tag or commit. Default: main."""
    normalizer: str | None = None
    """The attention function that it was trained with. Default: as its config says."""

    @model_validator(mode="before")
    @classmethod
    def _require_source(cls, value: Any) -> Any:
        if value is None:
            raise ValueError("it has no default; add --checkpoint NAME=FOLDER_OR_HUB_ID")
        return value

    @field_validator("normalizer")
    @classmethod
    def _known(cls, value: str | None) -> str | None:
        names = (*NORMALIZERS, NATIVE)
        if value is not None and value not in names:
            raise ValueError(f"unknown normalizer {shown(value)}; known: {', '.join(names)}")
        return value


class CalibrationSource(Strict):
    """Calibration text: ``samples`` documents of ``length`` tokens each."""

    path: Annotated[Text, AfterValidator(_is_text)]
    """The text that quantizers calibrate on: JSON Lines with a `text` field. Also an address
    hf://datasets/…."""
    samples: Whole = Field(128, ge=1, le=10**6)
    """Calibration texts that are read. Default: 128."""
    length: Whole = Field(2048, ge=8, le=MOST_TOKENS)
    """Tokens of each calibration text. Default: 2048."""
    seed: Seed = 0
    """Draws the documents, and the position in each."""


class Evaluation(Strict):
    """Settings of scoring; each is part of every cell's key, unless its text says otherwise."""

    softmax_dtype: Literal["float32", "model"] = "float32"
    """The dtype of log-probabilities: float32, or the model's dtype."""
    add_bos: Flag | None = None
    """Begin every text that is scored with BOS. Default: as the tokenizer does, as in lm-eval."""
    max_length: Whole | None = Field(None, ge=2, le=MOST_TOKENS)
    """Tokens of a request, at most the checkpoint's context. Default: that context."""
    batch_size: int | Literal["auto"] = "auto"
    """Requests of a batch."""
    limit: Whole | None = Field(None, ge=1, le=MOST_DOCUMENTS)
    """Score the first N documents of each task only. Default: all."""
    seed: Seed = 0
    """Draws answers of tasks that sample."""
    fewshot_seed: Seed = FEWSHOT_SEED
    """Draws few-shot examples."""
    apply_chat_template: Flag = False
    """Put prompts into the checkpoint's chat template, as lm-eval does."""
    fewshot_as_multiturn: Flag = True
    """With a chat template: few-shot examples are turns of the conversation."""
    system_instruction: Annotated[str, Field(min_length=1, max_length=10_000)] | None = None
    """With a chat template: the text of the system's turn."""
    scoring: Literal["auto", "exact", "fast", "lm-eval"] = "auto"
    """exact gives HFLM's scores, fast packs requests, lm-eval is HFLM itself; auto is the fastest
    that fits the model on a GPU, exact on a CPU."""
    tolerance: Tolerance = Tolerance()
    """The largest difference of fast from exact scoring: nats per token, share of changed answers.
    No part of the key: scores that were kept are judged by it anew."""
    attention: Literal["auto", "reference", "triton", "native"] = "auto"
    """The implementation of attention: triton (our kernels, on a GPU), reference (PyTorch), or
    native (the model's own)."""
    stream: Literal[True, False, "auto"] = "auto"
    """Bring weights to the device block by block, for models larger than its memory; auto: for
    those alone. Changes no score and is no part of the key."""
    device_map: Literal["auto"] | None = None
    """auto: spread the blocks over all visible GPUs of this host, and run cells one after the
    other. Changes no score and is no part of the key."""
    damage: Flag = True
    """Measure quantized cells against the unquantized one: KL divergence, flips."""

    @model_validator(mode="after")
    def _one_place(self) -> Evaluation:
        if self.device_map is not None and self.stream is True:
            raise problem(("device_map",), "not together with stream: true; leave one of them out")
        return self

    @field_validator("batch_size", mode="before")
    @classmethod
    def _known_size(cls, value: Any) -> Any:
        if value != "auto" and not (type(value) is int and 1 <= value <= MOST_BATCH):
            raise ValueError(
                f"must be auto, or a whole number from 1 to {MOST_BATCH} (it is {shown(value)})"
            )
        return value


Stems = Annotated[tuple[TaskName, ...], Field(min_length=1)]


class Files(Strict):
    """File names without .jsonl for a task's splits in a data folder; the first that exists is
    used. Default: the split's name."""

    evaluation: Stems | None = None
    """For the split that is scored."""
    fewshot: Stems | None = None
    """For the split that few-shot examples are drawn from."""


class Task(Strict):
    """A task of lm-eval."""

    name: TaskName
    """A task, group or tag of lm-eval, or of `passkey`. `sciq:validation` is short for the name and
    `files: [validation]`."""
    files: Annotated[Files, _short("evaluation", list)] = Files()
    """File names without .jsonl for its splits in the data folder."""
    num_fewshot: Whole | None = Field(None, ge=0, le=10_000)
    """Examples in each prompt. Default: as the task says."""

    @model_validator(mode="before")
    @classmethod
    def _with_file(cls, values: Any) -> Any:
        """Read ``piqa:FILE`` as the task piqa with this data file."""
        name = values.get("name") if isinstance(values, dict) else None
        if not isinstance(name, str) or ":" not in name:
            return values
        if "files" in values:
            raise ValueError(f"name {shown(name)} and files both name a file; keep one")
        task, _, file = name.partition(":")
        return {**values, "name": task, "files": [file]}


class Answers(Strict):
    """Answers to chat prompts: the unquantized model's, which others read, and each cell's own."""

    prompts: Text = PROMPTS.stem
    """Measure along the models' own answers to these prompts: a JSON Lines file with `prompt` or
    `messages`, a task whose prompts are taken, or chat_prompts: 60 that come with qbench."""
    max_new_tokens: Whole = Field(512, ge=1, le=MOST_TOKENS)
    """Tokens that an answer may have."""
    samples: Whole = Field(1, ge=1, le=1_000)
    """Answers to each prompt."""
    temperature: Annotated[float, Field(strict=True, ge=0, le=10)] | None = None
    """Draws tokens at this temperature; 0 takes the likeliest. Default: 0 for one sample, else 0.7.
    """

    @property
    def settings(self) -> AnswerSettings:
        """Return the settings of scoring; the default temperature is 0 for one sample, else 0.7."""
        default = 0.0 if self.samples == 1 else 0.7
        return AnswerSettings(
            max_new_tokens=self.max_new_tokens,
            samples=self.samples,
            temperature=default if self.temperature is None else self.temperature,
            from_task=not is_prompt_file(self.prompts) and self.prompts != PROMPTS.stem,
        )

    @model_validator(mode="after")
    def _can_differ(self) -> Answers:
        if self.samples > 1 and self.temperature == 0:
            why = "at 0 all samples are alike; raise it, or set samples: 1"
            raise problem(("temperature",), why)
        if is_prompt_file(self.prompts) and not os.path.isfile(self.prompts):
            raise problem(("prompts",), f"no such file: {self.prompts}; name a JSON Lines file")
        return self


def is_prompt_file(prompts: str) -> bool:
    """Return whether ``prompts`` names a file and no task: it ends in .jsonl or has a slash."""
    return prompts.endswith(".jsonl") or "/" in prompts


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizerEntry:
    """A quantizer of a recipe and its unique label. ``calibration_seed`` replaces the text's."""

    label: str
    quantization: InstanceOf[QuantizationConfig]
    calibration_seed: int | None = None


class Recipe(Strict):
    """What to run: checkpoints, quantizers, tasks and settings. ``Recipe.load`` reads one."""

    name: Name
    """Results go to results/NAME."""
    plugins: tuple[Text, ...] = ()
    """Python files that are loaded first: they register quantizers or normalizers."""
    checkpoints: dict[Name, Annotated[CheckpointSource, _short("path")]] = Field(min_length=1)
    """By name: a folder or hub id, or a mapping. A list, or a path with `*`, gives several
    trainings of one kind. Δ is taken against the first."""
    primary: Line | None = None
    """TASK/METRIC, such as lambada_openai/acc, that the verdict orders by. Default: KL divergence
    over all tasks."""
    replicates: SkipJsonSchema[dict[Name, tuple[Name, ...]]] = Field(default_factory=dict)
    """Groups of trainings of one kind, by the name of their entry in the file's ``checkpoints``. No
    key of a file."""
    compute_dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """The dtype in which quantized cells compute. Default: that of the unquantized quantizer."""
    quantizers: tuple[QuantizerEntry, ...]
    """Names, or mappings: a name with its options and a label, or parts."""
    tasks: tuple[Annotated[Task, _short("name")], ...]
    """Names of lm-eval, or mappings. Beside answers there may be none."""
    answers: Annotated[Answers | None, _short("prompts")] = None
    """Measure along the models' own answers: a file of prompts or a task, or a mapping."""
    calibration: CalibrationSource | None = None
    """The text that calibrated quantizers read."""
    data: Folder | None = None
    """A folder of TASK/SPLIT.jsonl files. Default: the hub."""
    skip_missing: Flag = False
    """Leave out tasks that the data folder lacks; tables name them. Default: false."""
    definitions: Folder | None = None
    """A folder of further lm-eval tasks: YAML files."""
    evaluation: Evaluation = Evaluation()
    """Settings of scoring."""

    @classmethod
    def load(cls, path: str | Path | None, overrides: Overrides | None = None) -> Recipe:
        """Read and check the recipe ``path``, with parts of it replaced by ``overrides``; the
        plug-in files that it names are imported. Without a ``path`` ``overrides`` give all of it:
        checkpoints, quantizers and tasks. Raises RecipeError, one line per problem."""
        path = Path(path) if path is not None else None
        source = _source(path, overrides or Overrides())
        if {"model", "normalizers"} <= source.values.keys():
            raise RecipeError(f"{path}: it is a training recipe; use qbench train {path}")
        require_no_removed(source)
        _group_checkpoints(source)
        try:
            return cls.model_validate(source.values, context=source)
        except ValidationError as error:
            raise RecipeError(*problem_lines(source, error, cls)) from None

    @field_validator("plugins")
    @classmethod
    def _load(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        """Load the plug-ins first: other keys may name what they register. Raises RecipeError."""
        source = info.context or Source(FROM_OPTIONS, {}, {})
        for number, path in enumerate(value):
            location = f"{source.at(('plugins', number))}: plugins[{number}]"
            load_file(Path(path), location=location)
        return value

    @field_validator(
        "quantizers", mode="wrap", json_schema_input_type=Annotated[list[Any], Field(min_length=1)]
    )
    @classmethod
    def _parse_quantizers(cls, value: Any, _: Any, info: ValidationInfo) -> Any:
        """Turn the entries of ``quantizers`` into QuantizerEntry objects."""
        if not value:
            raise ValueError("must name at least one quantizer, such as [bf16, gptq-4bit]")
        dtype = info.data.get("compute_dtype") or unquantized_dtype(value)
        return tuple(_column(index, entry, dtype) for index, entry in enumerate(value))

    @model_validator(mode="after")
    def _unique(self) -> Recipe:
        """Refuse labels and tasks that are listed twice, missing calibration text, and copies
        without a path beside other quantizers."""
        if not self.tasks and self.answers is None:
            raise problem(("tasks",), "name at least one task, or prompts for answers")
        labels = [column.label for column in self.quantizers]
        for part, names, remedy in (
            ("quantizers", labels, "; give one a label"),
            ("tasks", [task.name for task in self.tasks], "; leave one out"),
        ):
            for number, name in enumerate(names):
                if name in names[:number]:
                    raise problem((part, number), f"{name} is listed twice{remedy}")
        as_it_is = [_as_it_is(column) for column in self.quantizers]
        if any(as_it_is) and not all(as_it_is):
            raise problem(
                ("quantizers", as_it_is.index(True)),
                f"{labels[as_it_is.index(True)]}: add path: FOLDER_OR_HUB_ID of the quantized "
                "copy; without a path it means checkpoints that are quantized already, and must "
                "then be the only quantizer",
            )
        calibrated = [c.label for c in self.quantizers if c.quantization.needs_calibration]
        if calibrated and self.calibration is None:
            raise problem(
                ("quantizers", labels.index(calibrated[0])),
                f"{calibrated[0]} needs calibration text; "
                "add calibration: {path: FILE.jsonl} or --calibration FILE",
            )
        return self

    @property
    def without_baseline(self) -> bool:
        """Return whether the checkpoints themselves are quantized, so that there is no unquantized
        model to compare with."""
        return any(_as_it_is(column) for column in self.quantizers)


def _as_it_is(column: QuantizerEntry) -> bool:
    """Return whether a quantizer entry scores a quantized checkpoint as it was published."""
    weights = column.quantization.weights
    return isinstance(weights, Published) and weights.path is None


def _column(index: int, entry: Any, compute_dtype: str) -> QuantizerEntry:
    """Return the quantizer entry for item ``index`` of ``quantizers``: a name, or a mapping with
    options. Raises ValidationError for unknown names and options."""
    if not isinstance(entry, str | dict):
        raise problem((index,), f"a quantizer is a name, or {{name: …}}, not {shown(entry)}")
    options = {"name": entry} if isinstance(entry, str) else dict(entry)
    label = options.pop("label", None)
    if label is not None and not (isinstance(label, str) and LABEL.fullmatch(label)):
        raise problem((index,), f"label {shown(label)}: must be {NAME_RULE}; quote a number")
    seed = options.pop("calibration_seed", None)
    try:
        quantization = config_of(options, compute_dtype=compute_dtype)
    except QbenchError as error:
        raise problem((index,), str(error)) from None
    label = label or label_of(options.get("name") or quantization.name)
    if not LABEL.fullmatch(label):
        raise problem((index,), f"{label} is too long a name; give it a label")
    if seed is not None and not (type(seed) is int and quantization.needs_calibration):
        why = "a whole number" if type(seed) is not int else f"{label} is not calibrated"
        raise problem((index,), f"calibration_seed {shown(seed)}: {why}")
    return QuantizerEntry(label=label, quantization=quantization, calibration_seed=seed)


def label_of(quantizer: str) -> str:
    """Return the default label of ``quantizer``: its text with ``-`` in place of characters that a
    label cannot have, such as ``gptq-4bit-group_size-64``."""
    return re.sub(r"[^\w.+-]+", "-", quantizer, flags=re.ASCII).strip("-")


def added_column(recipe: Recipe, given: Overrides) -> str:
    """Return the line that says which unquantized column was added to ``recipe``, which was loaded
    from the options ``given`` alone; "" if none was."""
    if len(recipe.quantizers) <= len(given.quantizers or ()) + len(given.quantized):
        return ""
    names = (c.label for c in recipe.quantizers if not c.quantization.precision.quantized)
    return f"{next(names)} is added: damage is measured against an unquantized column"


# --- options in place of a recipe's parts


def _names(value: Any) -> Any:
    """Return ``"a,b"`` as ("a", "b"); other values as they are."""
    if not isinstance(value, str):
        return value
    if not (names := split_commas(value)):
        raise ValueError(f"write names with commas between them (it is {shown(value)})")
    return tuple(names)


def _sources(value: Any) -> Any:
    """Return a list of texts ``NAME=SOURCE`` as a mapping from name to source; other values as they
    are."""
    if not isinstance(value, list):
        return value or {}
    sources: dict[str, str] = {}
    for pair in value:
        name, _, source = pair.partition("=")
        if not (name and source):
            raise ValueError(f"write NAME=PATH_OR_HUB_ID (it is {shown(pair)})")
        if name in sources:
            raise ValueError(f"{name} is given twice; leave one out")
        sources[name] = source
    return sources


Sources = Annotated[Mapping[str, str | Path], BeforeValidator(_sources)]
Names = Annotated[tuple[str, ...] | None, BeforeValidator(_names)]


def _option(place: str, default: Any = None, **option: Any) -> Any:
    """Return a field of Overrides that replaces the recipe's key ``place``, such as
    "evaluation.limit", and takes its help from there; "": it replaces several, and has its own
    help. ``option``: settings of its command-line option."""
    kind: Any = Recipe
    *parts, key = place.split(".")
    for part in parts:
        kind = _mapping(kind.model_fields[part].annotation)
    about = kind.model_fields[key].description if key else None
    return Field(default, description=about, json_schema_extra={"place": place, "option": option})


class Overrides(Strict):
    """Holds values from the command line or a caller that replace parts of a recipe; None, or an
    empty mapping, keeps the recipe's. Paths are relative to the working folder. The fields' texts
    are the help of the options."""

    checkpoints: Sources = _option(
        "", {}, flag="--checkpoint", type=list[str] | None, metavar="NAME=SOURCE"
    )
    """Use this folder or hub id for the recipe's checkpoint NAME. Repeatable. Without a recipe: the
    checkpoints, of which the first is the baseline of Δ."""
    quantized: Sources = _option("", {}, type=list[str] | None, metavar="LABEL=SOURCE")
    """A checkpoint that is quantized already, scored beside its original; without --checkpoint it
    is scored alone. Repeatable."""
    quantizers: Names = _option("", type=str | None, metavar="NAMES")
    """These quantizers, separated by commas: bf16,gptq-4bit. Options follow a colon:
    hqq-4bit:axis=0. With +, weights and more: gptq-4bit+kv4. With a recipe, its labels keep their
    settings."""
    tasks: Names = _option("", type=str | None, metavar="NAMES")
    """These tasks, separated by commas, instead of the recipe's. sciq:validation scores the file
    validation.jsonl of the data folder."""
    dtype: Literal["bfloat16", "float32"] | None = _option("")
    """Compute in this dtype instead of the recipe's, unquantized cells too. Most CPUs are ten times
    slower in bfloat16."""
    answers: str | None = _option("answers.prompts", metavar="FILE|TASK")
    definitions: Path | None = _option("definitions", metavar="FOLDER")
    data: Path | None = _option("data", metavar="FOLDER")
    skip_missing: bool | None = _option("skip_missing", flag="--skip-missing")
    calibration: str | Path | None = _option("calibration.path", type=str | None, metavar="FILE")
    calibration_samples: int | None = _option("calibration.samples", metavar="N")
    calibration_length: int | None = _option("calibration.length", metavar="N")
    limit: int | None = _option("evaluation.limit", metavar="N")
    scoring: Literal["auto", "exact", "fast", "lm-eval"] | None = _option(
        "evaluation.scoring", metavar="MODE"
    )
    add_bos: bool | None = _option("evaluation.add_bos", flag="--add-bos/--no-add-bos")
    stream: bool | None = _option("evaluation.stream", flag="--stream/--no-stream")

    def __init__(self, **values: Any) -> None:
        """Check the values. Raises RecipeError for values of other types."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise RecipeError(validation_line(error)) from None


def save(
    path: Path | None, changed: Overrides, to: Path, *, command: str = "qbench run --save-recipe",
    **replaced: Any,
) -> None:  # fmt: skip
    """Write the recipe ``path`` (None: one of ``changed`` alone) with the changes ``changed``, the
    keys ``replaced`` and this process's plug-in files to the file ``to``; paths become absolute.
    ``command`` is named in the first line. Most values are not checked. Raises RecipeError if the
    recipe cannot be read or changed so, OutputError if ``to`` cannot be written."""
    values = _source(path, changed).values | replaced
    if files := [plugin.path for plugin in loaded()]:
        values["plugins"] = files
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style, yaml.allow_unicode, yaml.width = False, True, 100
    yaml.sort_base_mapping_type_on_output = False
    text = io.StringIO()
    yaml.dump(values, text)
    write_atomically(to, f"# Written by {command}.\n{text.getvalue()}".encode())


def _source(path: Path | None, changed: Overrides) -> Source:
    """Return the values of the recipe ``path`` changed by ``changed``; without a path, a recipe of
    ``changed`` alone. Raises RecipeError for missing parts."""
    here = Path.cwd()
    checkpoints, copies = (
        {name: absolute(here, str(source), hub=True) for name, source in sources.items()}
        for sources in (changed.checkpoints, changed.quantized)
    )
    source = _one_off(changed) if path is None else _read(path)
    values = source.values
    copies_only = path is None and not checkpoints  # copies without an original
    if copies_only:
        checkpoints, copies = copies, {}
    if checkpoints:
        _replace_checkpoints(source, checkpoints)
    for part, key in {"quantizers": "label", "tasks": "name"}.items():
        if (names := getattr(changed, part)) is not None:
            source.replace(_named(values.get(part, []), names, key), part)
    if copies_only:
        values["quantizers"] = ["checkpoint"]
    if copies:
        if len(declared := values.get("checkpoints", {})) > 1:
            raise RecipeError(
                f"--quantized {next(iter(copies))}=…: there are several checkpoints "
                f"({', '.join(map(str, declared))}); use a recipe with "
                "{name: checkpoint, path: {NAME: FOLDER_OR_HUB_ID}}"
            )
        columns = [{"name": "checkpoint", "path": p, "label": n} for n, p in copies.items()]
        values["quantizers"] = [*(values.get("quantizers") or ["bf16"]), *columns]
    for name, part in Overrides.model_fields.items():
        value, place = getattr(changed, name), part.json_schema_extra["place"]
        if place and value is not None:
            if name in PATHS or (name == "answers" and is_prompt_file(value)):
                value = absolute(here, str(value))
            source.replace(value, *place.split("."))
    data, calibration = values.get("data"), values.get("calibration") or {}
    if isinstance(data, str) and isinstance(calibration, dict) and "path" not in calibration:
        with suppress(DataError, OSError):  # if a quantizer needs one, that is said with its remedy
            source.replace(str(find_text(HUB_FILE, data=Path(data))), "calibration", "path")
    if values.get("answers"):
        values.setdefault("tasks", [])
    if changed.dtype is not None:
        _replace_dtype(source, changed.dtype)
    if path is None:
        _add_unquantized(source)
    return source


def _read(path: Path) -> Source:
    """Return the values of the recipe ``path``, with absolute paths. Raises RecipeError if one of
    ``SHAPES`` is not a mapping or list as it must be."""
    source = read_yaml(path)
    values, folder = source.values, Path(os.path.realpath(source.path)).parent
    for key in [key for key, value in values.items() if value is None]:
        del values[key]
    for key, kind in SHAPES.items():
        if not isinstance(values.get(key, kind()), kind):
            shape = "mapping" if kind is dict else "list"
            raise RecipeError(
                f"{source.at((key,))}: {key}: must be a {shape} (it is {shown(values[key])})"
            )
    for key in {"data", "definitions", "calibration", "plugins"} & values.keys():
        values[key] = _located(folder, values[key])
    answers = values.get("answers")
    if isinstance(answers, str):
        values["answers"] = answers = {"prompts": answers}
    if isinstance(answers, dict) and is_prompt_file(str(answers.get("prompts"))):
        answers["prompts"] = absolute(folder, answers["prompts"])
    values["quantizers"] = [
        _located(folder, entry, hub=True) if isinstance(entry, dict) else entry
        for entry in values.get("quantizers", [])
    ]
    for name, entry in values.get("checkpoints", {}).items():
        values["checkpoints"][name] = _located(folder, entry, hub=True)
    return source


def _located(folder: Path, entry: Any, *, hub: bool = False) -> Any:
    """Return ``entry`` with absolute paths. It is a path, a mapping whose ``path`` is a path or one
    path per checkpoint, or a list of these. ``hub``: hub ids stay as they are."""
    if isinstance(entry, list):
        return [_located(folder, part, hub=hub) for part in entry]
    if not isinstance(entry, dict):
        return absolute(folder, entry, hub=hub)
    path = entry.get("path")
    if isinstance(path, dict):
        path = {name: absolute(folder, part, hub=hub) for name, part in path.items()}
    return {**entry, "path": absolute(folder, path, hub=hub)} if "path" in entry else entry


def absolute(folder: Path, path: Any, *, hub: bool = False) -> Any:
    """Return ``path``, relative to ``folder`` or to the home (``~``), as an absolute path.
    Addresses hf://datasets/… and what is not text stay as they are; with ``hub`` hub ids too,
    unless a file or folder has that path."""
    if not isinstance(path, str) or path.startswith(HUB_FILE):
        return path
    full = os.path.abspath(folder / os.path.expanduser(path))
    on_hub = hub and not os.path.exists(full) and ON_HUB.fullmatch(path)
    return path if on_hub else full


def _one_off(changed: Overrides) -> Source:
    """Return a recipe that has only a name, made of the names of its checkpoints, and these names
    without sources: the caller adds the rest from ``changed``. Raises RecipeError naming missing
    options."""
    names = changed.checkpoints or changed.quantized
    given = {
        "--checkpoint NAME=FOLDER_OR_HUB_ID": names,
        "--quantizers bf16,gptq-4bit": changed.quantizers or changed.quantized,
        "--tasks piqa,sciq": changed.tasks or changed.answers,
    }
    if missing := [option for option, value in given.items() if not value]:
        raise RecipeError(
            f"name a recipe, or give all of it as options: {', '.join(missing)} missing"
        )
    values = {"name": "-".join(names)[:NAME_CHARACTERS], "checkpoints": dict.fromkeys(names)}
    return Source(FROM_OPTIONS, values, {})


def _add_unquantized(source: Source) -> None:
    """Add an unquantized column, which damage is measured against, if there is none, in the dtype
    that the first quantizer computes in."""
    entries = source.values["quantizers"]
    dtype = source.values.get("compute_dtype", "bfloat16")
    with suppress(ValidationError):  # what is wrong is said when the recipe is checked
        columns = [_column(index, entry, dtype) for index, entry in enumerate(entries)]
        if all(c.quantization.precision.quantized and not _as_it_is(c) for c in columns):
            dtype = columns[0].quantization.compute_dtype
            source.replace([*entries, UNQUANTIZED[dtype]], "quantizers")


def _named(entries: list[Any], names: tuple[str, ...], key: str) -> list[Any]:
    """Return per name the recipe's entry with that ``key`` or ``name``, else the name itself."""
    by_name: dict[str, Any] = {}
    for entry in entries:
        if isinstance(entry, dict):
            by_name.setdefault(str(entry.get(key) or entry.get("name")), entry)
        elif key == "label" and isinstance(entry, str):
            by_name.setdefault(label_of(entry), entry)
    chosen = []
    for name in names:
        task, _, file = name.partition(":")
        if key == "name" and file and task in by_name:
            chosen.append({**by_name[task], "files": [file]})
        else:
            chosen.append(by_name.get(name, name))
    return chosen


def _replace_checkpoints(source: Source, sources: Mapping[str, str]) -> None:
    """Replace the paths of the checkpoints named in ``sources``, and drop their revisions. Raises
    RecipeError for a name that the recipe does not have."""
    declared = source.values.get("checkpoints", {})
    for name, path in sources.items():
        if name not in declared:
            names = ", ".join(map(str, declared)) or "none"
            raise RecipeError(
                f"--checkpoint {name}={path}: {source.path} has no {name}; it has {names}"
            )
        entry = declared[name] if isinstance(declared[name], dict) else {}
        kept = {k: v for k, v in entry.items() if k not in ("path", "revision")}
        declared[name] = {**kept, "path": path}
        source.lines["checkpoints", name, "path"] = 0


def _replace_dtype(source: Source, dtype: str) -> None:
    """Set the dtype of all quantizers. Unquantized columns become the column of this dtype."""
    source.values["compute_dtype"] = dtype
    unquantized = UNQUANTIZED.get(dtype, dtype)
    changed: list[Any] = []
    for entry in source.values["quantizers"]:
        entry = _in_dtype(entry, unquantized)
        if isinstance(entry, dict) and "weights" in entry:
            entry["weights"] = _in_dtype(entry["weights"], unquantized)
        if entry not in changed or entry not in (unquantized, {"name": unquantized}):
            changed.append(entry)  # [bf16, fp32] become one column
    source.values["quantizers"] = changed


def _in_dtype(entry: Any, unquantized: str) -> Any:
    """Return a quantizer's entry without dtype; an unquantized one as ``unquantized``."""
    if isinstance(entry, dict):
        entry = {k: v for k, v in entry.items() if k not in ("compute_dtype", "dtype")}
        for key in {"name", "label"} & entry.keys():
            if entry[key] in UNQUANTIZED.values():
                entry[key] = unquantized
        return unquantized if entry.get("name") == entry.get("label") == unquantized else entry
    return unquantized if entry in UNQUANTIZED.values() else entry


# --- several trainings of one kind


def _group_checkpoints(source: Source) -> None:
    """Replace each checkpoint that is a list, or a path with ``*``, by its trainings: ``softmax``
    becomes ``softmax.1``, ``softmax.2``, … and a group in ``replicates``. Raises RecipeError for
    fewer than two trainings, and for one with the name of another checkpoint."""
    declared = source.values.get("checkpoints", {})
    made: dict[str, Any] = {}
    groups: dict[str, list[str]] = {}
    for name, entry in declared.items():
        path = entry.get("path") if isinstance(entry, dict) else entry
        if isinstance(entry, list):
            members = entry
        elif isinstance(path, str) and "*" in path:
            folders = [folder for folder in sorted(glob.glob(path)) if os.path.isdir(folder)]
            of_all = entry if isinstance(entry, dict) else {}
            members = [{**of_all, "path": folder} for folder in folders]
        else:
            made[name] = entry
            continue
        groups[name] = names = [f"{name}.{number}" for number in range(1, len(members) + 1)]
        why = ""
        if len(members) < 2:
            why = f"{shown(entry)} gives {len(members)} checkpoints; replicates need two or more"
        elif both := [member for member in names if member in declared]:
            why = f"its trainings are {', '.join(names)}, and {both[0]} is another checkpoint too; "
            why += "rename one of them"
        if why:
            raise RecipeError(f"{source.at(('checkpoints', name))}: checkpoints.{name}: {why}")
        line = source.lines.get(("checkpoints", name), 0)
        made |= zip(names, members, strict=True)
        source.lines.update({("checkpoints", member): line for member in names})
    if groups:
        source.values.update(checkpoints=made, replicates=groups)
