"""A digest of those of our own modules that can change a number. Imports no torch.

Of their syntax trees: comments, docstrings and layout change no number, and no key.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parent
# What these decide stands in keys; the rest of qbench says what is asked, or reads what came out.
QUANTIZING = ("attention", "checkpoints", "quantizers", "streaming.py")  # makes a quantized model
SCORING = (
    *QUANTIZING,
    "cell.py",
    "cell_result.py",
    "evaluation",
    "metrics.py",
)  # and scores it
# Of a syntax tree: places in the file, and what only some versions of Python say.
SILENT = {"ctx", "kind", "type_comment", "type_ignores", "type_params"}


@functools.cache
def code_digest(modules: tuple[str, ...] = SCORING) -> str:
    """SHA-256 over names and code of ``modules``, files and folders of this qbench."""
    return digest_of([PACKAGE / name for name in modules])


def digest_of(paths: Sequence[Path]) -> str:
    """SHA-256 over names and code of files and of the modules in folders: 64 hexadecimal digits."""
    total = hashlib.sha256()
    for path in paths:
        for module in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            words: list[str] = []
            _add_words(ast.parse(module.read_bytes()), words)
            code = hashlib.sha256("\n".join(words).encode())
            total.update(
                f"{module.relative_to(path.parent).as_posix()} {code.hexdigest()}\n".encode()
            )
    return total.hexdigest()


def _add_words(node: Any, words: list[str]) -> None:
    """A syntax tree in words, docstrings left out; the same under every version of Python."""
    if isinstance(node, list):
        words.append("[")
        for one in node:
            _add_words(one, words)
        words.append("]")
    elif isinstance(node, ast.AST):
        words.append(type(node).__name__)
        for name in node._fields:
            value = getattr(node, name, None)
            if name == "body" and isinstance(value, list) and _is_docstring(node, value):
                value = value[1:]
            if isinstance(node, ast.JoinedStr):  # Python 3.12 ends f"{x:{width}}" with an empty one
                value = [one for one in value if getattr(one, "value", None) != ""]
            if name not in SILENT:
                _add_words(value, words)
    else:
        words.append(repr(node))


def _is_docstring(node: ast.AST, body: list[Any]) -> bool:
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return isinstance(node, holders) and ast.get_docstring(node, clean=False) is not None
