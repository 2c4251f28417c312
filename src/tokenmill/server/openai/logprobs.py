"""Log-probabilities in OpenAI's two shapes. Owns: the chat list and the completions columns.

Must not know: how they were computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenmill.core.request import TokenLogprob
from tokenmill.text.codec import Tokenizer

Row = dict[int, TokenLogprob]
FLOOR = -9999.0
"""JSON has no minus infinity."""


class TokenNames:
    """How tokens are written in answers."""

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool) -> None:
        self.tokenizer = tokenizer
        self.as_ids = as_ids or tokenizer is None

    def name(self, token: int, entry: TokenLogprob) -> str:
        """The token's text, or its id."""
        return f"token_id:{token}" if self.as_ids else (entry.decoded_token or "")

    def raw(self, token: int) -> list[int] | None:
        """The token's exact bytes."""
        if self.tokenizer is None or token >= self.tokenizer.vocab_size:
            return None
        return list(self.tokenizer.token_bytes(token))


def chat_logprobs(rows: Sequence[Row], top: int, names: TokenNames) -> dict[str, Any]:
    """The `logprobs` object of a chat choice; the chosen token is each row's first."""
    return {"content": [_chat_row(row, top, names) for row in rows], "refusal": None}


def _chat_row(row: Row, top: int, names: TokenNames) -> dict[str, Any]:
    chosen = next(iter(row))
    likely = sorted((e.rank, t) for t, e in row.items() if e.rank <= top)
    found = _entry(chosen, row[chosen], names)
    found["top_logprobs"] = [_entry(t, row[t], names) for _, t in likely[:top]]
    return found


def _entry(token: int, entry: TokenLogprob, names: TokenNames) -> dict[str, Any]:
    return {"token": names.name(token, entry), "logprob": max(entry.logprob, FLOOR), "bytes": names.raw(token)}


class CompletionColumns:
    """The `logprobs` object of a completion, growing; `offset` is where the next token's text begins."""

    def __init__(self, names: TokenNames, top: int) -> None:
        self.names = names
        self.top = top
        self.offset = 0

    def take(self, rows: Sequence[Row | None], token_ids: Sequence[int]) -> dict[str, Any]:
        """The columns of some tokens; the very first prompt token has no probability."""
        out: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for row, token in zip(rows, token_ids, strict=False):
            if row is None:
                tokenizer = self.names.tokenizer
                text = tokenizer.decode([token], skip_special_tokens=False) if tokenizer is not None else ""
                name = f"token_id:{token}" if self.names.as_ids else text
                out["token_logprobs"].append(None)
                out["top_logprobs"].append(None)
            else:
                entry = row[token]
                text = entry.decoded_token or ""
                name = self.names.name(token, entry)
                out["token_logprobs"].append(max(entry.logprob, FLOOR))
                out["top_logprobs"].append(
                    {
                        self.names.name(t, e): max(e.logprob, FLOOR)
                        for t, e in row.items()
                        if e.rank <= self.top or t == token
                    }
                )
            out["tokens"].append(name)
            out["text_offset"].append(self.offset)
            self.offset += len(text)
        return out


def prompt_rows(rows: Sequence[Row | None] | None) -> list[dict[str, Any] | None] | None:
    """vLLM's prompt_logprobs: per position {id: {logprob, rank, decoded_token}}, the first one null."""
    if rows is None:
        return None
    return [
        None
        if row is None
        else {
            str(t): {"logprob": max(e.logprob, FLOOR), "rank": e.rank, "decoded_token": e.decoded_token}
            for t, e in row.items()
        }
        for row in rows
    ]
