"""The helper process that lowers schemas. Owns: its answers, and a first compilation, so that a grammar that takes the
engine too long, or breaks it, does so here. Must not know: who asks, tokens, fences.
"""

from __future__ import annotations

import re
import time
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from tokenmill.core.errors import UserError
from tokenmill.process.worker import Task, serve
from tokenmill.structured.compiled_grammar import limits
from tokenmill.structured.limits import refuse
from tokenmill.structured.lowering import lower_spec

NICE = 10
MOST_COMPILING_S = 0.5
"""Seconds of processor time. The engine's process compiles the grammar again, with its own vocabulary."""
_TOKEN = re.compile(r"<\[[^\]]*\]>")
_SOME_TOKEN = "<[257]>"


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
    """Compile over plain bytes, which takes about as long as any vocabulary. The engine's process reports errors."""
    began = time.process_time()
    LLMatcher(LLTokenizer("byte"), _TOKEN.sub(_SOME_TOKEN, text), log_level=0, limits=limits())
    if time.process_time() - began > MOST_COMPILING_S:
        refuse("the grammar engine takes too long for it. Simplify it.")


def run_helper() -> None:
    """As a process of its own."""
    serve(Task(lambda setup: answer, rests=True, nice=NICE))
