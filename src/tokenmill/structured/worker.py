"""The helper process that lowers schemas. Owns: its answers, and a first compilation and trial walk, so that a grammar
that takes the engine too long, or breaks it, does so here. Must not know: who asks, the model's tokens, fences.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from functools import cache
from typing import Any

from tokenmill.core.errors import ParameterError, UserError
from tokenmill.process.worker import HelperTask, serve
from tokenmill.structured.compiled_grammar import UNFORCED, Compiled
from tokenmill.structured.limits import refuse
from tokenmill.structured.lowering import lower_spec
from tokenmill.structured.trial import try_out
from tokenmill.structured.vocabulary import Vocabulary

NICE = 10
MOST_COMPILING_S = 0.5
"""Seconds of processor time. The engine's process compiles the grammar again, with its own vocabulary."""
_TOKEN = re.compile(r"<\[[^\]]*\]>")
_SOME_TOKEN = "<[257]>"
_UNFORCED = re.compile("|".join(map(re.escape, (UNFORCED, json.dumps(UNFORCED)[1:-1]))))


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """The grammar's text, or what is wrong with the structure."""
    try:
        text = lower_spec(question["spec"], question["reasoning"])
        _compile(text)
        return {"text": text}
    except UserError as error:
        return {"error": str(error), "param": error.param}
    except (MemoryError, RecursionError):  # our own mistake, which must not end the process
        return {"error": "structured_outputs: it needs too much memory. Simplify it.", "param": "structured_outputs"}
    except Exception as error:
        return {"error": f"structured_outputs: it could not be read ({type(error).__name__}).", "param": None}


def _compile(text: str) -> None:
    """Compile over plain bytes, which takes about as long as any vocabulary, and walk. Here every grammar is asked for
    forced text: one that forces text without an end uses up this process's work, and no engine's."""
    began = time.process_time()
    made = None
    with contextlib.suppress(ParameterError):  # the engine's process reports it: it knows the names of tokens
        made = Compiled(_TOKEN.sub(_SOME_TOKEN, _UNFORCED.sub("", text)), _bytes())
    if made is not None:
        try_out(made)
    if time.process_time() - began > MOST_COMPILING_S:
        refuse("the grammar engine takes too long for it. Simplify it.")


@cache
def _bytes() -> Vocabulary:
    """Every byte, an end, and a control token."""
    table = [*(bytes([i]) for i in range(256)), b"", b""]
    return Vocabulary.of(table, {256, 257}, (256,), lambda text: list(text.encode("utf-8", "replace")))


def run_helper() -> None:
    """As a process of its own."""
    serve(HelperTask(lambda setup: answer, rests=True, nice=NICE))
