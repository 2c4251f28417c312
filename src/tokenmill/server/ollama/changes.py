"""Changes of the store that clients ask for: each in a thread of its own, few at a time, with its progress as lines.

Owns: who may change models, which paths may be named, and what a client hears on the way. Must not know: routes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.checkpoint.pull import Progress, Tell
from tokenmill.checkpoint.store import NoSuchModelError, Store
from tokenmill.checkpoint.stored import open_store
from tokenmill.core.errors import UserError
from tokenmill.server.context import Context
from tokenmill.server.errors import HttpError, describe_error
from tokenmill.server.ollama.answers import error_body

AT_ONCE = 4
"""Pulls and creations that run beside each other."""
OFF = "Stored models cannot be changed through this server: --allow-model-changes allows it."
encode = msgspec.json.Encoder().encode
Work = Callable[[Tell], None]


@dataclass(slots=True)
class Changes:
    """The store of one server. on_change: told the name of each model that came, changed or went."""

    context: Context
    running: int = 0

    @property
    def allowed(self) -> bool:
        """May clients change anything?"""
        return self.context.config.store.allow_model_changes

    @property
    def store(self) -> Store:
        """This machine's models."""
        return open_store()

    def check(self) -> Store:
        """The store, if clients may change it."""
        if not self.allowed:
            raise HttpError(501, OFF)
        return self.store

    def find(self, given: str) -> Path | None:
        """What this names in the one folder that clients may use; nothing elsewhere is told from what is not there."""
        root = self.context.config.store.model_folder
        if root is None or not given or len(given) > 1024 or "\0" in given:
            return None
        home = Path(root).resolve()
        try:
            found = (home / given).resolve()
            inside = found != home and found.is_relative_to(home) and (found.is_dir() or found.suffix == ".gguf")
            return found if inside and found.exists() else None
        except (OSError, RuntimeError, ValueError):
            return None

    async def whole(self, work: Work) -> dict[str, Any]:
        """Do it all, then answer."""
        async for line in self._steps(work):
            if isinstance(line, Exception):
                raise described(line)
        return {"status": "success"}

    async def lines(self, work: Work) -> AsyncIterator[bytes]:
        """One object per step; the last one is success, or an error."""
        async for line in self._steps(work):
            if isinstance(line, Exception):
                yield error_body(described(line)) + b"\n"
                return
            yield encode(as_object(line)) + b"\n"
        yield b'{"status":"success"}\n'

    async def _steps(self, work: Work) -> AsyncIterator[Progress | Exception]:
        """What happens in the thread, as it happens. A client that leaves does not stop it: half of a download would
        be of no use to anybody."""
        if self.running >= AT_ONCE:
            raise HttpError(503, "Other models are being pulled or created now; try again.", retry_after=10)
        loop = asyncio.get_running_loop()
        heard: asyncio.Queue[Progress | Exception | None] = asyncio.Queue()

        def put(step: Progress | Exception | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._heard, heard, step)

        def run() -> None:
            try:
                work(put)
            except Exception as error:
                put(error)
            put(None)

        self.running += 1
        threading.Thread(target=run, daemon=True, name="tokenmill-store").start()
        while (step := await heard.get()) is not None:
            yield step

    def _heard(self, heard: asyncio.Queue[Progress | Exception | None], step: Progress | Exception | None) -> None:
        if step is None:
            self.running -= 1
        heard.put_nowait(step)


def as_object(step: Progress) -> dict[str, Any]:
    """Progress as Ollama's clients read it."""
    found: dict[str, Any] = {"status": step.status}
    if step.digest:
        found["digest"] = step.digest
    if step.total:
        found |= {"total": step.total, **({"completed": step.completed} if step.completed else {})}
    return found


def described(error: Exception) -> HttpError:
    """A failure of the store; a model that is not there is 404."""
    return HttpError(404, str(error)) if isinstance(error, NoSuchModelError) else describe_error(error)


async def in_thread(work: Callable[[], Any]) -> Any:
    """Something short, off the loop."""
    try:
        return await asyncio.to_thread(work)
    except UserError as error:
        raise described(error) from None
