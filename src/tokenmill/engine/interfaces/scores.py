"""Relevance, labels and cosines, for servers and LLM alike. Owns: the questions that are asked, shares of answers from
their log-probabilities, cosines and shorter vectors.

An answer's likelihood is the sum of its log-probabilities after the question, without the end token; shares compare it
with all answers. Must not know: engines, HTTP.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tokenmill.core.errors import ParameterError
from tokenmill.core.request import TokenLogprob

MOST_REQUESTS = 4096
RELEVANCE = "Given a query, find the documents that answer it."
LABEL = "Which label fits the text? Answer with the label alone."
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
ANSWERS = ["yes", "no"]
Messages = list[dict[str, Any]]
Rows = Sequence[Mapping[int, TokenLogprob] | None]


def relevance_question(query: str, document: str, instruction: str | None) -> Messages:
    """The question whether this document answers the query; the answer is one of ANSWERS."""
    asked = instruction or RELEVANCE
    return [
        {"role": "system", "content": JUDGE},
        {"role": "user", "content": f"<Instruct>: {asked}\n<Query>: {query}\n<Document>: {document}"},
    ]


def label_question(text: str, labels: Sequence[str], instruction: str | None) -> Messages:
    """The question which of the labels fits the text."""
    return [{"role": "user", "content": f"{instruction or LABEL}\nLabels: {', '.join(labels)}\nText: {text}"}]


def check_labels(labels: Sequence[str]) -> None:
    """Refuse equal labels, or too few of them."""
    several = isinstance(labels, (list, tuple)) and len(labels) >= 2
    if not several or not all(isinstance(label, str) and label for label in labels):
        raise ParameterError("labels must be a list of at least two texts.", param="labels")
    if len(set(labels)) < len(labels):
        raise ParameterError("labels must differ.", param="labels")


def check_ends(ends: Sequence[Sequence[int]]) -> None:
    """Refuse labels that become no tokens: they have no likelihood."""
    if not all(ends):
        raise ParameterError("One of the labels has no tokens in this model's vocabulary.", param="labels")


def check_count(count: int) -> None:
    """Refuse more scores than may be asked for at once."""
    if count > MOST_REQUESTS:
        raise ParameterError(f"{count} scores asked for at once; send at most {MOST_REQUESTS}.", param="documents")


def pair_up(first: list[str], second: list[str]) -> list[tuple[str, str]]:
    """Pair one text with all others, or texts one by one."""
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise ParameterError(
            f"There are {len(first)} first texts and {len(second)} second ones: give one first text, or as many.",
            param="text_1",
        )
    return list(zip(first, second, strict=True))


def answer_logprob(rows: Rows, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> float:
    """The log-probability of the answer at the prompt's end; rows: the prompt's log-probabilities."""
    tail = len(answer_ids)
    pairs = zip(rows[-tail:], prompt_ids[-tail:], strict=True)
    return sum(row[token].logprob for row, token in pairs if row is not None)


def shares(sums: Sequence[float], count: int) -> list[list[float]]:
    """For each question with `count` answers, the share of each answer."""
    return [_shares(sums[i : i + count]) for i in range(0, len(sums), count)]


def _shares(sums: Sequence[float]) -> list[float]:
    most = max(sums)
    weights = [math.exp(value - most) for value in sums]
    return [weight / sum(weights) for weight in weights]


def cosine(left: Sequence[float], right: Sequence[float]) -> float:
    """The cosine of two unit vectors, which are rounded."""
    return max(-1.0, min(1.0, sum(a * b for a, b in zip(left, right, strict=True))))


def shorten(vector: list[float], dimensions: int | None) -> list[float]:
    """The first entries, made a unit vector again."""
    if dimensions is None:
        return vector
    if dimensions > len(vector):
        raise ParameterError(f"dimensions is more than this model has ({len(vector)}).", param="dimensions")
    part = vector[:dimensions]
    length = math.sqrt(sum(x * x for x in part)) or 1.0
    return [x / length for x in part]
