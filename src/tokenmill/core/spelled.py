"""Structs that people fill in by name. Owns: refusing a field that is none, with the one that was meant.

Must not know: which fields there are.
"""

from __future__ import annotations

import difflib
from typing import Any

import msgspec

from tokenmill.core.errors import ParameterError
from tokenmill.core.vllm_fields import ELSEWHERE, fields_alone


class Spelled(msgspec.StructMeta):
    """Metaclass of structs that refuse an unknown field and suggest the one that was meant. Names of vLLM that are not
    fields are taken or refused as core/vllm_fields.py says."""

    def __call__(cls, *args: Any, **given: Any) -> Any:
        known = cls.__struct_fields__
        given = fields_alone(cls.__name__, given)
        for name in given.keys() - set(known):
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
            hint = f"Did you mean {close[0]!r}?" if close else "Leave it out."
            hint = f"Instead: {ELSEWHERE[name]}." if name in ELSEWHERE else hint
            raise ParameterError(f"{cls.__name__} has no field {name!r}. {hint}", param=name)
        return super().__call__(*args, **given)


class SpelledOut(Spelled):
    """The same, and fields are given by name alone."""

    def __call__(cls, *args: Any, **given: Any) -> Any:
        if args:
            raise ParameterError(f"{cls.__name__} takes its fields by name, like temperature=0.")
        return super().__call__(**given)
