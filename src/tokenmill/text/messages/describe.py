"""The small language that describes message formats. Owns: what a description can say.

A description holds its literals as a model writes them, including white space; readers pass any white space around
them. One description serves the parser, the grammar that holds a model to the format, and the writer for tests.
"""

from __future__ import annotations

from dataclasses import dataclass

# ---------------------------------------------------------------- what one call is made of


@dataclass(frozen=True, slots=True)
class Lit:
    """A fixed text. `optional`: models may leave it out."""

    text: str
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Skip:
    """Anything up to and including `until`; `written`: the text that models usually write there."""

    until: str
    written: str = ""


@dataclass(frozen=True, slots=True)
class Name:
    """The function's name, up to one of `until`, which is passed unless `keep`.

    `pattern` finds the name (group 1) in the text read. `is_id`: the whole text is the call's id. `written`: how it is
    spelled, with {name} and {index}."""

    until: tuple[str, ...]
    keep: bool = False
    pattern: str = "(.+)"
    is_id: bool = False
    written: str = "{name}"


@dataclass(frozen=True, slots=True)
class Id:
    """An optional call id between two texts; the second text is left for the next step."""

    open: str
    until: str


@dataclass(frozen=True, slots=True)
class Args:
    """The arguments, as JSON. `anything`: a known function's may be any text up to the call's end, or nothing."""

    anything: bool = False


@dataclass(frozen=True, slots=True)
class Object:
    """A JSON object with the name and the arguments (and an id), each under one of these keys.

    `opened`: its first bracket is the block's `open`. What has no arguments, or
    other keys before them, is no call then."""

    name: tuple[str, ...] = ("name",)
    args: tuple[str, ...] = ("arguments", "parameters")
    id: tuple[str, ...] = ("id", "tool_call_id")
    opened: bool = False


@dataclass(frozen=True, slots=True)
class Pairs:
    """Arguments one by one: `open` key `mid` value `close`. Values are text, or JSON if the tool's schema says so.

    `text_mid`: what stands in place of `mid` before a text, where models say themselves what is one."""

    open: str
    mid: str
    close: str
    text_mid: str = ""


@dataclass(frozen=True, slots=True)
class Python:
    """`name(key=value, ...)` with Python's literals."""


@dataclass(frozen=True, slots=True)
class Loose:
    """`{key:value,...}`: JSON with bare keys and `quote` around strings."""

    quote: str


Step = Lit | Skip | Name | Id | Args | Object | Pairs | Python | Loose


@dataclass(frozen=True, slots=True)
class Calls:
    """A block of calls: `open`, calls made of these steps, `close`. `array`: in brackets, with commas between.

    `many`: a block may hold several calls, with `between` written between them. `bare`: a block may begin the answer
    without `open`. `known`: it counts only if the function is known (None: if `bare`); False: nothing else looks so.
    `ends`: `close` is a token that ends the turn."""

    open: str
    steps: tuple[Step, ...]
    close: str = ""
    array: bool = False
    many: bool = False
    between: str = "\n"
    bare: bool = False
    known: bool | None = None
    ends: bool = False

    @property
    def doubtful(self) -> bool:
        """May a text that is no call look so?"""
        return self.bare if self.known is None else self.known


@dataclass(frozen=True, slots=True)
class Head:
    """A text that means nothing, whatever stands between its two ends."""

    open: str
    close: str


@dataclass(frozen=True, slots=True)
class Thinking:
    """Reasoning between `open` and `close`. `lead` is written before whatever follows, `answer` before a text.

    `anywhere`: reasoning may come again later. `calls_end`: a call of a known function ends it, too (calls have tokens
    of their own as markers). `drop`: texts around it that mean nothing."""

    open: str
    close: str
    lead: str = "\n\n"
    answer: str = ""
    anywhere: bool = False
    calls_end: bool = False
    drop: tuple[str | Head, ...] = ()


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family writes calls. Blocks are tried in order; the first is the one that grammars and writers use.

    `drop`: texts that mean nothing; `start_drop`: the same at the answer's beginning. `glue` is written between an
    answer's text (or the prompt) and a block, `between` blocks when a block holds one call. `ends_thinking`: models
    call within reasoning now and then, which ends it."""

    name: str
    blocks: tuple[Calls, ...]
    drop: tuple[str | Head, ...] = ()
    start_drop: tuple[str, ...] = ()
    glue: str = "\n"
    between: str = "\n"
    ends_thinking: bool = False


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """What an assistant's turn can hold. None: the format has no reasoning, or no calls."""

    thinking: Thinking | None = None
    calls: CallFormat | None = None

    def markers(self) -> tuple[str, ...]:
        """All literals that must be visible in the text so that this format can be read."""
        found: list[str] = []
        if self.thinking is not None:
            found += [
                self.thinking.open,
                self.thinking.close,
                self.thinking.lead,
                self.thinking.answer,
                *_ends(self.thinking.drop),
            ]
        if self.calls is not None:
            found += [*_ends(self.calls.drop), *self.calls.start_drop]
            for block in self.calls.blocks:
                found += [block.open, block.close]
                for step in block.steps:
                    found += _literals(step)
        return tuple(dict.fromkeys(t for t in found if t.strip()))


def _ends(dropped: tuple[str | Head, ...]) -> list[str]:
    return [text for d in dropped for text in ((d.open, d.close) if isinstance(d, Head) else (d,))]


def _literals(step: Step) -> list[str]:
    if isinstance(step, Lit):
        return [step.text]
    if isinstance(step, Skip):
        return [step.until]
    if isinstance(step, Name):
        return list(step.until)
    if isinstance(step, Id):
        return [step.open, step.until]
    if isinstance(step, Pairs):
        return [step.open, step.mid, step.close, step.text_mid]
    return [step.quote] if isinstance(step, Loose) else []
