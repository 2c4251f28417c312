"""The one parser of all formats. Owns: applying a description to text that arrives in pieces.

Whole and streamed results are the same events, added up. What looks like a call but is none becomes content, unchanged.
Nothing is read twice, so hostile text costs linear time. Must not know: any format by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenmill.text.messages.arriving_text import ArrivingText, Reading, markers
from tokenmill.text.messages.calls import CallReader, begins, fits
from tokenmill.text.messages.describe import Calls, Head, MessageFormat
from tokenmill.text.messages.message import Event, Kind, Message

_NO_BRACKET = re.compile(r"[^\s\]}]")


class MessageParser:
    """Reads one assistant turn. `tools`: the parameters' schema by function name; None: do not look for calls.

    `thinking`: the prompt ended inside reasoning. `drop`: further texts that mean nothing (control tokens).
    `most`: calls beyond this number are left out.
    """

    def __init__(
        self,
        form: MessageFormat,
        *,
        tools: Mapping[str, Any] | None = None,
        thinking: bool = False,
        drop: Sequence[str] = (),
        most: int | None = None,
    ) -> None:
        self.tools = tools
        self.form = form
        self.source = ArrivingText()
        self.blocks: dict[str, list[Calls]] = {}
        calls = form.calls if tools is not None else None
        for block in calls.blocks if calls is not None else ():
            self.blocks.setdefault(block.open.strip(), []).append(block)
        self.bare = [b for b in (calls.blocks if calls is not None else ()) if b.bare]
        own = [*(form.calls.drop if form.calls is not None else ())]
        own += form.thinking.drop if form.thinking is not None else ()
        self.start_drop = form.calls.start_drop if form.calls is not None else ()
        self.opens = form.thinking.open.strip() if form.thinking is not None else ""
        self.closes = form.thinking.close.strip() if form.thinking is not None else ""
        self.ends_thinking = form.thinking is not None and form.thinking.calls_end
        self.ends_thinking |= form.calls is not None and form.calls.ends_thinking
        anywhere = (self.opens,) if form.thinking is not None and form.thinking.anywhere else ()
        kept = {*self.blocks, self.opens}
        self.framing = {d.strip() for d in own if isinstance(d, str) and d.startswith("\n")}
        self.heads = {d.open: d.close for d in own if isinstance(d, Head)}
        dropped = {d.strip() for d in own if isinstance(d, str)} | {d for d in drop if d not in kept}
        self.markers = markers(*self.blocks, *self.heads, *dropped, *anywhere)
        self.most = most
        self.count = 0
        self.thinking = thinking
        self.hidden = tuple(drop)
        self.out: list[tuple[Kind, int, str | None, list[str]]] = []
        self.content = _Text(self, "content")
        self.reasoning = _Text(self, "reasoning")
        self._reader: Reading[None] | None = self._read()

    def feed(self, text: str) -> list[Event]:
        """Take more text; -> the events that it adds."""
        self.source.push(text)
        return self._go()

    def finish(self) -> list[Event]:
        """End the text; -> the remaining events."""
        left = self.source.text[self.source.at :]
        if left in self.markers.prefixes and left.startswith(self.hidden):
            self.source.at += len(left)  # the text is cut within a mark
        self.source.ended = True
        return self._go()

    def _go(self) -> list[Event]:
        if self._reader is not None:
            try:
                next(self._reader)
            except StopIteration:
                self._reader = None
        found = [Event(kind, "".join(parts), index, name) for kind, index, name, parts in self.out]
        self.out.clear()
        return [event for event in found if event.text or event.kind == "call"]

    def emit(self, kind: Kind, text: str, index: int = -1, call_id: str | None = None) -> None:
        """Add an event; neighbours of one kind become one event."""
        if kind != "call" and self.out and self.out[-1][0] == kind and self.out[-1][1] == index:
            self.out[-1][3].append(text)
        else:
            self.out.append((kind, index, call_id, [text]))

    # ------------------------------------------------------------ the turn

    def _read(self) -> Reading[None]:
        source = self.source
        if not self.thinking:
            space = yield from source.spaces()
            self.thinking = bool(self.opens) and (yield from source.word(self.opens))
            if not self.thinking:
                if self.closes and (yield from source.word(self.closes)):
                    space = yield from source.spaces()  # the prompt has closed the reasoning already
                    self.content.fresh = True
                self.content.push(space)
                yield from self._start()
        while True:
            if self.thinking:
                marker = yield from self._think()
            else:
                marker = yield from source.until(self.markers, self.content.push)
            if not marker:
                self.content.end(self.count == 0)
                return
            if marker in self.blocks:
                yield from self._block(self.blocks[marker], marker)
            elif marker == self.opens:
                self.thinking = True
            elif marker in self.heads:
                yield from source.until(markers(self.heads[marker]), _ignore)
                self.content.fresh = True
            elif marker != " ":
                if marker in self.framing:
                    self.content.drop_space()
                self.content.fresh = True

    def _think(self) -> Reading[str]:
        """Read reasoning to its end; -> a space, or "" at the text's end."""
        assert self.form.thinking is not None
        close = self.closes
        ends = markers(close, *(self.blocks if self.ends_thinking else ()))
        self.reasoning.fresh = True
        yield from self.source.spaces()
        yield from self.source.word(self.opens)  # some models repeat the opening that the prompt ends with
        while (marker := (yield from self.source.until(ends, self.reasoning.push))) != close:
            if not marker:
                self._stop_thinking()
                return ""
            yield from self._block(self.blocks[marker], marker)
            if not self.thinking:
                self.markers = markers(*self.markers.texts, close)  # it may still come, and means nothing
                return " "
        self._stop_thinking()
        space = yield from self.source.spaces()
        self.content.push(space)
        yield from self._start()
        return " "

    def _stop_thinking(self) -> None:
        self.reasoning.drop_space()
        self.thinking = False
        self.content.fresh = True

    def _start(self) -> Reading[None]:
        """Read an answer's beginning: texts that are dropped there, and calls without an opening."""
        for word in self.start_drop:
            if (yield from self.source.word(word)):
                self.content.fresh = True
                return
        for block in self.bare:
            if block.open and (yield from self.source.sees(block.open.strip())):
                return  # the call comes with its opening
        if self.bare:
            yield from self._block(self.bare, "")

    # ------------------------------------------------------------ calls

    def _block(self, blocks: list[Calls], marker: str) -> Reading[None]:
        source = self.source
        source.kept = [marker] if marker else []
        yield from source.spaces()
        seen = yield from source.peek(1)
        fitting = [b for b in blocks if fits(b, seen)] if seen else []
        if not fitting:
            self._give_up()
            return
        block = fitting[0]
        if block.array:
            source.skip(1)
            yield from source.spaces()
            seen = yield from source.peek(1)
            block = next((b for b in fitting if b.array and seen and begins(b.steps[0], seen)), block)
            if seen == "]" and marker and not self.thinking:  # no call at all
                source.kept = None
                yield from self._close(block)
                return
        more = True
        while more:
            call = CallReader(self, block)
            done = yield from call.read()
            if not call.begun:
                self._give_up()
                return
            source.kept = None
            self._stop_thinking()
            more = done and (yield from self._another(block))
            if more:
                source.kept = []
        yield from self._close(block)

    def _another(self, block: Calls) -> Reading[bool]:
        """Does another call follow in this block?"""
        if not (block.many or block.array):
            return False
        yield from self.source.spaces()
        seen = yield from self.source.peek(1)
        if seen and seen in ",;":
            self.source.skip(1)
            yield from self.source.spaces()
            seen = yield from self.source.peek(1)
        if block.array:
            return bool(seen) and seen != "]" and begins(block.steps[0], seen)
        close = block.close.strip()
        if not seen or (close and (yield from self.source.sees(close))):
            return False
        return begins(block.steps[0], seen)

    def _close(self, block: Calls) -> Reading[None]:
        if block.array:
            yield from self.source.spaces()
            yield from self.source.word("]")
        close = block.close.strip()
        seen = yield from self.source.spaces()
        if close and (yield from self.source.word(close)):
            return
        if close:
            seen += yield from self.source.span(_NO_BRACKET)  # models now and then close too much
            if (yield from self.source.word(close)):
                return
        self.content.push(seen)

    def _give_up(self) -> None:
        """The kept text is not a call: it belongs to what surrounds it."""
        kept, self.source.kept = self.source.kept, None
        for part in kept or ():
            (self.reasoning if self.thinking else self.content).push(part)


class _Text:
    """Text of one kind. White space is held back until more text follows: around calls and reasoning it is left out."""

    def __init__(self, parser: MessageParser, kind: Kind) -> None:
        self.parser = parser
        self.kind = kind
        self.space: list[str] = []
        self.fresh = False

    def push(self, text: str) -> None:
        """More text."""
        if self.fresh:
            text = text.lstrip()
            self.fresh = not text
        body = text.rstrip()
        if body:
            for part in self.space:
                self.parser.emit(self.kind, part)
            self.space.clear()
            self.parser.emit(self.kind, body)
        if len(body) < len(text):
            self.space.append(text[len(body) :])

    def drop_space(self) -> None:
        """It ends here."""
        self.space.clear()

    def end(self, keep: bool) -> None:
        """No more will come."""
        if keep:
            for part in self.space:
                self.parser.emit(self.kind, part)
        self.space.clear()


def _ignore(text: str) -> None:
    pass


def parse_message(form: MessageFormat, text: str, **options: Any) -> Message:
    """A whole turn at once."""
    parser = MessageParser(form, **options)
    message = Message()
    message.add(parser.feed(text))
    message.add(parser.finish())
    return message
