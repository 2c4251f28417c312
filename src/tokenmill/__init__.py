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
    from tokenmill.core.lora_request import LoRARequest
    from tokenmill.core.params import (
        BeamSearchParams,
        GuidedDecodingParams,
        PoolingParams,
        PromptType,
        RequestOutputKind,
        StructuredOutputsParams,
        TextPrompt,
        TokensPrompt,
    )
    from tokenmill.core.pooled import (
        BeamSearchOutput,
        BeamSearchSequence,
        ClassificationOutput,
        ClassificationRequestOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from tokenmill.core.request import CompletionOutput, RequestOutput, SamplingParams, TokenLogprob
    from tokenmill.engine.interfaces.async_llm import AsyncLLM
    from tokenmill.engine.interfaces.llm import LLM
    from tokenmill.engine.interfaces.llm_engine import LLMEngine
    from tokenmill.engine.options.engine_args import AsyncEngineArgs, EngineArgs
    from tokenmill.engine.running.metrics import Counter, Gauge, Histogram, Metric, Vector

    AsyncLLMEngine = AsyncLLM

__version__ = "0.1.0"

_HOMES = {
    "AsyncEngineArgs": "tokenmill.engine.options.engine_args",
    "AsyncLLM": "tokenmill.engine.interfaces.async_llm",
    "AsyncLLMEngine": "tokenmill.engine.interfaces.async_llm",
    "BeamSearchOutput": "tokenmill.core.pooled",
    "BeamSearchParams": "tokenmill.core.params",
    "BeamSearchSequence": "tokenmill.core.pooled",
    "ClassificationOutput": "tokenmill.core.pooled",
    "ClassificationRequestOutput": "tokenmill.core.pooled",
    "CompletionOutput": "tokenmill.core.request",
    "Counter": "tokenmill.engine.running.metrics",
    "EmbeddingOutput": "tokenmill.core.pooled",
    "EmbeddingRequestOutput": "tokenmill.core.pooled",
    "EngineArgs": "tokenmill.engine.options.engine_args",
    "EngineDeadError": "tokenmill.core.errors",
    "Gauge": "tokenmill.engine.running.metrics",
    "GuidedDecodingParams": "tokenmill.core.params",
    "Histogram": "tokenmill.engine.running.metrics",
    "LLM": "tokenmill.engine.interfaces.llm",
    "LLMEngine": "tokenmill.engine.interfaces.llm_engine",
    "LoRARequest": "tokenmill.core.lora_request",
    "Metric": "tokenmill.engine.running.metrics",
    "PoolingOutput": "tokenmill.core.pooled",
    "PoolingParams": "tokenmill.core.params",
    "PoolingRequestOutput": "tokenmill.core.pooled",
    "PromptType": "tokenmill.core.params",
    "RequestOutput": "tokenmill.core.request",
    "RequestOutputKind": "tokenmill.core.params",
    "SamplingParams": "tokenmill.core.request",
    "ScoringOutput": "tokenmill.core.pooled",
    "ScoringRequestOutput": "tokenmill.core.pooled",
    "StructuredOutputsParams": "tokenmill.core.params",
    "TextPrompt": "tokenmill.core.params",
    "TokenLogprob": "tokenmill.core.request",
    "TokenmillError": "tokenmill.core.errors",
    "TokensPrompt": "tokenmill.core.params",
    "UserError": "tokenmill.core.errors",
    "Vector": "tokenmill.engine.running.metrics",
}
"""Where each name lives."""

_CALLED = {"AsyncLLMEngine": "AsyncLLM"}
"""What a name is called where it lives."""

__all__ = [
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "Counter",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "EngineDeadError",
    "Gauge",
    "GuidedDecodingParams",
    "Histogram",
    "LLM",
    "LLMEngine",
    "LoRARequest",
    "Metric",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokenLogprob",
    "TokenmillError",
    "TokensPrompt",
    "UserError",
    "Vector",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tokenmill' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), _CALLED.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
