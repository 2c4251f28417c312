"""Log-probabilities in OpenAI's two shapes. Owns: the list of chat answers and the columns of completions.

Must not know: how they were computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenmill.core.request import TokenLogprob
from tokenmill.text.codec import Tokenizer
from tokenmill.text.stream_decoder import StreamDecoder

Row = dict[int, TokenLogprob]
FLOOR = -9999.0
"""Written in place of minus infinity, which JSON does not have."""


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
    """The `logprobs` object of a chat choice. The chosen token comes first in each row."""
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
    """The growing `logprobs` object of a completion. `offset`: the characters that the tokens have made so far.

    Tokens are keys here, so each needs a name of its own: parts of a character are written as OpenAI writes them."""

    def __init__(self, names: TokenNames, top: int, decoder: StreamDecoder | None) -> None:
        """decoder: decodes the answer's tokens. None: tokens do not become text."""
        self.names = names
        self.top = top
        self.decoder = decoder
        self.offset = 0

    def take_prompt(self, rows: Sequence[Row | None], token_ids: Sequence[int], echoed: str) -> dict[str, Any]:
        """Add the columns of a prompt that is echoed as this text. Its first token has no probability. A special token
        takes the place of its name where the text has it: encoding may have added it, and settings may hide it."""
        if self.names.tokenizer is None:
            return self.take(rows, token_ids)
        answers, self.decoder = self.decoder, StreamDecoder(self.names.tokenizer)
        found = self._taken(rows, token_ids, echoed)
        self.decoder, self.offset = answers, len(echoed)
        found["text_offset"] = [min(place, len(echoed)) for place in found["text_offset"]]
        return found

    def take(self, rows: Sequence[Row | None], token_ids: Sequence[int]) -> dict[str, Any]:
        """Add the columns of some tokens of the answer."""
        return self._taken(rows, token_ids)

    def _taken(self, rows: Sequence[Row | None], token_ids: Sequence[int], echoed: str = "") -> dict[str, Any]:
        out: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for row, token in zip(rows, token_ids, strict=False):
            if row is None:
                tokenizer = self.names.tokenizer
                text = tokenizer.decode([token], skip_special_tokens=False) if tokenizer is not None else ""
                out["token_logprobs"].append(None)
                out["top_logprobs"].append(None)
            else:
                text = row[token].decoded_token or ""
                out["token_logprobs"].append(max(row[token].logprob, FLOOR))
                out["top_logprobs"].append(self._likely(row, token))
            out["tokens"].append(self._name(token, text))
            out["text_offset"].append(self._place(token, text, echoed))
        return out

    def _likely(self, row: Row, token: int) -> dict[str, float]:
        """Log-probabilities by name. If tokens share a name, the chosen one wins, else the likeliest."""
        found: dict[str, float] = {}
        for each, entry in sorted(row.items(), key=lambda item: (item[0] != token, item[1].rank)):
            if entry.rank <= self.top or each == token:
                found.setdefault(self._name(each, entry.decoded_token or ""), max(entry.logprob, FLOOR))
        return found

    def _name(self, token: int, text: str) -> str:
        if self.names.as_ids:
            return f"token_id:{token}"
        raw = self.names.raw(token) if "\ufffd" in text else None
        return text if raw is None or is_text(raw) else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _place(self, token: int, text: str, echoed: str) -> int:
        """Where the token's text begins. A token that completes a character gives more text than its own bytes."""
        before = self.offset
        self.offset += len(self.decoder.push([token])) if self.decoder is not None else 0
        tokenizer = self.names.tokenizer
        if echoed and tokenizer is not None and token in tokenizer.special_ids and echoed.startswith(text, self.offset):
            self.offset += len(text)
        return max(before, self.offset - len(text))


def is_text(raw: list[int]) -> bool:
    """Are these bytes whole characters?"""
    try:
        bytes(raw).decode()
    except UnicodeDecodeError:
        return False
    return True


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
