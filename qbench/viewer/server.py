"""Serve the page only to this machine, and only with the token in its address; or write it as a
static site, which opens from a disk."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path

from qbench.errors import QbenchError, ResultsError
from qbench.files import write_atomically
from qbench.store import Store
from qbench.viewer.data import Json, Results, analysis, index

HOST = "127.0.0.1"
SECONDS = 10  # that a client may take for the next part of its request
PAYLOAD = re.compile(r"(\d{1,6})/([a-z]+(/\d{1,9})*)")  # folder and payload
ASSETS = {"viewer.js": "text/javascript", "viewer.css": "text/css"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; connect-src 'self'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def asset(name: str) -> str:
    """Return the text of a file of the page, such as ``index.html``."""
    return (files("qbench.viewer") / "static" / name).read_text()


def encode(payload: object) -> str:
    """Return ``payload`` as strict JSON with ``<`` escaped, so that it can be part of a page.
    Raises ValueError for NaN and infinity; ``data.plain`` replaces them."""
    return json.dumps(payload, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


class Server(ThreadingHTTPServer):
    """Serves ``results`` at ``address``; the page asks for ``state`` and loads what changed."""

    daemon_threads = True

    def __init__(self, results: Sequence[Results], *, port: int = 0) -> None:
        """Listen on ``port``, 0 for any that is free. Raises ResultsError if the port is taken."""
        self.results = results
        self.token = secrets.token_urlsafe(16)
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise ResultsError(f"--port {port}: {error.strerror}; name another port") from None
        self.encoded = lru_cache(maxsize=64)(self._encoded)

    @property
    def address(self) -> str:
        """Return the URL to open in a browser, with the access token in its path."""
        return f"http://{HOST}:{self.server_port}/{self.token}/"

    def payload(self, name: str) -> str:
        """Return the JSON text of the payload ``name``: index, state, or folder/payload such as
        0/cell/3. It is ``{"error": …}`` if records cannot be read. Raises KeyError if unknown."""
        if name == "index":
            return encode(index(self.results))
        if name == "state":
            return encode([[results.version, results.ready] for results in self.results])
        parts = PAYLOAD.fullmatch(name)
        if parts is None or int(parts[1]) >= len(self.results):
            raise KeyError(name)
        folder = int(parts[1])
        results = self.results[folder]
        return self.encoded(folder, parts[2], results.version, results.ready)

    def _encoded(self, folder: int, name: str, version: int, ready: bool) -> str:
        try:
            return encode(self.results[folder].payload(name))
        except QbenchError as error:
            return encode({"error": str(error)})


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = SECONDS

    def do_GET(self) -> None:
        """Answer a request (page, assets, data), only with our host name and the token."""
        # Another site's page may reach this port by a name of its own: the host must be ours.
        hosts = {f"{name}:{self.server.server_port}" for name in (HOST, "localhost")}
        token, _, name = self.path.removeprefix("/").partition("?")[0].partition("/")
        is_token = secrets.compare_digest(token.encode(), self.server.token.encode())
        if self.headers.get("Host") not in hosts or not is_token:
            self._send(HTTPStatus.FORBIDDEN, "text/plain", "not this address")
            return
        if name == "":
            self._send(HTTPStatus.OK, "text/html", asset("index.html"))
        elif name in ASSETS:
            self._send(HTTPStatus.OK, ASSETS[name], asset(name))
        elif name.startswith("data/"):
            try:
                payload = self.server.payload(name.removeprefix("data/").removesuffix(".json"))
            except KeyError:
                self._send(HTTPStatus.NOT_FOUND, "text/plain", "no such data")
            else:
                self._send(HTTPStatus.OK, "application/json", payload)
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", "no such page")

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        """Send an answer with qbench's security headers."""
        content = text.encode(errors="replace")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        for header, value in HEADERS.items():
            self.send_header(header, value)
        with suppress(OSError):  # the browser has gone
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        """Print nothing per request."""


# --- the same page without a server: a static site, which opens from a disk


def write_site(results: Sequence[Results], folder: Path) -> list[Path]:
    """Write ``index.html``, its assets and all data into ``folder``; return the paths, the page
    first. Data are scripts: a page from a disk may load no other files. Raises ResultsError, before
    anything is written, if results have no manifest or are damaged; OutputError if the folder
    cannot be written to."""
    for folder_results in results:
        require_intact(folder_results.store)
    page = asset("index.html").replace("<html ", '<html data-source="files" ', 1)
    paths = [folder / "index.html", *(folder / name for name in ASSETS)]
    write_atomically(paths[0], page.encode())
    for path in paths[1:]:
        write_atomically(path, asset(path.name).encode())
    for name, payload in _payloads(results):
        paths.append(folder / "data" / f"{name}.js")
        text = f"qbenchData({encode(name)},{encode(payload)});\n"
        write_atomically(paths[-1], text.encode(errors="replace"))
    return paths


def require_intact(store: Store) -> None:
    """Raise ResultsError, with a line per damaged file, unless all records, tables and analyses are
    as they were written. Missing records are no damage, nor what a ``WholeStore`` leaves out."""
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


def _payloads(results: Sequence[Results]) -> Iterator[tuple[str, Json]]:
    """Yield (name, payload) for all payloads."""
    yield "index", index(results)
    for folder, folder_results in enumerate(results):
        overview = folder_results.payload("overview", wait=True)
        yield f"{folder}/overview", overview
        tasks = range(len(overview["tasks"]))
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
