"""The same page without a server: a static site, or one file. Both open from a disk."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from qbench.errors import QbenchError
from qbench.files import write_atomically
from qbench.viewer.data import Json, Results, index
from qbench.viewer.server import ASSETS, asset, encode


def write_site(results: Sequence[Results], folder: Path) -> list[Path]:
    """Write ``index.html``, its assets and all data into ``folder``; returns the paths, the page
    first. Data are scripts: a page from a disk may load no other files.

    Raises OutputError where it cannot be written to, ResultsError for a folder without a grid.
    """
    page = asset("index.html").replace("<html ", '<html data-source="files" ', 1)
    paths = [folder / "index.html", *(folder / name for name in ASSETS)]
    write_atomically(paths[0], page.encode())
    for path in paths[1:]:
        write_atomically(path, asset(path.name).encode())
    for name, payload in _payloads(results, documents=True):
        paths.append(folder / "data" / f"{name}.js")
        text = f"qbenchData({encode(name)},{encode(payload)});\n"
        write_atomically(paths[-1], text.encode(errors="replace"))
    return paths


def _payloads(results: Sequence[Results], *, documents: bool) -> Iterator[tuple[str, Json]]:
    """All that there is, or without what is said of single ``documents``."""
    yield "index", index(results)
    for folder, one in enumerate(results):
        overview = one.payload("overview", wait=True)
        yield f"{folder}/overview", overview
        tasks = range(len(overview["tasks"])) if documents else ()
        names = ["analysis", *(f"texts/{task}" for task in tasks)]
        for cell, found in enumerate(overview["cells"]):
            if "documents" in found:
                names += [f"cell/{cell}", *(f"documents/{cell}/{task}" for task in tasks)]
        for name in names:
            payload = _payload(one, name)
            yield f"{folder}/{name}", payload
            for document in payload.get("by_token", ()):
                of = name.replace("documents", "tokens")
                yield f"{folder}/{of}/{document}", _payload(one, f"{of}/{document}")


def _payload(results: Results, name: str) -> Json:
    try:
        return results.payload(name, wait=True)
    except QbenchError as error:  # a damaged record takes nothing from the others
        return {"error": str(error)}


def write_report(results: Results, path: Path) -> Path:
    """Write the first page, with the cells behind it, as one file. Raises as ``write_site``."""
    data = dict(_payloads([results], documents=False))
    script = asset("viewer.js").replace("</script", "<\\/script")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    page = asset("index.html").replace("<html ", '<html data-source="inline" ', 1)
    page = page.replace(
        '<link rel="stylesheet" href="viewer.css">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<style>{asset('viewer.css')}</style>",
    )
    scripts = f'<script type="application/json" id="data">{encode(data)}</script>'
    scripts += f"<script>{script}</script>"
    page = page.replace('<script defer src="viewer.js"></script>', scripts)
    write_atomically(path, page.encode(errors="replace"))
    return path
