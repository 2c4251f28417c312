"""`tokenmill ps` and `tokenmill stop`: the models of a running server. Owns: asking it, and what is printed.

Must not know: how a server loads models.
"""

from __future__ import annotations

import datetime
import http.client
import json
import urllib.error
import urllib.request
from typing import Any

import typer

from tokenmill.cli.loading import size
from tokenmill.cli.stored_models import ago, table
from tokenmill.cli.terminal import harmless
from tokenmill.core.config import make_server_config
from tokenmill.core.errors import ParameterError, UserError, why

URL = typer.Option(None, "--url", help="The server (default: the one that `serve` starts: http://127.0.0.1:8000).")
KEY = typer.Option(None, "--api-key", help="Key for the server.")
TIMEOUT_S = 30.0
MOST_BYTES = 16 << 20
NEVER_YEAR = 2900


def ps(url: str = URL, api_key: str = KEY) -> None:
    """List the models that a running server holds in memory."""
    models = ask_server(url, api_key, "/api/ps").get("models") or []
    rows = [("NAME", "ID", "SIZE", "CONTEXT", "UNTIL")]
    for each in models:
        context = f"{each.get('context_length') or 0:,}"
        rows.append((str(each.get("name")), str(each.get("digest"))[:12], size(each.get("size_vram") or 0), context,
                     until(str(each.get("expires_at") or ""))))  # fmt: skip
    typer.echo(harmless(table(rows)))


def stop(
    name: str = typer.Argument(..., metavar="NAME", help="A model that the server holds in memory."),
    url: str = URL,
    api_key: str = KEY,
) -> None:
    """Unload a model from a running server, after its open answers."""
    found = ask_server(url, api_key, "/api/generate", {"model": name, "keep_alive": 0, "stream": False})
    if found.get("done_reason") != "unload":
        raise UserError(f"{name} stays: the server was started with it.")
    typer.echo(f"{name} is unloaded when its open answers have ended")


def ask_server(url: str | None, key: str | None, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """The server's answer, or its error in one sentence."""
    listen = make_server_config().listen
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(listen.host, listen.host)
    where = (url or f"http://{f'[{host}]' if ':' in host else host}:{listen.port}").rstrip("/").removesuffix("/v1")
    if not where.startswith(("http://", "https://")):
        raise ParameterError(f"--url is an address like http://127.0.0.1:8000, not {where!r}.")
    key = key or next(iter(listen.api_key or ()), None)
    headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(where + path, data, headers)
        with _opener(direct=not url).open(request, timeout=TIMEOUT_S) as answer:
            text = answer.read(MOST_BYTES)
    except urllib.error.HTTPError as error:
        raise UserError(f"{where}: {_said(error)}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        said = why(reason) if isinstance(reason, OSError) else reason
        raise UserError(f"no server answers at {where} ({said}); `tokenmill serve MODEL` starts one.") from error
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UserError(f"{where} does not speak Ollama's API.")
    return found


class _Stays(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: the key is for this server alone."""

    def redirect_request(self, *_: object) -> None:
        return None


def _opener(*, direct: bool) -> urllib.request.OpenerDirector:
    """direct: past the proxies that the environment names. This machine's server is not reached through them."""
    return urllib.request.build_opener(_Stays, *([urllib.request.ProxyHandler({})] if direct else []))


def _said(error: urllib.error.HTTPError) -> str:
    try:
        message = json.loads(error.read(1 << 16)).get("error")
    except (OSError, ValueError, AttributeError):
        message = None
    return harmless(str(message.get("message") if isinstance(message, dict) else message or f"status {error.code}"))


def until(moment: str) -> str:
    """The time until a model is unloaded, for people."""
    try:
        found = datetime.datetime.fromisoformat(moment)
    except ValueError:
        return moment
    if found.year >= NEVER_YEAR:
        return "for ever"
    left = (found - datetime.datetime.now(datetime.UTC)).total_seconds()
    return "now" if left <= 0 else f"in {ago(left).removesuffix(' ago')}"
