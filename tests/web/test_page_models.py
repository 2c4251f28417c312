"""The card of models in a real browser: what is loaded, what it takes, and switching it, with a mouse and with keys."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.web.conftest import Tabs, shoot
from tests.web.page_looks_helpers import AXE, check_axe
from tokenmill.core.config import make_config, make_server_config
from tokenmill.server.app import make_app, make_context, make_front, make_server_context
from tokenmill.server.context import Model
from tokenmill.server.engines.fleet import Fleet
from tokenmill.server.engines.state import FleetOptions
from tokenmill.server.listener import HttpServer
from tokenmill.server.many_models.catalogue import Bounds, Catalogue
from tokenmill.server.many_models.entry import Entry, Spec
from tokenmill.server.run import _bind
from tokenmill.server.switch.loaded_model import Loaded
from tokenmill.testing.fake_generator import FakeLink, FakeOptions

GIB = 1 << 30
NAMES = {"fast-3b": 4, "writer-8b": 9, "a-coder-with-a-rather-long-name-14b-q4_k_m": 11}
FACTS = {"num_blocks": [1000], "kv_block_bytes": GIB / 1000, "adapter_bytes": GIB // 4}


def start(control: bool, ended: list[Callable[[], None]]) -> str:
    """A server of three models, of which two fit; -> its address."""
    found: list[str] = []
    begun = threading.Event()

    async def main() -> None:
        config = make_server_config({}, port=0, log_level="error", models_control=control)

        async def make(entry: Entry[Model]) -> Model:
            facts = {**FACTS, "weight_bytes": (NAMES[entry.name] - 2) * GIB}
            options = FakeOptions(facts=facts)
            fleet = Fleet(lambda number, life: FakeLink(options), entry.spec.names, FleetOptions(watchdog_s=600))
            fleet.adapters.book = entry.book
            await fleet.start()
            return Loaded(fleet, make_context(fleet, entry.spec.server, shared))

        models: Catalogue[Model] = Catalogue(make, Bounds(14 * GIB))
        for name, size in NAMES.items():
            engine = make_config({}, model=f"/models/{name}", served_model_name=name, enable_sleep_mode=True)
            models.add(Spec(engine, config, (f"{name}-too",), memory=size * GIB))
        shared = make_server_context(config, models)
        sock = _bind(config)
        http = HttpServer(make_app(make_front(shared)), config, sock)
        await http.start()
        await models.load(models.entries["fast-3b"])
        over, loop = asyncio.Event(), asyncio.get_running_loop()
        ended.append(lambda: loop.call_soon_threadsafe(over.set))
        found.append(f"http://127.0.0.1:{sock.getsockname()[1]}/")
        begun.set()
        await over.wait()
        await http.stop()
        await models.close()

    thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    thread.start()
    assert begun.wait(60)
    ended.append(lambda: thread.join(60))
    return found[0]


@pytest.fixture
def town() -> Iterator[Callable[[bool], str]]:
    ended: list[Callable[[], None]] = []
    yield lambda control: start(control, ended)
    for end in ended:
        end()


def card(page: Any) -> Any:
    return page.locator("section.models")


def row(models: Any, name: str) -> Any:
    return models.locator("tr.model", has=models.page.get_by_role("button", name=name, exact=True))


def test_models_are_switched_by_hand(town: Callable[[bool], str], tab: Tabs) -> None:
    url = town(True)
    page = tab(f"{url}#engine")
    models = card(page)
    cells = row(models, "fast-3b").locator("td")
    cells.nth(3).get_by_text("loaded", exact=True).wait_for()
    assert cells.nth(1).inner_text() == "4,096" and cells.nth(2).inner_text().strip() == "4 GiB"
    assert models.get_by_text("not loaded").count() == 2 and models.locator("tr.model").count() == 3, "no aliases"
    picture = models.get_by_role("img", name="All models, 10 GiB free: 2 GiB weights, 1 GiB contexts")
    picture.wait_for()
    models.get_by_role("button", name="Load writer-8b").click()
    writer = row(models, "writer-8b")
    writer.get_by_text("loaded", exact=True).wait_for()
    models.get_by_role("img", name="All models, 1 GiB free").wait_for()
    shoot(page, "models")
    if AXE.is_file():
        check_axe(page, "models")
    sleep = models.get_by_role("button", name="Sleep writer-8b")
    sleep.focus()
    page.keyboard.press("Enter")
    models.get_by_text("sleeping, 7 bytes of the host").wait_for()
    models.get_by_role("button", name="Wake writer-8b").click()
    writer.get_by_text("loaded", exact=True).wait_for()
    models.get_by_role("button", name="Unload writer-8b").click()
    models.get_by_role("button", name="Load writer-8b").wait_for()
    chosen = models.get_by_role("button", name="writer-8b", exact=True)
    chosen.click()
    page.wait_for_function("() => document.querySelector('.model-name[aria-pressed=true]').innerText === 'writer-8b'")
    page.goto(f"{url}#chat")
    assert page.locator("select").first.input_value() == "writer-8b"


def test_without_leave_there_is_nothing_to_press(town: Callable[[bool], str], tab: Tabs) -> None:
    url = town(False)
    page = tab(f"{url}#engine", viewport={"width": 360, "height": 740}, color_scheme="dark")
    models = card(page)
    row(models, "fast-3b").get_by_text("loaded", exact=True).wait_for()
    assert models.locator(".model-asks button").count() == 0
    models.scroll_into_view_if_needed()
    shoot(page, "models-narrow")
    if AXE.is_file():
        check_axe(page, "models, dark")
    assert page.evaluate("document.documentElement.scrollWidth") == 360, "nothing sticks out"
    fast = row(models, "fast-3b")
    tops = {round(fast.locator(part).bounding_box()["y"]) for part in ("td:nth-of-type(2)", ".model-memory > span")}
    assert tops == {round(fast.locator(".standing").bounding_box()["y"])}, "facts are one line"
    assert fast.locator(".memory-bar").bounding_box()["width"] == fast.bounding_box()["width"]
    assert httpx.post(f"{url}sleep?model=fast-3b").status_code == 404
