"""The one parser of all formats. Owns: walking a description over text that arrives in pieces.

Whole and streamed results are the same events, added up. What looks like a call and turns out to be none is content,
as it stands; nothing is read twice, so hostile text costs linear time. Must not know: any format by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenmill.text.messages import values
from tokenmill.text.messages.describe import (
    Args,
    Calls,
    Id,
    Lit,
    Loose,
    MessageFormat,
    Name,
    Object,
    Pairs,
    Python,
    Skip,
    Step,
)
from tokenmill.text.messages.message import Event, Kind, Message
from tokenmill.text.messages.source import Reading, Source, markers

_NO_NAME = re.compile(r"[^\w.\-]")
MAX_NAME = 256


class MessageParser:
    """Reads one assistant turn. `tools`: parameters' schema by function name; None: calls are not looked for.

    `thinking`: the prompt ended inside of reasoning. `drop`: further texts that mean nothing (control tokens).
    `most`: calls beyond so many are left out.
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
        self.source = Source()
        self.blocks: dict[str, list[Calls]] = {}
        calls = form.calls if tools is not None else None
        for block in calls.blocks if calls is not None else ():
            self.blocks.setdefault(block.open.strip(), []).append(block)
        self.bare = [b for b in (calls.blocks if calls is not None else ()) if b.bare]
        own = [*(form.calls.drop if form.calls is not None else ())]
        own += form.thinking.drop if form.thinking is not None else ()
        self.start_drop = form.calls.start_drop if form.calls is not None else ()
        self.opens = form.thinking.open.strip() if form.thinking is not None else ""
        self.ends_thinking = form.thinking is not None and form.thinking.calls_end
        anywhere = (self.opens,) if form.thinking is not None and form.thinking.anywhere else ()
        kept = set(form.markers())
        dropped = {d.strip() for d in own} | {d for d in drop if d not in kept}
        self.markers = markers(*self.blocks, *dropped, *anywhere)
        self.most = most
        self.count = 0
        self.thinking = thinking
        self.out: list[tuple[Kind, int, str | None, list[str]]] = []
        self.content = _Text(self, "content")
        self.reasoning = _Text(self, "reasoning")
        self._reader: Reading[None] | None = self._read()

    def feed(self, text: str) -> list[Event]:
        """More text; -> what it added."""
        self.source.push(text)
        return self._go()

    def finish(self) -> list[Event]:
        """No more text will come; -> the rest."""
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
        """Say something; neighbours of one kind become one event."""
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
            elif marker != " ":
                self.content.fresh = True

    def _think(self) -> Reading[str]:
        """Reasoning up to its end; -> the marker of a call that ended it, or a space if its own end did."""
        assert self.form.thinking is not None
        close = self.form.thinking.close.strip()
        ends = markers(close, *(self.blocks if self.ends_thinking else ()))
        self.reasoning.fresh = True
        yield from self.source.spaces()
        yield from self.source.word(self.opens)  # some say again what the prompt has said
        marker = yield from self.source.until(ends, self.reasoning.push)
        self.reasoning.drop_space()
        self.thinking = False
        if marker != close:
            return marker
        self.content.fresh = True
        space = yield from self.source.spaces()
        self.content.push(space)
        yield from self._start()
        return " "

    def _start(self) -> Reading[None]:
        """Where an answer begins: texts that are dropped there, and calls without an opening."""
        for word in self.start_drop:
            if (yield from self.source.word(word)):
                self.content.fresh = True
                return
        for block in self.bare:
            if block.open and (yield from self.source.sees(block.open.strip())):
                return  # it comes with its opening
        if self.bare:
            yield from self._block(self.bare, "")

    # ------------------------------------------------------------ calls

    def _block(self, blocks: list[Calls], marker: str) -> Reading[None]:
        source = self.source
        source.kept = [marker] if marker else []
        yield from source.spaces()
        seen = yield from source.peek(1)
        block = next((b for b in blocks if _fits(b, seen)), None) if seen else None
        if block is None:
            self._give_up()
            return
        if block.array:
            source.skip(1)
        more = True
        while more:
            call = _Call(self, block)
            done = yield from call.read()
            if not call.begun:
                self._give_up()
                return
            source.kept = None
            self.content.fresh = True
            more = done and (yield from self._another(block))
            if more:
                source.kept = []
        yield from self._close(block)

    def _another(self, block: Calls) -> Reading[bool]:
        """Does a further call follow in this block?"""
        if not (block.many or block.array):
            return False
        yield from self.source.spaces()
        seen = yield from self.source.peek(1)
        if seen and seen in ",;":
            self.source.skip(1)
            yield from self.source.spaces()
            seen = yield from self.source.peek(1)
        if block.array:
            return bool(seen) and seen != "]" and _begins(block.steps[0], seen)
        close = block.close.strip()
        if not seen or (close and (yield from self.source.sees(close))):
            return False
        return _begins(block.steps[0], seen)

    def _close(self, block: Calls) -> Reading[None]:
        if block.array:
            yield from self.source.spaces()
            yield from self.source.word("]")
        close = block.close.strip()
        space = yield from self.source.spaces()
        if not (close and (yield from self.source.word(close))):
            self.content.push(space)

    def _give_up(self) -> None:
        """What was kept is no call."""
        kept, self.source.kept = self.source.kept, None
        for part in kept or ():
            self.content.push(part)


class _Text:
    """Text of one kind. White space waits for what follows: around calls and reasoning it is left out."""

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


def _fits(block: Calls, seen: str) -> bool:
    return seen == "[" if block.array else _begins(block.steps[0], seen)


def _begins(step: Step, seen: str) -> bool:
    if isinstance(step, Lit):
        return seen == step.text.strip()[0]
    if isinstance(step, Object | Args | Loose):
        return seen == "{"
    if isinstance(step, Name | Python):
        return seen not in "[]{}\"'<,"
    return True


class _Call:
    """One call as it is read. It begins, for the reader of events, when its name is certain."""

    def __init__(self, parser: MessageParser, block: Calls) -> None:
        self.parser = parser
        self.source = parser.source
        self.block = block
        self.name: str | None = None
        self.id: str | None = None
        self.begun = False
        self.muted = False
        self.index = -1
        self.held: list[str] = []

    def read(self) -> Reading[bool]:
        """All steps; False: it ends before its description does."""
        for step in self.block.steps:
            if not (yield from self._step(step)):
                return False
        return self.begun

    def _step(self, step: Step) -> Reading[bool]:
        source = self.source
        if isinstance(step, Lit):
            yield from source.spaces()
            return (yield from source.word(step.text.strip())) or step.optional
        if isinstance(step, Skip):
            return bool((yield from source.until(markers(step.until), _ignore)))
        if isinstance(step, Name):
            return (yield from self._name(step))
        if isinstance(step, Id):
            return (yield from self._id(step))
        if isinstance(step, Args):
            yield from source.spaces()
            if (yield from source.peek()) != "{" or not self.begin():
                return False
            return (yield from source.json(self.say))
        if isinstance(step, Object):
            return (yield from self._object(step))
        if isinstance(step, Pairs):
            return (yield from self._pairs(step))
        return (yield from (self._python() if isinstance(step, Python) else self._loose(step)))

    # ------------------------------------------------------------ beginning, saying

    def begin(self) -> bool:
        """The name is certain: say it. False: it is no call."""
        if self.begun:
            return True
        tools = self.parser.tools or {}
        if not self.name or len(self.name) > MAX_NAME or (self.block.bare and self.name not in tools):
            return False
        self.begun = True
        most = self.parser.most
        self.muted = most is not None and self.parser.count >= most
        self.index = self.parser.count
        if not self.muted:
            self.parser.count += 1
            self.parser.emit("call", self.name, self.index, self.id)
            for part in self.held:
                self.parser.emit("arguments", part, self.index)
        self.held.clear()
        return True

    def say(self, text: str) -> None:
        """More of the arguments."""
        if not self.begun:
            self.held.append(text)
        elif not self.muted:
            self.parser.emit("arguments", text, self.index)

    # ------------------------------------------------------------ steps

    def _name(self, step: Name) -> Reading[bool]:
        parts: list[str] = []
        if step.keep:
            yield from self._upto(step.until, parts)
        elif not (yield from self.source.until(markers(*step.until), parts.append)):
            return False
        whole = "".join(parts).strip()
        found = re.fullmatch(step.pattern, whole) if len(whole) <= MAX_NAME else None
        if found is None:
            return False
        self.name = found[1]
        if step.is_id:
            self.id = whole
        return True

    def _upto(self, words: Sequence[str], parts: list[str]) -> Reading[None]:
        """Everything before the first of some texts, which stay."""
        first = re.compile("|".join(sorted({re.escape(w[0]) for w in words})))
        while True:
            parts.append((yield from self.source.span(first)))
            for word in words:
                if (yield from self.source.peek(len(word))) == word:
                    return
            seen = yield from self.source.peek()
            if not seen:
                return
            self.source.skip(1)
            parts.append(seen)

    def _id(self, step: Id) -> Reading[bool]:
        if (yield from self.source.word(step.open)):
            parts: list[str] = []
            if not (yield from self.source.until(markers(step.until), parts.append)):
                return False
            self.id = "".join(parts).strip()[:MAX_NAME]
        else:
            yield from self.source.word(step.until)
        return True

    def _object(self, step: Object) -> Reading[bool]:
        source = self.source
        yield from source.spaces()
        if not (yield from source.word("{")):
            return False
        given = False
        while True:
            yield from source.spaces()
            seen = yield from source.peek()
            if seen in (",", "}") and seen:
                source.skip(1)
                if seen == "}":
                    break
                continue
            if seen != '"':
                return self._broken(seen)
            key = yield from source.string()
            yield from source.spaces()
            if key is None or not (yield from source.word(":")):
                return False
            yield from source.spaces()
            if key in step.args and not given:
                given = True
                if self.name is not None and not self.begin():
                    return False
                if not (yield from self._arguments()):
                    return False
            elif key in step.name and self.name is None:
                self.name = yield from source.string()
                if self.block.bare and self.name not in (self.parser.tools or {}):
                    return False
            elif key in step.id and (yield from source.peek()) == '"':
                self.id = yield from source.string()
            elif not (yield from source.json(_ignore)):
                return False
            if given and not self.begin() and self.name is not None:
                return False
        return self._complete(given)

    def _broken(self, seen: str) -> bool:
        """The object ends without its bracket, where something else begins: a call that has begun stays one."""
        return self.begun and bool(seen)

    def _complete(self, given: bool) -> bool:
        if not self.begin():
            return False
        if not given:
            self.say("{}")
        return True

    def _arguments(self) -> Reading[bool]:
        """An object; or one written into a string; or null for none."""
        seen = yield from self.source.peek()
        if seen == '"':
            value = yield from self.source.string()
            self.say(value or "{}")
            return value is not None
        if seen == "{":
            return (yield from self.source.json(self.say))
        parts: list[str] = []
        done = yield from self.source.json(parts.append)
        written = "".join(parts)
        self.say("{}" if written == "null" else written)
        return done

    def _pairs(self, step: Pairs) -> Reading[bool]:
        source = self.source
        if not self.begin():
            return False
        schema = (self.parser.tools or {}).get(self.name or "")
        first, *rest = step.mid.split()
        framed = step.close.startswith("\n")
        self.say("{")
        count = 0
        while True:
            yield from source.spaces()
            if not (yield from source.word(step.open.strip())):
                break
            parts: list[str] = []
            if not (yield from source.until(markers(first), parts.append)):
                return False
            for word in rest:
                yield from source.spaces()
                if not (yield from source.word(word)):
                    return False
            key = "".join(parts).strip()
            self.say((", " if count else "") + values.text(key) + ": ")
            count += 1
            if framed:
                yield from source.word("\n")
            value = _Value(self, values.types_of(schema, key), framed)
            if not (yield from source.until(markers(step.close.strip()), value.push)):
                value.cut()
                return False
            value.end()
        self.say("}")
        return True

    def _python(self) -> Reading[bool]:
        source = self.source
        self.name = yield from source.span(_NO_NAME)
        if not (yield from source.word("(")) or not self.begin():
            return False
        schema = (self.parser.tools or {}).get(self.name or "")
        known = list(schema.get("properties") or ()) if isinstance(schema, Mapping) else []
        self.say("{")
        count = 0
        while True:
            yield from source.spaces()
            seen = yield from source.peek()
            if seen == ",":
                source.skip(1)
                continue
            if seen in ("", ")", "]", "}"):
                break
            parts: list[str] = []
            done = yield from source.python(parts.append)
            if not done:
                return False
            key, written = _keyword("".join(parts))
            if not key:
                key = known[count] if count < len(known) else f"argument_{count}"
            self.say((", " if count else "") + values.text(key) + ": " + values.from_python(written))
            count += 1
        self.say("}")
        return (yield from source.word(")"))

    def _loose(self, step: Loose) -> Reading[bool]:
        source = self.source
        if (yield from source.peek()) != "{" or not self.begin():
            return False
        marks = markers(step.quote, "{", "}", "[", "]")
        depth = 0
        while True:
            parts: list[str] = []
            found = yield from source.until(marks, parts.append)
            self.say(values.loose_part("".join(parts)))
            if not found:
                return False
            if found == step.quote:
                self.say('"')
                ended = yield from source.until(markers(step.quote), lambda piece: self.say(values.escaped(piece)))
                if not ended:
                    return False
                self.say('"')
                continue
            self.say(found)
            depth += 1 if found in "{[" else -1
            if depth == 0:
                return True


_KEYWORD = re.compile(r"\s*([A-Za-z_]\w*)\s*=(?!=)(.*)", re.DOTALL)


def _keyword(written: str) -> tuple[str, str]:
    found = _KEYWORD.fullmatch(written)
    return ("", written) if found is None else (found[1], found[2])


class _Value:
    """A parameter's text: strings go on as they come, the rest when it is whole. `framed`: a line end before its
    closing mark belongs to the mark."""

    def __init__(self, call: _Call, types: frozenset[str], framed: bool) -> None:
        self.call = call
        self.types = types
        self.framed = framed
        self.streams = types == {"string"}
        self.parts: list[str] = []
        self.tail = ""
        if self.streams:
            call.say('"')

    def push(self, piece: str) -> None:
        """More of it."""
        if not self.streams:
            self.parts.append(piece)
            return
        piece = self.tail + piece
        self.tail = "\n" if self.framed and piece.endswith("\n") else ""
        self.call.say(values.escaped(piece[: len(piece) - len(self.tail)]))

    def end(self) -> None:
        """It is whole."""
        if self.streams:
            self.call.say('"')
            return
        found = "".join(self.parts)
        if self.framed:
            found = found.removesuffix("\n")
        self.call.say(values.by_type(found, self.types))

    def cut(self) -> None:
        """The text ended inside of it."""
        if not self.streams:
            self.call.say(values.escaped("".join(self.parts)))


def _ignore(text: str) -> None:
    pass


def parse_message(form: MessageFormat, text: str, **options: Any) -> Message:
    """A whole turn at once."""
    parser = MessageParser(form, **options)
    message = Message()
    message.add(parser.feed(text))
    message.add(parser.finish())
    return message
