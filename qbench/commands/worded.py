"""Help that says what an option takes in words: FOLDER, N, and nothing for a switch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import typer
from typer.core import TyperGroup

WORDS = {int: "N", float: "NUMBER", str: "TEXT", Path: "PATH"}


class WordedGroup(TyperGroup):
    """Commands whose options name no types of Python, which newer versions of typer show."""

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        for param in command.params if command is not None else ():
            if param.metavar is None and param.param_type_name == "option":
                param.metavar = "" if getattr(param, "is_flag", False) else _word(param)
        return command


def _word(param: Any) -> str | None:
    """None leaves it to typer: choices, and whatever versions without such types show."""
    kind = getattr(getattr(param, "type_descriptor", None), "annotation", None)
    return WORDS.get(next(iter(get_args(kind)), kind))
