"""What recipes' fields are made of, and how what is wrong with one is said. No torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from qbench.errors import shown
from qbench.recipe_source import Source
from qbench.records import DIGEST, LINE, NAME, TASK, Line

PATTERNS = {
    f"^{NAME}$": "letters, digits and . _ + - only, at most 64",
    LINE: "one line of text",
    TASK: "the name of a task, without / and line breaks",
    DIGEST: "a SHA-256, 64 hexadecimal digits",
}
MOST_TOKENS = 2**24  # of one text

Whole = Annotated[int, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Seed = Annotated[Whole, Field(ge=0, lt=2**32)]
Text = Annotated[Line, Field(min_length=1)]


def _is_text(value: object) -> object:
    if isinstance(value, str) and not all(c.isprintable() for c in value):
        raise ValueError(f"a path is printable text (it is {shown(value)})")
    return value


FilePath = Annotated[Path, BeforeValidator(_is_text)]


class Strict(BaseModel):
    """Unknown keys are refused, values are not changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def problem(location: tuple[int | str, ...], message: str) -> ValidationError:
    """A problem at ``location`` within what is validated."""
    kind = PydanticCustomError("recipe", "{message}", {"message": message})
    details = InitErrorDetails(type=kind, loc=location, input=None)
    return ValidationError.from_exception_data("Recipe", [details])


def problem_lines(
    source: Source, error: ValidationError, known: Callable[[tuple[int | str, ...]], str]
) -> list[str]:
    """One line a problem, with its place in the file; ``known`` says which keys a place has."""
    lines = []
    within = {p["loc"][:end] for p in error.errors() for end in range(len(p["loc"]))}
    for one in error.errors():
        if one["type"] == "too_short" and one["loc"] in within:
            continue  # pydantic counts only items that are well; the others are told of
        location = "".join(
            f"[{part}]" if isinstance(part, int) else f".{part}" for part in one["loc"]
        ).lstrip(".")
        message = one["msg"].removeprefix("Value error, ")
        if one["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            message = "unknown key; " + known(one["loc"])
        elif one["type"] == "dataclass_type":
            message = f"must be a mapping; {known((*one['loc'], ''))} (it is "
            message += f"{shown(one['input'])})"
        elif one["type"] == "string_pattern_mismatch":
            allowed = PATTERNS[one["ctx"]["pattern"]]
            message = f"must be {allowed} (it is {shown(one['input'])})"
        elif one["type"] not in ("value_error", "missing", "recipe"):
            message += f" (it is {shown(one['input'])})"
        lines.append(f"{source.at(one['loc'])}: {location}: {message}")
    return [" ".join(line.split("\n")) for line in lines]
