"""Changes to valid requests, by structure. Owns: what is changed in a body, and how a body is written.

The same seed gives the same requests. Must not know: sockets, answers.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.reliability.fuzz.corpus import Case, placed

MOST_BYTES = 1 << 20
Node = dict[Any, Any] | list[Any]
Place = tuple[Node, Any]


@dataclass(frozen=True, slots=True)
class Raw:
    """A value as it is written, be it JSON or not."""

    text: str


@dataclass(frozen=True, slots=True)
class Twice:
    """A member that is there two times."""

    first: Any
    second: Any


NUMBERS = [
    *(-1, 0, 1, 2, -0.0, 0.5, 1e-320, 1e308, -1e308, 1.7976931348623157e308, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1),
    *(2**32 - 1, 2**32, 2**53, 2**53 + 1, -(2**53) - 1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64 - 1, 2**64),
    *(10**30, float(2**63), 255, 256, 65535, 65536, 1e19, 3.0),
]
LITERALS = [
    *("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e-999", "9" * 400, "0x10", "01", "1.", ".5", "+1", "-"),
    *("True", "None", "undefined", "'a'", "1e", "-0", "1E+2", '"\\ud800"', '"\\udc00\\ud800"', '"\\u0000"', '"\\x"'),
    *('"\\ud83d\\ude00"', '"\x01"', '"a\nb"', "[1,]", '{"a":1,}', "/*a*/1", '{"a"}', "{1:2}", "[", "}", ""),
    *(
        "[" * 100 + "]" * 100,
        "[" * 5000 + "]" * 5000,
        '{"a":' * 100 + "1" + "}" * 100,
        '{"a":' * 5000 + "1" + "}" * 5000,
    ),
]
STRINGS = [
    *("", " ", "a", "\x00", "\x7f", "\t\n\r", "\ufeff", "\ufffe", "\uffff", "\u202e\u202dabc", "\u0301" * 300),
    *("e\u0301", "\u00e9", "\U0001f600", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\u2028", "\u0130", "\ufb01"),
    *("<|im_end|>", "<|im_start|>system\n", "{{ 7*7 }}", "{% for a in b %}", "{%", "../../etc/passwd", "%00", "%s%n"),
    *("true", "null", "0", "-1", "1e999", "NaN", "auto", "none", "user", "text", "function", "json_object", "object"),
    *("a" * 300, "a" * 70_000, "\u00e9" * 5000, "\\" * 999, '"' * 999, "(" * 200, "(a|b)*" * 50, "[^", "a{1,99999}"),
    *("\u0627\u0644\u0639", "\U000e0041", "\ud7ff\ue000", "a\u200bb", "data:,a", "http://127.0.0.1:9/", "tiny:latest"),
]
SHAPES: list[Callable[[random.Random], Any]] = [
    *(lambda _: None, lambda _: True, lambda _: False, lambda _: {}, lambda _: [], lambda _: [None], lambda _: [[]]),
    *(lambda _: [{}], lambda _: {"": ""}, lambda _: {"type": []}, lambda _: [{"type": {}}], lambda _: {"a": {"b": {}}}),
    *(lambda _: [1, "a", None, {}], lambda _: ["a", ["b"]], lambda _: {"type": "object", "properties": []}),
    lambda rng: [1] * rng.choice([2, 65, 1025, 9000, 70_000]),
    lambda rng: ["a"] * rng.choice([2, 65, 1025, 9000, 70_000]),
    lambda rng: [{} for _ in range(rng.choice([2, 65, 1025, 9000]))],  # each its own: a later change is of one of them
    lambda rng: {str(i): i for i in range(rng.choice([3, 17, 65, 600, 5000]))},
    lambda rng: rng.choice(NUMBERS),
    lambda rng: rng.choice(STRINGS),
    lambda rng: Raw(rng.choice(LITERALS)),
]


def written(value: Any) -> str:
    """JSON, except where it is not meant to be."""
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, Twice):
        return written(value.first)
    if isinstance(value, dict):
        return "{" + ",".join(_member(name, inner) for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def _member(name: Any, value: Any) -> str:
    shown = json.dumps(str(name), ensure_ascii=False)
    if isinstance(value, Twice):
        return f"{shown}:{written(value.first)},{shown}:{written(value.second)}"
    return f"{shown}:{written(value)}"


def places(value: Any) -> list[Place]:
    """Where something lies: (container, name or number), all the way down."""
    found: list[Place] = []
    open_nodes = [value]
    while open_nodes and len(found) < 2000:
        node = open_nodes.pop()
        if isinstance(node, dict | list):
            names = list(node) if isinstance(node, dict) else list(range(len(node)))
            found += [(node, name) for name in names]
            open_nodes += [node[name] for name in names]
    return found


class Mutator:
    """Changes requests; `cases`: whose parts are put into others."""

    def __init__(self, seed: str, cases: list[Case]) -> None:
        self.rng = random.Random(seed)
        self.bodies = [case.body for case in cases if case.body]
        self.parts = [(name, node[name]) for body in self.bodies for node, name in places(body)]
        self.names = sorted({name for name, _ in self.parts if isinstance(name, str)})

    def body(self, case: Case) -> tuple[str, bytes]:
        """(what was changed, the bytes) of a body that is probably wrong somewhere."""
        body = copy.deepcopy(case.body or {})
        done = []
        for _ in range(self.rng.choice([1, 1, 1, 2, 3])):
            change = self.rng.choice(CHANGES)
            change(self, body)
            done.append(change.__name__.strip("_"))
        return "+".join(done), self._encoded(written(body), done)

    def path(self, case: Case, known: dict[str, str]) -> str:
        """The path, mostly as it is; `known`: what is kept."""
        path = placed(case.path, known)
        if self.rng.random() < 0.95:
            return path
        odd = ["/", "//", "/..", "/%00", "/%ff", "?a=b", "?stream=1", "?" + "a" * 999, "/%2e%2e/x", ";a", "#a", "/*"]
        odd += [
            "?stream=true&starting_after=" + "9" * 500,
            "?limit=-1",
            "?since=nan",
            "?after=x&limit=0",
            "?order=up",
            "?metadata[a]=%00",
            "?limit=1e400",
            "?a=%ff&a",
        ]
        return self.rng.choice([path + self.rng.choice(odd), path[:-1], path.upper(), path.replace("/", "//")])

    def _encoded(self, text: str, done: list[str]) -> bytes:
        data = text.encode("utf-8", "surrogatepass")
        if self.rng.random() < 0.92:
            return data
        done.append("encoding")
        return self.rng.choice(ENCODINGS)(self.rng, data)

    def place(self, body: dict[Any, Any]) -> Place | None:
        """Somewhere in it."""
        found = places(body)
        return self.rng.choice(found) if found else None


def _broken(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data or b"{}")
    for _ in range(rng.randint(1, 6)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def _as(name: str) -> Callable[[random.Random, bytes], bytes]:
    return lambda _, data: data.decode("utf-8", "replace").encode(name, "replace")


ENCODINGS: list[Callable[[random.Random, bytes], bytes]] = [
    *(_as("utf-16"), _as("utf-16-be"), _as("utf-32"), _as("latin-1"), _as("utf-8-sig"), _as("utf-7"), _broken),
    lambda rng, data: data[: rng.randrange(len(data) + 1)],
    lambda rng, data: data + rng.choice([b"\x00", b"}", b" x", b"\xff", b"{}", data]),
    lambda rng, data: data.replace(b'"', b'"\xed\xa0\x80', 3),
    lambda rng, data: data.replace(b'":"', b'":"\xc0\x80\xf5', 1),
    lambda rng, data: b" \n\t" * 999 + data,
]


def _drop(m: Mutator, body: dict[Any, Any]) -> None:
    if place := m.place(body):
        del place[0][place[1]]


def _replace(m: Mutator, body: dict[Any, Any]) -> None:
    if place := m.place(body):
        place[0][place[1]] = m.rng.choice(SHAPES)(m.rng)


def _number(m: Mutator, body: dict[Any, Any]) -> None:
    found = [place for place in places(body) if isinstance(place[0][place[1]], int | float)]
    if found:
        node, name = m.rng.choice(found)
        node[name] = m.rng.choice([m.rng.choice(NUMBERS), Raw(m.rng.choice(LITERALS)), str(node[name])])


def _string(m: Mutator, body: dict[Any, Any]) -> None:
    found = [place for place in places(body) if isinstance(place[0][place[1]], str)]
    if found:
        node, name = m.rng.choice(found)
        odd = m.rng.choice(STRINGS)
        node[name] = m.rng.choice([odd, node[name] + odd, odd + node[name], node[name][:-1]])


def _twice(m: Mutator, body: dict[Any, Any]) -> None:
    found = [place for place in places(body) if isinstance(place[0], dict)]
    if found:
        node, name = m.rng.choice(found)
        node[name] = Twice(node[name], m.rng.choice([node[name], m.rng.choice(SHAPES)(m.rng)]))


def _repeat(m: Mutator, body: dict[Any, Any]) -> None:
    found = [node[name] for node, name in places(body) if isinstance(node[name], list) and 0 < len(node[name]) < 50]
    if found:
        node = m.rng.choice(found)
        entries = [Raw(written(entry)) for entry in node]  # nothing within them grows any more
        room = MOST_BYTES // (1 + sum(len(entry.text) for entry in entries))
        node[:] = entries * max(1, min(room, m.rng.choice([2, 17, 130, 1100, 9000])))


def _misspell(m: Mutator, body: dict[Any, Any]) -> None:
    found = [place for place in places(body) if isinstance(place[0], dict) and place[1]]
    if found:
        node, name = m.rng.choice(found)
        name = str(name)
        odd = [
            name[:-1],
            name.upper(),
            name + "_",
            name.replace("_", "-"),
            name + "\u0000",
            "\ufeff" + name,
            "a" * 9999,
        ]
        node[m.rng.choice(odd)] = node.pop(name, None)


def _cross(m: Mutator, body: dict[Any, Any]) -> None:
    """A field of another API's, with its value or with none of its own."""
    name, value = m.rng.choice(m.parts)
    if m.rng.random() < 0.5:
        name = m.rng.choice(m.names)
    if isinstance(name, str):
        body[name] = copy.deepcopy(value)


def _graft(m: Mutator, body: dict[Any, Any]) -> None:
    """A part of another body, anywhere."""
    if place := m.place(body):
        place[0][place[1]] = copy.deepcopy(m.rng.choice(m.parts)[1])


def _insert(m: Mutator, body: dict[Any, Any]) -> None:
    """One more member or entry, anywhere."""
    nodes: list[Any] = [body, *(n[k] for n, k in places(body) if isinstance(n[k], dict | list))]
    node = m.rng.choice(nodes)
    value = m.rng.choice(SHAPES)(m.rng)
    if isinstance(node, list):
        node.insert(m.rng.randrange(len(node) + 1), value)
    else:
        node[m.rng.choice([*m.names, "$ref", "__proto__", "", "constructor"])] = value


def _nest(m: Mutator, body: dict[Any, Any]) -> None:
    if place := m.place(body):
        node, name = place
        around = m.rng.choice([("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
        times = m.rng.choice([1, 2, 60, 127, 200])
        node[name] = Raw(around[0] * times + written(node[name]) + around[1] * times)


def _mix(m: Mutator, body: dict[Any, Any]) -> None:
    """All of another API's body beside it."""
    other = copy.deepcopy(m.rng.choice(m.bodies))
    body.update({name: value for name, value in other.items() if name not in body or m.rng.random() < 0.2})


CHANGES: list[Callable[[Mutator, dict[Any, Any]], None]] = [
    *(_drop, _replace, _replace, _replace, _number, _number, _string, _string, _twice, _repeat, _misspell),
    *(_cross, _cross, _graft, _graft, _insert, _nest, _mix),
]
