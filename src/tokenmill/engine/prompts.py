"""From what people pass in to token ids. Owns: prompt forms, chat rendering, truncation, and default parameters.

Must not know: engines, threads. A prompt is a string, token ids, or a dict with `prompt` or `prompt_token_ids`.
"""

from __future__ import annotations

import difflib
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tokenmill.core.errors import ParameterError, TooLargeError, UserError
from tokenmill.core.request import Request, SamplingParams
from tokenmill.text.chat_template import ChatTemplate, check_template_kwargs
from tokenmill.text.guard import ControlGuard, render_and_encode
from tokenmill.text.messages.span import span_after
from tokenmill.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
MAX_PROMPT_CHARS = 50_000_000
CHAT_OPTIONS = (
    *("chat_template", "chat_template_kwargs", "tools", "documents", "add_generation_prompt"),
    *("continue_final_message", "enable_thinking", "reasoning_effort"),
)
"""What `chat` and most templates know."""


class PromptReader:
    """Reads prompts for one model; texts that cannot fit into `max_model_len` tokens are refused unread."""

    def __init__(self, tokenizer: Tokenizer | None, max_model_len: int | None = None) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self._templates: dict[str, ChatTemplate] = {}
        self._guard: ControlGuard | None = None

    def read(self, prompt: Prompt, params: SamplingParams | None = None) -> tuple[str | None, list[int]]:
        """-> text (if there was one) and token ids. `params` may ask for the end of a prompt of any length."""
        if isinstance(prompt, str):
            return prompt, self._encode(prompt, params)
        if isinstance(prompt, Mapping):
            if prompt.get("prompt_token_ids") is not None:
                text = prompt.get("prompt")
                return text if isinstance(text, str) else None, _ids(prompt["prompt_token_ids"])
            if isinstance(prompt.get("prompt"), str):
                return prompt["prompt"], self._encode(prompt["prompt"], params)
            raise ParameterError("A prompt dict needs 'prompt' (text) or 'prompt_token_ids'.", param="prompt")
        if isinstance(prompt, Sequence):
            return None, _ids(prompt)
        raise ParameterError(
            f"A prompt is text, token ids or a dict, not {type(prompt).__name__}.{_as_plain(prompt)}", param="prompt"
        )

    def chat(self, messages: Any, params: SamplingParams | None = None, **options: Any) -> tuple[str, list[int]]:
        """Render messages with the model's chat template (or `chat_template`); typed control tokens stay text."""
        tokenizer = self._need_tokenizer("chat")
        _check_parts(messages)
        self._check_size(tokenizer, _chars(messages), params)
        source = options.pop("chat_template", None) or tokenizer.chat_template
        if source is None:
            raise UserError("This model has no chat template: give one with chat_template=, or use plain prompts.")
        kwargs = options.pop("chat_template_kwargs", None) or {}
        check_template_kwargs(kwargs)
        key = source if isinstance(source, str) else repr(sorted(source.items()))
        if key not in self._templates:
            self._templates[key] = ChatTemplate(source, tokenizer.special_strings)
        if self._guard is None:
            self._guard = ControlGuard(tokenizer)
        return render_and_encode(self._templates[key], self._guard, messages, **options, **kwargs)

    def with_reasoning(self, text: str, params: SamplingParams) -> SamplingParams:
        """Parameters for the answer to a rendered chat: structures and budgets must know where reasoning ends."""
        wanted = params.structured_outputs is not None or params.thinking_token_budget is not None
        if not wanted or params.reasoning is not None or self.tokenizer is None:
            return params
        return msgspec.structs.replace(params, reasoning=span_after(text, self.tokenizer))

    def close(self) -> None:
        """End the template processes."""
        for template in self._templates.values():
            template.close()
        self._templates.clear()

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


def check_size(tokenizer: Tokenizer, chars: int, max_model_len: int) -> None:
    """Refuse a text that cannot fit however it is tokenised, before the work of tokenising it."""
    if chars > max_model_len and chars > tokenizer.longest_token * max_model_len:
        raise TooLargeError(
            f"The prompt has {chars} characters, which cannot fit into the context of {max_model_len} tokens: "
            "shorten it.",
            param="prompt",
        )


def make_request(request_id: str, text: str | None, ids: list[int], params: SamplingParams, **fields: Any) -> Request:
    """A Request with its seed fixed: one without a seed gets a random one, so that it can be replayed exactly."""
    if not isinstance(params, SamplingParams):
        raise ParameterError(f"sampling_params must be a SamplingParams, not {type(params).__name__}.")
    params.check()  # fields may have been set since it was made
    if params.truncate_prompt_tokens is not None:
        ids = ids[-params.truncate_prompt_tokens :]
    seed = params.seed if params.seed is not None else secrets.randbits(63)
    return Request(id=request_id, prompt_ids=ids, params=params, prompt=text, seed=seed % (1 << 64), **fields)


def check_chat_options(options: Mapping[str, Any]) -> None:
    """Refuse misspelt names: what `chat` does not know goes to the template, which ignores what it does not know."""
    for name in options:
        close = difflib.get_close_matches(name, CHAT_OPTIONS, n=1, cutoff=0.8)
        if close and name not in CHAT_OPTIONS:
            raise ParameterError(f"chat has no option {name!r}. Did you mean {close[0]!r}?", param=name)
    tools = options.get("tools")
    if tools is not None and not (isinstance(tools, (list, tuple)) and all(isinstance(t, Mapping) for t in tools)):
        raise ParameterError("tools must be a list of dicts, one for each function.", param="tools")


def _check_parts(messages: Any) -> None:
    """Refuse what only looks like text to a template: it would drop a picture without a word."""
    for message in messages if isinstance(messages, (list, tuple)) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, (list, tuple)) else ():
            kind = str(part.get("type", "text")) if isinstance(part, Mapping) else "text"
            if any(word in kind for word in ("image", "audio", "video", "file", "document")):
                raise ParameterError(f"This engine reads text, not a content part of type {kind!r}.", param="messages")


def _chars(messages: Any) -> int:
    """Characters of the plain texts in a conversation."""
    contents = [m.get("content") for m in messages if isinstance(m, Mapping)] if isinstance(messages, list) else []
    return sum(len(content) for content in contents if isinstance(content, str))


def default_params(generation: Mapping[str, Any]) -> SamplingParams:
    """Sampling defaults of generation_config.json (where it asks for sampling), else the neutral ones."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    kept = {n: generation[n] for n in names if isinstance(generation.get(n), (int, float))}
    if generation.get("do_sample") is False:
        kept = {"temperature": 0.0}
    return SamplingParams(**kept)


def _ids(value: Any) -> list[int]:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise ParameterError(f"prompt_token_ids must be a list of integers.{_as_plain(value)}", param="prompt")
    return list(value)


def _as_plain(value: Any) -> str:
    """What to do with an array or tensor, or one number of it."""
    return " Its tolist() is one." if hasattr(value, "tolist") else ""
