"""Rendered chats are what Transformers renders, for several families of templates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.cpu.text.chat_examples import CHATS, FAMILIES, STRINGS, TOOLS
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tokenmill.core.errors import UserError
from tokenmill.text.chat_template import ChatTemplate


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[ChatTemplate, PreTrainedTokenizerFast]]:
    source = FAMILIES[request.param]
    ours = ChatTemplate(source, STRINGS)
    inner = Tokenizer(models.WordLevel({"a": 0}))
    yield ours, PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=source, **STRINGS)
    ours.close()


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("chat", sorted(CHATS))
def test_same_text(pair: tuple[ChatTemplate, Any], chat: str, tools: Any, prompt: bool) -> None:
    ours, theirs = pair
    if chat == "call" and "message['content'] is not none" in theirs.chat_template:
        # Transformers drops a null content, on which such templates fail; we keep it for them.
        assert ours.render(CHATS[chat]).endswith('{"rain": true}')
        return
    options = {"tools": tools, "add_generation_prompt": prompt}
    try:
        want = theirs.apply_chat_template(CHATS[chat], tokenize=False, **options)
    except Exception:
        with pytest.raises(UserError):
            ours.render(CHATS[chat], **options)
        return
    assert ours.render(CHATS[chat], **options) == want


@pytest.mark.parametrize("chat", ["system", "no turns"])
def test_same_continuation(pair: tuple[ChatTemplate, Any], chat: str) -> None:
    ours, theirs = pair
    try:
        want = theirs.apply_chat_template(CHATS[chat], tokenize=False, continue_final_message=True)
    except Exception:
        with pytest.raises(UserError):
            ours.render(CHATS[chat], continue_final_message=True)
        return
    assert ours.render(CHATS[chat], continue_final_message=True) == want
