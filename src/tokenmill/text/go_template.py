"""Go templates of Ollama's models as Jinja chat templates. Owns: translating the part of Go's template language that
has an exact counterpart in Jinja, and refusing anything else by name.

A template that names .Messages is rendered once. An older one, made of .System, .Prompt and .Response, is rendered once
per turn; in the last turn, what follows .Response is left out. Must not know: tokens, models, who asks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from tokenmill.core.errors import UserError

MOST_CHARS = 1 << 20
MOST_DEPTH = 32
MOST_WORDS = 1000
"""Of one action."""
OWN = "leave TEMPLATE out, and the model's own chat template is used"
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_WORD = re.compile(
    r"""\s*(?:(?P<string>"(?:[^"\\\n]|\\.)*"|`[^`]*`)|(?P<number>-?\d+(?![\w.]))|(?P<name>\$?\.?[A-Za-z_][\w.]*|\$\w*|\.)"""
    r"""|(?P<mark>:=|[()|,=]))"""
)
_SPACE = " \t\r\n"
TURN = {".System": "system", ".Prompt": "prompt", ".Response": "response"}
WHOLE = {".System": "mill.system", "$.System": "mill.system", ".Response": "''", "$.Response": "''"}
MESSAGE = {".Role": "role", ".Content": "content"}
_GATHER = (
    "{%- set mill = namespace(messages=[], system=none) -%}"
    "{%- for message in messages -%}{%- set words = message.content or '' -%}"
    "{%- if message.role == 'system' -%}"
    "{%- set mill.system = words if mill.system is none else mill.system ~ '\\n\\n' ~ words -%}{%- endif -%}"
    "{%- if mill.messages and mill.messages[-1].role == message.role and message.role != 'tool' -%}"
    "{%- set mill.messages = mill.messages[:-1]"
    " + [{'role': message.role, 'content': mill.messages[-1].content ~ '\\n\\n' ~ words}] -%}"
    "{%- else -%}{%- set mill.messages = mill.messages + [{'role': message.role, 'content': words}] -%}{%- endif -%}"
    "{%- endfor -%}{%- set mill.system = mill.system or '' -%}"
)
"""Neighbouring messages of the same role become one, as in Ollama."""
_TURNS = (
    "{%- set now = namespace(system='', prompt='', response='') -%}"
    "{%- for message in mill.messages -%}"
    "{%- if message.role == 'system' and (now.prompt or now.response) or message.role == 'user' and now.response -%}"
    "{{ turn(now.system, now.prompt, now.response) }}"
    "{%- set now.system = '' -%}{%- set now.prompt = '' -%}{%- set now.response = '' -%}{%- endif -%}"
    "{%- if message.role == 'system' -%}{%- set now.system = message.content -%}"
    "{%- elif message.role == 'user' -%}{%- set now.prompt = message.content -%}"
    "{%- elif message.role == 'assistant' -%}{%- set now.response = message.content -%}"
    "{%- else -%}{{ raise_exception('this template has no place for messages of role ' ~ message.role) }}{%- endif -%}"
    "{%- endfor -%}{{ last(now.system, now.prompt, now.response) }}"
)


class TemplateError(UserError):
    """A Go template that cannot be expressed in Jinja."""


@dataclass(slots=True)
class GoNode:
    """A text, a print of a value, or an if or range with its head, its body and the body of its `else`."""

    kind: str
    head: str = ""
    words: list[str] = field(default_factory=list)
    inside: list[GoNode] = field(default_factory=list)
    other: list[GoNode] = field(default_factory=list)
    line: int = 0


def to_jinja(template: str) -> str:
    """The Jinja template that makes the same prompts; TemplateError names what has no counterpart."""
    if len(template) > MOST_CHARS:
        raise TemplateError(f"the template has more than {MOST_CHARS} characters.")
    nodes, rest = _parse(list(_pieces(template.replace("\r\n", "\n"))), 0, 0)
    assert not rest
    names = set(_names(nodes))
    if names & {".Messages", "$.Messages"}:
        return _GATHER + _Writer(whole=True).write(nodes)
    if ".Response" not in names:
        nodes.append(GoNode("print", words=[".Response"]))
    writer = _Writer(whole=False)
    full, last = writer.write(nodes), writer.write(_until_response(nodes)[0])
    macro = "{{%- macro {}(system, prompt, response) -%}}{}{{%- endmacro -%}}"
    return macro.format("turn", full) + macro.format("last", last) + _GATHER + _TURNS


def _pieces(template: str) -> Iterator[GoNode]:
    """Actions, and the texts between them, trimmed as the actions ask."""
    at, line, trim = 0, 1, False
    while (begin := template.find("{{", at)) >= 0:
        end = template.find("}}", begin + 2)
        line += template.count("\n", at, begin)
        if end < 0:
            raise _wrong(line, "an action has no }} at its end")
        body = template[begin + 2 : end]
        if "{{" in body:
            raise _wrong(line, "an action begins within an action")
        before, after = re.match(r"-[ \t\r\n]", body), re.search(r"[ \t\r\n]-\Z", body)
        yield from _between(template[at:begin], trim, before is not None)
        body = body[before is not None : len(body) - (after is not None)].strip(_SPACE)
        if not _COMMENT.fullmatch(body):
            yield _action(body, line)
        line += template.count("\n", begin, end)
        at, trim = end + 2, after is not None
    yield from _between(template[at:], trim, False)


def _between(text: str, left: bool, right: bool) -> Iterator[GoNode]:
    text = text.lstrip(_SPACE) if left else text
    text = text.rstrip(_SPACE) if right else text
    if text:
        yield GoNode("text", text)


def _action(body: str, line: int) -> GoNode:
    words = _words(body, line)
    if not words:
        raise _wrong(line, "an action is empty")
    first = words[0]
    if first in ("if", "range", "else", "end"):
        return GoNode(first, words=words[1:], line=line)
    if first in ("with", "define", "template", "block", "break", "continue"):
        raise _wrong(line, f"`{first}` has no counterpart here")
    if first.startswith("$") and words[1:2] in ([":="], ["="]):
        return GoNode("set", first, words[2:], line=line)
    return GoNode("print", words=words, line=line)


def _words(body: str, line: int) -> list[str]:
    found, at = [], 0
    while at < len(body):
        match = _WORD.match(body, at)
        if match is None:
            raise _wrong(line, f"`{body[at : at + 40].strip()}` cannot be read")
        found.append(match[0].strip())
        at = match.end()
        if len(found) > MOST_WORDS:
            raise _wrong(line, f"an action has more than {MOST_WORDS} words")
    return found


def _parse(pieces: list[GoNode], at: int, depth: int) -> tuple[list[GoNode], int]:
    """Parse pieces from `at` on; -> (the tree, 0 if all is read, else the place of the `else` or `end`)."""
    if depth > MOST_DEPTH:
        raise TemplateError(f"the template nests more than {MOST_DEPTH} levels deep: {OWN}.")
    found: list[GoNode] = []
    while at < len(pieces):
        node = pieces[at]
        if node.kind in ("else", "end"):
            if depth:
                return found, at
            raise _wrong(node.line, f"`{node.kind}` belongs to nothing")
        at += 1
        if node.kind in ("if", "range"):
            at = _branch(node, pieces, at, depth)
        found.append(node)
    if depth:
        raise TemplateError(f"the template has an if or range without its end: {OWN}.")
    return found, 0


def _branch(node: GoNode, pieces: list[GoNode], at: int, depth: int) -> int:
    """Parse a node's body; -> the place behind its end."""
    node.inside, at = _parse(pieces, at, depth + 1)
    closing = pieces[at]
    if closing.kind == "end":
        return at + 1
    if closing.words[:1] == ["if"]:  # else if: both share one end
        inner = GoNode("if", words=closing.words[1:], line=closing.line)
        at = _branch(inner, pieces, at + 1, depth + 1)
        node.other = [inner]
        return at
    if closing.words:
        raise _wrong(closing.line, f"`else {closing.words[0]}` has no counterpart here")
    node.other, at = _parse(pieces, at + 1, depth + 1)
    if pieces[at].kind != "end":
        raise _wrong(pieces[at].line, "a second `else`")
    return at + 1


def _names(nodes: list[GoNode]) -> Iterator[str]:
    for node in nodes:
        yield from node.words
        yield from _names(node.inside)
        yield from _names(node.other)


def _until_response(nodes: list[GoNode]) -> tuple[list[GoNode], bool]:
    """-> (the nodes up to and including the one that prints .Response, was there one?)."""
    kept: list[GoNode] = []
    for node in nodes:
        if node.kind == "print" and ".Response" in node.words:
            return [*kept, node], True
        inside, found = _until_response(node.inside)
        if found and node.other:
            raise _wrong(node.line, "an `if` around .Response has an `else`")
        other, also = _until_response(node.other)
        if found or also:
            return [*kept, GoNode(node.kind, node.head, node.words, inside, other, node.line)], True
        kept.append(node)
    return kept, False


class _Writer:
    """Writes nodes as Jinja. `whole`: the template renders all messages; otherwise one turn."""

    def __init__(self, *, whole: bool) -> None:
        self.whole = whole
        self.inside = False
        self.item = ""
        self.index = ""
        self.lasts: set[str] = set()
        """Variables that say whether this message is the last one."""

    def write(self, nodes: list[GoNode]) -> str:
        return "".join(self._node(node) for node in nodes)

    def _node(self, node: GoNode) -> str:
        if node.kind == "text":
            return f"{{{{ {literal(node.head)} }}}}"
        if node.kind == "print":
            return f"{{{{ {self._printed(node)} }}}}"
        if node.kind == "if":
            return self._if(node)
        if node.kind == "range":
            return self._range(node)
        return self._set(node)

    def _printed(self, node: GoNode) -> str:
        if len(node.words) != 1:
            raise _wrong(node.line, f"`{' '.join(node.words)[:60]}` has no counterpart here")
        return self._text(node.words[0], node.line)

    def _text(self, word: str, line: int) -> str:
        """A string: a field or a quoted text."""
        if word[0] in '"`':
            return literal(_unquoted(word, line))
        if self.inside and word in MESSAGE:
            return f"message.{MESSAGE[word]}"
        if self.inside and self.item and word in {self.item + name for name in MESSAGE}:
            return f"message.{MESSAGE[word.removeprefix(self.item)]}"
        known = WHOLE if self.whole else TURN
        if word in known and (not self.inside or word.startswith("$")):
            return known[word]
        if not self.whole and word.removeprefix("$") in TURN:
            return TURN[word.removeprefix("$")]
        raise _wrong(line, f"`{word[:60]}` has no counterpart here")

    def _if(self, node: GoNode) -> str:
        if (
            self.whole
            and node.words in ([".Messages"], ["$.Messages"])
            and not (self.inside and node.words[0][0] == ".")
        ):
            return self.write(node.inside)  # there is always one
        other = f"{{%- else -%}}{self.write(node.other)}" if node.other else ""
        return f"{{%- if {self._condition(node)} -%}}{self.write(node.inside)}{other}{{%- endif -%}}"

    def _condition(self, node: GoNode) -> str:
        found, rest = self._operand(node.words, node.line, depth=0, alone=True)
        if rest:
            raise _wrong(node.line, f"`{' '.join(node.words)[:60]}` has no counterpart here")
        return found

    def _operand(self, words: list[str], line: int, depth: int, *, alone: bool) -> tuple[str, list[str]]:
        """Read one condition from the front of the words. alone: a function needs no brackets."""
        if not words or depth > MOST_DEPTH:
            raise _wrong(line, "a condition is not complete")
        word, rest = words[0], words[1:]
        if word == "(":
            found, rest = self._operand(rest, line, depth + 1, alone=True)
            if rest[:1] != [")"]:
                raise _wrong(line, "a bracket is not closed")
            return f"({found})", rest[1:]
        if word in ("eq", "ne", "and", "or", "not") and alone:
            return self._call(word, rest, line, depth)
        if word in self.lasts:
            return "loop.last", rest
        if self.whole and word == "$.Messages":
            return "true", rest
        return self._text(word, line), rest

    def _call(self, name: str, words: list[str], line: int, depth: int) -> tuple[str, list[str]]:
        if name in ("eq", "ne"):
            if last := self._last(words):
                return (last if name == "eq" else f"not {last}"), words[words.index(")", words.index(")") + 1) + 2 :]
            texts = []
            while words and words[0] != ")":
                texts.append(self._text(words[0], line))
                words = words[1:]
            if len(texts) < 2 or (name == "ne" and len(texts) > 2):
                raise _wrong(line, f"`{name}` needs two values")
            mark = "==" if name == "eq" else "!="
            return "(" + " or ".join(f"{texts[0]} {mark} {each}" for each in texts[1:]) + ")", words
        parts = []
        while words and words[0] != ")":
            part, words = self._operand(words, line, depth + 1, alone=False)
            parts.append(part)
        if not parts or (name == "not" and len(parts) > 1):
            raise _wrong(line, f"`{name}` has not the right number of values")
        return (f"(not {parts[0]})" if name == "not" else "(" + f" {name} ".join(parts) + ")"), words

    def _last(self, words: list[str]) -> str:
        """`(len (slice $.Messages $i)) 1`, by which templates ask for the last message."""
        wanted = ["(", "len", "(", "slice", "$.Messages", self.index, ")", ")", "1"]
        return "loop.last" if self.index and words[: len(wanted)] == wanted else ""

    def _range(self, node: GoNode) -> str:
        words = node.words
        item, index = "", ""
        if ":=" in words:
            at = words.index(":=")
            names = [word for word in words[:at] if word != ","]
            words = words[at + 1 :]
            if not 1 <= len(names) <= 2 or not all(re.fullmatch(r"\$\w+", name) for name in names):
                raise _wrong(node.line, "the variables of a `range` cannot be read")
            index, item = (names[0], names[1]) if len(names) == 2 else ("", names[0])
        if not self.whole or self.inside or words not in ([".Messages"], ["$.Messages"]):
            raise _wrong(node.line, f"`range {' '.join(words)[:60]}` has no counterpart here")
        if node.other:
            raise _wrong(node.line, "a `range` with `else` has no counterpart here")
        self.inside, self.item, self.index = True, item, index
        text = self.write(node.inside)
        self.inside, self.item, self.index = False, "", ""
        self.lasts.clear()
        return f"{{%- for message in mill.messages -%}}{text}{{%- endfor -%}}"

    def _set(self, node: GoNode) -> str:
        if self.inside and node.words[:1] == ["eq"] and self._last(node.words[1:]) and len(node.words) == 10:
            self.lasts.add(node.head)
            return ""
        raise _wrong(node.line, f"the variable {node.head[:40]} has no counterpart here")


def literal(text: str) -> str:
    """A text as Jinja writes it."""
    return json.dumps(text, ensure_ascii=False)


def _unquoted(word: str, line: int) -> str:
    if word[0] == "`":
        return word[1:-1]
    try:
        found: str = json.loads(word)
    except ValueError:
        raise _wrong(line, f"the text {word[:40]} cannot be read") from None
    return found


def _wrong(line: int, what: str) -> TemplateError:
    return TemplateError(f"TEMPLATE, line {line}: {' '.join(what.split())}; {OWN}.", param="template")
