"""Rows of local data files, and what of a task's definition must be in them. No torch."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qbench.errors import DataError
from qbench.evaluation.definitions import Definition

RENDERED = ("doc_to_text", "doc_to_target", "doc_to_choice")  # templates over a row's fields
BARE = re.compile(r"\{\{\s*(\w+)\s*\}\}")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFile:
    """One split's JSON Lines file; ``digest`` is the SHA-256 of its bytes."""

    split: str
    path: Path
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line's JSON object."""

    line: int  # counted from 1
    fields: dict[str, Any]


def read_rows(path: Path) -> tuple[list[Row], str]:
    """The rows of a JSON Lines file, and the SHA-256 of the very bytes that were parsed.

    Raises DataError with file and line.
    """
    try:
        payload = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    rows = []
    # not splitlines: a string in JSON may hold U+2028, which is no end of a line
    for number, line in enumerate(payload.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{number}: not JSON ({error})") from None
        if not isinstance(fields, dict):
            raise DataError(f"{path}:{number}: a JSON object is needed, this is {fields!r:.40}")
        rows.append(Row(line=number, fields=fields))
    if not rows:
        raise DataError(f"{path}: no documents in it")
    return rows, hashlib.sha256(payload).hexdigest()


def require_fields(name: str, definition: Definition, path: Path, rows: Sequence[Row]) -> None:
    """Raises DataError where a row lacks a field that the task's templates name, or has a label
    that nobody can meet. What the task computes with functions of its own is not looked at."""
    config = definition.config
    if config.get("process_docs") or config.get("use_prompt"):
        return
    source = config.get("dataset_path")
    for key in RENDERED:
        template = config.get(key)
        if isinstance(template, str):
            _require_template(f"{key} of {name}", template, path, rows, source)
    target = config.get("doc_to_target")
    if config.get("output_type") == "multiple_choice" and isinstance(target, str):
        bare = BARE.fullmatch(target.strip())
        _require_labels(name, bare[1] if bare else target, path, rows)


def _require_template(
    what: str, template: str, path: Path, rows: Sequence[Row], source: Any
) -> None:
    needed = {template} if template in rows[0].fields else _variables(template)
    for row in rows:
        missing = sorted(needed - row.fields.keys())
        if missing and not _renders(template, row.fields):
            raise DataError(
                f"{path}:{row.line}: no field {missing[0]!r}, which {what} needs; "
                f"are the fields those of {source}? this line has {', '.join(row.fields) or 'none'}"
            )


def _variables(template: str) -> set[str]:
    from jinja2 import TemplateSyntaxError, meta

    try:
        return meta.find_undeclared_variables(_environment().parse(template))
    except TemplateSyntaxError:
        return set()  # lm-eval says so


def _renders(template: str, fields: dict[str, Any]) -> bool:
    """Whether a template can do without what it names, as behind ``is defined``."""
    from jinja2 import UndefinedError

    try:
        _environment().from_string(template).render(**fields)
    except UndefinedError:
        return False
    return True


def _environment() -> Any:
    """As lm-eval renders: what is not there is an error, not an empty text."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True)
    environment.filters["regex_replace"] = lambda text, pattern, new, count=0: re.sub(
        pattern, new, text, count=count
    )
    return environment


def _require_labels(name: str, field: str, path: Path, rows: Sequence[Row]) -> None:
    """Test sets are published with their labels hidden as −1 or null."""
    for row in rows:
        if field not in row.fields:
            return  # a template, or a fixed index among the choices
        label = row.fields[field]
        hidden = label is None or label == "-1" or isinstance(label, bool)
        number = isinstance(label, int | float) and not isinstance(label, bool)
        if hidden or (number and (label < 0 or label != int(label))):
            raise DataError(
                f"{path}:{row.line}: {name}: its label, {field}, is {json.dumps(label)}: missing "
                "or hidden; score a split whose labels are known"
            )
