"""Messages that are no turns of a chat are refused by their number."""

from __future__ import annotations

from typing import Any

import pytest

from tokenmill.core.errors import ParameterError
from tokenmill.text.messages.turns import ROLES, check_turns

HELLO = {"role": "user", "content": "Hello"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
OWN = """{% if m.role == 'observation' or m.role.startswith("document") %}{{ m.content }}{% endif %}"""


@pytest.mark.parametrize("role", ROLES)
def test_usual_roles_are_left_to_the_template(role: str) -> None:
    check_turns([HELLO, {"role": role, "content": ""}], "x")


@pytest.mark.parametrize("role", ["observation", "document", "document 3"])
def test_a_template_has_roles_of_its_own(role: str) -> None:
    message = {"role": role, "content": "x"}
    check_turns([message], OWN)
    with pytest.raises(ParameterError, match="a role that the chat template names"):
        check_turns([message], "{{ m.role }}")


@pytest.mark.parametrize("role", ["wizard", "User", "observ", "", " ", None, 5, ["user"]])
def test_other_roles_are_refused(role: Any) -> None:
    with pytest.raises(ParameterError, match=rf"messages\.1\.role must be one of {', '.join(ROLES)}") as refused:
        check_turns([HELLO, {"role": role, "content": "x"}], OWN)
    assert refused.value.param == "messages.1.role"


@pytest.mark.parametrize("more", [{}, {"content": None}, {"content": None, "tool_calls": [], "reasoning": ""}])
@pytest.mark.parametrize("role", [*ROLES, "observation"])
def test_a_turn_says_something(role: str, more: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match=r"messages\.1\.content is missing") as refused:
        check_turns([HELLO, {"role": role, **more}], OWN)
    assert refused.value.param == "messages.1.content"


@pytest.mark.parametrize("more", [{"tool_calls": [CALL]}, {"reasoning": "hm"}, {"reasoning_content": "hm"}])
def test_calls_and_reasoning_are_turns_of_the_assistant(more: dict[str, Any]) -> None:
    check_turns([HELLO, {"role": "assistant", **more}], "x")
    with pytest.raises(ParameterError, match="content is missing"):
        check_turns([{"role": "user", **more}], "x")
