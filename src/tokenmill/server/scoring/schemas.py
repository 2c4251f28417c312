"""Requests for scores. Owns: their fields and bounds. Must not know: engines, HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tokenmill.server.fields import Label, few

LOOSE = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, populate_by_name=True)
Words = Annotated[str, Field(min_length=1)]
Method = Literal["embedding", "likelihood"]
Direction = Literal["left", "right", "Left", "Right"]
MOST_TEXTS = 1024
RERANK = ("/rerank", "/v1/rerank", "/v2/rerank", "/reranking", "/v1/reranking")


class Document(BaseModel):
    """A document as an object."""

    model_config = LOOSE
    text: Words


Documents = Annotated[list[Words | Document], few(MOST_TEXTS, 1)]


class Scored(BaseModel):
    """The fields that all of them share. method: the cosine of embeddings, or how likely the model finds the answer
    yes."""

    model_config = LOOSE
    model: str | None = Field(None, max_length=1024)
    method: Method = "embedding"
    instruction: str | None = Field(None, max_length=1 << 16)
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=2**31 - 1)
    truncation_side: Literal["left", "right"] | None = None
    priority: int = 0
    timeout: float | None = Field(None, gt=0, le=86_400)
    user: Label | None = None


class RerankRequest(Scored):
    """POST to any path of RERANK."""

    query: Words
    documents: Documents
    top_n: Annotated[int, Field(ge=0)] | None = None
    return_documents: bool = True


class ScoreRequest(Scored):
    """POST /score and /v1/score: one text against many, or pairs."""

    text_1: Words | Annotated[list[Words], few(MOST_TEXTS, 1)]
    text_2: Words | Documents


class ClassifyRequest(BaseModel):
    """POST /classify: which of these labels is the likeliest for each text?"""

    model_config = LOOSE
    model: str | None = Field(None, max_length=1024)
    input: Words | Annotated[list[Words], few(MOST_TEXTS, 1)]
    labels: Annotated[list[Words], few(256, 2)]
    instruction: str | None = Field(None, max_length=1 << 16)
    priority: int = 0
    timeout: float | None = Field(None, gt=0, le=86_400)
    user: Label | None = None


class EmbedRequest(BaseModel):
    """POST /embed, TEI's form of embeddings."""

    model_config = LOOSE
    inputs: Words | Annotated[list[Words], few(MOST_TEXTS, 1)]
    truncate: bool = False
    truncation_direction: Direction = "right"
    dimensions: int | None = Field(None, ge=1, le=1 << 20)


class Sentences(BaseModel):
    """One sentence, and those with which it is compared."""

    model_config = LOOSE
    source_sentence: Words
    sentences: Annotated[list[Words], few(MOST_TEXTS, 1)]


class SimilarityRequest(BaseModel):
    """POST /similarity, in TEI's form."""

    model_config = LOOSE
    inputs: Sentences


class TeiRerankRequest(BaseModel):
    """POST /rerank in TEI's form: `texts`, and a bare list back. `top_n` is llama.cpp's."""

    model_config = LOOSE
    query: Words
    texts: Annotated[list[Words], few(MOST_TEXTS, 1)]
    top_n: Annotated[int, Field(ge=0)] | None = None
    return_text: bool = False
    truncate: bool = False
    truncation_direction: Direction = "right"


def form_of(raw: Mapping[str, Any]) -> type[RerankRequest] | type[TeiRerankRequest]:
    """The schema that fits a body of /rerank."""
    return TeiRerankRequest if raw.get("texts") is not None and raw.get("documents") is None else RerankRequest


def text_of(document: Any) -> str:
    """A document's text."""
    return document.text if isinstance(document, Document) else str(document)
