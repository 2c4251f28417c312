"""Chat messages to prompt text. Owns: the ChatTemplate class, choosing one of several templates, and which names a
caller may pass. Rendering happens in a process of its own (template_worker.py). Must not know: tokens, HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenmill.core.errors import BusyError, ParameterError, UserError
from tokenmill.process.client import Pool
from tokenmill.text.messages.turns import check_turns
from tokenmill.text.messages.values import without_halves
from tokenmill.text.template_process import TemplateProcesses

DEFAULT_BUDGET_S = 1.0
DEFAULT_MAX_CHARS = 8_000_000
_REQUEST = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
)
_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_HELPERS = ("raise_exception", "strftime_now", "namespace", "dict", "range", "cycler", "joiner")
_JINJA = ("loop", "caller", "self", "context", "environment", "varargs", "kwargs")
_RESERVED = frozenset({*_REQUEST, *_TOKENS, *_HELPERS, *_JINJA, "additional_special_tokens"})


def check_template_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Refuse template arguments that would replace what the server or the tokenizer sets."""
    for name in kwargs:
        if name in _RESERVED or not name.isidentifier() or name.startswith("_"):
            raise ParameterError(
                f"{name!r} cannot be given as a template argument; it is set by the request or the tokenizer",
                param="chat_template_kwargs",
            )


def check_template(source: str, said: str, param: str) -> None:
    """Refuse a template that no conversation could be rendered with. `said`: what gave it, for the error."""
    made = ChatTemplate(source)
    try:
        made.warm()
    except BusyError:
        return  # the machine is too busy to say
    except UserError as error:
        raise ParameterError(f"{said}: {error}.", param=param) from None
    finally:
        made.close()


class ChatTemplate:
    """A model's chat template, or its several named ones ("default", "tool_use")."""

    def __init__(
        self,
        source: str | Mapping[str, str] | None,
        special_strings: Mapping[str, str] | None = None,
        *,
        budget_s: float = DEFAULT_BUDGET_S,
        max_chars: int = DEFAULT_MAX_CHARS,
        pool: Pool | None = None,
    ) -> None:
        """pool: processes that several templates share."""
        if not source:
            raise UserError(
                "this model has no chat template, so messages cannot become a prompt; give one with "
                "--chat-template FILE, or send a finished prompt to the completions endpoint"
            )
        self._sources = {"default": source} if isinstance(source, str) else dict(source)
        self._special = dict(special_strings or {})
        self._processes = TemplateProcesses(self._sources, budget_s=budget_s, max_chars=max_chars, pool=pool)

    def warm(self) -> None:
        """Start the template's process now; raises UserError when the template does not compile."""
        self._processes.start()

    def close(self) -> None:
        """End the template's processes."""
        self._processes.close()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt text. `kwargs` are the template's own switches. The generation prompt is added unless the last
        message is to be continued. Raises UserError if the template refuses, fails or takes too long."""
        if continue_final_message and add_generation_prompt:
            raise ParameterError(
                "add_generation_prompt and continue_final_message exclude each other", param="continue_final_message"
            )
        if not messages or not all(isinstance(message, Mapping) for message in messages):
            raise ParameterError("messages must be a list of at least one object", param="messages")
        check_template_kwargs(kwargs)
        name = self._pick(bool(tools))
        check_turns(messages, self._sources[name])
        if documents and "documents" not in self._sources[name]:
            raise ParameterError(
                "this model's chat template has no place for documents; put their texts into a message",
                param="documents",
            )
        variables = {
            **self._special,
            **kwargs,
            "tools": tools or None,
            "documents": documents or None,
            "add_generation_prompt": not continue_final_message
            if add_generation_prompt is None
            else add_generation_prompt,
        }
        text = self._processes.ask(
            {
                "template": name,
                "messages": [dict(message) for message in messages],
                "variables": variables,
                "continue": continue_final_message,
            }
        )
        return without_halves(text)  # arguments of calls are JSON, which can escape them

    def _pick(self, with_tools: bool) -> str:
        name = "tool_use" if with_tools and "tool_use" in self._sources else "default"
        if name not in self._sources:
            raise UserError(f"this model has no default chat template, only {sorted(self._sources)}; give one of them")
        return name
