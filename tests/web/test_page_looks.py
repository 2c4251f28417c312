"""How the page fits: phones, dark and light, the keyboard alone, screen readers; and, timed, how quick it is."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from tests.web.conftest import SHOTS, Servers, Tabs, reload, shoot
from tests.web.page_chat_helpers import STORY, ended, say
from tests.web.page_engine_helpers import load, wait_for_rows
from tests.web.page_looks_helpers import AXE, check_axe
from tokenmill.testing.fake_generator import FakeOptions, byte_tokenizer

PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True, "device_scale_factor": 2}


def fits(page: Any) -> None:
    """Nothing is wider than the window, and nothing that one can press lies outside of it."""
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
    out = page.evaluate(
        """() => [...document.querySelectorAll('button, a, input, select, textarea')].filter(e => {
            const r = e.getBoundingClientRect();
            const hidden = !r.width || e.closest('.unseen, .skip, .table, details:not([open])') || e.type === 'range';
            return !hidden && (r.left < -1 || r.right > innerWidth + 1);
        }).map(e => e.outerHTML.slice(0, 120))"""
    )
    assert not out


def test_it_works_on_a_phone(serve: Servers, tab: Tabs) -> None:
    server = serve(FakeOptions(script=STORY))
    page = tab(server.url, **PHONE)
    page.get_by_text("What shall we talk about?").wait_for()
    fits(page)
    shoot(page, "phone-start")
    page.get_by_label("Message", exact=True).fill("How does a mill work, and who built the first one by this river?")
    page.get_by_role("button", name="Send").tap()
    ended(page)
    fits(page)
    shoot(page, "phone-chat")
    page.get_by_role("button", name="List of conversations").tap()
    page.get_by_role("button", name="New chat").wait_for()
    fits(page)
    shoot(page, "phone-list")
    page.get_by_role("button", name="Close the list").tap()
    page.get_by_role("button", name="Settings").tap()
    page.get_by_label("Temperature", exact=True).wait_for()
    fits(page)
    page.get_by_role("button", name="Close the settings").tap()
    for view in ("Compare", "Text"):
        page.get_by_role("link", name=view).tap()
        page.locator("#write").wait_for()
        fits(page)
    page.get_by_role("link", name="Engine").tap()
    wait_for_rows(page, 1)
    fits(page)
    shoot(page, "phone-engine")
    page.locator(".requests tbody tr").first.tap()
    page.get_by_role("dialog").get_by_text("First token after").wait_for()
    fits(page)
    shoot(page, "phone-timeline")


def _background(page: Any) -> int:
    """How bright the page's background is, 0 to 255."""
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(int(part) for part in colour.strip("rgb()").split(",")[:3]) // 3


def test_dark_and_light_follow_the_system_or_the_switch(serve: Servers, tab: Tabs) -> None:
    server = serve(FakeOptions(script=STORY, step_s=0.001))
    page = tab(server.url, color_scheme="dark")
    assert _background(page) < 60
    say(page, "Night?")
    ended(page)
    shoot(page, "dark-chat")
    page.emulate_media(color_scheme="light")
    assert _background(page) > 200
    page.get_by_role("button", name="Colours: as the system").click()
    page.get_by_role("button", name="Colours: light").click()
    assert _background(page) < 60
    reload(page)
    assert page.evaluate("document.documentElement.dataset.theme") == "dark" and _background(page) < 60
    with load(server, users=3, tokens=30):
        page.get_by_role("link", name="Engine").click()
        wait_for_rows(page, 3)
        shoot(page, "dark-engine")


def test_the_keyboard_is_enough(serve: Servers, tab: Tabs) -> None:
    server = serve(FakeOptions(script="By keys."))
    page = tab(server.url)
    page.get_by_text("What shall we talk about?").wait_for()
    keys = page.keyboard
    assert page.evaluate("document.activeElement.id") == "write"
    keys.type("Hello")
    keys.press("Enter")
    ended(page)
    keys.press("Shift+Tab")  # from the message to what one can do with the answer
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Show this request's timeline"
    keys.press("r")
    page.get_by_text("2 / 2").wait_for()
    keys.press("?")
    page.get_by_role("dialog", name="Keyboard").wait_for()
    shoot(page, "keyboard")
    keys.press("Escape")
    page.get_by_role("dialog").wait_for(state="detached")
    keys.press("s")
    page.get_by_label("System prompt").wait_for()
    keys.press("Escape")
    page.get_by_label("System prompt").wait_for(state="detached")
    keys.press("e")
    wait_for_rows(page, 2)
    page.get_by_role("button", name="Pause").wait_for()
    seen = []
    for _ in range(60):
        keys.press("Tab")
        seen.append(
            page.evaluate("document.activeElement.getAttribute('aria-label') || document.activeElement.innerText")
        )
        if seen[-1].startswith("Timeline of request"):
            break
    assert seen[-1].startswith("Timeline of request") and "1 min" in seen and "Pause" in seen
    keys.press("Enter")
    page.get_by_role("dialog").get_by_text("First token after").wait_for()
    keys.press("Escape")
    keys.press("n")
    page.get_by_text("What shall we talk about?").wait_for()
    page.locator(".messages").focus()
    keys.press("/")
    page.wait_for_function("() => document.activeElement.id === 'write'")
    keys.type("a?nb")  # letters, not commands, where one writes
    assert page.get_by_label("Message", exact=True).input_value() == "a?nb"


def test_whoever_wants_less_motion_gets_none(serve: Servers, tab: Tabs) -> None:
    page = tab(serve(FakeOptions(step_s=0.05)).url, reduced_motion="reduce")
    say(page, "Hi")
    page.locator(".pulse").wait_for()
    assert page.locator(".pulse").evaluate("e => getComputedStyle(e).animationName") == "none"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault(serve: Servers, tab: Tabs, scheme: str) -> None:
    if not AXE.is_file():
        pytest.skip("axe-core is not here: make test-web fetches it")
    server = serve(FakeOptions(script=f"<think>Hm.</think>{STORY}\n\n\\[ \\frac{{1}}{{2}} \\]\n"))
    page = tab(server.url, color_scheme=scheme)
    page.get_by_text("What shall we talk about?").wait_for()
    check_axe(page, "start")
    say(page, "Tell me")
    ended(page)
    page.get_by_text("Thoughts").click()
    check_axe(page, "chat")
    page.get_by_role("button", name="Settings").click()
    page.locator(".settings").get_by_text("More", exact=True).click()
    page.get_by_role("button", name="Schema").click()
    page.get_by_role("button", name="Take the example").click()
    page.get_by_text("Tools", exact=True).click()
    page.get_by_role("button", name="Add a tool").click()
    check_axe(page, "settings")
    page.get_by_role("button", name="Import and export").click()
    check_axe(page, "files")
    page.keyboard.press("Escape")
    page.locator(".messages").focus()
    page.keyboard.press("?")
    check_axe(page, "keys")
    page.keyboard.press("Escape")
    page.keyboard.press("k")
    page.get_by_role("dialog", name="API key").wait_for()
    check_axe(page, "key")
    page.keyboard.press("Escape")
    page.keyboard.press("m")
    page.get_by_label("Question to both").fill("Which?")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelectorAll('.turn .figures').length === 2")
    check_axe(page, "compare")
    page.goto(f"{server.url}#text")
    page.get_by_label("Text to continue").wait_for()
    check_axe(page, "text")
    page.goto(f"{server.url}#engine")
    wait_for_rows(page, 1)
    page.locator(".plot canvas").first.wait_for()
    check_axe(page, "engine")
    page.locator(".requests tbody tr").first.click()
    page.get_by_role("dialog").get_by_text("First token after").wait_for()
    check_axe(page, "timeline")


def box(page: Any, selector: str) -> dict[str, float]:
    """Where the only element that fits lies."""
    found: dict[str, float] = page.locator(selector).bounding_box()
    return found


def test_nothing_lies_askew_or_in_the_way(serve: Servers, tab: Tabs) -> None:
    """Rows have one middle, columns one line between them, notes cover nothing that is being used."""
    server = serve(FakeOptions(script=STORY))
    page = tab(server.url)
    row = [box(page, f".composer-row {part}") for part in ("select", ".chip", "[aria-label='Add text or PDF files']")]
    middles = [place["y"] + place["height"] / 2 for place in row]
    assert max(middles) - min(middles) < 1.5
    assert page.locator(".model-choice").evaluate("e => getComputedStyle(e).borderTopWidth") == "0px"
    page.locator(".composer textarea").evaluate(
        """e => { const d = new DataTransfer(); d.setData('text/plain', 'grain by the river\\n'.repeat(400));
        e.dispatchEvent(new ClipboardEvent('paste', {clipboardData: d, bubbles: true, cancelable: true})); }"""
    )
    page.locator(".toast").wait_for()
    toast, composer = box(page, ".toast"), box(page, ".composer")
    assert toast["y"] + toast["height"] < composer["y"]
    page.goto(f"{server.url}#compare")
    page.get_by_label("Question to both").fill("Twice?")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelectorAll('.turn .figures').length === 2")
    heads = page.locator(".side-head").nth(1).bounding_box()
    assert abs(page.locator(".beside > *").nth(1).bounding_box()["x"] - heads["x"]) < 2


def test_brackets_grow_with_what_they_hold(serve: Servers, tab: Tabs) -> None:
    r"""The font of formulas comes from here, whatever the machine has: with it \left( is as high as its fraction."""
    server = serve(FakeOptions(script=r"\[ \left(\frac{\frac{a}{b}}{\frac{c}{d}}\right) \] and \( \int_0^1 x \)"))
    page = tab(server.url)
    fetched = []
    page.on("response", lambda answer: fetched.append(answer) if "math.woff2" in answer.url else None)
    say(page, "Show me.")
    ended(page)
    page.wait_for_function("() => document.fonts.check('16px \"Mill Math\"', 'x')")
    page.wait_for_function(
        """() => { const high = n => document.querySelector(`.formula ${n}`).getBoundingClientRect().height;
        return high('mo') > 0.8 * high('mfrac'); }"""
    )
    assert [answer.status for answer in fetched] == [200] and fetched[0].headers["content-type"] == "font/woff2"


def test_values_out_of_range_are_marked(serve: Servers, tab: Tabs) -> None:
    page = tab(serve().url)
    page.get_by_role("button", name="Settings").click()
    field = page.get_by_label("Top p", exact=True)
    for text, marked in (("5", "true"), ("0.5", None), ("-1", "true"), ("", None)):
        field.fill(text)
        page.wait_for_function(
            "m => document.getElementById('set-top_p').getAttribute('aria-invalid') === m", arg=marked
        )
        assert page.get_by_text("From 0.05 to 1.").count() == (marked is not None)
    page.get_by_label("Longest answer", exact=True).fill("0")
    page.get_by_text("At least 1.").wait_for()


# ---------------------------------------------------------------- timed


def test_everything_comes_in_one_small_load(serve: Servers, tab: Tabs) -> None:
    server = serve(FakeOptions(script="$x^2$"))
    page = tab("about:blank", accept_downloads=False)  # nothing of it is known
    session = page.context.new_cdp_session(page)
    session.send("Network.enable")
    sizes: list[int] = []
    session.on("Network.loadingFinished", lambda event: sizes.append(event["encodedDataLength"]))
    page.goto(server.url, wait_until="networkidle")
    page.get_by_role("link", name="Engine").click()
    page.get_by_text("Idle").wait_for()
    page.get_by_role("link", name="Chat").click()
    say(page, "Show me a formula.")
    ended(page)
    page.wait_for_function("() => document.fonts.check('16px \"Mill Math\"', 'x')")
    page.evaluate(
        """async () => { const { imported } = await import('/static/conversation.js');
        await imported(JSON.stringify([{ role: 'assistant', content: '```mermaid\\ngraph TD\\nA --> B\\n```' }])); }"""
    )
    page.locator(".drawing svg").wait_for()
    page.wait_for_load_state("networkidle")
    fetched = "() => performance.getEntriesByType('resource').map(e => e.name.split('/').at(-1))"
    assert {"math.woff2", "diagram.js"} <= set(page.evaluate(fetched))
    assert "letters.woff2" not in page.evaluate(fetched)  # 19 kB, where a formula has bold letters or rare signs
    assert len(sizes) > 15 and sum(sizes) <= 250_000
    (SHOTS / "size.txt").write_text(f"{sum(sizes)} bytes on the wire in {len(sizes)} answers\n")


def test_first_paint_within_a_second(serve: Servers, tab: Tabs, timed: None) -> None:
    server = serve()
    times = []
    for _ in range(3):
        page = tab("about:blank", accept_downloads=False)
        page.goto(server.url)
        page.get_by_text("What shall we talk about?").wait_for()
        paint = "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
        page.wait_for_function(paint)
        ready = page.evaluate("() => performance.getEntriesByType('resource').at(-1).responseEnd")
        times.append((page.evaluate(paint), ready))
    (SHOTS / "first-paint.txt").write_text(f"first contentful paint and last answer, ms: {times}\n")
    assert max(paint for paint, _ in times) <= 1000


WORDS = [
    "the",
    "mill",
    "by",
    "river",
    "turns",
    "slowly",
    "while",
    "grain",
    "becomes",
    "flour",
    "and",
    "water",
    "runs",
    "old",
    "stones",
    "again",
]


def long_text(tokens: int) -> str:
    """Markdown of about so many word tokens: headings, paragraphs, lists, code, tables."""
    parts: list[str] = []
    count = 0
    while count < tokens:
        n = len(parts)
        if n % 7 == 0:
            part = f"## Part {n}"
        elif n % 7 == 2:
            part = "\n".join(f"- the **mill** and {' '.join(WORDS[(i * 3) % 9 :][:7])}" for i in range(12))
        elif n % 7 == 4:
            part = "```python\n" + "\n".join(f"mill = grain(water, {i})  # the old stones" for i in range(15)) + "\n```"
        elif n % 7 == 6:
            rows = "\n".join(f"| {WORDS[i % 16]} | *{WORDS[(i + 5) % 16]}* | {i} |" for i in range(12))
            part = f"| grain | water | n |\n|---|---|--:|\n{rows}"
        else:
            part = " ".join(WORDS[(n + i * i) % 16] for i in range(90)) + "."
        parts.append(part)
        count += len(part.split()) + 20
    return "\n\n".join(parts)


@pytest.mark.parametrize("shape", ["mixed", "one paragraph", "one list", "one code block", "one table"])
def test_10_000_tokens_stay_smooth(serve: Servers, tab: Tabs, timed: None, shape: str) -> None:
    words = [w for word in WORDS for w in (word, f" {word}")]
    text = {
        "mixed": long_text(12_000),
        "one paragraph": " ".join(WORDS[(i * i) % 16] for i in range(11_000)),
        "one list": "\n".join(f"- {' '.join(WORDS[(i + j * j) % 16] for j in range(9))}" for i in range(1_100)),
        "one code block": "```python\n" + "\n".join(" ".join(WORDS[:10]) for _ in range(1_200)) + "\n```",
        "one table": "| grain | water |\n|---|---|\n"
        + "\n".join(f"| {' '.join(WORDS[:6])} | flour |" for _ in range(900)),
    }[shape]
    server = serve(FakeOptions(script=text, max_model_len=100_000, step_s=0.001, tokenizer=byte_tokenizer(words)))
    page = tab(server.url)
    page.get_by_role("button", name="Settings").wait_for()
    page.evaluate(
        """() => {
            window.frames = []; let last = performance.now();
            const frame = (now) => { window.frames.push(now - last); last = now; requestAnimationFrame(frame); };
            requestAnimationFrame(frame);
        }"""
    )
    trace = SHOTS / f"trace-{shape.replace(' ', '-')}.json"
    page.context.browser.start_tracing(page=page, path=str(trace), categories=["devtools.timeline", "toplevel"])
    say(page, "Go")
    page.wait_for_function("() => document.querySelector('.figures')", timeout=120_000)
    page.context.browser.stop_tracing()
    frames = page.evaluate("() => window.frames")
    wall, own = _main_tasks(json.loads(trace.read_text()))
    trace.unlink()
    figures = page.locator(".figures").inner_text()
    report = f"{shape}: {figures}; {len(frames)} frames, longest {max(frames):.0f} ms; longest task of the main thread "
    report += f"{max(wall):.0f} ms, of which its own {max(own):.0f} ms; load {os.getloadavg()[0]:.1f}\n"
    with (SHOTS / "smooth.txt").open("a") as out:
        out.write(report)
    assert int(figures.split(" ")[0].replace(",", "")) >= 10_000
    shown = page.locator(".answer .prose").last.inner_text()
    assert shown.count("mill") == text.count("mill")
    assert max(own) <= 50, report
    if os.getloadavg()[0] < (os.cpu_count() or 1):  # else the page waits for others, whatever it does
        assert max(wall) <= 100 and round(max(frames)) <= 100, report


def _main_tasks(trace: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Milliseconds of each task on the page's main thread: as they passed, and of the processor."""
    events = trace["traceEvents"]
    mains = {
        (e["pid"], e["tid"]) for e in events if e["name"] == "thread_name" and e["args"]["name"] == "CrRendererMain"
    }
    names = ("RunTask", "ThreadControllerImpl::RunTask")
    tasks = [e for e in events if e["name"] in names and (e["pid"], e["tid"]) in mains]
    return [e.get("dur", 0) / 1000 for e in tasks], [e.get("tdur", 0) / 1000 for e in tasks]
