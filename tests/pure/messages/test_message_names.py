"""Names of chat messages: what a template or the server never reads is told, in the same words."""

from __future__ import annotations

import pytest

from tokenmill.core.errors import ParameterError
from tokenmill.server.inputs.harmless import HARMLESS
from tokenmill.server.inputs.refused import REFUSED
from tokenmill.server.openai import schemas
from tokenmill.text.messages.names import CALL, MESSAGE, PART, check_names

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m['content'] }}{{ m.mood }}{% endfor %}"
USER = {"role": "user", "content": "Hello"}
CALLS = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f"}}]}


@pytest.mark.parametrize("rules", [MESSAGE, PART, CALL, CALL.inside["function"]], ids=lambda rules: rules.name)
def test_the_server_judges_by_the_same_lists(rules):
    assert rules.fields == {*getattr(schemas, rules.name.removeprefix("openai.")).model_fields}
    assert HARMLESS.get(rules.name, {}) == rules.harmless and REFUSED.get(rules.name, {}) == rules.refused


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({**USER, "contnet": "x"}, "messages.contnet is not a field of this request. Did you mean content?"),
        ({**USER, "zzz": 0}, "messages.zzz is not a field"),
        ({**USER, "partial": True}, "messages.partial is not supported in this version: use continue_final_message"),
        ({**USER, "content": [{"type": "text", "text": "x", "zzz": 1}]}, "messages.content.zzz is not a field"),
        ({**CALLS, "tool_calls": [{"zzz": 1}]}, "messages.tool_calls.zzz is not a field"),
        ({**CALLS, "tool_calls": [{"function": {"name": "f", "zzz": 1}}]}, "messages.tool_calls.function.zzz"),
    ],
)
def test_what_would_be_lost_is_refused(message, says):
    with pytest.raises(ParameterError, match=says.replace(".", r"\.")):
        check_names([USER, message], TEMPLATE)


@pytest.mark.parametrize(
    "message",
    [
        USER, CALLS,
        {**USER, "mood": "glad"},  # the template reads it
        {**USER, "zzz": None},
        {**CALLS, "refusal": None, "audio": None, "function_call": None, "annotations": []},  # as the client dumps it
        "no message at all",
    ],
)  # fmt: skip
def test_other_messages_pass_as_they_are(message):
    kept = str(message)
    check_names([message], TEMPLATE)
    assert str(message) == kept
