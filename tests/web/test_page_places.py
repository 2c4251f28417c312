"""What stays where it was: the place, drafts, the focus, the reader's scrolling, and conversations in several tabs."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.web.conftest import Servers, Tabs, WebServer, reload, start_server
from tests.web.page_chat_helpers import ended, say
from tokenmill.testing.fake_generator import FakeOptions

FOCUS = "() => document.activeElement.getAttribute('aria-label') || document.activeElement.className"
LEFT = """() => { const m = document.querySelector('.messages');
    return m.scrollHeight - m.scrollTop - m.clientHeight; }"""


@pytest.fixture(scope="module")
def mill() -> Iterator[WebServer]:
    """A server that nobody changes."""
    server = start_server(FakeOptions(script="Fine."))
    yield server
    server.close()


def focused(page: Any, label: str) -> None:
    page.wait_for_function(f"label => ({FOCUS})() === label", arg=label)


def test_the_place_and_the_draft_outlive_the_page(mill: WebServer, tab: Tabs) -> None:
    page = tab(mill.url)
    write = page.get_by_label("Message", exact=True)
    write.fill("a draft")
    page.get_by_role("link", name="Engine").click()
    page.get_by_role("link", name="Chat").click()
    assert write.input_value() == "a draft"
    reload(page)
    assert write.input_value() == "a draft"
    for mark in ("isComposing: true", "keyCode: 229"):  # Enter ends a composition; the second is Safari's way to say so
        page.evaluate(
            f"""() => document.getElementById('write').dispatchEvent(
            new KeyboardEvent('keydown', {{key: 'Enter', bubbles: true, cancelable: true, {mark}}}))"""
        )
    assert page.locator(".question").count() == 0
    say(page, "Hello")
    ended(page)
    reload(page)
    page.locator(".answer > .prose", has_text="Fine.").wait_for()
    assert write.input_value() == ""
    page.get_by_role("button", name="New chat").click()
    page.wait_for_function("() => location.hash === '#chat'")
    page.go_back()  # nothing of it fills the history


def test_two_tabs_keep_what_both_say(serve: Servers, tab: Tabs) -> None:
    server = serve(FakeOptions(script="Fine."))
    page = tab(server.url)
    say(page, "one")
    ended(page)
    other = page.context.new_page()
    other.goto(page.url)
    ended(other)
    say(other, "two")
    ended(other, 2)
    ended(page, 2)  # it hears of it
    server.options.step_s, server.options.script = 0.01, "slow " * 12
    say(page, "three")
    say(other, "four")
    for each in (page, other):
        ended(each, 3)
        each.locator(".send.stop").wait_for(state="detached")
    reload(page)
    page.locator(".question").first.wait_for()
    kept = page.evaluate(
        """async () => { const { chat } = await import('/static/conversation.js');
        return Object.values(chat.get().open.nodes).filter(n => n.role === 'user').map(n => n.content); }"""
    )
    assert sorted(kept) == ["four", "one", "three", "two"]


def test_versions_of_two_tabs_are_kept_as_one(mill: WebServer, tab: Tabs) -> None:
    """Neither has heard of the other's question; what was taken away does not come back."""
    page = tab(mill.url)
    page.locator(".model-card").wait_for()
    kept = page.evaluate(
        """async () => { const db = await import('/static/db.js'), tree = await import('/static/tree.js');
        const said = async (id) => Object.values((await db.load(id)).nodes).map(n => n.content).sort().join(' ');
        const here = tree.emptyConversation(), seen = [];
        const first = tree.add(here, null, { role: 'user', content: 'one' });
        await db.save(here);
        const there = structuredClone(here);
        tree.add(here, first.id, { role: 'user', content: 'two' });
        tree.add(there, first.id, { role: 'user', content: 'three' });
        await Promise.all([db.save(here), db.save(there)]);
        seen.push(await said(here.id));
        await db.save(here);
        tree.prune(here, Object.values(here.nodes).find(n => n.content === 'three'));
        await db.save(here);
        seen.push(await said(here.id));
        return seen; }"""
    )
    assert kept == ["one three two", "one two"]


def test_a_full_storage_is_said(mill: WebServer, tab: Tabs) -> None:
    page = tab(mill.url, accept_downloads=True)
    page.locator(".model-card").wait_for()
    browser = page.context.new_cdp_session(page)
    origin = mill.url.rstrip("/")
    browser.send("Storage.overrideQuotaForOrigin", {"origin": origin, "quotaSize": 1})
    say(page, "Keep this")
    alert = page.get_by_role("alert", name="").filter(has_text="This conversation is not kept")
    alert.get_by_text("storage is full").wait_for()
    ended(page)
    with page.expect_download() as download:
        alert.get_by_role("button", name="Save as a file").click()
    assert "Keep this" in download.value.path().read_text()
    browser.send("Storage.overrideQuotaForOrigin", {"origin": origin})
    alert.get_by_role("button", name="Try again").click()
    alert.wait_for(state="detached")
    reload(page)
    page.locator(".question .said", has_text="Keep this").wait_for()


def test_whoever_scrolls_up_is_left_alone(serve: Servers, tab: Tabs) -> None:
    server = serve(FakeOptions(step_s=0.002, script="one two three\n\n" * 400, max_model_len=100_000))
    page = tab(server.url)
    say(page, "go")
    page.wait_for_function("() => document.querySelector('.messages').scrollHeight > 1200")
    page.mouse.move(700, 300)
    page.mouse.wheel(0, -30)
    page.get_by_role("button", name="To the newest").wait_for()  # it grows below
    before = page.evaluate("() => document.querySelector('.messages').scrollTop")
    page.wait_for_function(f"() => ({LEFT})() > 300")
    assert page.evaluate("() => document.querySelector('.messages').scrollTop") == before
    page.get_by_role("button", name="To the newest").click()
    page.wait_for_function(f"() => ({LEFT})() < 2")
    page.mouse.wheel(0, -900)
    page.get_by_role("button", name="To the newest").wait_for()
    page.get_by_role("button", name="Stop").click()
    server.options.script = "short"
    say(page, "again")
    ended(page, 2)
    page.wait_for_function(f"() => ({LEFT})() < 2")  # whoever asks sees the answer


def test_the_focus_comes_back(mill: WebServer, tab: Tabs) -> None:
    page = tab(mill.url)
    say(page, "one")
    ended(page)
    keys = page.keyboard

    def press(name: str, key: str = "Enter") -> None:
        page.get_by_role("button", name=name).last.focus()
        keys.press(key)

    for name, where in (("Edit and ask again", "Edit the question"), ("Edit the answer", "Edit the answer")):
        press(name)
        focused(page, where)
        keys.press("Escape")
        focused(page, name)
    press("Answer again")
    page.get_by_text("2 / 2").wait_for()
    focused(page, "Messages")
    press("Earlier answer")
    page.get_by_text("1 / 2").wait_for()
    focused(page, "Later answer")
    press("Compare the answers side by side")
    page.get_by_role("dialog").wait_for()
    keys.press("Escape")
    focused(page, "Compare the answers side by side")
    press("Settings")
    press("Close the settings")
    focused(page, "Settings")
    press("Rename “one”")
    focused(page, "New name")
    keys.type("two")
    keys.press("Escape")
    focused(page, "open")
    press("Export “one”")
    page.get_by_role("dialog").wait_for()
    keys.press("Escape")
    focused(page, "Export “one”")


def test_settings_have_a_way_back_and_files_may_be_dropped_anywhere(mill: WebServer, tab: Tabs) -> None:
    page = tab(mill.url)
    page.locator(".model-card").wait_for()
    page.get_by_role("button", name="Settings").click()
    field = page.get_by_label("Temperature", exact=True)
    slider = page.get_by_label("Temperature, slider")
    assert "default" in (slider.get_attribute("aria-valuetext") or "")
    field.fill("0.4")
    page.get_by_role("button", name="Settings 1 changed").wait_for()
    page.get_by_role("button", name="Default for Temperature").click()
    page.get_by_role("button", name="Settings", exact=True).wait_for()
    assert field.input_value() == "" and page.evaluate("document.activeElement.id") == "set-temperature"
    drop = """name => { const d = new DataTransfer(); d.items.add(new File(['grain'], name, {type: 'text/plain'}));
        return document.querySelector('main').dispatchEvent(
            new DragEvent('drop', {dataTransfer: d, bubbles: true, cancelable: true})); }"""
    assert page.evaluate(drop, "mill.txt") is False  # else the browser would leave the page
    page.get_by_role("button", name="Show mill.txt").wait_for()
    page.get_by_role("link", name="Text").click()
    page.get_by_label("Text to continue").wait_for()
    assert page.evaluate(drop, "other.txt") is False
    page.get_by_text("Files are taken in the chat.").wait_for()


def test_a_long_conversation_is_drawn_from_its_end(mill: WebServer, tab: Tabs) -> None:
    page = tab(mill.url)
    turns = [{"role": r, "content": f"{r} {i}"} for i in range(150) for r in ("user", "assistant")]
    first = page.evaluate(
        """async (turns) => { const m = await import('/static/conversation.js');
        await m.imported(JSON.stringify(turns));
        await new Promise(requestAnimationFrame);
        return document.querySelectorAll('.message').length; }""",
        turns,
    )
    assert 0 < first < 150
    page.wait_for_function("() => document.querySelectorAll('.message').length === 300")
    assert page.evaluate(LEFT) < 2
    assert page.locator(".question .said").first.text_content() == "user 0"


def test_a_conversation_that_cannot_be_drawn_takes_nothing_with_it(mill: WebServer, tab: Tabs) -> None:
    page = tab(mill.url)
    page.locator(".model-card").wait_for()
    page.evaluate(
        """async () => { const tree = await import('/static/tree.js');
        const { adopt } = await import('/static/conversation.js');
        const made = tree.emptyConversation();
        made.title = 'Odd';
        tree.add(made, null, { ...tree.emptyAnswer('Hm.'), stats: { output: 1, engine: { rate: 'x' } } });
        await adopt(made); }"""
    )
    page.get_by_role("alert").get_by_text("This conversation cannot be shown").wait_for()
    page.get_by_role("button", name="New chat").click()
    page.get_by_text("What shall we talk about?").wait_for()


def test_a_wide_table_takes_the_room_beside_the_text(serve: Servers, tab: Tabs) -> None:
    row = "| " + " | ".join(f"column no. {i}" for i in range(8)) + " |\n"
    wide = {"width": 1900, "height": 800}  # room for these columns in any font of a system
    page = tab(serve(FakeOptions(script=f"Below.\n\n{row}{'|---' * 8}|\n{row}")).url, viewport=wide)
    say(page, "Which?")
    ended(page)
    text, table = (page.locator(f".answer > .prose {part}") for part in ("p", "table"))
    assert abs(text.bounding_box()["x"] - table.bounding_box()["x"]) < 1
    assert table.bounding_box()["width"] > text.bounding_box()["width"] + 40
    assert page.locator(".prose .table").evaluate("e => e.scrollWidth <= e.clientWidth")
    there = (
        "e => e === document.elementFromPoint(e.getBoundingClientRect().right - 4, e.getBoundingClientRect().top + 4)"
    )
    assert table.locator("th").last.evaluate(there)  # no box around it cuts it off


def test_paper_and_forced_colours_show_what_matters(mill: WebServer, tab: Tabs) -> None:
    page = tab(mill.url, color_scheme="dark")
    say(page, "Print this")
    ended(page)
    page.emulate_media(media="print")
    for part in (".top", ".conversations", ".composer", ".actions"):
        assert not page.locator(part).first.is_visible()
    assert page.locator(".messages").evaluate("e => getComputedStyle(e).overflowY") == "visible"
    assert page.locator(".answer").evaluate("e => getComputedStyle(e).color") == "rgb(37, 35, 31)"
    page.emulate_media(media="screen", forced_colors="active")
    ground = "e => getComputedStyle(e).backgroundColor"
    tabs = page.locator(".tabs a")
    assert tabs.nth(0).evaluate(ground) != tabs.nth(1).evaluate(ground)


ACTS = [
    "<img src=x onerror=owned=1>",
    "[a](javascript:owned=1) [b](&#106;avascript:owned=1) [c](data:text/html,x) <vbscript:owned=1>",
    "<svg><script>owned=1</script></svg><style>*{display:none}</style>",
    "```mermaid\ngraph TD\nA[<img src=x onerror=owned=1>]\nclick A javascript:owned=1\n```",
    "```<img src=x onerror=owned=1>\nx\n```",
    "\\[ \\text{<img src=x onerror=owned=1>} \\href{javascript:owned=1}{x} \\]",
]
ODD: list[Any] = [None, 0, -1, 1e300, "", [], {}, [None], True, {"toString": 1}, "__proto__"]


def hostile(draw: random.Random) -> Any:
    """A file in one of the known forms whose parts are of any kind."""

    def any_of(*good: Any) -> Any:
        return draw.choice(good) if good and draw.random() < 0.8 else draw.choice(ODD)

    def node() -> dict[str, Any]:
        figures = {
            "output": any_of(3),
            "request": any_of("r"),
            "engine": any_of({"rate": any_of(1), "first": any_of(2)}),
        }
        parts = {"parts": any_of(ACTS[:2]), "text": any_of(ACTS[0])}
        message = {
            "author": any_of({"role": any_of("user", "assistant")}),
            "content": any_of(parts),
            "create_time": any_of(1),
        }
        texts = {name: any_of(*ACTS) for name in ("content", "reasoning")}
        known: dict[str, tuple[Any, ...]] = {
            "id": ("a", "b", "c"),
            "parent": ("a", "b"),
            "parentId": ("a",),
            "role": ("user", "assistant", "tool"),
        }
        known |= {
            "finish": ("stop", "length"),
            "at": (1,),
            "timestamp": (1,),
            "message": (message,),
            "stats": (figures,),
        }
        known |= {"tools": ([{"name": any_of(*ACTS), "arguments": any_of(*ACTS)}],), "tool_calls": ()}
        known |= {"files": ([{"name": any_of(*ACTS), "text": any_of(*ACTS)}],), "answers": ([texts],)}
        return {**texts, **{name: any_of(*good) for name, good in known.items()}}

    nodes = any_of({str(i): node() for i in range(4)}, [node() for _ in range(4)])
    form = draw.choice(
        [
            {"nodes": nodes, "leaf": any_of("a")},
            {"mapping": nodes},
            {"chat": any_of({"history": any_of({"messages": nodes})})},
            {"messages": nodes},
        ]
    )
    return any_of({**form, "title": any_of(*ACTS), "created": any_of(1), "created_at": any_of(1)}, nodes)


def test_hostile_files_cannot_act_or_break_the_page(mill: WebServer, tab: Tabs) -> None:
    page = tab(mill.url)
    draw = random.Random(7)
    files = [json.dumps(hostile(draw)) for _ in range(120)]
    read, refused, bad = page.evaluate(
        """async (files) => {
            const m = await import('/static/conversation.js');
            const refused = new Set(), bad = [], elements = /^(img|script|style|iframe|object)$/i;
            let read = 0;
            for (const file of files) {
                try { await m.imported(file); } catch (error) { refused.add(error.message); continue; }
                read += 1;
                await new Promise(requestAnimationFrame);
                const all = [...document.querySelectorAll('#app *')];
                const links = all.filter(e => !/^(https?:|mailto:|#|$)/i.test(e.getAttribute('href') ?? ''));
                const acts = all.filter(e => elements.test(e.localName) && !e.closest('.top')
                    || [...e.attributes].some(a => a.name.startsWith('on')));
                if (links.length || acts.length || globalThis.owned || !document.querySelector('#write'))
                    bad.push(file);
                if (document.querySelectorAll('.conversations .open').length > 9)
                    for (const { id } of m.chat.get().list) await m.forget(id);
            }
            return [read, [...refused], bad];
        }""",
        files,
    )
    assert not bad and read > 15
    for words in refused:
        assert words.startswith(("There is no conversation in this file", "This JSON is no conversation")), words
