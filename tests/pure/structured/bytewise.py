"""Constraints over single bytes: what a schema admits, asked text by text, and texts that it says by itself."""

from __future__ import annotations

import json
import random
from typing import Any

from tokenmill.structured.compile import Compiler
from tokenmill.structured.constraint import GrammarConstraint
from tokenmill.structured.vocabulary import Vocabulary

END = 256


def byte_vocabulary() -> Vocabulary:
    """Token i is the byte i; 256 ends."""
    return Vocabulary.of([bytes([i]) for i in range(256)] + [b""], {END}, (END,), lambda text: list(text.encode()))


COMPILER = Compiler(byte_vocabulary)


def compiled(schema: Any, **more: Any) -> GrammarConstraint:
    """A constraint at its start; true and false are schemas as well."""
    return COMPILER.constraint({"json": json.dumps(typed(schema)), **more})


def typed(schema: Any) -> Any:
    """The same schema, which says by itself that values of all types fit, if they do."""
    return {"anyOf": [True], **schema} if isinstance(schema, dict) else schema


def says(constraint: GrammarConstraint, text: str) -> bool:
    """Is this a whole answer?"""
    twin = constraint.fork()
    data = list(text.encode())
    return twin.validate(data) == len(data) and (twin.accept(data), twin.validate([END]) == 1 or twin.finished())[1]


def allowed(mask: bytes) -> list[int]:
    """Token ids of a mask."""
    return [i for i in range(len(mask) * 8) if mask[i >> 3] >> (i & 7) & 1]


def speak(constraint: GrammarConstraint, rng: random.Random, most: int = 400, loved: bytes = b"") -> str | None:
    """A random answer; None if it did not end. Ends are preferred, so that most do; after them `loved` bytes."""
    twin, said = constraint.fork(), bytearray()
    while not twin.finished() and len(said) < most:
        choices = allowed(twin.mask())
        if not choices:
            raise AssertionError(f"stuck after {bytes(said)!r}")
        closing = [c for c in choices if c in (END, *b'"]}')]
        odd = [c for c in choices if c in set(loved)]
        usual = odd if odd and rng.random() < 0.5 else choices
        token = rng.choice(closing if closing and rng.random() < 0.4 else usual)
        twin.accept([token])
        if token != END:
            said.append(token)
    return said.decode() if twin.finished() else None
