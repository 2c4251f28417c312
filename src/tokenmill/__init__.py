"""tokenmill: an LLM inference engine you can read.

    from tokenmill import LLM, SamplingParams

    llm = LLM(model="demo")
    outputs = llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=16))

Names are imported when first used, so that `import tokenmill` and `tokenmill --help` stay quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenmill.core.errors import EngineDeadError, TokenmillError, UserError
    from tokenmill.core.request import (
        CompletionOutput,
        EmbeddingOutput,
        RequestOutput,
        SamplingParams,
        TokenLogprob,
    )
    from tokenmill.engine.async_llm import AsyncLLM
    from tokenmill.engine.llm import LLM

__version__ = "0.1.0"

_HOMES = {
    "AsyncLLM": "tokenmill.engine.async_llm",
    "CompletionOutput": "tokenmill.core.request",
    "EmbeddingOutput": "tokenmill.core.request",
    "EngineDeadError": "tokenmill.core.errors",
    "LLM": "tokenmill.engine.llm",
    "RequestOutput": "tokenmill.core.request",
    "SamplingParams": "tokenmill.core.request",
    "TokenLogprob": "tokenmill.core.request",
    "TokenmillError": "tokenmill.core.errors",
    "UserError": "tokenmill.core.errors",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EmbeddingOutput",
    "EngineDeadError",
    "RequestOutput",
    "SamplingParams",
    "TokenLogprob",
    "TokenmillError",
    "UserError",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tokenmill' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
