"""Forty pictures of the page for people to judge: `python -m tools.pictures [URL of a server with the demo]`.

Not a test. With a URL, chat and engine are shown with a real model; the rest is shown with fake engines. -> out/web/,
and README's docs/images/page.png.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import sync_playwright
from tests.web.conftest import FLAGS, SHOTS, WebServer, start_server
from tests.web.page_engine_helpers import load

from tokenmill.testing.fake_generator import FakeOptions

README = ("02-chat-light", "26-engine-busy")
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True, "device_scale_factor": 2}
FORMULAS = r"""The roots of $ax^2+bx+c=0$ are

\[ x_{1,2} = \frac{-b \pm \sqrt{b^2 - 4ac}}{2a} \]

Attention is \(\operatorname{softmax}\left(\frac{QK^\top}{\sqrt{d_k}}\right)V\), and a Gaussian integrates to

$$\int_{-\infty}^{\infty} e^{-x^2}\,dx = \sqrt{\pi}, \qquad \sum_{n=1}^{\infty} \frac{1}{n^2} = \frac{\pi^2}{6}$$

A rotation, and a function in cases:

\[ R = \begin{pmatrix} \cos\theta & -\sin\theta \\ \sin\theta & \cos\theta \end{pmatrix}, \quad
f(x) = \begin{cases} x^2 & \text{if } x \ge 0 \\ -x & \text{otherwise} \end{cases} \]

\begin{align} \nabla \cdot \mathbf{E} &= \frac{\rho}{\varepsilon_0} \\
\nabla \times \mathbf{B} &= \mu_0 \mathbf{J} + \mu_0\varepsilon_0 \frac{\partial \mathbf{E}}{\partial t} \end{align}

It costs $5 or $6; that is no formula. $\hat{y} = \underbrace{w^T x}_{\text{score}} + b$ is one, in $\mathbb{R}^n$.
"""
MERMAID = """Here is the flow:

```mermaid
flowchart LR
  title Way of a request
  A[Request] --> B{Cached?}
  B -- yes --> C[Reuse blocks]
  B -- no --> D[Prefill]
```

Each box is a stage.
"""
CHINESE = """# 水磨的故事

从前，在一条**缓慢的河**边，有一座老水磨。磨坊主人每天清晨都会打开水闸，让水轮转动起来。

1. 先把谷物倒进石磨；
2. 再慢慢调节水流；
   - 水太急，面粉会发热；
   - 水太缓，石磨会停下。

| 月份 | 谷物（公斤） | 备注 |
|---|--:|---|
| 三月 | 1,200 | 河水上涨，水轮转得很快 |
| 七月 | 860 | 天旱，水位下降 |

公式也可以写在中文里：当 \\(v = \\sqrt{2gh}\\) 时，水流最快。`print("你好，世界")`
"""
ARABIC = """# قصة الطاحونة

كانت هناك **طاحونة قديمة** بجانب نهر بطيء. كل صباح يفتح الطحان البوابة فيدور الدولاب:

1. يصب الحبوب في الحجر،
2. ثم يضبط الماء:
   - إذا كان سريعًا سخن الدقيق،
   - وإذا كان بطيئًا توقف الحجر.

> الماء لا ينتظر أحدًا.

| الشهر | الحبوب |
|---|--:|
| مارس | 1200 |

الصيغة \\(E = mc^2\\) تبقى من اليسار إلى اليمين، وكذلك `print("hi")`.

```python
print("left to right")
```
"""
HEADS = ["Name", "Weights", "Context", "Licence", "Prompt tok/s", "Output tok/s", "Memory in GiB", "What it is good at"]
ROWS = [
    (f"Model-{i}-Instruct", f"{i * 3}.{i} B", 8192 * i, "Apache-2.0", 12000 // i, 900 // i, i * 2, "talk and some code")
    for i in range(1, 9)
]
WIDE = "\n".join(f"| {' | '.join(map(str, row))} |" for row in (HEADS, ("---",) * 8, *ROWS))


def say(page: Any, text: str, number: int = 1) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    page.wait_for_function("n => document.querySelectorAll('.answer .figures').length >= n", arg=number)


@contextmanager
def opened(browser: Any, url: str, **context: Any) -> Iterator[Any]:
    made = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **context})
    page = made.new_page()
    page.goto(url)
    page.locator(".composer, .engine, .complete").first.wait_for()
    page.wait_for_function(
        "() => !document.querySelector('.welcome') || document.querySelector('.model-card, .compare')"
    )
    yield page
    made.close()


def shoot(page: Any, name: str) -> None:
    page.mouse.move(640, 1)
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    page.screenshot(path=str(SHOTS / f"{name}.png"))
    print(name)


def texts(browser: Any) -> None:
    """Formulas, languages, tables, code."""
    server = start_server(FakeOptions(step_s=0.0005))
    for name, asked, script in (
        ("05-formulas", "Show me some formulas.", FORMULAS),
        ("06-mermaid", "Draw the flow.", MERMAID),
        ("07-chinese", "讲一个水磨的故事。", CHINESE),
        ("08-right-to-left", "احكِ لي قصة عن طاحونة.", ARABIC),
        ("09-long-table", "Compare the models.", WIDE),
    ):
        server.options.script = script
        with opened(browser, server.url, viewport={"width": 1280, "height": 1000}) as page:
            say(page, asked)
            page.locator(".messages").evaluate("e => { e.scrollTop = 0; }")
            shoot(page, name)
        if name in ("05-formulas", "09-long-table", "08-right-to-left"):
            with opened(browser, server.url, **PHONE) as page:
                say(page, asked)
                page.locator(".messages").evaluate("e => { e.scrollTop = 0; }")
                shoot(page, f"{name}-phone")
    server.options.script = FORMULAS
    with opened(browser, server.url, color_scheme="dark", viewport={"width": 1280, "height": 1000}) as page:
        say(page, "Show me some formulas.")
        shoot(page, "10-formulas-dark")
    server.close()


def errors(browser: Any) -> None:
    """What goes wrong, and what is asked for."""
    locked = start_server(FakeOptions(), api_key=["picture-key-aaaaaaaaaaaa"])
    with opened_plain(browser, locked.url) as page:
        page.get_by_role("dialog").wait_for()
        shoot(page, "11-api-key")
    locked.close()
    server = start_server(FakeOptions(script="Here."))
    with opened(browser, server.url) as page:
        say(page, "Hi")
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Top p", exact=True).fill("5")
        page.get_by_label("Message", exact=True).fill("And now?")
        page.keyboard.press("Enter")
        page.get_by_role("alert").wait_for()
        shoot(page, "12-refused")
        server.close()
        page.get_by_role("button", name="Close the settings").click()
        page.get_by_label("Message", exact=True).fill("Still there?")
        page.keyboard.press("Enter")
        page.get_by_role("alert").get_by_text("The server does not answer").wait_for()
        shoot(page, "13-gone")
        page.get_by_role("link", name="Engine").click()
        page.get_by_role("alert").wait_for()
        shoot(page, "14-engine-gone")


@contextmanager
def opened_plain(browser: Any, url: str) -> Iterator[Any]:
    made = browser.new_context(viewport={"width": 1280, "height": 800})
    page = made.new_page()
    page.goto(url)
    yield page
    made.close()


def forms(browser: Any) -> None:
    """Settings, tools, schema, branches, files, search."""
    server = start_server(FakeOptions(script='{"name": "Ada", "mood": "glad", "age": 36}'))
    with opened(browser, server.url, viewport={"width": 1400, "height": 1000}) as page:
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Temperature", exact=True).hover()
        page.wait_for_timeout(500)
        page.screenshot(path=str(SHOTS / "15-settings.png"))
        page.get_by_role("button", name="Schema").click()
        page.get_by_role("button", name="Take the example").click()
        page.evaluate("() => document.querySelector('.settings-body').scrollTo(0, 420)")
        shoot(page, "16-schema")
        page.get_by_role("button", name="Text", exact=True).click()
        page.get_by_text("Tools", exact=True).click()
        page.get_by_role("button", name="Add a tool").click()
        page.get_by_label("Tool's name").fill("weather")
        page.get_by_label("What the tool does").fill("The weather of a city")
        page.get_by_role("button", name="Parameter").click()
        page.get_by_label("Name", exact=True).fill("city")
        page.evaluate("() => document.querySelector('.settings-body').scrollTo(0, 560)")
        shoot(page, "17-tools")
    server.options.script = "A mill is a machine that grinds grain between two stones."
    with opened(browser, server.url) as page:
        for n, text in enumerate(("What is a mill?", "And who built it?"), 1):
            say(page, text, n)
        page.get_by_role("button", name="Answer again").last.click()
        page.get_by_text("2 / 2").wait_for()
        page.locator(".composer textarea").evaluate(
            """e => { const d = new DataTransfer(); d.setData('text/plain', 'grain by the river\\n'.repeat(400));
            e.dispatchEvent(new ClipboardEvent('paste', {clipboardData: d, bubbles: true, cancelable: true})); }"""
        )
        page.get_by_label("Search the conversations").fill("stones")
        page.wait_for_timeout(400)
        shoot(page, "18-branches-files-search")
        page.get_by_role("button", name="Compare the answers side by side").click()
        shoot(page, "19-side-by-side")
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Edit the answer").last.click()
        shoot(page, "36-edit-answer")
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Import and export").click()
        shoot(page, "20-import-export")
    server.close()


def real(browser: Any, url: str, server: WebServer | None) -> None:
    """Chat, comparing, continuing and the engine, with the demo if there is one."""
    for scheme, first in (("light", 1), ("dark", 21)):
        with opened(browser, url, color_scheme=scheme) as page:
            shoot(page, f"{first:02}-start-{scheme}")
            say(page, "Tell me a short story about a mill by a river.")
            shoot(page, f"{first + 1:02}-chat-{scheme}")
            page.goto(f"{url}#compare")
            page.get_by_label("Question to both").fill("Tell me a short story about a fox.")
            page.keyboard.press("Enter")
            page.wait_for_function("() => document.querySelectorAll('.turn .figures').length === 2")
            shoot(page, f"{first + 2:02}-compare-{scheme}")
            page.goto(f"{url}#text")
            page.get_by_label("Text to continue").fill("Once upon a time, by a slow river,")
            page.keyboard.press("Control+Enter")
            page.get_by_role("button", name="Go on", exact=True).wait_for()
            shoot(page, f"{first + 3:02}-text-{scheme}")
    fake = server or WebServer(url, None, None, None, None, None, None)  # type: ignore[arg-type]
    with opened(browser, f"{url}#engine", viewport={"width": 1280, "height": 1500}) as page:
        page.get_by_text("Idle").wait_for()
        shoot(page, "25-engine-idle")
        with load(fake, users=8, tokens=160):
            page.wait_for_timeout(9000)
            shoot(page, "26-engine-busy")
            with opened(
                browser, f"{url}#engine", viewport={"width": 1280, "height": 1500}, color_scheme="dark"
            ) as dark:
                dark.wait_for_timeout(4000)
                shoot(dark, "27-engine-dark")
            with opened(browser, f"{url}#engine", viewport={"width": 3840, "height": 2160}) as large:
                large.wait_for_timeout(3000)
                shoot(large, "28-engine-4k")
        page.locator(".requests tbody tr").first.click()
        page.get_by_role("dialog").get_by_text("First token after").wait_for()
        shoot(page, "29-timeline")
    for name, where in (
        ("30-phone-start", ""),
        ("31-phone-engine", "#engine"),
        ("32-phone-compare", "#compare"),
        ("33-phone-text", "#text"),
    ):
        with opened(browser, f"{url}{where}", **PHONE) as page:
            page.wait_for_timeout(1500)
            shoot(page, name)
    with opened(browser, url, **PHONE) as page:
        say(page, "Tell me a short story about a mill by a river.")
        shoot(page, "34-phone-chat")
        page.get_by_role("button", name="Settings").tap()
        shoot(page, "35-phone-settings")


def readme(browser: Any) -> None:
    """README's picture: the chat and the busy engine beside each other."""
    images = (base64.b64encode((SHOTS / f"{name}.png").read_bytes()).decode() for name in README)
    parts = "".join(f"<div style='background-image:url(data:image/png;base64,{image})'></div>" for image in images)
    style = "body{margin:0;display:flex;gap:12px}div{width:800px;height:500px;background-size:100% auto}"
    page = browser.new_page(viewport={"width": 1612, "height": 500})
    page.set_content(f"<style>{style}</style>{parts}")
    page.screenshot(path="docs/images/page.png")
    page.close()


def main() -> None:
    SHOTS.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=FLAGS)
        server = (
            None
            if len(sys.argv) > 1
            else start_server(FakeOptions(script="Once there was a mill by a river. " * 12, step_s=0.004))
        )
        real(browser, sys.argv[1] if len(sys.argv) > 1 else server.url, server)  # type: ignore[union-attr]
        if server is None:
            readme(browser)
        texts(browser)
        forms(browser)
        errors(browser)
        browser.close()
        if server is not None:
            server.close()


if __name__ == "__main__":
    main()
