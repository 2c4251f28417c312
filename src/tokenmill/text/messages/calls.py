"""Reading one tool call, step by step. Owns: each step of a description, and when a call is certain enough to be
reported.

Must not know: what surrounds a call, any format by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tokenmill.text.messages import values
from tokenmill.text.messages.arriving_text import ArrivingText, Reading, markers
from tokenmill.text.messages.describe import Args, Calls, Id, Lit, Loose, Name, Object, Pairs, Python, Skip, Step
from tokenmill.text.messages.message import Kind

_NO_NAME = re.compile(r"[^\w.\-]")
MAX_NAME = 256


class CallingTurn(Protocol):
    """What a call needs from the turn that it belongs to."""

    source: ArrivingText
    tools: Mapping[str, Any] | None
    most: int | None
    count: int
    thinking: bool

    def emit(self, kind: Kind, text: str, index: int = -1, call_id: str | None = None) -> None: ...


def fits(block: Calls, seen: str) -> bool:
    """Can a block continue with this character?"""
    return seen == "[" if block.array else begins(block.steps[0], seen)


def begins(step: Step, seen: str) -> bool:
    """Can a step begin with this character?"""
    if isinstance(step, Lit):
        return seen == step.text.strip()[0]
    if isinstance(step, Object) and step.opened:
        return seen == '"'
    if isinstance(step, Object | Args | Loose):
        return seen == "{"
    if isinstance(step, Name | Python):
        return seen not in "[]{}\"'<,"
    return True


class CallReader:
    """One call while it is read. Its first event comes when its name is certain."""

    def __init__(self, parser: CallingTurn, block: Calls) -> None:
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
            if (yield from source.peek()) != "{":
                return step.anything and (yield from self._anything())
            return self.begin() and (yield from source.json(self.say))
        if isinstance(step, Object):
            return (yield from self._object(step))
        if isinstance(step, Pairs):
            return (yield from self._pairs(step))
        return (yield from (self._python() if isinstance(step, Python) else self._loose(step)))

    # ------------------------------------------------------------ beginning, saying

    def begin(self) -> bool:
        """The name is certain: report it. False: this is not a call."""
        if self.begun:
            return True
        if not self.name or len(self.name) > MAX_NAME:
            return False
        if (self.block.doubtful or self.parser.thinking) and not self._known():
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

    def _known(self) -> bool:
        return self.name in (self.parser.tools or {})

    def say(self, text: str) -> None:
        """Report more of the arguments."""
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
        """Read everything before the first of some texts, which are not passed."""
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
        if not step.opened and not (yield from source.word("{")):
            return False
        given, own = False, (*step.name, *step.args, *step.id, "type")
        while True:
            yield from source.spaces()
            seen = yield from source.peek()
            if seen in (",", "}"):
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
            if step.opened and not self.begun and key not in own:
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
                if self.block.doubtful and not self._known():
                    return False
            elif key in step.id and (yield from source.peek()) == '"':
                self.id = yield from source.string()
            elif not (yield from source.json(_ignore)):
                return False
            if given and not self.begin() and self.name is not None:
                return False
        return (given or not step.opened) and self._complete(given)

    def _broken(self, seen: str) -> bool:
        """Does the object end without its bracket, because something else begins? A call that has begun stays a
        call."""
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

    def _anything(self) -> Reading[bool]:
        """Arguments that are no object, as they stand."""
        if not self._known() or not self.begin():
            return False
        close = self.block.close
        if (yield from self.source.sees(close)) or not (yield from self.source.peek()):
            self.say("{}")
            return True
        return bool((yield from self.source.until(markers(close), self.say)))

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
            text = bool(step.text_mid) and (yield from self._words(step.text_mid.split()[1:]))
            if not text and not (yield from self._words(rest)):
                return False
            key = "".join(parts).strip()
            types = values.types_of(schema, key)
            if step.text_mid:
                types = frozenset(("string",)) if text else types - {"string"}
            self.say((", " if count else "") + values.text(key) + ": ")
            count += 1
            if framed:
                yield from source.word("\n")
            value = _Value(self, types, framed)
            if not (yield from source.until(markers(step.close.strip()), value.push)):
                value.cut()
                return False
            value.end()
        self.say("}")
        return True

    def _words(self, words: Sequence[str]) -> Reading[bool]:
        """Pass these words, whatever space is before them."""
        for word in words:
            yield from self.source.spaces()
            if not (yield from self.source.word(word)):
                return False
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
    """A parameter's text. Strings are passed on as they come, other values when they are complete. `framed`: a line end
    before the closing mark belongs to the mark."""

    def __init__(self, call: CallReader, types: frozenset[str], framed: bool) -> None:
        self.call = call
        self.types = types
        self.framed = framed
        self.streams = types == {"string"}
        self.parts: list[str] = []
        self.tail = ""
        if self.streams:
            call.say('"')

    def push(self, piece: str) -> None:
        """Append text."""
        if not self.streams:
            self.parts.append(piece)
            return
        piece = self.tail + piece
        self.tail = "\n" if self.framed and piece.endswith("\n") else ""
        self.call.say(values.escaped(piece[: len(piece) - len(self.tail)]))

    def end(self) -> None:
        """The value is complete."""
        if self.streams:
            self.call.say('"')
            return
        found = "".join(self.parts)
        if self.framed:
            found = found.removesuffix("\n")
        self.call.say(values.by_type(found, self.types))

    def cut(self) -> None:
        """The text ended inside the value."""
        if not self.streams:
            self.call.say(values.escaped("".join(self.parts)))


def _ignore(text: str) -> None:
    pass
