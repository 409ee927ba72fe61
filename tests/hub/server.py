"""A server on the loopback address that speaks as much of the Hub's protocol as its clients ask.

Repositories are folders of bytes with revisions. The clients, huggingface_hub and datasets, are
unmodified: they are told its address by HF_ENDPOINT.
"""

import hashlib
import json
import re
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import parse_qs, unquote, urlsplit

LFS = (".safetensors", ".parquet", ".gz")  # kept beside git, as the hub keeps large files


@dataclass
class Repository:
    """Commits of one repository, and the names that point to them."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    def commit(self, files: dict[str, bytes], name: str = "main") -> str:
        """Add a commit that ``name`` points to from now on; its 40-digit id."""
        total = hashlib.sha1()
        for path, content in sorted(files.items()):
            total.update(path.encode() + b"\0" + content)
        self.commits[total.hexdigest()] = files
        self.names[name] = total.hexdigest()
        return total.hexdigest()

    def find(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.names.get(revision)


class Hub:
    """The server, its repositories by kind and id, and the requests it got."""

    def __init__(self) -> None:
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.requests: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def model(self, name: str) -> Repository:
        return self.repositories.setdefault(("models", name), Repository())

    def dataset(self, name: str) -> Repository:
        return self.repositories.setdefault(("datasets", name), Repository())

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer()

        def do_HEAD(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            self.posted = self.rfile.read(length).decode()
            self._answer()

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append(f"{self.command} {path}")
            if match := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)(/.*)?", path):
                return self._describe(match[1], match[2], match[3] or "")
            if match := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                kind = "datasets" if match[1] else "models"
                return self._file(kind, match[2], match[3], match[4])
            return self._send(404, b"{}")

        def _describe(self, kind: str, name: str, rest: str) -> None:
            """Information, trees and paths of a repository, as JSON."""
            repository = hub.repositories.get((kind, name))
            if repository is None:
                return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            action, _, place = rest.lstrip("/").partition("/")
            revision, _, folder = place.partition("/")
            commit = repository.find(revision or "main")
            if commit is None:
                return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            files = repository.commits[commit]
            if action in ("", "revision"):
                siblings = [{"rfilename": path} for path in files]
                about = {"id": name, "sha": commit, "siblings": siblings, "private": False,
                         "gated": False, "disabled": False,
                         "tags": [], "downloads": 0, "likes": 0,
                         "lastModified": "2025-01-01T00:00:00.000Z"}  # fmt: skip
                return self._json(about)
            if action == "tree":
                recursive = parse_qs(urlsplit(self.path).query).get("recursive") == ["True"]
                return self._tree(files, folder, recursive or "recursive=true" in self.path)
            if action == "paths-info":
                wanted = parse_qs(self.posted).get("paths") or json.loads(self.posted)["paths"]
                return self._json([_entry(path, files) for path in wanted if _there(path, files)])
            return self._send(404, b"{}")

        def _tree(self, files: dict[str, bytes], folder: str, recursive: bool) -> None:
            prefix = f"{folder}/" if folder else ""
            below = [path for path in files if path.startswith(prefix)]
            if not below:
                return self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
            parents = {path.rsplit("/", 1)[0] for path in below if "/" in path[len(prefix) :]}
            paths = [*sorted(parents), *sorted(below)]
            if not recursive:
                paths = sorted({prefix + path[len(prefix) :].split("/")[0] for path in below})
            return self._json([_entry(path, files) for path in paths])

        def _file(self, kind: str, name: str, revision: str, path: str) -> None:
            repository = hub.repositories.get((kind, name))
            if repository is None:
                return self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
            commit = repository.find(revision)
            if commit is None:
                return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            headers = {"X-Repo-Commit": commit}
            content = repository.commits[commit].get(path)
            if content is None:
                return self._send(404, b"", {**headers, "X-Error-Code": "EntryNotFound"})
            etag = f'"{_oid(path, content)}"'
            headers["ETag"] = etag
            if path.endswith(LFS):
                headers |= {"X-Linked-Etag": etag, "X-Linked-Size": str(len(content))}
            return self._send(200, content, headers)

        def _json(self, value: object) -> None:
            self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    return Handler


def _oid(path: str, content: bytes) -> str:
    """What the hub calls the content: SHA-256 for large files, git's blob id for others."""
    if path.endswith(LFS):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _there(path: str, files: dict[str, bytes]) -> bool:
    return path in files or any(name.startswith(f"{path}/") for name in files)


def _entry(path: str, files: dict[str, bytes]) -> dict[str, object]:
    if path not in files:
        return {"type": "directory", "path": path, "oid": hashlib.sha1(path.encode()).hexdigest()}
    content = files[path]
    entry: dict[str, object] = {
        "type": "file", "path": path, "size": len(content),
        "oid": hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest(),
    }  # fmt: skip
    if path.endswith(LFS):
        entry["lfs"] = {"oid": _oid(path, content), "size": len(content), "pointerSize": 130}
    return entry
