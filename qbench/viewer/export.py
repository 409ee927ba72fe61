"""The same page without a server: a static site, or one file. Both open from a disk."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from qbench.errors import ResultsError
from qbench.files import write_atomically
from qbench.store import Store
from qbench.viewer.data import Json, Results, analysis, index
from qbench.viewer.server import ASSETS, asset, encode


def write_site(results: Sequence[Results], folder: Path) -> list[Path]:
    """Write ``index.html``, its assets and all data into ``folder``; return the paths, the page
    first. Data are scripts: a page from a disk may load no other files.

    Raises OutputError if the folder cannot be written to, ResultsError if results have no manifest
    or are damaged; nothing is written then.
    """
    for folder_results in results:
        require_intact(folder_results.store)
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


def require_intact(store: Store) -> None:
    """Raise ResultsError, with a line for each damaged file, unless all records, their tables and
    the analyses are what was written."""
    damaged = list(analysis(store)["problems"])
    for cell in store.manifest().cells:
        try:
            record = store.get(cell)
            for name in record.files if record else ():
                store.payload(record, name)
        except ResultsError as error:
            damaged.append(str(error))
    if damaged:
        raise ResultsError(*damaged)


def _payloads(results: Sequence[Results], *, documents: bool) -> Iterator[tuple[str, Json]]:
    """Yield (name, payload) for all payloads, or without those of single ``documents``."""
    yield "index", index(results)
    for folder, folder_results in enumerate(results):
        overview = folder_results.payload("overview", wait=True)
        yield f"{folder}/overview", overview
        tasks = range(len(overview["tasks"])) if documents else ()
        names = ["analysis", *(f"texts/{task}" for task in tasks)]
        for cell, shown in enumerate(overview["cells"]):
            if "documents" in shown:
                names.append(f"cell/{cell}")
                names += [f"documents/{cell}/{task}" for task in tasks if shown["documents"]]
        for name in names:
            payload = folder_results.payload(name, wait=True)
            yield f"{folder}/{name}", payload
            for document in payload.get("by_token", ()):
                tokens = f"{name.replace('documents', 'tokens')}/{document}"
                yield f"{folder}/{tokens}", folder_results.payload(tokens, wait=True)


def write_report(results: Results, path: Path) -> Path:
    """Write the first page, with the cells behind it, as one file. Raises as ``write_site``."""
    require_intact(results.store)
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
