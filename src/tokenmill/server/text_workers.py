"""Turning prompts into token ids off the event loop. Owns: a few threads, a time budget, and early refusals of huge
texts.

Must not know: HTTP, engines.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from tokenmill.core.errors import BusyError, ParameterError, TooLargeError, UserError
from tokenmill.engine.interfaces.prompts import PromptReader, check_size
from tokenmill.text.chat_template import DEFAULT_MAX_CHARS
from tokenmill.text.codec import Tokenizer
from tokenmill.text.fill import FillForm, fill_ends, fill_ids, find_fill, snippet_ids

T = TypeVar("T")
Talk = tuple[list[dict[str, Any]], dict[str, Any]]
"""The messages, and the template's options."""
THREADS = 4
LONG = 1 << 18
"""Texts of at least this many characters have their own threads, so that shorter texts never wait for them."""
LONG_THREADS = 2
MOST = DEFAULT_MAX_CHARS
"""Most characters of a text that is only counted or cut. Tokenising takes a hundred times its size in memory."""
SLICES = 8
"""The budget is used in this many slices. If this process itself stands still (stopped, swapped out), only one slice is
lost."""


class TextWorkers:
    """Reads prompts of one model in threads."""

    def __init__(self, tokenizer: Tokenizer | None, max_model_len: int, *, budget_s: float = 10.0) -> None:
        self.tokenizer = tokenizer
        self.reader = PromptReader(tokenizer)
        self.max_model_len = max_model_len
        self.budget_s = budget_s
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenmill-text")
        self.slow = ThreadPoolExecutor(LONG_THREADS, thread_name_prefix="tokenmill-long-text")

    async def run_in_thread(self, work: Callable[[], T], size: int = 0) -> T:
        """Run work on a text of this size in a thread. If it takes too long, its result is dropped. ParameterError: the
        work itself takes too long. BusyError: it had to wait, or its thread got no processor time."""
        begun: list[tuple[int, float]] = []

        def timed() -> T:
            clock = _own_clock()
            begun.append((clock, time.clock_gettime(clock)))
            return work()

        threads = self.slow if size > LONG else self.threads
        future = asyncio.get_running_loop().run_in_executor(threads, timed)
        try:
            for _ in range(SLICES):
                await asyncio.wait((future,), timeout=self.budget_s / SLICES)
                if future.done():
                    return future.result()
        finally:
            future.cancel()
        if not begun or time.clock_gettime(begun[0][0]) - begun[0][1] < self.budget_s / 2:
            raise BusyError("The server is too busy to read the prompt now; try again.")
        raise ParameterError(f"The prompt could not be read within {self.budget_s:g} s; shorten it.", param="prompt")

    async def read(
        self, prompt: str | list[int], *, add_special_tokens: bool = True, any_length: bool = False
    ) -> tuple[str | None, list[int]]:
        """(text, ids) of a prompt given as text or ids. `any_length`: the prompt will be cut, or is only counted."""
        if isinstance(prompt, list):
            return None, prompt
        tokenizer, check = self.tokenizer, self.check_read if any_length else self._check_size

        def work() -> list[int]:
            if tokenizer is None:
                raise _blind("prompt")
            check(len(prompt))
            return tokenizer.encode(prompt, add_special_tokens=add_special_tokens)

        return prompt, await self.run_in_thread(work, len(prompt))

    async def read_pieces(self, pieces: Sequence[int | str], *, framed: bool) -> list[int]:
        """The ids of one prompt of texts and ids in turn. `framed`: if it begins with a text, then as every prompt
        does."""
        tokenizer, texts = self.tokenizer, [piece for piece in pieces if isinstance(piece, str)]
        size = sum(map(len, texts)) + len(pieces)

        def work() -> list[int]:
            if tokenizer is None:
                raise _blind("prompt")
            self._check_size(size - len(texts))
            ids = list(tokenizer.frame[0]) if framed and isinstance(pieces[0], str) else []
            for piece in pieces:
                ids += [piece] if isinstance(piece, int) else tokenizer.encode(piece, add_special_tokens=False)
            return ids

        return await self.run_in_thread(work, size)

    async def chat(
        self, talk: Callable[[], Talk], *, size: int, add_special_tokens: bool = False, any_length: bool = False
    ) -> tuple[str, list[int]]:
        """(text, ids) of a conversation from a body of this size. The thread also makes the messages.
        `add_special_tokens`: add the special tokens of a plain prompt."""
        framed = add_special_tokens

        def work() -> tuple[str, list[int]]:
            if self.tokenizer is None:
                raise _blind("messages")
            messages, options = talk()
            if not any_length:
                self._check_size(sum(_chars(message.get("content")) for message in messages))
            text, ids = self.reader.chat(messages, **options)
            if framed:
                before, after = self.tokenizer.frame
                ids = [*before, *ids, *after]
            return text, ids

        try:
            return await self.run_in_thread(work, size)
        except UserError as error:  # the template's own message names no field
            if error.param is None and not isinstance(error, BusyError):
                error.param = "messages"
            raise

    @property
    def fill_form(self) -> FillForm:
        """How this model fills gaps. Raises an error that names the field if it cannot."""
        if self.tokenizer is None:
            raise _blind("suffix")
        form = find_fill(self.tokenizer)
        if form is None:
            raise ParameterError(
                "suffix is not supported by this model: its tokenizer has no fill-in-the-middle tokens.", param="suffix"
            )
        return form

    async def fill(
        self, gap: tuple[str, str], begun: str = "", others: Sequence[tuple[str, str]] = (), *, framed: bool = True
    ) -> tuple[str, list[int]]:
        """(text, ids) of a prompt whose answer goes between two texts. `others`: names and texts of more files;
        `framed`: the prompt begins as every prompt does."""
        prefix, suffix = gap
        form, tokenizer = self.fill_form, self.tokenizer
        assert tokenizer is not None

        size = len(prefix) + len(suffix) + len(begun) + sum(len(text) for _, text in others)

        def work() -> tuple[str, list[int]]:
            self._check_size(size)
            before = tokenizer.frame[0] if framed else ()
            return prefix, [*before, *snippet_ids(tokenizer, others), *fill_ids(tokenizer, form, gap, begun)]

        return await self.run_in_thread(work, size)

    def fill_ends(self) -> list[int]:
        """The ids that end the text in a gap."""
        form, tokenizer = self.fill_form, self.tokenizer
        assert tokenizer is not None
        return fill_ends(tokenizer, form)

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str | None:
        """The text of some ids, with control tokens unless they are skipped. None: there is no tokenizer."""
        return None if self.tokenizer is None else self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def close(self) -> None:
        """End the threads and the template processes."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.slow.shutdown(wait=False, cancel_futures=True)
        self.reader.close()

    @staticmethod
    def check_read(chars: int) -> None:
        """Refuse a text that is too long even to be counted or cut."""
        if chars > MOST:
            raise TooLargeError(f"The text is longer than the limit of {MOST} characters. Send a shorter one.")

    def _check_size(self, chars: int) -> None:
        if self.tokenizer is not None:
            check_size(self.tokenizer, chars, self.max_model_len)


def _own_clock() -> int:
    """The clock of this thread's processor time, which other threads can read. Without one: the process's clock."""
    if hasattr(time, "pthread_getcpuclockid"):
        return time.pthread_getcpuclockid(threading.get_ident())
    return time.CLOCK_PROCESS_CPUTIME_ID


def _chars(content: Any) -> int:
    """The number of characters in a message's text, which may come in parts."""
    if isinstance(content, list):
        return sum(_chars(part.get("text") if isinstance(part, dict) else part) for part in content)
    return len(content) if isinstance(content, str) else 0


def _blind(param: str) -> ParameterError:
    text = "This server has no tokenizer (--skip-tokenizer-init) and reads token ids alone: /v1/completions takes them."
    return ParameterError(text, param=param)
