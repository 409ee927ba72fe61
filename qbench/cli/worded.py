"""Help that says what an option takes in words: FOLDER, N, and nothing for a switch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

import typer
from typer.core import TyperGroup

WORDS = {int: "N", float: "NUMBER", str: "TEXT", Path: "PATH"}


class WordedGroup(TyperGroup):
    """Commands whose help names no types of Python, which newer versions of typer show."""

    def get_params(self, ctx: typer.Context) -> list[Any]:
        return _worded(super().get_params(ctx))

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            _worded(command.get_params(ctx))
        return command


def _worded(params: Iterable[Any]) -> list[Any]:
    params = list(params)
    for param in params:
        if param.param_type_name == "option":
            if param.metavar is None:
                param.metavar = "" if getattr(param, "is_flag", False) else _word(param)
        elif hasattr(param, "display_type_rich"):  # an argument's name says what it is
            param.display_type_rich = lambda ctx: None
    return params


def _word(param: Any) -> str | None:
    """None leaves it to typer: choices, and whatever versions without such types show."""
    kind = getattr(getattr(param, "type_descriptor", None), "annotation", None)
    return WORDS.get(next(iter(get_args(kind)), kind))
