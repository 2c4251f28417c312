"""What goes wrong, or is too long: the page says what is so, and loses nothing."""

from __future__ import annotations

from typing import Any

from tests.web.conftest import Servers, Tabs, reload
from tests.web.page_chat_helpers import bodies, ended, say
from tokenmill.testing.fake_generator import FakeOptions


def test_a_server_that_is_back_is_no_longer_gone(serve: Servers, tab: Tabs) -> None:
    server = serve(FakeOptions(script="Here."))
    page = tab("about:blank")
    gone = [True]
    page.route("**/v1/**", lambda route: route.abort() if gone[0] else route.continue_())
    page.goto(server.url)
    page.get_by_role("alert").get_by_text("The server does not answer").wait_for()
    gone[0] = False
    say(page, "Are you there?")
    ended(page)
    page.get_by_role("alert").wait_for(state="detached")
    page.locator(".model-choice option", has_text="fake").wait_for(state="attached")
    gone[0] = True
    page.evaluate("async () => (await import('/static/conversation.js')).loadModels()")
    page.get_by_role("alert").wait_for()
    gone[0] = False
    page.evaluate("dispatchEvent(new Event('online'))")
    page.get_by_role("alert").wait_for(state="detached")


def test_answers_grow_on_while_others_are_looked_at(serve: Servers, tab: Tabs) -> None:
    """Two conversations answer at once, the reader goes from one to the other, and nothing breaks (see `tab`)."""
    page = tab(serve(FakeOptions(script="word " * 40, step_s=0.005, max_model_len=100_000)).url)
    grows = "n => document.querySelector('.answer.live > .prose')?.innerText.split('word').length > n"
    say(page, "first")
    page.wait_for_function(grows, arg=2)
    page.get_by_role("button", name="New chat").click()
    page.get_by_text("What shall we talk about?").wait_for()
    say(page, "second")
    page.wait_for_function(grows, arg=2)
    page.get_by_role("button", name="first", exact=True).click()
    page.get_by_role("link", name="Engine").click()
    page.get_by_role("link", name="Chat").click()
    for name in ("first", "second"):
        page.get_by_role("button", name=name, exact=True).click()
        page.locator(".question .said", has_text=name).wait_for()
        ended(page)
        assert page.locator(".answer .prose").last.inner_text().count("word") == 40


def test_a_comparison_outlives_a_reload(serve: Servers, tab: Tabs) -> None:
    page = tab(f"{serve(FakeOptions(script='Both.')).url}#compare")
    page.get_by_label("Question to both").fill("Which?")
    page.keyboard.press("Enter")
    page.get_by_text("Both say exactly the same.").wait_for()
    page.reload()
    page.get_by_text("Both say exactly the same.").wait_for()
    sent = bodies(page)
    page.get_by_label("Question to both").fill("And now?")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelectorAll('.turn .figures').length === 4")
    assert [m["content"] for m in sent[0]["messages"]] == ["Which?", "Both.", "And now?"]
    page.get_by_role("button", name="Begin anew").click()
    page.get_by_text("One question, two answers").wait_for()
    page.evaluate("sessionStorage['tokenmill.comparison'] = JSON.stringify([{question: 1}, null, {answers: []}])")
    page.reload()
    page.get_by_text("One question, two answers").wait_for()


def test_a_thought_alone_offers_no_going_on(serve: Servers, tab: Tabs) -> None:
    page = tab(serve(FakeOptions(script="<think>" + "hm " * 2000, step_s=0.01, max_model_len=100_000)).url)
    say(page, "Think")
    page.get_by_text("tok/s").wait_for()
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("stopped").wait_for()
    assert page.get_by_role("button", name="Answer again").count() == 1
    assert page.get_by_role("button", name="Go on").count() == 0
    assert page.get_by_role("button", name="Copy the answer").count() == 0  # there is none


def test_what_is_too_large_has_a_way_out(serve: Servers, tab: Tabs) -> None:
    page = tab(serve().url)
    refusal = {"error": {"message": "The body has 70 MiB; at most 64 MiB are taken."}}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=413, json=refusal))
    say(page, "Hello")
    alert = page.get_by_role("alert")
    alert.get_by_role("button", name="Edit the question").wait_for()
    alert.get_by_role("button", name="New chat").click()
    page.get_by_text("What shall we talk about?").wait_for()


KEEP = """async ([count, long]) => {
    const { loadList } = await import('/static/conversation.js');
    const db = await import('/static/db.js');
    const tree = await import('/static/tree.js');
    const now = Date.now();
    for (let i = 0; i < count; i++) {
        const made = tree.emptyConversation();
        made.title = i ? `No. ${i}` : long;
        made.updated = now + (count - i) * 1000;
        tree.add(made, null, {role: 'user', content: `question ${i}`});
        await db.save(made);
    }
    await loadList();
}"""


def test_many_conversations_and_long_names(serve: Servers, tab: Tabs) -> None:
    page = tab(serve().url)
    page.locator(".model-card").wait_for()
    long = "A name of three hundred characters " * 9
    page.evaluate(KEEP, [120, long])
    page.wait_for_function("() => document.querySelectorAll('.conversations .open').length === 120")
    first = page.locator(".conversations .open").first
    assert first.get_attribute("title") == long
    first.click()
    page.locator(".question .said", has_text="question 0").wait_for()
    row = page.locator(".conversations li").first
    row.hover()
    row.get_by_role("button", name="Export “A name").click()
    title = page.get_by_role("dialog").locator("h2")
    assert len(title.inner_text()) < 80
    assert title.evaluate("e => getComputedStyle(e).color === getComputedStyle(document.body).color")
    page.keyboard.press("Escape")
    row.get_by_role("button", name="Delete “A name").click()
    toast = page.locator(".toast")
    toast.get_by_role("button", name="Undo").wait_for()
    assert toast.bounding_box()["height"] < 90 and toast.bounding_box()["width"] <= 560
    page.get_by_label("Search the conversations").fill("question 119")
    page.wait_for_function("() => document.querySelectorAll('.conversations .open').length === 1")
    reload(page)


def test_results_of_tools_show_a_glimpse(serve: Servers, tab: Tabs) -> None:
    page: Any = tab(serve().url)
    page.locator(".model-card").wait_for()
    page.evaluate(
        """async () => { const tree = await import('/static/tree.js');
        const { adopt } = await import('/static/conversation.js');
        const made = tree.emptyConversation();
        for (const town of ['Nantes', 'Lyon'])
            tree.add(made, made.leaf, { role: 'tool', name: 'weather', callId: town, content: `{"town": "${town}"}` });
        await adopt(made); }"""
    )
    assert page.locator(".result summary").all_text_contents() == [
        'Result of weather{"town": "Nantes"}',
        'Result of weather{"town": "Lyon"}',
    ]


def test_files_outlive_a_reload_and_may_be_left_out_when_asking_again(serve: Servers, tab: Tabs) -> None:
    page = tab(serve(FakeOptions(script="Read.", max_model_len=100_000)).url)
    sent = bodies(page)
    names = ("mill.txt", "wheel.txt")
    page.locator("input[type=file]").set_input_files(
        [{"name": name, "mimeType": "text/plain", "buffer": name.encode()} for name in names]
    )
    page.get_by_role("button", name="Show wheel.txt").wait_for()
    page.get_by_label("Message", exact=True).fill("Sum up")
    page.reload()
    page.get_by_role("button", name="Show mill.txt").wait_for()
    assert page.get_by_label("Message", exact=True).input_value() == "Sum up"
    page.keyboard.press("Enter")
    ended(page)
    page.get_by_role("button", name="Edit and ask again").click()
    page.get_by_role("button", name="Remove mill.txt").click()
    page.get_by_label("Edit the question").press("Enter")
    page.get_by_text("2 / 2").wait_for()
    ended(page)
    first, second = (body["messages"][0]["content"] for body in sent)
    assert all(name in first for name in names) and "mill.txt" not in second and "wheel.txt" in second
    page.evaluate(
        "sessionStorage['tokenmill.drafts'] = JSON.stringify({new: 'old form', x: {files: [null, 5]}, y: null})"
    )
    page.goto("about:blank")
    page.go_back()
    page.get_by_role("button", name="New chat").click()
    page.get_by_text("What shall we talk about?").wait_for()
    assert page.get_by_label("Message", exact=True).input_value() == "old form"
