"""Text from a stream of token ids. Owns: which characters are certain already. Must not know: requests, stop strings.

Promise: however the ids are cut, all pushes and the flush together give decode(prompt + output) without decode(prompt).
If a prompt ends inside a character, that character belongs to the output.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from tokenmill.text.codec import Tokenizer
from tokenmill.text.token_bytes import PieceTable, StartTrimmer

_UTF8 = codecs.getincrementaldecoder("utf-8")
_WINDOW = 6  # tokens kept as left context by decoders without a byte table
_UNFINISHED = 3  # most tokens that an unfinished character may consist of


class StreamDecoder:
    """One sequence's decoder; push() ids as they come, flush() at the end."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        table = tokenizer.piece_table(skip_special_tokens)
        self._inner: _ByteStream | _WindowStream
        if table is not None:
            self._inner = _ByteStream(table, prompt_ids)
        else:
            self._inner = _WindowStream(tokenizer, prompt_ids, skip_special_tokens, spaces_between_special_tokens)
        self.push = self._inner.push  # bound once: this is called for every token

    def flush(self) -> str:
        """The rest of the text. An unfinished character becomes U+FFFD."""
        return self._inner.flush()


class _ByteStream:
    def __init__(self, table: PieceTable, prompt_ids: Sequence[int]) -> None:
        self._table = table
        self._head: StartTrimmer | None = StartTrimmer(table)
        self._utf8 = _UTF8("replace")
        used = 0
        while not self._head.settled and used < len(prompt_ids):
            self._head.take(prompt_ids[used : used + 1])
            used += 1
        # An unfinished character is at most three bytes long, so a short tail of the prompt holds all of it.
        tail: list[bytes] = []
        size, index = 0, len(prompt_ids)
        while size < 4 and index > 0:
            index -= 1
            tail.append(table[prompt_ids[index]])
            size += len(tail[-1])
        self._utf8.decode(b"".join(reversed(tail)))

    def push(self, ids: Sequence[int]) -> str:
        if self._head is None:
            return self._utf8.decode(b"".join(map(self._table.__getitem__, ids)))
        data = self._head.take(ids)
        if self._head.settled:
            self._head = None
        return self._utf8.decode(data)

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowStream:
    """Decodes a few tokens of context with and without the new ones; the difference is new text."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip: bool, spaces: bool) -> None:
        self._tokenizer, self._skip, self._spaces = tokenizer, skip, spaces
        self._ids = [token_id for token_id in prompt_ids if tokenizer.shows(token_id, skip)][-_WINDOW:]
        self._seen = self._text()

    def _text(self) -> str:
        return self._tokenizer.decode(
            self._ids, skip_special_tokens=self._skip, spaces_between_special_tokens=self._spaces
        )

    def push(self, ids: Sequence[int]) -> str:
        self._ids += [token_id for token_id in ids if self._tokenizer.shows(token_id, self._skip)]
        text = self._text()
        if text.endswith("\ufffd"):
            return self._sure(text)
        return self._advance(text)

    def _sure(self, text: str) -> str:
        """What stands before tokens that may be an unfinished character: some models say U+FFFD itself, again and
        again."""
        whole, rest = self._ids, self._ids[-_UNFINISHED:]
        if not text.startswith(self._seen) or len(whole) <= _UNFINISHED:
            return ""  # bytes that follow others are decoded together with them
        self._ids = whole[:-_UNFINISHED]
        sure = self._text()
        if len(sure) <= len(self._seen) or not text.startswith(sure) or not sure.startswith(self._seen):
            self._ids = whole
            return ""
        new = self._advance(sure)
        self._ids += rest
        return new

    def flush(self) -> str:
        return self._advance(self._text())

    def _advance(self, text: str) -> str:
        new = text[len(self._seen) :]
        self._ids = self._ids[-_WINDOW:]
        self._seen = self._text()
        return new
