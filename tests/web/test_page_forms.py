"""What is more than a chat, in a real browser: branches, files, search, import, presets,
schema, tools, comparing, a text."""

from __future__ import annotations

import json
from typing import Any

from tests.web.conftest import Servers, Tabs, reload
from tests.web.page_chat_helpers import _events, bodies, ended, say
from tokenmill.testing.fake_generator import FakeOptions

PASTE = """(e, text) => { const data = new DataTransfer(); data.setData('text/plain', text);
    e.dispatchEvent(new ClipboardEvent('paste', {clipboardData: data, bubbles: true, cancelable: true})); }"""


def test_the_model_is_described_and_its_defaults_are_real(serve: Servers, tab: Tabs) -> None:
    page = tab(serve(FakeOptions(max_model_len=2000)).url)
    card = page.get_by_role("region", name="What is served")
    card.get_by_text("2,000 tokens").wait_for()
    page.get_by_role("button", name="Settings").click()
    assert page.get_by_label("Temperature", exact=True).get_attribute("placeholder") == "1"
    page.get_by_label("Temperature", exact=True).hover()
    page.get_by_text("0 always takes the likeliest token. Default: 1.").wait_for()
    page.get_by_label("Message", exact=True).fill("grain " * 20)
    page.get_by_role("img", name="of 2,000 tokens of the context, 119 of them being written").wait_for()


def test_branches_are_kept(serve: Servers, tab: Tabs) -> None:
    server = serve(FakeOptions(script="Yes."))
    page = tab(server.url)
    say(page, "One")
    ended(page)
    say(page, "Two")
    ended(page, 2)
    page.get_by_role("button", name="Edit and ask again").first.click()
    page.get_by_label("Edit the question").fill("Uno")
    page.get_by_role("button", name="Ask again", exact=True).click()
    page.get_by_text("2 / 2").wait_for()
    page.wait_for_function("() => document.querySelectorAll('.answer').length === 1")
    page.get_by_role("button", name="Earlier question").click()
    page.get_by_text("Two", exact=True).wait_for()  # and what followed it
    server.options.script = "No."
    page.get_by_role("button", name="Answer again").last.click()
    page.get_by_text("No.", exact=True).wait_for()
    page.get_by_role("button", name="Compare the answers side by side").click()
    dialog = page.get_by_role("dialog")
    for said in ("Yes.", "No."):  # written once the dialog stands
        dialog.get_by_text(said, exact=True).wait_for()
    assert dialog.locator(".prose:visible").all_inner_texts() == ["Yes.", "No."]
    dialog.get_by_role("button", name="Go on with this").first.click()
    reload(page)
    page.get_by_role("button", name="One", exact=True).click()
    page.wait_for_function("() => document.querySelectorAll('.answer').length === 2")
    assert page.locator(".answer .prose:visible").all_inner_texts() == ["Yes.", "Yes."]


def test_an_answer_can_be_put_right(serve: Servers, tab: Tabs) -> None:
    """Editing keeps the model's words as a version, goes on from the new ones, and is what the model is told."""
    server = serve(FakeOptions(script="A mill grinds rain."))
    page = tab(server.url)
    say(page, "What is a mill?")
    ended(page)
    page.get_by_role("button", name="Edit the answer").click()
    field = page.get_by_label("Edit the answer")
    assert field.input_value() == "A mill grinds rain."
    field.press("Escape")
    page.get_by_role("button", name="Edit the answer").click()
    page.get_by_label("Edit the answer").fill("A mill grinds grain.")
    page.get_by_role("button", name="Keep").click()
    page.get_by_text("2 / 2").wait_for()
    page.get_by_text("Edited", exact=True).wait_for()
    page.get_by_role("button", name="Earlier answer").click()
    page.get_by_text("A mill grinds rain.").wait_for()
    page.get_by_role("button", name="Later answer").click()
    with page.expect_request("**/v1/chat/completions") as sent:
        say(page, "And then?")
    assert [m["content"] for m in sent.value.post_data_json["messages"]][1] == "A mill grinds grain."
    ended(page, 2)
    reload(page)
    page.get_by_role("button", name="What is a mill?").first.click()
    page.get_by_text("A mill grinds grain.").wait_for()


def test_long_pastes_become_files_and_are_sent(serve: Servers, tab: Tabs) -> None:
    page = tab(serve(FakeOptions(script="Read.", max_model_len=100_000)).url)
    sent = bodies(page)
    page.locator("#write").evaluate(PASTE, "by the river\n" * 400)
    page.get_by_role("button", name="Show pasted-1.txt").wait_for()
    page.locator("input[type=file]").set_input_files(
        [
            {"name": "mill.py", "mimeType": "text/x-python", "buffer": b"print('```')"},
            {"name": "x.png", "mimeType": "image/png", "buffer": b"\x89PNG"},
        ]
    )
    page.get_by_text("this model does not see pictures").wait_for()
    say(page, "Sum it up")
    ended(page)
    content = sent[0]["messages"][0]["content"]
    assert (
        content.startswith("Sum it up\n\nFile pasted-1.txt:\n```\nby the river\n") and "File mill.py:\n````" in content
    )
    page.get_by_role("button", name="Show mill.py").click()
    page.get_by_role("dialog").get_by_text("print('```')").wait_for()


def test_search_and_import(serve: Servers, tab: Tabs) -> None:
    page = tab(serve(FakeOptions(script="Under the moon.")).url)
    say(page, "Wheels")
    ended(page)
    page.get_by_role("heading", name="Today").wait_for()
    page.get_by_role("button", name="Import and export").click()
    choose = page.get_by_label("Files to import")
    choose.set_input_files([{"name": "a.json", "mimeType": "application/json", "buffer": b"{}"}])
    page.get_by_role("alert").get_by_text("no conversation that is known here").wait_for()
    chat = {"title": "From elsewhere", "created_at": 1700000000, "updated_at": 1700000000}
    tree = {"1": {"id": "1", "parentId": None, "role": "user", "content": "Stones?"}}
    tree["2"] = {"id": "2", "parentId": "1", "role": "assistant", "content": "Of granite."}
    chat["chat"] = {"history": {"messages": tree, "currentId": "2"}}
    data = json.dumps([chat]).encode()
    choose.set_input_files([{"name": "a.json", "mimeType": "application/json", "buffer": data}])
    page.get_by_text("Of granite.").wait_for()
    page.get_by_role("heading", name="November 2023").wait_for()
    page.get_by_label("Search the conversations").fill("MOON under")
    page.wait_for_function("() => document.querySelectorAll('.conversations .open').length === 1")
    assert page.locator(".conversations .open").inner_text() == "Wheels"
    page.get_by_label("Search the conversations").fill("nowhere")
    page.get_by_text("Nothing holds “nowhere”.").wait_for()


def test_presets_are_kept(serve: Servers, tab: Tabs) -> None:
    page = tab(serve().url)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Preset", exact=True).select_option("Exact")
    assert page.get_by_label("Temperature", exact=True).input_value() == "0"
    page.get_by_label("Seed", exact=True).fill("9")
    page.get_by_role("button", name="Keep these settings as a preset").click()
    page.get_by_label("Name of the preset").fill("Mine")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Back to the defaults").click()
    reload(page)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Preset", exact=True).select_option("Mine")
    assert page.get_by_label("Seed", exact=True).input_value() == "9"


def test_an_answer_is_held_to_its_schema(serve: Servers, tab: Tabs) -> None:
    page = tab(serve().url)
    sent = bodies(page)
    answers = ['{"name": "Ada", "mood": "glad"}', '{"name": 5, "mood": "glad"}', '{"name": "A']
    page.route(
        "**/v1/chat/completions",
        lambda r: r.fulfill(body=_events({"content": answers.pop(0)}), content_type="text/event-stream"),
    )
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("button", name="Schema").click()
    page.get_by_role("button", name="Take the example").click()
    page.get_by_text("A valid schema with 3 fields").wait_for()
    for text in ("meets the schema", "name must be string, and is integer", "The JSON is not closed"):
        say(page, "Who?")
        page.get_by_text(text).wait_for()
    assert sent[0]["response_format"]["json_schema"]["schema"]["required"] == ["name", "mood"]
    page.get_by_role("group", name="Schema of the answer as").get_by_role("button", name="JSON").click()
    page.get_by_label("Schema of the answer as JSON").fill('{"type": "objekt"}')
    page.get_by_text("“objekt” is no type of JSON").wait_for()


def test_a_tool_is_made_in_a_form_and_tried(serve: Servers, tab: Tabs) -> None:
    page = tab(serve().url)
    sent: list[Any] = []

    def answer(route: Any) -> None:
        sent.append(json.loads(route.request.post_data))
        call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Nantes"}'}}
        body = {"choices": [{"message": {"role": "assistant", "content": None, "tool_calls": [call]}}]}
        route.fulfill(body=json.dumps(body), content_type="application/json")

    page.route("**/v1/chat/completions", answer)
    page.get_by_role("button", name="Settings").click()
    page.get_by_text("Tools", exact=True).click()
    page.get_by_role("button", name="Add a tool").click()
    page.get_by_label("Tool's name").fill("weather")
    page.get_by_role("button", name="Parameter", exact=True).click()
    page.get_by_label("Name", exact=True).fill("city")
    page.get_by_role("button", name="Test call").click()
    page.get_by_text("city is missing; town is not in the schema").wait_for()
    assert sent[0]["tool_choice"] == {"type": "function", "function": {"name": "weather"}}
    assert sent[0]["tools"][0]["function"]["parameters"]["properties"] == {"city": {"type": "string"}}


def test_two_settings_answer_side_by_side(serve: Servers, tab: Tabs) -> None:
    page = tab(f"{serve(FakeOptions(script='Both.')).url}#compare")
    sent = bodies(page)
    page.get_by_role("button", name="Settings of A").click()
    page.get_by_label("Temperature", exact=True).fill("0.7")
    page.keyboard.press("Escape")
    page.get_by_text("temperature 0.7").wait_for()
    page.get_by_label("Question to both").fill("Which?")
    page.keyboard.press("Enter")
    page.get_by_text("Both say exactly the same.").wait_for()
    assert sorted(body["temperature"] for body in sent) == [0, 0.7]
    page.get_by_role("button", name="Go on with B in the chat").click()
    page.wait_for_function("() => location.hash.startsWith('#chat')")
    page.locator(".question .said", has_text="Which?").wait_for()


def test_a_text_is_continued_and_taken_back(serve: Servers, tab: Tabs) -> None:
    page = tab(f"{serve(FakeOptions(script=' a mill turned.')).url}#text")
    sent: list[Any] = []
    page.on("request", lambda r: sent.append(json.loads(r.post_data)) if r.url.endswith("/v1/completions") else None)
    text = page.get_by_label("Text to continue")
    text.fill("By the river")
    page.keyboard.press("Control+Enter")
    page.get_by_role("button", name="Go on", exact=True).wait_for()
    assert text.input_value() == "By the river a mill turned."
    assert sent[0]["prompt"] == "By the river" and sent[0]["max_tokens"] == 128
    page.get_by_role("button", name="Take the last continuation back").click()
    assert text.input_value() == "By the river"


def test_a_base_model_is_led_to_the_text(serve: Servers, tab: Tabs) -> None:
    page = tab("about:blank")
    page.route("**/v1/card?*", lambda r: r.fulfill(json=CARD))
    page.goto(serve().url)
    page.get_by_text("A model that continues text").wait_for()
    page.get_by_text("8.03B parameters, 15 GiB").wait_for()
    page.get_by_role("button", name="Continue a text").click()
    page.get_by_label("Text to continue").wait_for()


CARD = {
    **{"model": "base", "family": "qwen3", "format": "safetensors", "parameters": 8_030_000_000, "file_bytes": 0},
    **{"weight_bytes": 16_060_000_000, "quantization": "", "dtype": "bfloat16", "device": "cuda", "context": 4096},
    **{"device_name": "NVIDIA H200", "defaults": {}, "ceilings": None},
    "can": {"chat": False, "tools": False, "thinking": False, "structure": True, "fill": False, "pictures": False},
}


def test_restarts_and_refusals_are_events(serve: Servers, tab: Tabs) -> None:
    server = serve(FakeOptions(step_s=0.01))
    page = tab(f"{server.url}#engine")
    page.get_by_text("Nothing has happened that you should know of.").wait_for()
    server.call(lambda: server.fake.link().die())
    page.get_by_text("An engine was started again").wait_for()
    server.call(lambda: server.context.shared.metrics.reject("queue_full"))
    server.call(lambda: server.context.shared.metrics.reject("queue_full"))
    page.get_by_text("Refused: the queue was full. × 2").wait_for()
