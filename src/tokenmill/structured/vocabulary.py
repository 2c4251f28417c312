"""The token table that grammars are walked with. Owns: making the engine's trie from the exact bytes of a vocabulary.

Special tokens are never text, and ids without bytes can never be said. The tokens of a text have exactly its bytes: if
the tokenizer would change a text, the longest tokens that fit are taken instead. Must not know: grammars, requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

from llguidance import LLTokenizer, TokenizerWrapper

from tokenmill.structured.numerals import Numerals
from tokenmill.structured.walking_time import Crowd

SLICE_LENGTHS = (5, 6, 7, 8, 10, 13, 20)
"""Lengths with a trie of their own. Measured on a trained vocabulary of 128k: no string with a maxLength takes a
millisecond per mask. With more lengths, prefixes are walked more often; with fewer, whole words are. A length below
five does not help: longer tokens have to be walked that far anyway."""

KNOWN_TEXTS = 4096
SHORT = 64
"""Forced texts repeat (names, brackets): the tokens of this many texts, of up to this many characters, are kept."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`trie` is shared by all constraints; `size` token ids; `end_ids` end a text; `table`: each token's bytes.
    `crowd`: what all constraints together take."""

    trie: LLTokenizer
    size: int
    end_ids: frozenset[int]
    table: list[bytes]
    encode: Callable[[str], list[int]]
    numerals: Numerals
    crowd: Crowd = field(default_factory=Crowd, compare=False)

    def bytes_of(self, token: int) -> bytes:
        """What a token adds to a text."""
        return self.table[token] if token < self.size else b""

    @property
    def mask_bytes(self) -> int:
        """The size of every mask."""
        return (self.trie.vocab_size + 7) // 8

    @classmethod
    def of(
        cls, bytes_of: list[bytes], special: set[int], end_ids: tuple[int, ...], encode: Callable[[str], list[int]]
    ) -> Vocabulary:
        """`bytes_of[i]`: what token i adds to a text; `encode`: the usual tokens of a text without special ones."""
        size = len(bytes_of)
        # Without an end token, a constraint still ends when nothing can follow: an id past the end stands in for it.
        ends = [i for i in end_ids if i < size] or [size]
        table = list(bytes_of) + ([b"<end>"] if ends == [size] else [])
        hidden = sorted({*special, *ends})
        for token in hidden:
            table[token] = table[token] or b"<special>"
        exact = _Exact(bytes_of, frozenset(hidden), encode)
        wrapper = TokenizerWrapper(_Source(table, hidden, ends[0], exact))
        trie = LLTokenizer(wrapper, n_vocab=len(table), eos_token=ends, slices=_slices())
        return cls(trie, size, frozenset(end_ids), bytes_of, exact, Numerals(bytes_of, frozenset(ends)))


def _slices() -> list[str]:
    """Parts of the vocabulary with ready masks for strings that may go on for a given number of characters.

    The engine's own list has 10 and 30. Near its maxLength, a string is below that and would walk all tokens."""
    blanks, *_, rest = LLTokenizer.json_slices()
    return [blanks, *(rest.removesuffix("+") + f"{{1,{n}}}" for n in SLICE_LENGTHS), rest]


class _Exact:
    """Encodes a text in tokens whose bytes are those of the text."""

    def __init__(self, table: list[bytes], hidden: frozenset[int], encode: Callable[[str], list[int]]) -> None:
        self.table = table
        self.hidden = hidden
        self.encode = encode
        self.ids: dict[bytes, int] = {}

    def __call__(self, text: str) -> list[int]:
        data = text.encode("utf-8", "replace")
        found = self.encode(text)
        if b"".join(self.table[i] if i < len(self.table) else b"?" for i in found) == data:
            return found
        return self._longest(data)

    def _longest(self, data: bytes) -> list[int]:
        """The longest tokens from the left; empty if a byte has no token."""
        if not self.ids:
            self.ids = {piece: i for i, piece in enumerate(self.table) if piece and i not in self.hidden}
        most, at, found = max(map(len, self.ids), default=0), 0, []
        while at < len(data):
            ends = range(min(len(data), at + most), at, -1)
            end = next((e for e in ends if data[at:e] in self.ids), None)
            if end is None:
                return []
            found.append(self.ids[data[at:end]])
            at = end
        return found


class _Source:
    """The attributes of a tokenizer that the wrapper reads."""

    def __init__(self, tokens: list[bytes], special: list[int], end: int, encode: Callable[[str], list[int]]) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = end
        self.bos_token_id = None
        self.encode = encode
        self.known = lru_cache(KNOWN_TEXTS)(encode)

    def __call__(self, text: str | bytes) -> list[int]:
        plain = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self.known(plain) if len(plain) <= SHORT else self.encode(plain)
