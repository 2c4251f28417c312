"""The engine view in a real browser: what it shows under load is what the server says; timelines of requests."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import httpx

from tests.web.conftest import Servers, Tabs, shoot
from tests.web.page_engine_helpers import load, wait_for_rows
from tokenmill.testing.fake_generator import FakeOptions


def ink(page: Any, title: str) -> int:
    """Pixels of a plot that are not empty."""
    figure = page.locator("figure", has=page.get_by_role("heading", name=title))
    return figure.locator("canvas").evaluate(  # of a copy: the plot's own canvas is not made for reading
        """c => {
            const copy = document.createElement('canvas');
            Object.assign(copy, {width: c.width, height: c.height});
            const pen = copy.getContext('2d', {willReadFrequently: true});
            pen.drawImage(c, 0, 0);
            return pen.getImageData(0, 0, c.width, c.height).data.filter((v, i) => i % 4 === 3 && v).length;
        }"""
    )


def test_the_engine_view_under_load(serve: Servers, tab: Tabs) -> None:
    server = serve(FakeOptions(step_s=0.01, max_rows=4))
    page = tab(f"{server.url}#engine")
    page.get_by_text("Idle").wait_for()
    page.get_by_role("button", name="1 min", exact=True).click()
    empty = ink(page, "Requests")
    with load(server):
        page.get_by_text("Working").wait_for()
        page.get_by_text("running 4").wait_for()
        page.get_by_text("queue 6").wait_for()
        page.get_by_text("in use 100 %").wait_for()
        page.wait_for_function(
            "() => [...document.querySelectorAll('.plot b')].filter(b => / ms$| s$/.test(b.innerText)).length >= 6"
        )
        wait_for_rows(page, 5)
        shoot(page, "engine")
        assert ink(page, "Requests") > empty + 100
        assert ink(page, "Tokens per second") > 100 and ink(page, "Between tokens") > 100
        spoken = page.get_by_role("img", name="Tokens per second over time").get_attribute("aria-label")
        assert spoken is not None and "written" in spoken
        server.call(lambda: server.fake.link().die())
        page.get_by_text("1 restart").wait_for()
    page.get_by_text("Idle").wait_for()
    page.get_by_text("running 0").wait_for()


def test_what_happened_before_one_looked_is_shown(serve: Servers, tab: Tabs) -> None:
    server = serve(FakeOptions(step_s=0.01, max_rows=4))
    page = tab(server.url)
    with load(server, users=3, tokens=20):
        while len(server.context.history) < 6:
            time.sleep(0.02)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    assert not [url for url in asked if "/v1/engine" in url]  # nobody looks, nothing is asked
    page.get_by_role("link", name="Engine").click()
    page.get_by_text("Idle").wait_for()
    wait_for_rows(page, 6)
    page.get_by_role("button", name="Pause").click()
    page.get_by_role("button", name="Go on").wait_for()


def test_timeline_of_a_request(serve: Servers, tab: Tabs) -> None:
    server = serve(FakeOptions(step_s=0.02, max_rows=1))
    with load(server, users=2, tokens=15):
        while len(server.context.history) < 4:
            time.sleep(0.02)
    page = tab(f"{server.url}#engine")
    page.get_by_role("button", name="Timeline of request").nth(1).click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_text("First token after").wait_for()
    bar = dialog.get_by_role("img", name="Timeline:").get_attribute("aria-label")
    assert bar is not None and "in the queue" in bar and "writing" in bar
    widths = dialog.locator(".big-bar i").evaluate_all(
        "all => all.map(i => [i.className, i.getBoundingClientRect().width])"
    )
    queued, writing = dict(widths)["queued"], dict(widths)["decode"]
    assert 0.2 < queued / writing < 5  # two users take turns: one waits while the other writes
    assert "15 tokens" in dialog.inner_text() and "the token limit" in dialog.inner_text()
    shoot(page, "timeline")
    page.keyboard.press("Escape")
    dialog.wait_for(state="detached")
    focused = "document.activeElement.getAttribute('aria-label')"  # the browser gives it back after the dialog has gone
    page.wait_for_function(f"() => ({focused} || '').startsWith('Timeline of request')")


def test_guesses_in_a_timeline(serve: Servers, tab: Tabs) -> None:
    server = serve(FakeOptions(script="There."))
    httpx.post(f"{server.url}v1/completions", json={"prompt": "Where?", "max_tokens": 20}).raise_for_status()
    page = tab(f"{server.url}#engine")

    def guessed(route: Any) -> None:
        answer = route.fetch()
        shown = answer.json()
        shown["prompts"][0]["drafts"] = {"tried": 8, "right": 3, "saved_ms": 812.0}
        route.fulfill(response=answer, json=shown)

    page.route(re.compile(r"/v1/requests/[^?]+$"), guessed)
    page.get_by_role("button", name="Timeline of request").first.click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("img", name="answer tokens were guessed ahead").wait_for()
    assert "3 of 8 right, about 812 ms saved" in dialog.inner_text()


def test_an_answer_leads_to_its_timeline(serve: Servers, tab: Tabs) -> None:
    server = serve(FakeOptions(script="There."))
    page = tab(server.url)
    page.get_by_label("Message", exact=True).fill("Where?")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Show this request's timeline").click()
    page.get_by_role("dialog").get_by_text("6 tokens").wait_for()
    assert page.url.endswith("#engine")


def test_a_running_request_is_followed_to_its_end(serve: Servers, tab: Tabs) -> None:
    server = serve(FakeOptions(step_s=0.02))
    page = tab(f"{server.url}#engine")
    asked = threading.Thread(
        target=lambda: httpx.post(f"{server.url}v1/completions", json={"prompt": "a", "max_tokens": 150}, timeout=120)
    )
    asked.start()
    page.locator("tr.open").first.click()
    page.get_by_role("dialog").get_by_text("still running").wait_for()
    page.get_by_role("dialog").get_by_text("150 tokens").wait_for()
    asked.join()
    page.get_by_role("dialog").get_by_text("the token limit").wait_for()
    assert page.get_by_role("dialog").get_by_text("still running").count() == 0


def test_figures_need_the_key(serve: Servers, tab: Tabs) -> None:
    server = serve(FakeOptions(), api_key=["engine-key-aaaaaaaaaaaa"])
    page = tab(f"{server.url}#engine")
    page.locator("#key").fill("engine-key-aaaaaaaaaaaa")
    page.keyboard.press("Enter")
    page.get_by_text("Idle").wait_for()
