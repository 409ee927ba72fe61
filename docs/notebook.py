"""Run the cells of docs/notebook.ipynb in the working folder and write their outputs:
`python docs/notebook.py` in the project's folder. What jupyter nbconvert does, without Jupyter."""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
from pathlib import Path

PAGE = Path(__file__).parent / "notebook.ipynb"


def run(notebook: dict) -> list[list[dict]]:
    """Return the outputs of each code cell, as notebooks store them; standard error is left out."""
    names: dict[str, object] = {"__name__": "__main__"}
    outputs = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            outputs.append(_run("".join(cell["source"]), names))
    return outputs


def _run(source: str, names: dict[str, object]) -> list[dict]:
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "<cell>", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    found = []
    if text := printed.getvalue():
        found.append({"output_type": "stream", "name": "stdout", "text": text.splitlines(True)})
    if value is not None:
        found.append({"output_type": "display_data", "metadata": {}, "data": _data(value)})
    return found


def _data(value: object) -> dict[str, object]:
    if hasattr(value, "_repr_png_"):
        return {"image/png": base64.b64encode(value._repr_png_()).decode()}
    if hasattr(value, "_repr_html_"):
        return {"text/html": value._repr_html_().splitlines(True)}
    return {"text/plain": repr(value).splitlines(True)}


if __name__ == "__main__":
    page = json.loads(PAGE.read_text())
    code = (cell for cell in page["cells"] if cell["cell_type"] == "code")
    for cell, shown in zip(code, run(page), strict=True):
        cell["outputs"] = shown
    PAGE.write_text(json.dumps(page, indent=1, ensure_ascii=False) + "\n")
