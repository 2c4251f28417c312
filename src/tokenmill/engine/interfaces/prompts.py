"""From what people pass in to token ids. Owns: forms of prompts, chat rendering, truncation, and making requests.

Must not know: engines, threads. A prompt is a string, token ids, or a dict with `prompt` or `prompt_token_ids`.
"""

from __future__ import annotations

import difflib
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tokenmill.core.errors import ContextError, ParameterError, UserError, shown
from tokenmill.core.request import Request, SamplingParams
from tokenmill.process.home_process import HomeProcess
from tokenmill.text.chat_template import ChatTemplate, check_template_kwargs
from tokenmill.text.guard import ControlGuard, render_and_encode
from tokenmill.text.messages.names import check_names
from tokenmill.text.messages.span import span_after, text_of
from tokenmill.text.template_process import template_pool
from tokenmill.text.template_worker import TEXT_PARTS
from tokenmill.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
MAX_PROMPT_CHARS = 50_000_000
CHAT_OPTIONS = (
    *("chat_template", "chat_template_kwargs", "tools", "documents", "add_generation_prompt"),
    *("continue_final_message", "enable_thinking", "reasoning_effort"),
)
"""Options that `chat` or most templates know."""
_OF_CHAT = ("chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
"""The options that `chat` itself acts on; only templates use the others."""
_OF_PROMPTS = ("prompt", "prompt_token_ids", "cache_salt")
_NOT_TEXT = (
    *("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs", "prompt_embeds", "token_type_ids"),
    *("encoder_prompt", "decoder_prompt"),
)
"""Keys of prompt dicts that other engines know; if they are empty, they ask for nothing."""
MAX_SALT_CHARS = 128
_MEDIA = ("image", "audio", "video", "file", "document")


class PromptReader:
    """Reads prompts for one model; refuses texts that cannot fit into `max_model_len` tokens without tokenising
    them."""

    def __init__(self, tokenizer: Tokenizer | None, max_model_len: int | None = None) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self._processes = template_pool()
        self._home = HomeProcess()
        self._guard: ControlGuard | None = None

    def read(self, prompt: Prompt, params: SamplingParams | None = None) -> tuple[str | None, list[int], str]:
        """Returns text (if there was one), token ids and cache salt. `params` may ask to keep only the end of a
        prompt."""
        _check_budget(params)
        if isinstance(prompt, str):
            return prompt, self._encode(prompt, params), ""
        if isinstance(prompt, Mapping):
            _check_keys(prompt)
            text, salt = prompt.get("prompt"), check_salt(prompt.get("cache_salt"))
            if text is not None and not isinstance(text, str):
                raise ParameterError(f"'prompt' of a prompt dict must be text.{_as_plain(text)}", param="prompt")
            if prompt.get("prompt_token_ids") is not None:
                return text, _ids(prompt["prompt_token_ids"]), salt
            if text is not None:
                return text, self._encode(text, params), salt
            raise ParameterError("A prompt dict needs 'prompt' (text) or 'prompt_token_ids'.", param="prompt")
        if isinstance(prompt, Sequence):
            return None, _ids(prompt), ""
        raise ParameterError(
            f"A prompt is text, token ids or a dict, not {type(prompt).__name__}.{_as_plain(prompt)}", param="prompt"
        )

    def chat(self, messages: Any, params: SamplingParams | None = None, **options: Any) -> tuple[str, list[int]]:
        """Render messages with the model's chat template (or `chat_template`); typed control tokens stay text."""
        self._home.check()
        tokenizer = self._need_tokenizer("chat")
        _check_parts(messages)
        self._check_size(tokenizer, _chars(messages), params)
        source = options.pop("chat_template", None) or tokenizer.chat_template
        if source is None:
            raise UserError(
                "This model has no chat template: give one (--chat-template, chat_template=), or use plain prompts."
            )
        if isinstance(messages, (list, tuple)):
            check_names(messages, _text(source))
        kwargs = options.pop("chat_template_kwargs", None) or {}
        check_template_kwargs(kwargs)
        if self._guard is None:
            self._guard = ControlGuard(tokenizer)
        template = ChatTemplate(source, tokenizer.special_strings, pool=self._processes)
        try:
            return render_and_encode(template, self._guard, messages, **options, **kwargs)
        except RecursionError:
            raise ParameterError(
                "messages, or what goes with them, are nested without end.", param="messages"
            ) from None

    def render(self, messages: Any, **options: Any) -> tuple[str, list[int]]:
        """`chat` with options as a tokenizer's apply_chat_template has them: names of templates among the others."""
        named = {name: options.pop(name) for name in list(options) if name not in CHAT_OPTIONS}
        kwargs = {**(options.pop("chat_template_kwargs", None) or {}), **named}
        return self.chat(messages, None, **options, chat_template_kwargs=kwargs)

    def with_reasoning(
        self, text: str, params: SamplingParams, messages: Sequence[Any], options: Mapping[str, Any]
    ) -> SamplingParams:
        """The parameters for a rendered chat's answer, with the place of its reasoning: structures and budgets need
        it."""
        wanted = params.structured_outputs is not None or params.thinking_token_budget is not None
        if not wanted or params.reasoning is not None or self.tokenizer is None:
            return params
        continued = text_of(messages[-1]) if options.get("continue_final_message") else ""
        return msgspec.structs.replace(params, reasoning=span_after(text, self.tokenizer, continued))

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Refuse chat options without effect: misspelt ones, and those that the template never reads."""
        _check_names(options)
        source = options.get("chat_template") or (self.tokenizer and self.tokenizer.chat_template) or ""
        text = _text(source)
        given = {**options, **(options.get("chat_template_kwargs") or {})}
        for name, value in given.items():
            if name in _OF_CHAT or value is None or (name in ("tools", "documents") and not value):
                continue
            if text and re.search(rf"\b{re.escape(name)}\b", text) is None:
                raise ParameterError(
                    f"{name!r} would be lost: the chat template never reads it. Leave it out, or give a template that "
                    "does with chat_template=.",
                    param=name,
                )

    def close(self) -> None:
        """End the template processes; a fork leaves them alone."""
        if self._home.here:
            self._processes.close()

    def _encode(self, text: str, params: SamplingParams | None) -> list[int]:
        if len(text) > MAX_PROMPT_CHARS:
            raise ParameterError(f"The prompt is longer than {MAX_PROMPT_CHARS} characters.", param="prompt")
        tokenizer = self._need_tokenizer("text prompts")
        self._check_size(tokenizer, len(text), params)
        return tokenizer.encode(text)

    def _check_size(self, tokenizer: Tokenizer, chars: int, params: SamplingParams | None) -> None:
        cut = isinstance(params, SamplingParams) and params.truncate_prompt_tokens is not None
        if self.max_model_len is not None and not cut:
            check_size(tokenizer, chars, self.max_model_len)

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise ParameterError(
                f"{what} need a tokenizer, and this engine has none: pass prompt_token_ids.", param="prompt"
            )
        return self.tokenizer


def _text(template: str | Mapping[str, str]) -> str:
    """A template's text, or that of all templates of a model."""
    return template if isinstance(template, str) else "\n".join(map(str, template.values()))


def check_size(tokenizer: Tokenizer, chars: int, max_model_len: int) -> None:
    """Refuse a text that cannot fit however it is tokenised, before the work of tokenising it."""
    if chars > max_model_len and chars > tokenizer.longest_token * max_model_len:
        raise ContextError(max_model_len, -(-chars // tokenizer.longest_token), exact=False)


def make_request(
    request_id: str,
    text: str | None,
    ids: list[int],
    params: SamplingParams,
    *,
    context: int | None = None,
    **fields: Any,
) -> Request:
    """A Request with its seed fixed: one without a seed gets a random one, so that it can be replayed exactly.

    context: the model's context, if an answer that does not fit shall end there; None: such a request is refused."""
    if not isinstance(params, SamplingParams):
        raise ParameterError(f"sampling_params must be a SamplingParams, not {type(params).__name__}.")
    if not isinstance(request_id, str):
        raise ParameterError(f"request_id must be text, got {shown(request_id)}.", param="request_id")
    params.check()  # fields may have been set since its construction
    if (keep := params.truncate_prompt_tokens) is not None:
        if keep == -1:  # as many tokens as fit together with the answer
            keep = len(ids) if context is None else max(1, context - max(1, params.max_tokens or 1))
        ids = ids[-keep:]
    room = None if context is None else context - len(ids)
    if room is not None and params.max_tokens is not None and 0 < room < params.max_tokens:
        if params.min_tokens > room:
            raise ParameterError(f"min_tokens ({params.min_tokens}) is more than fits ({room}).", param="min_tokens")
        params = msgspec.structs.replace(params, max_tokens=room)
    seed = params.seed if params.seed is not None else secrets.randbits(63)
    return Request(id=request_id, prompt_ids=ids, params=params, prompt=text, seed=seed % (1 << 64), **fields)


def check_salt(salt: Any) -> str:
    """Check a prompt's `cache_salt`: prompts share cached prefixes only with prompts of the same salt."""
    if salt is None:
        return ""
    if not isinstance(salt, str) or not 1 <= len(salt) <= MAX_SALT_CHARS:
        raise ParameterError(f"cache_salt must be text of 1 to {MAX_SALT_CHARS} characters.", param="cache_salt")
    return salt


def _check_keys(prompt: Mapping[str, Any]) -> None:
    """Refuse every key of a prompt dict that would be dropped."""
    for name, value in prompt.items():
        if name in _OF_PROMPTS or (name in _NOT_TEXT and (value is None or value == {})):
            continue
        if name in _NOT_TEXT:
            raise ParameterError(f"This engine reads text and token ids: {name!r} cannot be used.", param=name)
        close = difflib.get_close_matches(str(name), _OF_PROMPTS, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(_OF_PROMPTS)}."
        raise ParameterError(f"A prompt dict has no key {name!r}. {hint}", param=str(name))


def _check_budget(params: SamplingParams | None) -> None:
    """Refuse a reasoning budget outside chats: only there is it known which text is reasoning."""
    if not isinstance(params, SamplingParams) or params.reasoning is not None:
        return
    if params.thinking_token_budget is not None and params.thinking_token_budget >= 0:
        raise ParameterError(
            "thinking_token_budget needs to know where reasoning ends: use chat(), or give reasoning= too.",
            param="thinking_token_budget",
        )


def _check_names(options: Mapping[str, Any]) -> None:
    """Refuse misspelt names. Other names that `chat` does not know go to the template."""
    for name in options:
        close = difflib.get_close_matches(name, CHAT_OPTIONS, n=1, cutoff=0.8)
        if close and name not in CHAT_OPTIONS:
            raise ParameterError(f"chat has no option {name!r}. Did you mean {close[0]!r}?", param=name)
    tools, kwargs = options.get("tools"), options.get("chat_template_kwargs")
    if tools is not None and not (isinstance(tools, (list, tuple)) and all(isinstance(t, Mapping) for t in tools)):
        raise ParameterError("tools must be a list of dicts, one for each function.", param="tools")
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs)):
        raise ParameterError(
            "chat_template_kwargs must be a dict of the template's names.", param="chat_template_kwargs"
        )
    template = options.get("chat_template")
    if template is not None and not isinstance(template, str):
        raise ParameterError("chat_template must be the template's text.", param="chat_template")


def check_priority(priority: int, policy: str) -> int:
    """Refuse a priority that the policy would ignore, or could not compare with others."""
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise ParameterError(f"priority must be an integer, got {shown(priority)}.", param="priority")
    if priority and policy != "priority":
        raise ParameterError("priority needs scheduling_policy='priority'.", param="priority")
    return priority


def _check_parts(messages: Any) -> None:
    """Refuse content that a template would take for text: it would silently drop a picture."""
    for message in messages if isinstance(messages, (list, tuple)) else ():
        if not isinstance(message, Mapping):
            continue
        for name in ("images", "audio", "audios", "videos"):
            if message.get(name):
                raise ParameterError(f"This engine reads text: {name!r} of a message cannot be used.", param="messages")
        content = message.get("content")
        if not isinstance(content, (str, list, tuple, Mapping)) and content is not None:
            raise ParameterError("A message's content must be text, or a list of parts.", param="messages")
        for part in content if isinstance(content, (list, tuple)) else ():
            if not isinstance(part, (str, Mapping)):
                raise ParameterError("A content part must be text or a dict.", param="messages")
            if isinstance(part, str):
                continue
            names = [str(part.get("type", "text")), *(str(key) for key in part if part[key] is not None)]
            kind = next((name for name in names if any(word in name for word in _MEDIA)), names[0])
            if kind not in TEXT_PARTS:
                raise ParameterError(
                    f"This engine reads text, not a content part of type {shown(kind)}.", param="messages"
                )
            if not isinstance(part.get(TEXT_PARTS[kind]), str):
                raise ParameterError(
                    f"A content part of type {kind!r} needs {TEXT_PARTS[kind]!r}, a text.", param="messages"
                )


def _chars(messages: Any) -> int:
    """How many characters the plain texts of a conversation have."""
    contents = [m.get("content") for m in messages if isinstance(m, Mapping)] if isinstance(messages, list) else []
    return sum(len(content) for content in contents if isinstance(content, str))


def _ids(value: Any) -> list[int]:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise ParameterError(f"prompt_token_ids must be a list of integers.{_as_plain(value)}", param="prompt")
    return list(value)


def _as_plain(value: Any) -> str:
    """A hint for a message: what to do with an array or tensor, or with one number of it."""
    return " Its tolist() is one." if hasattr(value, "tolist") else ""
