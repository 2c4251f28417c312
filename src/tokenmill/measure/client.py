"""One streamed request to an OpenAI-compatible server, timed. Owns: its body, reading events, counting tokens.

Tokens of an event are counted by its `token_ids`, else by running usage, else as one; the last usage corrects the sum.
Times are taken when bytes arrive, before they are parsed. Must not know: load patterns, statistics.
"""

from __future__ import annotations

import errno
import json
import os
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from tokenmill.core.errors import UserError


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go, and in which form. `extras`: fields that only tokenmill, vLLM and the like know. `want_ids`:
    answers come with token ids, so that the next turn can repeat them."""

    base_url: str
    model: str
    key: str | None = None
    chat: bool = False
    extras: bool = True
    want_ids: bool = False
    ignore_eos: bool = True
    timeout: float = 600.0
    temperature: float = 0.0

    @property
    def url(self) -> str:
        """The endpoint."""
        return f"{self.base_url.rstrip('/')}/v1/{'chat/completions' if self.chat else 'completions'}"

    def headers(self) -> dict[str, str]:
        """The key, if there is one."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def body(self, prompt: Any, max_tokens: int) -> dict[str, Any]:
        """A streamed, greedy request."""
        usage: dict[str, Any] = {"include_usage": True}
        body: dict[str, Any] = {
            "model": self.model,
            "messages" if self.chat else "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": usage,
        }
        if self.extras:
            usage["continuous_usage_stats"] = True
            body |= {"ignore_eos": self.ignore_eos, **({"return_token_ids": True} if self.want_ids else {})}
        return body


@dataclass(slots=True)
class Answer:
    """The result of one request: seconds on one clock, and (time, tokens so far) for each event with text."""

    planned: float
    sent: float = 0.0
    end: float = 0.0
    marks: list[tuple[float, int]] = field(default_factory=list)
    prompt_tokens: int = 0
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    error: str | None = None
    counted: bool = False
    """The server has reported the number of tokens of each event."""

    @property
    def tokens(self) -> int:
        """Output tokens."""
        return self.marks[-1][1] if self.marks else 0


async def send_request(
    session: aiohttp.ClientSession, target: Target, prompt: Any, max_tokens: int, planned: float
) -> Answer:
    """Send one request now and read its whole stream. Errors are put into the answer, by kind."""
    answer = Answer(planned)
    answer.sent = time.perf_counter()
    limit = aiohttp.ClientTimeout(total=target.timeout)
    try:
        async with session.post(
            target.url, json=target.body(prompt, max_tokens), headers=target.headers(), timeout=limit
        ) as response:
            if response.status != 200:
                answer.error = f"http {response.status}"
                answer.text.append((await response.content.read(2000)).decode("utf-8", "replace"))
            else:
                await _read(response, answer)
    except TimeoutError:
        answer.error = "timeout"
    except aiohttp.ClientConnectorError:
        answer.error = "cannot connect"
    except (aiohttp.ClientError, ConnectionError, OSError):
        answer.error = "connection lost"
    answer.end = time.perf_counter()
    if answer.error is None and not answer.marks:
        answer.error = "no tokens"
    return answer


async def _read(response: aiohttp.ClientResponse, answer: Answer) -> None:
    """Read events as they come. [DONE] or a final usage must end them."""
    rest, done = b"", False
    async for data in response.content.iter_any():
        now = time.perf_counter()
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            payload = line[5:].strip()
            if payload == b"[DONE]":
                done = True
            elif payload and not _take(answer, payload, now):
                return
    if not done and answer.error is None:
        answer.error = "stream broke off"


def _take(answer: Answer, payload: bytes, now: float) -> bool:
    """Read one event. False: it was the last."""
    try:
        event = msgspec.json.decode(payload)
        choices, usage = event.get("choices") or [], event.get("usage")
    except (msgspec.DecodeError, AttributeError):
        answer.error = "malformed event"
        return False
    if event.get("error"):
        answer.error = "error event"
        answer.text.append(json.dumps(event["error"]))
        return False
    before, total = answer.tokens, answer.tokens
    for choice in choices:
        text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        thought = (choice.get("delta") or {}).get("reasoning") or (choice.get("delta") or {}).get("reasoning_content")
        ids = choice.get("token_ids")
        if text:
            answer.text.append(text)
        if isinstance(ids, list):
            answer.token_ids += ids
            answer.counted = True
            total += len(ids)
        elif text or thought:
            total += 1
    if isinstance(usage, dict):
        answer.prompt_tokens = usage.get("prompt_tokens") or answer.prompt_tokens
        running = usage.get("completion_tokens")
        if isinstance(running, int):
            if choices:
                total, answer.counted = running, True
            elif answer.marks:
                answer.marks[-1] = (answer.marks[-1][0], running)
                return True
    if total > before:
        answer.marks.append((now, total))
    return True


async def find_model(session: aiohttp.ClientSession, target: Target) -> str:
    """The name of the served model: the given one if the server has it, else the first."""
    url = f"{target.base_url.rstrip('/')}/v1/models"
    try:
        async with session.get(url, headers=target.headers(), timeout=aiohttp.ClientTimeout(total=10)) as response:
            if response.status in (401, 403):
                raise UserError(f"{url} needs a key: give it with --api-key.")
            if response.status != 200:
                raise UserError(f"{url} answers with HTTP {response.status}: is this an OpenAI-compatible server?")
            names = [entry["id"] for entry in (await response.json(content_type=None))["data"]]
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        raise UserError(f"{target.base_url} cannot be reached: {_why(error)}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{url} does not list models: is this an OpenAI-compatible server?") from error
    if not names or (target.model and target.model not in names):
        raise UserError(f"{target.base_url} has no model {target.model!r}; it has: {', '.join(names) or 'none'}.")
    return str(target.model or names[0])


def _why(error: Exception) -> str:
    """Why the server cannot be reached, without a library's internal names."""
    if isinstance(error, aiohttp.InvalidURL):
        return "this is not an address such as http://HOST:PORT"
    if isinstance(error, TimeoutError):
        return "it does not answer"
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "no host of this name is found"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return "its certificate is not trusted here"
    if isinstance(error, aiohttp.ClientSSLError):
        return "it does not speak TLS there (http:// instead of https://?)"
    code = error.errno if isinstance(error, OSError) else None
    if code == errno.ECONNREFUSED:
        return "nothing listens there (is the server running?)"
    return os.strerror(code).lower() if code else "the connection broke off before an answer"
