"""Chatting in a real browser: to the end, stopped, again, edited, with settings, keys and errors that teach."""

from __future__ import annotations

import json
import random
import socket
from typing import Any

import pytest

from tests.thinned import WHOLE
from tests.web.conftest import Servers, Tabs, WebServer, reload, shoot
from tests.web.page_chat_helpers import STORY, _events, bodies, ended, say
from tokenmill.testing.fake_generator import FakeOptions

KEY = "web-key-aaaaaaaaaaaaaaaa"


def until(page: Any, function: str) -> None:
    """Wait until an asynchronous function of the page says true."""
    for _ in range(4000):
        if page.evaluate(function):
            return
        page.wait_for_timeout(30)
    raise AssertionError(function)


def no_work(server: WebServer) -> None:
    """Wait until the server has no open request."""
    import time

    for _ in range(3000):
        if server.context.gate.open == 0:
            return
        time.sleep(0.02)
    raise AssertionError("the request goes on")


def test_a_chat_to_its_end(serve: Servers, tab: Tabs) -> None:
    server = serve(FakeOptions(script=STORY, step_s=0.002))
    page = tab(server.url)
    say(page, "Tell me of the mill.\nSlowly.")
    ended(page)
    prose = page.locator(".answer .prose").last
    assert prose.locator("strong").inner_text() == "mill"
    assert prose.locator("ol > li").count() == 2 and prose.locator("ol ul li").inner_text() == "of oak"
    assert "def grind(grain: str) -> str:  # slowly" in prose.locator("pre code").inner_text()
    assert prose.locator("pre .k").first.inner_text() == "def"
    assert prose.locator("td").all_inner_texts() == ["left", "12"]
    assert page.locator(".question .said").inner_text() == "Tell me of the mill.\nSlowly."
    tokens = len(STORY.encode())
    assert f"{tokens} tokens" in page.locator(".figures").inner_text()
    page.locator(".figures").get_by_text("tok/s").wait_for()  # the engine is asked for it behind the answer
    shoot(page, "chat")
    reload(page)
    page.get_by_role("button", name="Tell me of the mill.", exact=True).click()
    ended(page)
    assert page.locator(".answer .prose").last.locator("td").count() == 2
    assert page.locator(".conversations li").count() == 1


def test_what_a_model_writes_cannot_act(serve: Servers, tab: Tabs) -> None:
    page = tab(serve(FakeOptions(script=STORY)).url)
    calls: list[str] = []
    page.on("request", lambda request: calls.append(request.url))
    say(page, "Hi")
    ended(page)
    assert page.locator(".prose img").count() == 0 and not [u for u in calls if "far.example" in u]
    assert page.locator(".prose").last.get_by_text("<img src=x").count() == 1
    hrefs = page.eval_on_selector_all(".prose a", "links => links.map(a => [a.getAttribute('href'), a.rel])")
    assert {href for href, _ in hrefs} <= {"https://example.org/wheels", "https://far.example/x.png", None}
    assert all("noopener" in rel for href, rel in hrefs if href)
    assert page.title() == "Hi · tokenmill"


def test_stop_ends_the_request_and_go_on_continues(serve: Servers, tab: Tabs) -> None:
    server = serve(FakeOptions(step_s=0.01, max_model_len=100_000))
    page = tab(server.url)
    sent = bodies(page)
    say(page, "Say much")
    page.get_by_text("tok/s").wait_for()
    shoot(page, "streaming")
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("stopped").wait_for()
    no_work(server)
    text = page.locator(".answer .prose").last.inner_text()
    assert len(text) > 1
    server.options.script = "and so it went on."
    page.get_by_role("button", name="Go on").click()
    page.get_by_text("and so it went on.").wait_for()
    assert sent[1]["continue_final_message"] is True and sent[1]["messages"][-1]["role"] == "assistant"
    assert sent[1]["messages"][-1]["content"].split() == text.split()
    server.options.script = ""
    say(page, "More")
    page.get_by_role("button", name="Stop").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Send").wait_for()
    no_work(server)


def test_regenerate_keeps_both_answers(serve: Servers, tab: Tabs) -> None:
    server = serve(FakeOptions(script="First."))
    page = tab(server.url)
    say(page, "Hi")
    ended(page)
    server.options.script = "Second."
    page.get_by_role("button", name="Answer again").click()
    page.get_by_text("Second.").wait_for()
    page.get_by_text("2 / 2").wait_for()
    page.get_by_role("button", name="Earlier answer").click()
    page.get_by_text("First.").wait_for()
    assert page.get_by_text("Second.").count() == 0
    sent = bodies(page)
    say(page, "And then?")
    ended(page, 2)
    assert [m["content"] for m in sent[0]["messages"]] == ["Hi", "First.", "And then?"]


def test_edit_asks_again_from_there(serve: Servers, tab: Tabs) -> None:
    page = tab(serve(FakeOptions(script="Yes.")).url)
    for number, text in enumerate(("One", "Two"), 1):
        say(page, text)
        ended(page, number)
    sent = bodies(page)
    page.locator(".question").first.hover()
    page.get_by_role("button", name="Edit and ask again").first.click()
    page.get_by_label("Edit the question").fill("Uno")
    page.get_by_role("button", name="Ask again", exact=True).click()
    ended(page)
    assert page.locator(".question .said").all_inner_texts() == ["Uno"]
    assert [m["content"] for m in sent[0]["messages"]] == ["Uno"]
    page.get_by_label("Message", exact=True).press("ArrowUp")
    page.get_by_label("Edit the question").press("Escape")
    assert page.locator(".question .said").inner_text() == "Uno"


def test_settings_reach_the_request_and_stay(serve: Servers, tab: Tabs) -> None:
    page = tab(serve(FakeOptions(max_model_len=200)).url)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("You are a miller.")
    for name, value in {"Temperature": "0.3", "Top p": "0.9", "Longest answer": "7", "Seed": "42"}.items():
        page.get_by_label(name, exact=True).fill(value)
    page.get_by_text("More", exact=True).click()
    page.get_by_label("Stop strings").fill("END\nstop")
    shoot(page, "settings")
    sent = bodies(page)
    page.get_by_label("Model").select_option("other")
    say(page, "Hi")
    ended(page)
    first = page.locator(".answer .prose").last.inner_text()
    body = sent[0]
    assert body["messages"][0] == {"role": "system", "content": "You are a miller."}
    expected = {"temperature": 0.3, "top_p": 0.9, "max_tokens": 7, "seed": 42, "stop": ["END", "stop"]}
    assert expected.items() <= body.items() and body["model"] == "other" and "top_k" not in body
    assert (
        "7 tokens" in page.locator(".figures").inner_text() and "token limit" in page.locator(".figures").inner_text()
    )
    reload(page)
    page.get_by_role("button", name="Settings 6 changed").click()
    assert page.get_by_label("Seed", exact=True).input_value() == "42"
    page.get_by_role("button", name="New chat").click()
    page.get_by_text("What shall we talk about?").wait_for()
    say(page, "Hi")
    ended(page)
    assert page.locator(".answer .prose").last.inner_text() == first  # the same seed, the same text
    page.get_by_label("Top p", exact=True).fill("5")
    say(page, "Hi")
    page.get_by_role("alert").get_by_text("The server refuses “top_p”").wait_for()
    page.get_by_role("button", name="Back to the defaults").click()
    page.get_by_role("button", name="Settings", exact=True).wait_for()
    page.get_by_text("More", exact=True).click()
    page.get_by_text("Tools", exact=True).click()
    page.get_by_role("group", name="Tools as").get_by_role("button", name="JSON").click()
    page.get_by_label("Tools as JSON").fill("[{]")
    page.get_by_text("Not valid JSON").wait_for()


def test_code_and_answers_are_copied(serve: Servers, tab: Tabs) -> None:
    server = serve(FakeOptions(script=STORY))
    page = tab(server.url, permissions=["clipboard-read", "clipboard-write"])
    say(page, "Hi")
    ended(page)
    page.get_by_role("button", name="Copy", exact=True).click()
    page.get_by_role("button", name="Copied").wait_for()
    read = "navigator.clipboard.readText()"
    assert page.evaluate(read).startswith("def grind(grain: str)")
    page.get_by_role("button", name="Copy the answer").click()
    until(page, f"async () => (await {read}).startsWith('The **mill**')")


def test_conversations_are_renamed_exported_deleted_and_brought_back(serve: Servers, tab: Tabs) -> None:
    page = tab(serve(FakeOptions(script="Fine.")).url, accept_downloads=True)
    for text in ("Wheels", "Stones"):
        say(page, text)
        ended(page)
        page.get_by_role("button", name="New chat").click()
        page.get_by_text("What shall we talk about?").wait_for()
    titles = page.locator(".conversations .open")
    assert titles.all_inner_texts() == ["Stones", "Wheels"]
    page.get_by_role("button", name="Wheels", exact=True).hover()
    page.get_by_role("button", name="Rename “Wheels”").click()
    page.get_by_label("New name").fill("Water wheels")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Water wheels", exact=True).wait_for()
    page.get_by_role("button", name="Water wheels", exact=True).hover()
    page.get_by_role("button", name="Export “Water wheels”").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="tokenmill everything").click()
    (saved,) = json.loads(download.value.path().read_text())["conversations"]
    assert [node["content"] for node in saved["nodes"].values()] == ["Wheels", "Fine."]
    page.get_by_role("button", name="Water wheels", exact=True).hover()
    page.get_by_role("button", name="Delete “Water wheels”").click()
    page.wait_for_function("() => document.querySelectorAll('.conversations .open').length === 1")
    page.get_by_role("button", name="Undo").click()
    page.wait_for_function("() => document.querySelectorAll('.conversations .open').length === 2")
    reload(page)
    page.wait_for_function("() => document.querySelectorAll('.conversations .open').length === 2")


def test_a_growing_answer_outlives_its_page(serve: Servers, tab: Tabs) -> None:
    server = serve(FakeOptions(step_s=0.02, max_model_len=100_000))
    page = tab(server.url)
    say(page, "Long")
    page.get_by_text("tok/s").wait_for()
    until(
        page,
        """async () => {
            const opened = indexedDB.open('tokenmill');
            const db = await new Promise(done => { opened.onsuccess = e => done(e.target.result); });
            const all = await new Promise(done => {
                db.transaction('whole').objectStore('whole').getAll().onsuccess = e => done(e.target.result);
            });
            db.close();
            return all.some(c => Object.values(c.nodes).some(n => n.role === 'assistant' && n.content.length > 20));
        }""",
    )
    reload(page)
    no_work(server)  # nobody reads any more
    page.get_by_role("button", name="Long", exact=True).click()
    page.get_by_role("button", name="Go on").wait_for()
    assert len(page.locator(".answer .prose").last.inner_text()) > 5
    server.options.script = "More of it."
    page.get_by_role("button", name="Go on").click()
    page.get_by_text("More of it.").wait_for()


def test_a_deleted_conversation_ends_its_answer_and_stays_deleted(serve: Servers, tab: Tabs) -> None:
    server = serve(FakeOptions(step_s=0.02, max_model_len=100_000))
    page = tab(server.url)
    say(page, "Endless")
    page.get_by_text("tok/s").wait_for()
    page.get_by_role("button", name="Endless", exact=True).hover()
    page.get_by_role("button", name="Delete “Endless”").click()
    page.get_by_text("What shall we talk about?").wait_for()
    no_work(server)
    reload(page)
    page.get_by_text("They appear here.").wait_for()


def test_the_key_is_asked_for_and_kept_for_the_tab(serve: Servers, tab: Tabs) -> None:
    server = serve(FakeOptions(script="Open."), api_key=[KEY])
    page = tab(server.url)
    page.get_by_role("dialog").wait_for()
    shoot(page, "key")
    page.locator("#key").fill("wrong")
    page.keyboard.press("Enter")
    page.get_by_text("The server does not know that API key.").wait_for()
    page.locator("#key").fill(KEY)
    page.keyboard.press("Enter")
    page.locator(".model-choice option", has_text="fake").wait_for(state="attached")
    say(page, "Sesame")
    ended(page)
    reload(page)
    say(page, "Again")
    ended(page)
    assert page.evaluate("JSON.stringify({...localStorage})").find(KEY) < 0 and KEY not in page.url
    second = page.context.new_page()
    second.goto(server.url)
    second.get_by_role("dialog").wait_for()


def test_a_full_server_says_when_to_try_again(serve: Servers, tab: Tabs) -> None:
    server = serve(FakeOptions(step_s=0.01, max_model_len=100_000), max_num_queued_reqs=1)
    first, second = tab(server.url), tab(server.url)
    say(first, "Long")
    first.get_by_text("tok/s").wait_for()
    say(second, "Me too")
    second.get_by_role("alert").get_by_text("The server has no room just now").wait_for()
    shoot(second, "error")
    first.get_by_role("button", name="Stop").click()
    no_work(server)
    server.options.script = "Now there is room."
    second.get_by_role("button", name="Try again", exact=True).click()
    second.get_by_text("Now there is room.").wait_for()


def test_a_long_question_is_folded_and_shown_in_whole(serve: Servers, tab: Tabs) -> None:
    server = serve(FakeOptions(script="Read.", max_model_len=100_000))
    page = tab(server.url)
    say(page, "grain " * 2000)
    ended(page)
    folded = page.locator(".question .said").bounding_box()["height"]
    page.get_by_role("button", name="Show all 11,999 characters").click()
    assert page.locator(".question .said").bounding_box()["height"] > 4 * folded
    page.get_by_role("button", name="Show less").click()
    assert page.locator(".question .said").bounding_box()["height"] == folded
    say(page, "short")
    ended(page, 2)
    assert page.locator(".unfold").count() == 1


def test_what_is_too_long_for_the_model_is_said_so(serve: Servers, tab: Tabs) -> None:
    page = tab(serve(FakeOptions(script="No.")).url)
    say(page, "word " * 30_000)
    alert = page.get_by_role("alert")
    alert.get_by_text("Too long for this model").wait_for()
    assert "begin a new chat" in alert.inner_text() and alert.get_by_text("Open the settings").count() == 0
    alert.get_by_role("button", name="Edit the question").click()
    page.get_by_label("Edit the question").fill("word")
    page.keyboard.press("Enter")
    page.locator(".answer > .prose", has_text="No.").wait_for()


def test_code_in_front_does_not_turn_a_sentence_round(serve: Servers, tab: Tabs) -> None:
    page = tab(serve(FakeOptions(script="`code` مع كلمة في الوسط.\n\n`code` among words.")).url)
    say(page, "?")
    ended(page)
    turned = "es => es.map(e => getComputedStyle(e).direction)"
    assert page.locator(".answer .prose p").evaluate_all(turned) == ["rtl", "ltr"]


def test_a_server_that_is_gone_is_explained(serve: Servers, tab: Tabs) -> None:
    server = serve(FakeOptions(script="Here."))
    page = tab(server.url)
    say(page, "Hi")
    ended(page)
    server.close()
    say(page, "Still there?")
    page.get_by_role("alert").get_by_text("The server does not answer").wait_for()
    port = int(server.url.rstrip("/").rpartition(":")[2])
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
    serve(FakeOptions(script="Back again."), port=port)
    page.get_by_role("button", name="Try again").click()
    page.get_by_text("Back again.").wait_for()


@pytest.mark.parametrize("spelling", ["field", "tags"])
def test_thoughts_are_folded(serve: Servers, tab: Tabs, spelling: str) -> None:
    page = tab(serve().url)
    thought: list[dict[str, Any]] = [{"reasoning": "Let me "}, {"reasoning": "see."}]
    if spelling == "tags":
        thought = [{"content": "<think>Let me "}, {"content": "see.</think>"}]
    sse = _events(*thought, {"content": "\n\nForty-two."})
    page.route("**/v1/chat/completions", lambda r: r.fulfill(body=sse, content_type="text/event-stream"))
    say(page, "What?")
    ended(page)
    assert page.locator(".answer > .prose").inner_text() == "Forty-two."
    assert not page.get_by_text("Let me see.").is_visible()
    page.get_by_text("Thoughts").click()
    assert page.get_by_text("Let me see.").is_visible()


def test_tool_calls_are_shown_and_answered(serve: Servers, tab: Tabs) -> None:
    page = tab(serve().url)
    call = {"index": 0, "id": "call-1", "function": {"name": "weather", "arguments": '{"city":'}}
    rest = {"index": 0, "function": {"arguments": ' "Nantes"}'}}
    answers = [
        _events({"tool_calls": [call]}, {"tool_calls": [rest]}, finish="tool_calls"),
        _events({"content": "It rains."}),
    ]
    sent = bodies(page)
    page.route("**/v1/chat/completions", lambda r: r.fulfill(body=answers.pop(0), content_type="text/event-stream"))
    say(page, "Weather?")
    page.get_by_text("calls weather").wait_for()
    page.locator(".call pre").get_by_text("Nantes").wait_for()  # arguments come behind the name
    assert json.loads(page.locator(".call pre").inner_text()) == {"city": "Nantes"}
    page.get_by_label("Result").fill("rain")
    shoot(page, "tools")
    page.get_by_role("button", name="Send the result").click()
    page.get_by_text("It rains.").wait_for()
    assert sent[1]["messages"][1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Nantes"}'}
    assert sent[1]["messages"][2] == {"role": "tool", "content": "rain", "tool_call_id": "call-1"}


def test_an_answer_that_breaks_off_is_kept(serve: Servers, tab: Tabs) -> None:
    page = tab(serve().url)
    cut = _events({"content": "Half of it"}).partition(
        'data: {"id": "chatcmpl-1", "choices": [{"index": 0, "delta": {}'
    )[0]
    page.route("**/v1/chat/completions", lambda r: r.fulfill(body=cut, content_type="text/event-stream"))
    say(page, "Go")
    page.get_by_role("alert").get_by_text("The answer broke off").wait_for()
    assert page.locator(".answer .prose").last.inner_text() == "Half of it"
    problem = {"error": {"message": "The request could not be computed.", "code": 500, "param": None}}
    error = f"data: {json.dumps(problem)}\n\ndata: [DONE]\n\n"
    page.unroute("**/v1/chat/completions")
    page.route("**/v1/chat/completions", lambda r: r.fulfill(body=error, content_type="text/event-stream"))
    page.get_by_role("button", name="Try again").click()
    page.get_by_text("The request could not be computed.").wait_for()


BLOCKS = [
    "# Head *one*",
    "A plain line\nwith a second one and `code`.",
    "**bold** and *slanted* and ~~gone~~ words " * 60,
    "- a\n- b\n  - c\n  - d\n- e",
    "\n".join(f"- item {i} with **some** words that make it long enough to be cut" for i in range(60)),
    "\n".join(f"{i}. step {i} that goes on and on until the list is long" for i in range(3, 60)),
    "```js\nconst a = `x`; // y\n\nif (a) { b() }\n```",
    "~~~~\n```\nfence in a fence\n~~~~",
    "| a | b |\n|:-:|--:|\n| 1 | *2* |\n| 3 | `4` |",
    "| n | words |\n|--:|---|\n" + "\n".join(f"| {i} | **some** words in row {i} of it |" for i in range(70)),
    "> quoted\n> twice\n\n> - again",
    "---",
    "    indented code\n    twice",
    "<div onclick=x>html</div>",
    "![i](x.png) [l](https://example.org/a_b) https://example.org/auto",
    "- [ ] open\n- [x] done",
]


@pytest.mark.parametrize("seed", range(2 if WHOLE else 1))
def test_markdown_grows_to_what_it_is_at_once(serve: Servers, tab: Tabs, seed: int) -> None:
    page = tab(serve().url)
    draw = random.Random(seed)
    # Between two blocks stands a line: a list would take in what follows it, however it is written.
    texts = ["\n\nThen this.\n\n".join(draw.sample(BLOCKS, draw.randint(1, 8))) for _ in range(12)]
    different = page.evaluate(
        """async ([texts, seed]) => {
            const { GrowingMarkdown } = await import('/static/markdown.js');
            let state = seed * 7919 + 1;
            const random = () => (state = (state * 48271) % 2147483647) / 2147483647;
            const shown = (pieces) => {
                const box = document.createElement('div');
                const made = new GrowingMarkdown(box);
                let text = '';
                for (const piece of pieces) { text += piece; made.cost = 0; made.update(text); }
                made.update(text, true);
                for (const e of box.querySelectorAll('.growing')) e.remove();
                for (const e of box.querySelectorAll('span:empty')) e.remove();
                box.normalize();
                return box.innerHTML.replace(/\\s+/g, ' ').replace(/> </g, '><');
            };
            const cut = (text) => {
                const pieces = [];
                for (let at = 0, n; at < text.length; at += n) {
                    n = 1 + Math.floor(random() * 30);
                    pieces.push(text.slice(at, at + n));
                }
                return pieces;
            };
            return texts.map(t => [t, shown([t]), shown(cut(t))]).filter(([, a, b]) => a !== b);
        }""",
        [texts, seed],
    )
    assert not different, different[0]
