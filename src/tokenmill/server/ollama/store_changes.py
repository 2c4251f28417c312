"""Changes of the store that clients ask for: each in a thread of its own, few at a time, with its progress as lines.

Owns: who may change models, which paths may be named, and what a client hears on the way. Must not know: routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
from fastapi import Request

from tokenmill.checkpoint.entry import Entry as StoredModel
from tokenmill.checkpoint.hub import Hub
from tokenmill.checkpoint.pull import Progress, Tell
from tokenmill.checkpoint.store import NoSuchModelError, Store
from tokenmill.checkpoint.stored import BASE, as_stored, open_store
from tokenmill.checkpoint.stored_names import full_name, may_be_name, short_name
from tokenmill.core.config import EngineConfig, make_config
from tokenmill.core.errors import ModelError, UserError
from tokenmill.server.context import Context, ServerContext
from tokenmill.server.errors import HttpError, describe_error
from tokenmill.server.many_models.entry import GoneError, Spec, State
from tokenmill.server.many_models.sleepers import without_folders
from tokenmill.server.many_models.spellings import with_and_without_tag
from tokenmill.server.model_lookup import find_by_name
from tokenmill.server.ollama.answers import error_body
from tokenmill.server.rights import check_may_change_all

log = logging.getLogger("tokenmill.server")
KEEP_S = 300.0
"""How long a stored model stays loaded without requests, as with Ollama's own server. `keep_alive` overrides it."""
AT_ONCE = 4
"""How many pulls and creations run at once."""
OFF = "Stored models cannot be changed through this server: --allow-model-changes allows it."
encode = msgspec.json.Encoder().encode
Work = Callable[[Tell], None]


@dataclass(slots=True)
class Changes:
    """The store of one server."""

    context: Context
    running: int = 0
    known: dict[str, tuple[StoredModel, str]] = field(default_factory=dict)
    """Stored models that requests may use, by full name: the manifest, and the name in the catalogue."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    leaving: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def allowed(self) -> bool:
        """May clients change the store?"""
        return self.context.config.store.allow_model_changes is True

    @property
    def store(self) -> Store:
        """The stored models of this machine."""
        return open_store()

    @property
    def hub(self) -> Hub:
        """How this server downloads models."""
        files = self.context.shared.models.first.spec.engine.files
        return Hub(files.download_dir, files.hf_token)

    def check(self, request: Request) -> Store:
        """The store, if this client may change it."""
        if not self.allowed:
            raise HttpError(501, OFF)
        check_may_change_all(self.context.shared, request)
        return self.store

    def check_free(self, name: str) -> None:
        """Refuse the name of a model that the server was started with."""
        short = short_name(full_name(name))
        if self._started_with(short) or short in self.context.shared.models.coming:
            raise HttpError(400, f"The server was started with a model {short!r}: choose another name.", param="model")

    def check_known(self, name: str) -> None:
        """Refuse to copy or delete a model that the server was started with: it is in the lists, but not stored."""
        short = short_name(full_name(name))
        if self._started_with(short) and self.store.find(short) is None:
            why = "is a model that the server was started with: it is not stored, and stays as it is."
            raise HttpError(400, f"{short!r} {why}", param="model")

    def _started_with(self, short: str) -> bool:
        own = [each for each in self.context.shared.models.entries.values() if not each.spec.stored]
        taken = {short_name(given).lower() for each in own for given in (*each.spec.names, *each.book.by_name)}
        return short.lower() in taken

    def stored(self, name: str) -> StoredModel | None:
        """The stored model behind a name in a request."""
        return next((found for found, own in self.known.values() if name in (short_name(found.name), own)), None)

    def unloaded(self, request: Request, name: str) -> StoredModel | None:
        """The same, but only if nothing has loaded it yet and this client may ask for it."""
        if not name or not may_be_name(name):
            return None
        try:
            entry = find_by_name(self.context.shared, request, short_name(full_name(name)))
        except HttpError:
            return None  # the handler reports it
        return self.stored(entry.name) if entry.state is not State.READY else None

    async def sync(self) -> None:
        """Bring the catalogue up to date: every stored model can be requested as its manifest has it now, and deleted
        ones no longer can."""
        if not self.allowed:
            return
        async with self.turn:
            self._drop({entry.name: entry for entry in (await asyncio.to_thread(self.store.entries))[0]})
            await asyncio.sleep(0)  # their names are free now; their open requests end by themselves
            self.add_stored()

    def add_stored(self) -> None:
        """Add the stored models that requests cannot name yet."""
        entries = self.store.entries()[0] if self.allowed else []
        for entry in entries:
            if entry.name in self.known:
                continue
            try:
                spec = spec_of(self.store, entry, self.context.shared, _spoken(each.name for each in entries))
                self.known[entry.name] = (entry, self.context.shared.models.add(spec).name)
            except UserError as error:  # its files are missing, or the server was started with a model of that name
                log.info("stored model left out", extra={"data": {"model": entry.name, "reason": str(error)}})

    def _drop(self, entries: Mapping[str, StoredModel]) -> None:
        spoken = _spoken(entries)
        for name, (found, own) in self.known.items():
            beside = own.lower() in spoken - _spoken([name])  # another model got the name of this one's base
            if name not in entries or entries[name].digest != found.digest or beside:
                task = asyncio.get_running_loop().create_task(self._removed(name, own))
                self.leaving.add(task)
                task.add_done_callback(self.leaving.discard)

    async def _removed(self, name: str, own: str) -> None:
        """Forget the model here in the same moment as in the catalogue. A model that only the catalogue knows is the
        server's own, and its name cannot be used for another."""
        self.known.pop(name, None)
        with contextlib.suppress(GoneError):
            await self.context.shared.models.remove(own)

    def find(self, given: str) -> Path | None:
        """What this path names in the one folder that clients may use. A path elsewhere is reported as missing."""
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
        """Do all the work, then answer."""
        async for line in self._steps(work):
            if isinstance(line, Exception):
                raise described(line) from line
        return {"status": "success"}

    async def lines(self, work: Work) -> AsyncIterator[bytes]:
        """One object per step; the last one is success or an error. An error before the first step is raised: nothing
        has been sent yet, so it can have a status of its own."""
        steps = self._steps(work)
        first = await anext(steps, None)
        if isinstance(first, Exception):
            raise described(first) from first
        return self._lines(first, steps)

    async def _lines(
        self, step: Progress | Exception | None, steps: AsyncIterator[Progress | Exception]
    ) -> AsyncIterator[bytes]:
        while step is not None:
            if isinstance(step, Exception):
                yield error_body(described(step)) + b"\n"
                return
            yield encode(as_object(step)) + b"\n"
            step = await anext(steps, None)
        yield b'{"status":"success"}\n'

    async def _steps(self, work: Work) -> AsyncIterator[Progress | Exception]:
        """Yield the steps of work in a thread as they happen. The work goes on if the client leaves, because half of a
        download is of no use to anybody; at its end its model can be requested."""
        if self.running >= AT_ONCE:
            raise HttpError(503, "Other models are being pulled or created now; try again.", retry_after=10)
        loop = asyncio.get_running_loop()
        heard: asyncio.Queue[Progress | Exception | None] = asyncio.Queue()

        def put(step: Progress | Exception) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(heard.put_nowait, step)

        def work_and_tell() -> None:
            try:
                work(put)
            except Exception as error:
                if not isinstance(error, UserError):
                    log.exception("a change of the store failed")
                put(error)
            if not loop.is_closed():
                asyncio.run_coroutine_threadsafe(self._done(heard), loop)

        self.running += 1
        threading.Thread(target=work_and_tell, daemon=True, name="tokenmill-store").start()
        while (step := await heard.get()) is not None:
            yield step

    async def _done(self, heard: asyncio.Queue[Progress | Exception | None]) -> None:
        """The work has ended, whether or not somebody still listens."""
        self.running -= 1
        try:
            await self.sync()
        finally:
            heard.put_nowait(None)


def _spoken(names: Iterable[str]) -> set[str]:
    """Names of stored models as people write them, without regard to capitals."""
    return {short_name(name).lower() for name in names}


def spec_of(store: Store, entry: StoredModel, shared: ServerContext, spoken: set[str]) -> Spec:
    """A stored model as an entry of the catalogue, with its own options, on the devices of the server's first model.
    spoken: the names of all stored models, which none gets for its base (the model without its adapter)."""
    found, models = as_stored(store, entry), shared.models
    options, called = found.options, str(found.options["served_model_name"])
    if entry.adapter is not None:
        while called.lower() in spoken or any(map(models.find, with_and_without_tag(called))):
            called += BASE
    engine, first = make_config(**{**options, "served_model_name": called}), models.first.spec.engine
    own = {name: options[name] for name in ("device", "threads") if name in options}
    engine = replace(engine, execute=replace(first.execute, **own), files=replace(first.files, **_generation(engine)))
    config = shared.config
    server = replace(
        config,
        serve=replace(config.serve, chat_template=found.server.get("chat_template")),
        messages=replace(config.messages, opening=found.server.get("opening")),
    )
    return Spec(engine, server, ttl=KEEP_S, stored=True)


def _generation(engine: EngineConfig) -> dict[str, Any]:
    files = engine.files
    return {
        "generation_config": files.generation_config,
        "override_generation_config": files.override_generation_config,
        "tokenizer_revision": files.tokenizer_revision,
        "stored_as": files.stored_as,
    }


def as_object(step: Progress) -> dict[str, Any]:
    """A step of progress in the form of Ollama's API."""
    found: dict[str, Any] = {"status": step.status}
    if step.digest:
        found["digest"] = step.digest
    if step.total:
        found |= {"total": step.total, **({"completed": step.completed} if step.completed else {})}
    return found


def described(error: Exception) -> HttpError:
    """A failure of the store as an error. A missing model is 404. The places of a model's files are not shown."""
    if isinstance(error, NoSuchModelError):
        return HttpError(404, str(error))
    if isinstance(error, ModelError):
        return HttpError(400, without_folders(str(error)), param=error.param)
    return describe_error(error)


async def in_thread(work: Callable[[], Any]) -> Any:
    """Run short work in a thread."""
    try:
        return await asyncio.to_thread(work)
    except UserError as error:
        raise described(error) from None
