"""A helper that does to itself what it is asked to."""

from __future__ import annotations

import os
import signal
from typing import Any

from tokenmill.process.worker import HelperTask, Unusable, serve


def prepare(setup: Any) -> Any:
    if setup == "unusable":
        raise Unusable("this set-up is of no use")
    return answer


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """`signal`: end by it; `spin`: compute for ever; `size`: say so much."""
    if "signal" in question:
        os.kill(os.getpid(), getattr(signal, question["signal"]))
    while question.get("spin"):
        pass
    return {"pid": os.getpid(), "text": "x" * question.get("size", 1)}


def run_helper() -> None:
    serve(HelperTask(prepare))
