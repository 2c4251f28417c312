"""Schemas as people write them, answered by scripted tokens: what ends is valid, nothing dies.

    python bench/structured/fuzz.py [--schemas 3000] [--walks 6] [--vocabulary 6000] [--json OUT]

Half of the walks take any allowed token, the others prefer quotes, backslashes, escapes, control characters and odd
pieces. Answers are judged by jsonschema, with patterns as Python's `regex` reads
them after an ECMA-262 reading of their classes. A schema that is refused is counted by its reason.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import regex
from jsonschema import Draft202012Validator, ValidationError, validators  # type: ignore[import-untyped]
from lookalikes import lookalike
from vocabulary import longest_pieces, pieces

from tokenmill.core.errors import UserError
from tokenmill.structured.compile import Compiler
from tokenmill.structured.constraint import GrammarConstraint
from tokenmill.structured.vocabulary import Vocabulary

ODD = [
    *('\\"', "\\\\", '"\\', '\\"\\"', "\\u0000", "\\u0022", "\\u005c", "\\n", "\\n\\r", "\\t\\", "\\/", "\\b", "\\f"),
    *("\\u", "\\x", '""', '"}', '"]', '","', '":"', '": "', '"a"', '\\\\"', 'a"', 'a\\"', "\x00", "\x1f", "\x7f"),
    *("\n\n", "\r\n", "\u2028", "\u00a0", "\ufeff", "é", "😀", "e999", "1e", "-0", "00", "1.0", "true", "{}", "[]"),
    *("//", "$ref", "\ud7ff", "\ue000"),
]
LOVED = set(b'"\\\x00\x1f\x7f\n\r\t<>:/|?*')
SPACE = r"\t\n\v\f\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
CLASSES = {"d": "0-9", "w": "A-Za-z0-9_", "s": SPACE}


def in_python(pattern: str) -> str:
    """An ECMA-262 pattern as `regex` takes it."""
    out: list[str] = []
    inside, at = False, 0
    while at < len(pattern):
        char, after = pattern[at], pattern[at + 1 : at + 2]
        at += 1
        if char == "\\":
            at += 1
            if after.lower() in CLASSES:
                chars = CLASSES[after.lower()]
                negative = after.isupper()
                if inside and negative:
                    out.append(f"[^{chars}]")
                else:
                    out.append(chars if inside else f"[{'^' * negative}{chars}]")
            elif after == "c":
                out.append(f"\\x{ord(pattern[at]) % 32:02x}")
                at += 1
            elif after == "0":
                out.append("\\x00")
            else:
                out.append("/" if after == "/" else "\\b" if after == "b" else "\\" + after)
        elif inside:
            inside = char != "]"
            out.append("\\[" if char == "[" else char)
        elif pattern[at - 1 : at + 2] == "[^]":
            out.append(r"[\s\S]")
            at += 2
        elif char == "[":
            inside = True
            out.append("[^" if after == "^" else "[")
            at += after == "^"
        else:
            out.append({".": r"[^\n\r\u2028\u2029]", "$": r"\Z"}.get(char, char))
    return "(?V1)" + "".join(out)


def judged(schema: Any) -> Any:
    """A schema whose patterns are the judge's."""
    if not isinstance(schema, dict):
        return [judged(s) for s in schema] if isinstance(schema, list) else schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("enum", "const", "required", "dependentRequired"):
            made[key] = value
        elif key in ("properties", "$defs", "definitions"):
            made[key] = {name: judged(s) for name, s in value.items()}
        elif key == "patternProperties":
            made[key] = {in_python(p): judged(s) for p, s in value.items()}
        else:
            made[key] = in_python(value) if key == "pattern" else judged(value)
    return made


def _pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(value, str) and not regex.search(pattern, value):
        yield ValidationError("pattern")


def _by_pattern(validator: Any, patterns: dict[str, Any], value: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(value, dict):
        for pattern, part in patterns.items():
            for name in value:
                if regex.search(pattern, name):
                    yield from validator.descend(value[name], part)


def _additional(validator: Any, part: Any, value: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(value, dict):
        patterns = schema.get("patternProperties", {})
        for name in value:
            if name not in schema.get("properties", {}) and not any(regex.search(p, name) for p in patterns):
                yield from validator.descend(value[name], part)


READ_BY_REGEX = {"pattern": _pattern, "patternProperties": _by_pattern, "additionalProperties": _additional}


class Judge:
    """Says whether a text is JSON of a schema."""

    def __init__(self, schema: Any) -> None:
        kind = validators.extend(Draft202012Validator, READ_BY_REGEX)
        self.validator = kind(judged(schema), format_checker=Draft202012Validator.FORMAT_CHECKER)

    def finds(self, text: str) -> str:
        """What it is."""
        try:
            value = json.loads(text, parse_constant=_refuse)
        except ValueError:
            return "invalid"
        if not self.validator.is_valid(value):
            return "invalid"
        return "valid, with a number beyond a double" if "Infinity" in json.dumps(value) else "valid"


def _refuse(name: str) -> None:
    raise ValueError(name)


def vocabulary(size: int) -> Vocabulary:
    """Bytes, pieces of this repository's texts, odd pieces, and an end."""
    table = list(dict.fromkeys([*pieces(size), *(o.encode() for o in ODD)]))
    return Vocabulary.of([*table, b""], {len(table)}, (len(table),), longest_pieces(table))


def bits(vocabulary: Vocabulary, wanted: Sequence[bool]) -> int:
    """A mask of tokens."""
    return sum(1 << i for i, want in enumerate(wanted[: vocabulary.size]) if want)


class Walker:
    """Chooses tokens."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        table = vocabulary.table
        self.vocabulary = vocabulary
        self.end = vocabulary.size - 1
        self.loved = bits(vocabulary, [bool(LOVED & set(t)) or (len(t) == 1 and t[0] > 126) for t in table])
        self.closing = bits(vocabulary, [t in (b'"', b"}", b"]", b'"}', b'"]') for t in table]) | 1 << self.end
        self.single = {t: 1 << i for i, t in enumerate(table) if len(t) == 1}
        self.marks = bits(vocabulary, [len(t) == 1 and 32 < t[0] < 127 and not chr(t[0]).isalnum() for t in table])

    def hints(self, schema: Any) -> int:
        """Single characters that a schema's text holds."""
        return sum(self.single[bytes([c])] for c in set(json.dumps(schema).encode()))

    def answer(
        self, constraint: GrammarConstraint, rng: random.Random, hints: int, odd: bool, most: int
    ) -> tuple[str | None, str | None]:
        """-> a finished text or None, and what went wrong."""
        said = bytearray()
        for step in range(most):
            if constraint.finished():
                break
            mask = int.from_bytes(constraint.mask(), "little")
            if not mask:
                return None, f"{constraint.failure()} after {bytes(said[-60:])!r}"
            closing, loved = mask & self.closing, mask & self.loved
            late = step > most // 2
            if closing and rng.random() < (0.9 if late else 0.15):
                mask = closing
            elif late and (near := mask & (self.marks if rng.random() < 0.5 else hints)):
                mask = near  # many patterns end after a mark, or after letters that they name
            elif odd and loved and rng.random() < 0.7:
                mask = loved
            token = _any_of(mask, rng)
            constraint.accept([token])
            said += self.vocabulary.bytes_of(token)
        return (said.decode() if constraint.finished() else None), None


def _any_of(mask: int, rng: random.Random) -> int:
    """An allowed token; about evenly among many."""
    if mask.bit_length() < 256:
        return rng.choice([i for i in range(mask.bit_length()) if mask >> i & 1])
    low = rng.randrange(mask.bit_length())
    high = mask >> low
    return low + (high & -high).bit_length() - 1


@dataclass(slots=True)
class Findings:
    """What came of some schemas."""

    counts: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[Any] = field(default_factory=list)
    slowest_s: float = 0.0


def fuzz(seeds: Iterable[int], size: int, walks: int, most: int) -> Findings:
    """Answer the schemas of these seeds, some walks of at most so many tokens each."""
    words, found = vocabulary(size), Findings()
    walker, counts = Walker(words), found.counts
    for seed in seeds:
        family, schema = lookalike(seed)
        compiler = Compiler(lambda: words)
        begun = time.process_time()
        try:
            compiler.constraint({"json": schema})
        except UserError as error:
            counts["refused"] += 1
            found.refused[regex.sub(r" at #\S*", "", str(error))[:120]] += 1
            continue
        found.slowest_s = max(found.slowest_s, time.process_time() - begun)
        counts["enforced"] += 1
        judge, hints, ended = Judge(schema), walker.hints(schema), 0
        for walk in range(walks):
            constraint = compiler.constraint({"json": schema})
            assert isinstance(constraint, GrammarConstraint)
            said, died = walker.answer(constraint, random.Random(f"{seed} {walk}"), hints, walk % 2 == 1, most)
            counts["died" if died else "cut" if said is None else "finished"] += 1
            ended += said is not None
            verdict = "died" if died else "" if said is None else judge.finds(said)
            if verdict not in ("", "died"):
                counts[verdict] += 1
            if verdict not in ("", "valid"):
                found.wrong.append({"family": family, "schema": schema, verdict: died or said})
        counts["schemas with no finished answer"] += not ended
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=int, default=3000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--walks", type=int, default=6)
    parser.add_argument("--most", type=int, default=240)
    parser.add_argument("--vocabulary", type=int, default=6000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.schemas)
    found = fuzz(seeds, options.vocabulary, options.walks, options.most)
    for name, count in found.counts.most_common():
        print(f"{count:6} {name}")
    print(f"slowest to compile: {1000 * found.slowest_s:.0f} ms of work")
    for name, count in found.refused.most_common():
        print(f"{count:6} refused: {name}")
    for entry in found.wrong[:20]:
        print(json.dumps(entry, ensure_ascii=False)[:600])
    if options.json:
        plain = {"counts": found.counts, "refused": found.refused, "wrong": found.wrong}
        options.json.write_text(json.dumps(plain, indent=1))
    sys.exit(bool(found.wrong))


if __name__ == "__main__":
    main()
