"""Results for prompts that are not continued. Owns: embeddings, scores, labels and beams, in vLLM's shapes.

Must not know: engines, how any of these is computed.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tokenmill.core.request import TokenLogprob

AS_STATED = "model"
"""The way to pool that stands for the one in the model's files."""


class Vectors(msgspec.Struct, frozen=True, kw_only=True):
    """How a model's files say that prompts become vectors: a way, or why there is none (`unbuilt`: a request may name
    another one; `layers`: what else they ask for, so that no way gives the model's vectors)."""

    pooling: str = "last"
    unbuilt: str = ""
    layers: str = ""


class PoolingOutput(msgspec.Struct, kw_only=True):
    """The result of pooling a prompt, as a tensor."""

    data: Any


class EmbeddingOutput(msgspec.Struct, kw_only=True):
    """One vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """How many numbers the vector has."""
        return len(self.embedding)


class ClassificationOutput(msgspec.Struct, kw_only=True):
    """A probability for each label, in the labels' order."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """How many labels there are."""
        return len(self.probs)


class ScoringOutput(msgspec.Struct, kw_only=True):
    """How well two texts match."""

    score: float


class PoolingRequestOutput(msgspec.Struct, kw_only=True):
    """A prompt with its result."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: Any
    num_cached_tokens: int = 0
    finished: bool = True


class EmbeddingRequestOutput(PoolingRequestOutput, kw_only=True):
    """A prompt with its vector: `outputs.embedding`, or `embedding` for short."""

    outputs: EmbeddingOutput

    @property
    def embedding(self) -> list[float]:
        """The vector."""
        return self.outputs.embedding


class ClassificationRequestOutput(PoolingRequestOutput, kw_only=True):
    """A prompt with the probabilities of its labels."""

    outputs: ClassificationOutput


class ScoringRequestOutput(PoolingRequestOutput, kw_only=True):
    """A pair of texts with its score; the prompt's token ids are those of both texts, joined."""

    outputs: ScoringOutput


class BeamSearchSequence(msgspec.Struct, kw_only=True):
    """One beam: its tokens and text begin with the prompt's."""

    tokens: list[int]
    text: str | None = None
    cum_logprob: float = 0.0
    logprobs: list[dict[int, TokenLogprob]] = []
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class BeamSearchOutput(msgspec.Struct, kw_only=True):
    """The beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]
