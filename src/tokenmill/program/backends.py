"""Where a program's generations run. Owns: the Backend protocol, an engine in this process, and a server over HTTP.

Both backends take token ids, so a program's text is tokenised once and shares its prefix. Must not know: programs.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from tokenmill.core.errors import ParameterError, UserError
from tokenmill.core.request import SamplingParams, TextDelta
from tokenmill.engine.interfaces.llm import LLM
from tokenmill.engine.interfaces.outputs import Accumulator
from tokenmill.engine.interfaces.prompts import make_request
from tokenmill.text.messages.describe import MessageFormat
from tokenmill.text.messages.detect import find_format

Message = dict[str, Any]
MAX_CALLS = 64
"""HTTP requests of one session at a time."""


@dataclass(frozen=True, slots=True)
class Generated:
    """One generation: its text, why it ended, and each token's log-probability if they were asked for."""

    text: str
    finish: str
    logprobs: tuple[float, ...] = ()


Tell = Callable[[Generated], None]


class Backend(Protocol):
    """Runs generations side by side. `tell` is called from within `drive`."""

    def render(self, messages: Sequence[Message], options: dict[str, Any]) -> list[int]: ...
    def encode(self, text: str) -> list[int]: ...
    def start(self, ids: list[int], params: SamplingParams, tell: Tell) -> None: ...
    def drive(self) -> None:
        """Get on with what was started; returns when something may have come of it."""
        ...

    def form(self) -> MessageFormat: ...

    @property
    def active(self) -> bool:
        """Is there anything to drive?"""
        ...


class EngineBackend:
    """An LLM in this process: everything that was started, here or by others, shares its steps."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.open = 0
        self.ended: deque[tuple[Accumulator, Tell]] = deque()
        self.count = 0

    def render(self, messages: Sequence[Message], options: dict[str, Any]) -> list[int]:
        return self.llm.reader.chat(list(messages), **options)[1]

    def encode(self, text: str) -> list[int]:
        tokenizer = self.llm.get_tokenizer()
        found: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return found

    def form(self) -> MessageFormat:
        return find_format(self.llm.get_tokenizer().chat_template)

    def start(self, ids: list[int], params: SamplingParams, tell: Tell) -> None:
        self.count += 1
        name = f"program-{id(self)}-{self.count}"
        request = make_request(name, None, ids, params, arrival=time.perf_counter())
        accumulator = Accumulator(request)

        def hear(delta: TextDelta) -> None:
            accumulator.add(delta)
            if accumulator.finished:
                self.open -= 1
                self.ended.append((accumulator, tell))

        self.llm.driver.add(request, hear)
        self.open += 1

    @property
    def active(self) -> bool:
        return bool(self.open or self.ended)

    def drive(self) -> None:
        if not self.ended:
            self.llm.driver.step()
        while self.ended:
            accumulator, tell = self.ended.popleft()
            out = accumulator.output().outputs[0]
            if out.finish_reason == "error":
                raise UserError(f"A generation failed: {out.stop_reason}")
            pairs = zip(out.logprobs or (), out.token_ids, strict=False)
            tell(Generated(out.text, out.finish_reason or "", tuple(row[token].logprob for row, token in pairs)))


class ServerBackend:
    """A tokenmill server: /tokenize renders, /v1/completions goes on behind token ids."""

    def __init__(self, url: str, key: str | None = None, model: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.key = key
        self.model = model
        self.pool = ThreadPoolExecutor(MAX_CALLS, "tokenmill-program")
        self.calls: dict[Future[Any], Tell] = {}

    def render(self, messages: Sequence[Message], options: dict[str, Any]) -> list[int]:
        tools = [
            t if "function" in t else {"type": "function", "function": t} for t in options.pop("tools", None) or ()
        ]
        found: list[int] = self._post("/tokenize", {"messages": list(messages), "tools": tools or None, **options})[
            "tokens"
        ]
        return found

    def encode(self, text: str) -> list[int]:
        found: list[int] = self._post("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
        return found

    def form(self) -> MessageFormat:
        raise ParameterError("A server does not say how its model writes calls: give Session(tool_call_parser=...).")

    def start(self, ids: list[int], params: SamplingParams, tell: Tell) -> None:
        fields = msgspec.to_builtins(params)
        fields.pop("reasoning", None)
        body = {"prompt": ids, "model": self.model, "max_tokens": params.max_tokens, **fields}
        self.calls[self.pool.submit(self._post, "/v1/completions", body)] = tell

    @property
    def active(self) -> bool:
        return bool(self.calls)

    def drive(self) -> None:
        done, _ = wait(self.calls, return_when=FIRST_COMPLETED)
        for call in done:
            tell = self.calls.pop(call)
            choice = call.result()["choices"][0]
            logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or ()
            tell(Generated(choice["text"], choice["finish_reason"], tuple(logprobs)))

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        data = json.dumps({k: v for k, v in body.items() if v is not None}).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise UserError(f"The server answered {error.code}: {_words(error.read())}") from None
        except OSError as error:
            inner = getattr(error, "reason", None)
            known = inner if isinstance(inner, OSError) else error
            raise UserError(f"The server at {self.url} cannot be reached: {known.strerror or known}.") from error


def _words(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:300].decode("utf-8", "replace")
