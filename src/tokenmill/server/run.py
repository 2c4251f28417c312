"""A server from its start to its end. Owns: sockets, loading, signals, draining, and the order of shutting down.

Must not know: endpoints.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import signal
import socket
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tokenmill.core.config import EngineConfig, ServerConfig
from tokenmill.core.errors import SHUTTING_DOWN, UserError
from tokenmill.core.garbage import no_collection
from tokenmill.server.access import Rights
from tokenmill.server.adapters import AdapterBook
from tokenmill.server.backend import ModelInfo
from tokenmill.server.engines.child import Build, build_default
from tokenmill.server.engines.fleet import Fleet
from tokenmill.server.engines.links import Link, ProcessLink, ThreadLink
from tokenmill.server.engines.state import FleetOptions
from tokenmill.server.many_models.catalogue import Bounds, Catalogue
from tokenmill.server.many_models.entry import Entry, Spec
from tokenmill.server.many_models.survey import Survey
from tokenmill.server.preflight import check_before_loading, check_effects

if TYPE_CHECKING:
    from tokenmill.server.context import Model, ServerContext
    from tokenmill.server.gate import Gate

log = logging.getLogger("tokenmill.server")
BROKEN_EXIT = 3
BACKLOG = 4096


@dataclass(frozen=True, slots=True)
class Hooks:
    """Callbacks for the command line: `loading` before and `serving` after the model is loaded; `ending` when the
    shutdown begins, with the number of open answers and the most seconds to wait for them."""

    loading: Callable[[str], None] = lambda model: None
    serving: Callable[[str, ModelInfo | None], None] = lambda url, info: None
    ending: Callable[[int, float], None] = lambda open_answers, seconds: None


def serve(engine: EngineConfig, server: ServerConfig, hooks: Hooks | None = None, build: Build = build_default) -> int:
    """Serve one model until a signal. Returns the exit status."""
    return serve_models([Spec(engine, server, pin=True)], server, hooks, build)


def serve_models(
    specs: Sequence[Spec],
    server: ServerConfig,
    hooks: Hooks | None = None,
    build: Build = build_default,
    rights: Mapping[str, Rights] | None = None,
) -> int:
    """The same with many models. Pinned models are loaded before the server answers. rights: of restricted keys."""
    import uvloop

    check_before_loading(server)
    several = len(specs) > 1 or not specs[0].pin
    check_effects(server, several=several, adapters=any(spec.engine.adapters.enable_lora for spec in specs))
    for spec in specs:
        count_engines(spec.engine, spec.server)
    with _listening(server) as sock, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(specs, server, hooks or Hooks(), (build, dict(rights or {})), sock))


def import_http() -> None:
    """Import the modules that answer requests. This takes a second."""
    with no_collection():
        import tokenmill.server.app
        import tokenmill.server.listener  # noqa: F401


def make_fleet(spec: Spec, book: AdapterBook, build: Build) -> Fleet:
    """Make engines in processes, or one in a thread."""
    engine, server = spec.engine, spec.server
    count = count_engines(engine, server)
    each = replace(engine, parallel=replace(engine.parallel, data_parallel_size=1), engines=max(1, count))

    def link(number: int, life: int) -> Link:
        mine = replace(each, number=number)
        return ThreadLink(build, mine) if count == 0 else ProcessLink(build, mine)

    options = FleetOptions(
        engines=max(1, count),
        watchdog_s=server.patience.watchdog_timeout,
        max_restarts_per_minute=server.patience.max_restarts,
        fair=len(server.listen.api_key or ()) > 1,
    )
    fleet = Fleet(link, spec.names, options)
    fleet.adapters.book = book
    return fleet


def count_engines(engine: EngineConfig, server: ServerConfig) -> int:
    """The number of engine processes; 0: one engine in the server's own process."""
    asked, size = server.serve.engines, engine.parallel.data_parallel_size
    if size > 1 and asked not in (1, size):
        raise UserError(f"--engines {asked} and --data-parallel-size {size} say different things: give one of them.")
    return asked if size == 1 else size


class ModelLoader:
    """Loads the models of one server, and holds what they share once the HTTP side is imported."""

    def __init__(self, server: ServerConfig, build: Build, rights: dict[str, Rights]) -> None:
        self.server, self.build, self.rights = server, build, rights
        self._importing: asyncio.Future[None] | None = None
        self._shared: ServerContext | None = None
        self.models: Catalogue[Model] | None = None
        self.survey = Survey(lambda: (), None)
        self.broken: Callable[[str], None] = lambda reason: None

    def catalogue(self, specs: Sequence[Spec]) -> Catalogue[Model]:
        """The catalogue of all models. None of them is loaded yet."""
        given = self.server.models
        several = len(specs) > 1 or not specs[0].pin or self.server.store.allow_model_changes
        self.survey = survey = Survey(lambda: [entry.spec for entry in made.entries.values()], given.models_memory)
        bounds = Bounds(given.models_memory, given.models_queue, given.models_patience, given.models_sleep_memory)
        made: Catalogue[Model] = Catalogue(self.load, bounds, survey.size_of if several else None)
        survey.found_memory, made.place_of = made.limit, survey.place_of
        for spec in specs:
            made.add(spec)
        self.models = made
        return made

    async def server_context(self) -> ServerContext:
        """What all models of the server share."""
        if self._shared is None:
            assert self.models is not None
            if self._importing is None:
                self._importing = asyncio.ensure_future(asyncio.to_thread(import_http))  # while an engine loads
            await asyncio.shield(self._importing)
            from tokenmill.server.app import make_server_context

            self._shared = self._shared or make_server_context(self.server, self.models)
            self._shared.rights = self.rights
        return self._shared

    async def load(self, entry: Entry[Model]) -> Model:
        """Load one model completely, so that it can answer."""
        from tokenmill.server.switch.loaded_model import Loaded

        if self._importing is None:
            self._importing = asyncio.ensure_future(asyncio.to_thread(import_http))
        fleet = make_fleet(entry.spec, entry.book, self.build)
        fleet.on_broken = lambda reason: self._broken(entry, reason)
        try:
            await fleet.start()
            shared = await self.server_context()
            from tokenmill.server.app import make_context

            return Loaded(fleet, make_context(fleet, entry.spec.server, shared))
        except BaseException:
            await fleet.close()
            raise

    def _broken(self, entry: Entry[Model], reason: str) -> None:
        """One model's engines cannot be kept alive. A server with only this model gives up."""
        assert self.models is not None
        if list(self.models.entries.values()) == [entry]:
            self.broken(reason)
        else:
            log.error("a model gives up", extra={"data": {"model": entry.name, "reason": reason}})
            self.models.broken(entry, reason)


async def _serve(
    specs: Sequence[Spec],
    server: ServerConfig,
    hooks: Hooks,
    make: tuple[Build, dict[str, Rights]],
    sock: socket.socket,
) -> int:
    shutdown = Shutdown(server.patience.shutdown_timeout)
    shutdown.listen_to_signals()
    loader = ModelLoader(server, *make)
    loader.broken = shutdown.give_up
    models = loader.catalogue(specs)
    for name in [entry.spec.engine.model.model for entry in models.entries.values() if entry.spec.pin]:
        hooks.loading(name)
    try:
        if await shutdown.unless_ended(models.start()):
            models.predict = loader.survey.size_of  # a single model is loaded without counting, but others may be added
            await _serve_loaded(await loader.server_context(), hooks, shutdown, sock)
    finally:
        await models.close()
    return shutdown.status


async def _serve_loaded(shared: ServerContext, hooks: Hooks, shutdown: Shutdown, sock: socket.socket) -> None:
    from tokenmill.server.app import make_app, make_front
    from tokenmill.server.listener import HttpServer

    server, first = shared.config, shared.models.first
    http = HttpServer(make_app(first.unit.context if first.unit is not None else make_front(shared)), server, sock)
    await http.start()
    gc.freeze()  # these objects stay, so the collector need not scan them again while the event loop waits
    url = _url(server, sock)
    hooks.serving(url, first.unit.context.backend.info if first.unit is not None else None)
    log.info("serving", extra={"data": {"model": first.name, "url": url}})
    await shutdown.wait(shared.gate, hooks.ending)
    for entry in (*shared.models.entries.values(), *shared.models.removed):
        if entry.unit is not None:
            entry.unit.end_all(SHUTTING_DOWN)
    await http.stop()


class Shutdown:
    """The end of a server after the first signal: refuse new requests, let open ones finish, then stop."""

    def __init__(self, grace: float) -> None:
        self.grace = grace
        self.ending = asyncio.Event()
        self.hurry = asyncio.Event()
        self.status = 0

    def listen_to_signals(self) -> None:
        """SIGHUP, which a terminal sends that is closed, ends the server as the others do, but not under `nohup`."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is signal.SIG_DFL:
                loop.add_signal_handler(number, self._signal)

    def _signal(self) -> None:
        if self.ending.is_set():
            self.hurry.set()
        self.ending.set()

    def give_up(self, reason: str) -> None:
        """Shut down because the engines cannot be kept alive."""
        log.error("giving up", extra={"data": {"reason": reason}})
        self.status = BROKEN_EXIT
        self.hurry.set()
        self.ending.set()

    async def unless_ended(self, work: Any) -> bool:
        """Run `work`. False: a signal came first and cancelled it."""
        task = asyncio.ensure_future(work)
        ended = asyncio.ensure_future(self.ending.wait())
        await asyncio.wait((task, ended), return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if task.done():
            task.result()
            return True
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return False

    async def wait(self, gate: Gate, ending: Callable[[int, float], None]) -> None:
        """Wait for a signal. Then wait until nothing runs, the grace period is over, or a second signal comes."""
        await self.ending.wait()
        gate.draining = True
        ending(gate.open, self.grace)
        log.info("draining", extra={"data": {"open": gate.open}})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.grace):
                while gate.open and not self.hurry.is_set():
                    await asyncio.sleep(0.02)


@contextlib.contextmanager
def _listening(server: ServerConfig) -> Iterator[socket.socket]:
    """The listening socket. A file that it has is removed at the end, if it is still this one's."""
    with contextlib.closing(_bind(server)) as sock:
        path = server.listen.uds
        made = None if path is None else os.stat(path)
        try:
            yield sock
        finally:
            if path is not None and made is not None:
                with contextlib.suppress(OSError):
                    if os.path.samestat(made, os.stat(path)):
                        os.unlink(path)


def _bind(server: ServerConfig) -> socket.socket:
    """Bind the listening socket before the model is loaded, so that a port in use is reported at once."""
    listen = server.listen
    where = listen.uds or f"{listen.host}:{listen.port}"
    try:
        if listen.uds is not None:
            sock = socket.socket(socket.AF_UNIX)
            with contextlib.suppress(FileNotFoundError):
                if _is_stale(listen.uds):
                    os.unlink(listen.uds)
            sock.bind(listen.uds)
            os.chmod(listen.uds, 0o600)
            sock.listen(BACKLOG)  # a socket without a listener looks like one that was left behind
            return sock
        family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
        # without the protocol's number asyncio sets no TCP_NODELAY, and an answer's second write waits for the client
        sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((listen.host, listen.port))
        # or another server could bind the port while this one loads
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except (OSError, OverflowError) as error:
        reason = str(getattr(error, "strerror", None) or error).rstrip(".")
        ours = getattr(error, "errno", None) != errno.EADDRNOTAVAIL and _has_address(listen.host)
        flag = "uds" if listen.uds is not None else "port" if ours else "host"
        raise UserError(f"Cannot listen on {where}: {reason}. Choose another with --{flag}.", param=flag) from error
    return sock


def _has_address(host: str) -> bool:
    """Does this host exist?"""
    with contextlib.suppress(OSError, UnicodeError):
        return bool(socket.getaddrinfo(host, None))
    return False


def _is_stale(path: str) -> bool:
    """Is this a socket file on which nobody listens any more? Any other file belongs to somebody."""
    if not stat.S_ISSOCK(os.stat(path).st_mode):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
        return False


def _url(server: ServerConfig, sock: socket.socket) -> str:
    listen = server.listen
    if listen.uds is not None:
        return f"unix:{listen.uds}"
    scheme = "https" if listen.ssl_certfile else "http"
    host = f"[{listen.host}]" if ":" in listen.host else listen.host
    return f"{scheme}://{host}:{sock.getsockname()[1]}"
