"""POST /tokenize and /detokenize, GET /v1/models. Owns: their answers. Must not know: engines' insides."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import msgspec

from tokenmill.core.errors import ParameterError
from tokenmill.server.context import Context
from tokenmill.server.errors import HttpError
from tokenmill.server.openai.chat import template_message
from tokenmill.server.openai.schemas import DetokenizeRequest, TokenizeRequest
from tokenmill.server.opening_messages import with_opening
from tokenmill.server.switch.listing import ListedModel, status
from tokenmill.server.text_workers import Talk

SLICE = 1 << 14


async def tokenize(context: Context, body: TokenizeRequest, size: int) -> dict[str, Any]:
    """The ids of a prompt or a conversation. `size`: bytes of the request's body."""
    context.check_model(body.model)
    if body.content is not None:
        if body.prompt is not None or body.messages is not None:
            raise ParameterError("Give one of content, prompt and messages.", param="content")
        _check_form(body, "content", (*_OF_TEXTS, *_OF_TALKS))
        return await _pieces(context, body, body.content)
    if (body.prompt is None) == (body.messages is None):
        raise ParameterError("Give either prompt or messages.", param="prompt")
    form = "prompt" if body.messages is None else "messages"
    _check_form(body, form, (*_OF_CONTENT, *(_OF_TALKS if body.messages is None else ())))
    if body.messages is not None:
        _, ids = await context.text.chat(
            lambda: talk(context, body), size=size, add_special_tokens=bool(body.add_special_tokens), any_length=True
        )
    else:
        framed = True if body.add_special_tokens is None else body.add_special_tokens
        _, ids = await context.text.read(body.prompt or "", add_special_tokens=framed, any_length=True)
    tokenizer = context.backend.info.tokenizer
    strings = None
    if body.return_token_strs and tokenizer is not None:
        strings = await context.text.run_in_thread(lambda: _joined(tokenizer.id_to_token, ids), size)
    return {
        "count": len(ids),
        "max_model_len": context.backend.info.max_model_len,
        "tokens": ids,
        "token_strs": strings,
    }


def _joined(show: Callable[[int], Any], ids: list[int]) -> msgspec.Raw:
    """What is shown of each id as one encoded list. Every id is encoded once, and slices are joined one by one: a
    million in one call would keep all other work of the interpreter waiting."""
    shown = cache(lambda i: msgspec.json.encode(show(i)))
    slices = [b",".join(map(shown, ids[start : start + SLICE])) for start in range(0, len(ids), SLICE)]
    return msgspec.Raw(b"[" + b",".join(slices) + b"]")


_OF_CONTENT = ("add_special", "parse_special", "with_pieces")
_OF_TEXTS = ("add_special_tokens", "return_token_strs")
_OF_TALKS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")


def _check_form(body: TokenizeRequest, form: str, others: Iterable[str]) -> None:
    """Refuse fields that belong to other forms of this request."""
    for name in others:
        if getattr(body, name) not in (None, [], {}, type(body).model_fields[name].default):
            raise ParameterError(f"{name} has no effect with {form}.", param=name)


async def _pieces(context: Context, body: TokenizeRequest, text: str) -> dict[str, Any]:
    """llama.cpp's answer: ids, or ids with their texts (bytes if a token is not valid text)."""
    tokenizer = context.backend.info.tokenizer
    if tokenizer is None:
        raise ParameterError("This server has no tokenizer.", param="content")

    def work() -> list[int] | msgspec.Raw:
        context.text.check_read(len(text))
        ids = tokenizer.encode(text, add_special_tokens=body.add_special, allow_special=body.parse_special)
        return _joined(lambda i: {"id": i, "piece": _piece(tokenizer.token_bytes(i))}, ids) if body.with_pieces else ids

    return {"tokens": await context.text.run_in_thread(work, len(text))}


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def talk(context: Context, body: Any) -> Talk:
    """The messages and the template's options in a body."""
    options = {
        "chat_template": context.chat_template,
        "chat_template_kwargs": body.chat_template_kwargs,
        "tools": [t.model_dump(exclude_none=True) for t in body.tools] if body.tools else None,
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": body.continue_final_message,
    }
    return with_opening(context.config.messages.opening, [template_message(m) for m in body.messages or ()]), options


async def detokenize(context: Context, body: DetokenizeRequest) -> dict[str, Any]:
    """The text of ids."""
    context.check_model(body.model)
    if context.backend.info.tokenizer is None:
        raise ParameterError("This server has no tokenizer.", param="tokens")
    size = max(context.backend.info.tokenizer.vocab_size, context.backend.info.vocab_size)
    if (highest := max(body.tokens, default=0)) >= size:
        raise ParameterError(
            f"tokens holds token id {highest}, which is out of vocabulary (of {size} ids).", param="tokens"
        )
    text = await context.text.run_in_thread(
        lambda: context.text.decode(body.tokens, body.skip_special_tokens), len(body.tokens)
    )
    return {"prompt": text, "content": text}  # under vLLM's name and llama.cpp's


def tokenizer_info(context: Context) -> dict[str, Any]:
    """The part of a model's tokenizer_config.json that is used here."""
    tokenizer = context.backend.info.tokenizer
    if tokenizer is None:
        raise HttpError(404, "This server has no tokenizer.")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **tokenizer.special_strings,
        "chat_template": context.chat_template or tokenizer.chat_template,
        "model_max_length": context.backend.info.max_model_len,
        "vocab_size": tokenizer.vocab_size,
        "added_tokens_decoder": {
            str(i): {"content": tokenizer.id_to_token(i), "special": True} for i in sorted(tokenizer.special_ids)
        },
    }


def model_card(shown: ListedModel, created: int) -> dict[str, Any]:
    """One entry of /v1/models."""
    name = shown.name
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "tokenmill",
        "root": shown.root,
        "parent": shown.parent,
        "max_model_len": shown.max_model_len,
        **status(shown.entry),
        "permission": [
            {
                "id": f"modelperm-{name}",
                "object": "model_permission",
                "created": created,
                "allow_create_engine": False,
                "allow_sampling": True,
                "allow_logprobs": True,
                "allow_search_indices": False,
                "allow_view": True,
                "allow_fine_tuning": False,
                "organization": "*",
                "group": None,
                "is_blocking": False,
            }
        ],
    }


def model_list(models: Iterable[ListedModel], created: int) -> dict[str, Any]:
    """The list of all served names."""
    return {"object": "list", "data": [model_card(shown, created) for shown in models]}
