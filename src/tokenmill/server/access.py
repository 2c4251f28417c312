"""Who may use the server. Owns: keys, Host and Origin checks, and CORS headers. Must not know: endpoints.

Keys are kept as digests. Each of them is compared in constant time, even after one has matched.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from tokenmill.core.config import ListenOptions
from tokenmill.core.errors import ParameterError, shown
from tokenmill.server.errors import HttpError

OPEN_PATHS = frozenset({"/health", "/v1/health", "/ready"})
_LOCAL = ("localhost", "127.0.0.1", "::1")
CORS_METHODS = b"GET, HEAD, POST, DELETE, OPTIONS"
CORS_HEADERS = b"authorization, content-type, x-api-key, x-request-id"
_NAMES = re.compile(rb"[\w!#$%&'*+.^`|~, -]{1,2048}", re.ASCII)
CORS_EXPOSED = b"x-request-id, retry-after, x-tokenmill-ignored, x-tokenmill-did-you-mean"
MAX_KEY = 1024
_HOST = re.compile(
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]{2,45})(?:%[A-Za-z0-9._~%-]{1,32})?\]|(?P<name>[A-Za-z0-9._~-]{0,255}))(?::[0-9]{0,5})?"
)
_ORIGIN = re.compile(r"null|[A-Za-z][A-Za-z0-9+.-]{0,31}://[\x21-\x7e]{0,300}")


def digest(key: str | bytes) -> bytes:
    """The digest that is stored and compared instead of a key."""
    return hashlib.sha256(key.encode(errors="surrogatepass") if isinstance(key, str) else key).digest()


def shown_key(key_digest: bytes) -> str:
    """How a key appears in logs and rate limits."""
    return key_digest.hex()[:12]


@dataclass(frozen=True, slots=True)
class Rights:
    """A key that the file of models restricts: the entries that it may use, and whether it may also manage these."""

    models: frozenset[str]
    manage: bool = False


def allowed_headers(asked: bytes) -> bytes:
    """The headers that a page of an allowed origin may send: those that it asks for. APIs' own clients send many, and a
    header alone opens nothing."""
    return CORS_HEADERS + b", " + asked if _NAMES.fullmatch(asked) else CORS_HEADERS


def read_origins(given: Iterable[str]) -> frozenset[str]:
    """--allowed-origins as browsers send them: in small letters and without a usual port. What could never be one is
    refused, because it would allow nothing. vLLM's users write a list in JSON."""
    found: set[str] = set()
    for text in given:
        try:
            found |= set(map(_origin, msgspec.json.decode(text, type=list[str])))
        except msgspec.MsgspecError:
            found.add(_origin(text))
    return frozenset(found)


def _origin(given: str) -> str:
    text = given.strip().lower().removesuffix("/")
    scheme, _, place = text.partition("://")
    if given == "*" or text == "null":
        return text
    if not _ORIGIN.fullmatch(text) or not place or set("/*?#@,") & set(place):
        raise ParameterError(
            f"--allowed-origins {shown(given)}: an origin is a scheme, a host and perhaps a port, such as "
            "https://page.example or http://localhost:3000; * alone allows every page, and there are no patterns.",
            param="allowed_origins",
        )
    return text.removesuffix({"http": ":80", "https": ":443"}.get(scheme, ":"))


def read_host(given: str) -> str:
    """One of --allowed-hosts as it is compared: in small letters and without a port."""
    name = "*" if given == "*" else _host_name(given)
    if not name:
        raise ParameterError(
            f"--allowed-hosts {shown(given)}: a host is a name or an address, such as api.example; * alone stands for "
            "any, and there are no patterns.",
            param="allowed_hosts",
        )
    return name


class Access:
    """The rules of one server."""

    def __init__(self, options: ListenOptions) -> None:
        self.keys = [digest(key) for key in options.api_key or ()]
        self.origins = read_origins(options.allowed_origins or ())
        self.hosts = frozenset(map(read_host, options.allowed_hosts or ()))
        listens_locally = options.uds is not None or _is_local(options.host)
        self.any_host = "*" in self.hosts or not (listens_locally or self.hosts)

    def tenant(self, path: str, headers: Mapping[bytes, bytes]) -> str:
        """The name of the key's owner; raises 401 if a valid key is needed and missing."""
        if not self.keys or path in OPEN_PATHS:
            return "anonymous"
        given = digest(_given_key(headers))
        found = 0
        for number, key in enumerate(self.keys, 1):
            found |= number * hmac.compare_digest(key, given)
        if not found:
            raise HttpError(401, "A valid API key is needed: send it as 'Authorization: Bearer KEY' or 'x-api-key'.")
        return shown_key(given)

    def check_host(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise 403 for a host name that is not this server's: otherwise a foreign page could point its own name at
        this address and get in."""
        host = _host_name(headers.get(b"host", b"").decode("latin-1"))
        if host is None:
            raise HttpError(400, "The Host header is malformed.")
        if not self.any_host and b"host" not in headers:
            raise HttpError(400, "This server tells its pages from foreign ones by the Host header: send one.")
        if not self.any_host and host not in _LOCAL and host not in self.hosts:
            raise HttpError(403, "This Host is not served here (--allowed-hosts adds names).")

    def check_origin(self, headers: Mapping[bytes, bytes]) -> bytes | None:
        """The Origin to allow in CORS headers, None without one; 403 for a foreign page."""
        origin = headers.get(b"origin")
        if origin is None:
            return None
        text = origin.decode("latin-1")
        if text in self.origins or ("*" in self.origins and _ORIGIN.fullmatch(text)):
            return origin
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if _ORIGIN.fullmatch(text) and text.partition("://")[2].lower() == host:
            return None  # our own page
        raise HttpError(403, "This Origin may not call the API (--allowed-origins adds origins).")


def _given_key(headers: Mapping[bytes, bytes]) -> bytes:
    value = headers.get(b"authorization", b"")
    if value[:7].lower() == b"bearer ":
        return value[7:].strip()[:MAX_KEY]
    return headers.get(b"x-api-key", b"")[:MAX_KEY]


def _is_local(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _host_name(value: str) -> str | None:
    """The name in a Host header, without port and brackets; None if it is not a host."""
    found = _HOST.fullmatch(value.strip())
    return None if found is None else (found["v6"] or found["name"] or "").lower()
