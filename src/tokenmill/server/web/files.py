"""The page's files. Owns: reading them once, their types, compressed forms, tags, and the headers that fence them in.

They are the same for everybody and hold no data, so they need no key. Must not know: endpoints, engines.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.responses import Response

STATIC = Path(__file__).parent / "static"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
    ".md": "text/plain; charset=utf-8",
    ".txt": "text/plain; charset=utf-8",
}
_INLINE = re.compile(rb"<script(?![^>]*\bsrc=)[^>]*>(.*?)</script>", re.S)
_FOR_READERS = {
    ".js": re.compile(rb"(?<=[;{},)]) // .*$|^\s*//.*\n|^\s+", re.M),
    ".css": re.compile(rb" ?/\*.*?\*/\s*|^\s+|(?<=[{};:]) | (?=[{}])", re.M | re.S),
}
"""What is there for who reads the sources, comments and space: a tenth of what would go over the wire."""
FENCES = {
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
DOCUMENT = {
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}
"""What only a document heeds: the other files are spared these bytes."""


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file, ready to send."""

    body: bytes
    packed: bytes
    headers: Mapping[str, str]

    def answer(self, accept_encoding: str, known: str) -> Response:
        """The file, compressed if the browser accepts that. 304 if the browser already has this version."""
        if known and known == self.headers["etag"]:
            return Response(status_code=304, headers=dict(self.headers))
        if "gzip" in accept_encoding and len(self.packed) < len(self.body):
            return Response(self.packed, headers={**self.headers, "content-encoding": "gzip"})
        return Response(self.body, headers=dict(self.headers))


def read_files() -> dict[str, PageFile]:
    """Every file of the page, by its name below STATIC."""
    paths = sorted(p for p in STATIC.rglob("*") if p.is_file() and p.suffix in TYPES)
    return {path.relative_to(STATIC).as_posix(): read_file(path) for path in paths}


def read_file(path: Path) -> PageFile:
    """One file with its headers."""
    body = path.read_bytes()
    if path.suffix in _FOR_READERS and "vendor" not in path.parts:  # vendored files stay as they were published
        body = _FOR_READERS[path.suffix].sub(b"", body)
    headers = {
        **FENCES,
        "content-type": TYPES[path.suffix],
        "etag": f'W/"{hashlib.sha256(body).hexdigest()[:20]}"',
        "vary": "accept-encoding",
    }
    if path.suffix == ".html":
        headers["content-security-policy"] = policy(body)
        headers |= DOCUMENT
    return PageFile(body, gzip.compress(body, 9, mtime=0), headers)


def policy(page: bytes) -> str:
    """What the page may load and do: its own files, its own server, and the inline scripts in it, by hash. Markdown
    from a model becomes HTML, so trusted types let only the sanitiser make HTML from text."""
    hashes = [base64.b64encode(hashlib.sha256(text).digest()).decode() for text in _INLINE.findall(page)]
    scripts = " ".join(["'self'", *(f"'sha256-{value}'" for value in hashes)])
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {scripts}",
            "style-src 'self'",
            "img-src 'self' data:",
            "font-src 'self'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types dompurify",
        )
    )
