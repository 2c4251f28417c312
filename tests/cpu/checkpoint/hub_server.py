"""A server that stands in for the hub: repositories of files, ranges, and the ways in which it can fail."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """files[repo][path]. token: without it, 401. breaks: bytes after which a connection ends, used up one by one."""

    files: dict[str, dict[str, bytes]]
    token: str | None = None
    gated: set[str] = field(default_factory=set)
    breaks: list[int] = field(default_factory=list)
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)
    """(method, path, range) of every request."""
    url: str = ""
    lies: dict[str, str] = field(default_factory=dict)
    """Headers that it gives in place of the true ones."""
    page: bytes | None = None
    """What it answers in place of what it has, as a proxy does that wants a log-in."""

    def downloads(self) -> list[str]:
        """Files whose bytes were asked for."""
        return [path.rsplit("/", 1)[-1] for method, path, _ in self.asked if method == "GET" and "/resolve/" in path]


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Run it on a free port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(False)

        def do_GET(self) -> None:
            self._answer(True)

        def _answer(self, body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.asked.append((self.command, path, self.headers.get("Range")))
            if hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}":
                return self._say(401, b"{}", body, {"X-Error-Code": "RepoNotFound"})
            if hub.page is not None:
                return self._say(200, hub.page, body)
            if path.startswith("/api/models/"):
                return self._list(path.removeprefix("/api/models/"), body)
            repo, _, rest = path[1:].partition("/resolve/")
            revision, _, name = rest.partition("/")
            found = hub.files.get(repo, {}).get(name)
            if revision not in ("main", COMMIT, "v1"):
                return self._say(404, b"{}", body, {"X-Error-Code": "RevisionNotFound"})
            if found is None:
                code = "EntryNotFound" if repo in hub.files else "RepoNotFound"
                return self._say(404, b"{}", body, {"X-Error-Code": code})
            self._file(found, body)

        def _list(self, rest: str, body: bool) -> None:
            repo = "/".join(rest.split("/")[:2])
            if repo in hub.gated:
                return self._say(403, b"{}", body, {"X-Error-Code": "GatedRepo"})
            if repo not in hub.files:
                return self._say(404, b"{}", body, {"X-Error-Code": "RepoNotFound"})
            kind, _, revision = rest.removeprefix(repo).strip("/").partition("/")
            if revision.split("/")[0] not in ("", "main", COMMIT, "v1"):
                return self._say(404, b"{}", body, {"X-Error-Code": "RevisionNotFound"})
            names = hub.files[repo]
            if kind == "tree":
                plain = [{"type": "file", "path": n, "size": len(b), "oid": _tag(b)} for n, b in names.items()]
                return self._say(200, json.dumps(plain).encode(), body)
            about = {"_id": "1", "id": repo, "modelId": repo, "sha": COMMIT, "private": False, "tags": [],
                     "siblings": [{"rfilename": name, "size": len(data), "blobId": _tag(data)}
                                  for name, data in names.items()]}  # fmt: skip
            self._say(200, json.dumps(about).encode(), body)

        def _file(self, data: bytes, body: bool) -> None:
            start, stop = 0, len(data)
            given = self.headers.get("Range")
            if given:
                first, _, last = given.removeprefix("bytes=").partition("-")
                start, stop = int(first), int(last) + 1 if last else len(data)
            self.send_response(206 if given else 200)
            for name, value in {"ETag": f'"{_tag(data)}"', "X-Repo-Commit": COMMIT, **hub.lies}.items():
                self.send_header(name, value)
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(stop - start))
            if given:
                self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
            self.end_headers()
            if body:
                piece = data[start:stop]
                cut = hub.breaks.pop(0) if hub.breaks and len(piece) > hub.breaks[0] else None
                self.wfile.write(piece if cut is None else piece[:cut])
                self.close_connection = cut is not None

        def _say(self, status: int, data: bytes, body: bool, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def _tag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
