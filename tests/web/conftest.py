"""The page in a real browser: a server over fake engines in a thread, and Chromium driven by Playwright.

Without Chromium or Playwright these tests are skipped, with the reason. Screenshots go to out/web/. Tests that look at
the clock run only with `--timed` (make test-web): a busy machine must not fail them.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import pytest

from tokenmill.core.config import make_server_config
from tokenmill.server.app import make_app, make_context
from tokenmill.server.context import Context
from tokenmill.server.listener import HttpServer
from tokenmill.server.run import _bind
from tokenmill.testing.fake_generator import FakeFleet, FakeOptions, fake_fleet

SHOTS = Path(__file__).parents[2] / "out" / "web"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
FLAGS += ["--renderer-process-limit=1"]  # to start one takes as long as to load the page
FLAGS += ["--disable-sync", "--disable-dev-shm-usage", "--force-color-profile=srgb"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--timed", action="store_true", help="web: also check how fast the page is")


@pytest.fixture
def timed(request: pytest.FixtureRequest) -> None:
    """Skip what looks at the clock."""
    if not request.config.getoption("--timed", default=False):
        pytest.skip("looks at the clock: make test-web runs it")


@dataclass
class WebServer:
    """A server with its own event loop; `options` may be changed while it runs."""

    url: str
    options: FakeOptions
    context: Context
    fake: FakeFleet
    loop: asyncio.AbstractEventLoop
    ended: asyncio.Event
    thread: threading.Thread

    def call(self, function: Callable[[], Any]) -> None:
        """Run something in the server's thread."""
        self.loop.call_soon_threadsafe(function)

    def close(self) -> None:
        if self.thread.is_alive():
            self.call(self.ended.set)
            self.thread.join(60)


def start_server(options: FakeOptions, port: int = 0, **flags: Any) -> WebServer:
    """Serve fake engines on a free port."""
    ready: list[Any] = []
    begun = threading.Event()

    async def main() -> None:
        config = make_server_config({}, port=port, log_level="error", **flags)
        fake = await fake_fleet(options)
        context = make_context(fake.fleet, config)
        sock = _bind(config)
        http = HttpServer(make_app(context), config, sock)
        await http.start()
        ended = asyncio.Event()
        ready.extend((f"http://127.0.0.1:{sock.getsockname()[1]}/", context, fake, asyncio.get_running_loop(), ended))
        begun.set()
        await ended.wait()
        await http.stop()
        context.text.close()
        await fake.fleet.close()

    thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    thread.start()
    assert begun.wait(120)
    url, context, fake, loop, ended = ready
    return WebServer(url, options, context, fake, loop, ended, thread)


@dataclass
class Servers:
    """Makes servers and ends them."""

    open: list[WebServer] = field(default_factory=list)

    def __call__(self, options: FakeOptions | None = None, port: int = 0, **flags: Any) -> WebServer:
        self.open.append(start_server(options or FakeOptions(), port, **flags))
        return self.open[-1]


@pytest.fixture
def serve() -> Iterator[Servers]:
    """serve(FakeOptions(...), flag=value) -> WebServer."""
    servers = Servers()
    yield servers
    for server in servers.open:
        server.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's Chromium, without a window. It ends with the module, for its event loop would be in the way of
    tests that have one of their own."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no chromium here (apt-get install chromium)")
    with api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield made
        made.close()


def open_context(browser: Any, **options: Any) -> Any:
    """A browser of its own within the browser: it shares nothing with others."""
    made = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
    made.set_default_timeout(1000 * float(os.environ.get("TOKENMILL_WEB_TIMEOUT_S", "60")))
    return made


class Usual:
    """The context of pages that ask for nothing special. One empty page of it stays, and with it the process."""

    def __init__(self, browser: Any) -> None:
        self.context = open_context(browser)
        self.blank = self.context.new_page()
        self.session = self.context.new_cdp_session(self.blank)

    def clear(self) -> None:
        """Close what a test has opened, and forget what was kept for its servers."""
        opened = [page for page in self.context.pages if page != self.blank]
        origins = {urljoin(page.url, "/").rstrip("/") for page in opened if page.url.startswith("http")}
        for page in opened:
            page.close()
        for origin in origins:
            self.session.send("Storage.clearDataForOrigin", {"origin": origin, "storageTypes": "all"})


@pytest.fixture(scope="module")
def usual(browser: Any) -> Usual:
    return Usual(browser)


@dataclass
class Tabs:
    """Opens pages; remembers what went wrong in them. All but the first of a test, and those with options, have a
    context of their own."""

    browser: Any
    usual: Usual | None = None
    contexts: list[Any] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)

    def __call__(self, url: str, **options: Any) -> Any:
        if options or self.usual is None or len(self.usual.context.pages) > 1:
            self.contexts.append(open_context(self.browser, **options))
            page = self.contexts[-1].new_page()
        else:
            page = self.usual.context.new_page()
        page.on("pageerror", lambda error: self.troubles.append(f"error: {error}"))
        page.on("console", self._console)
        page.goto(url)
        return page

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            self.troubles.append(f"{message.type}: {message.text}")


@pytest.fixture
def tab(browser: Any, usual: Usual) -> Iterator[Tabs]:
    """tab(url, color_scheme="dark", ...) -> page. No script error and no policy violation may happen in it."""
    tabs = Tabs(browser, usual)
    yield tabs
    usual.clear()
    for context in tabs.contexts:
        context.close()
    assert not tabs.troubles, tabs.troubles


def shoot(page: Any, name: str) -> None:
    """A screenshot for people."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=str(SHOTS / f"{name}.png"))


# A transaction that only reads begins when all that were to write before it have ended.
WRITTEN = """() => new Promise((resolve) => {
    const opening = indexedDB.open("tokenmill", 1);
    opening.onsuccess = () => {
        const db = opening.result;
        const reading = db.transaction(["list", "whole"]);
        reading.objectStore("whole").count();
        reading.oncomplete = () => { db.close(); resolve(); };
    };
})"""


def reload(page: Any) -> None:
    """Load the page again, once what it keeps in the browser is written."""
    page.evaluate(WRITTEN)
    page.reload()


@pytest.fixture(scope="module")
def modules(browser: Any) -> Iterator[Any]:
    """A page of the server, for importing modules in it."""
    servers = Servers()
    tabs = Tabs(browser)
    yield tabs(servers().url)
    for context in tabs.contexts:
        context.close()
    for server in servers.open:
        server.close()
    assert not tabs.troubles, tabs.troubles


def using(page: Any, module: str, body: str, argument: Any = None) -> Any:
    """Run `body` with the module as `m` and the argument as `a`."""
    return page.evaluate(f"async (a) => {{ const m = await import('/static/{module}.js'); {body} }}", argument)
