"""Many talks over one model. Owns: waiting; meanwhile all generations that have begun continue together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tokenmill.core.errors import ParameterError, UserError
from tokenmill.engine.interfaces.llm import LLM
from tokenmill.program.backends import Backend, EngineBackend, ServerBackend
from tokenmill.program.talk import Talk
from tokenmill.text.messages.describe import MessageFormat
from tokenmill.text.messages.detect import find_format


class Session:
    """Talks over an LLM in this process or a server's address. Use it from one thread."""

    def __init__(
        self,
        model: LLM | str,
        *,
        api_key: str | None = None,
        served_model: str | None = None,
        tool_call_parser: str | None = None,
    ) -> None:
        if isinstance(model, str) and not model.startswith(("http://", "https://")):
            raise ParameterError("A session needs an LLM, or a server's address (http://...).", param="model")
        self.backend: Backend = (
            ServerBackend(model, api_key, served_model) if isinstance(model, str) else EngineBackend(model)
        )
        self._form = None if tool_call_parser is None else find_format(None, tool_call_parser)

    @property
    def form(self) -> MessageFormat:
        """How the model writes calls."""
        if self._form is None:
            self._form = self.backend.form()
        return self._form

    def talk(self, text: str = "", **options: Any) -> Talk:
        """A new talk; with `text` a plain one. `options` go to the chat template: tools, chat_template_kwargs."""
        made = Talk(self, options)
        return made.say(text) if text else made

    def wait(self, *talks: Talk) -> None:
        """Until all steps of these talks have ended; others get on meanwhile."""
        while any(talk.busy for talk in talks):
            self._drive()

    def wait_for(self, talk: Talk, name: str) -> None:
        """Until this value is there."""
        while talk.coming[name]:
            self._drive()
        if name not in talk.values:
            raise ParameterError(f"Nothing in this talk generates {name!r}.", param=name)

    def _drive(self) -> None:
        if not self.backend.active:
            raise UserError("A generation that this talk waits for has failed.")
        self.backend.drive()

    def join(self, talks: Iterable[Talk], name: str = "answer") -> list[Any]:
        """One value of each talk, in order."""
        every = list(talks)
        self.wait(*every)
        return [talk[name] for talk in every]
