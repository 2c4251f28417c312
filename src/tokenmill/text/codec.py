"""Text to token ids and back. Owns: the Tokenizer class, which wraps the `tokenizers` library, and its rules: encoding
lets other threads run, typed text cannot become control tokens, decoding is exact to the byte. Must not know: files
(see tokenizer.py), requests, models.
"""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from os.path import commonprefix
from typing import Any, final

import tokenizers

from tokenmill.core.errors import UserError
from tokenmill.text.charsmap import CharsMap
from tokenmill.text.inside_twin import inside_twin, later_twin
from tokenmill.text.lone_pieces import LonePieces
from tokenmill.text.pieces import encode_in_pieces, is_long
from tokenmill.text.plain_twin import control_ids, plain_twin
from tokenmill.text.token_bytes import PieceTable, read_rules

_FAILED = (
    "The model's tokenizer failed on this text: it holds too long a run of letters, blanks or signs for the rules by "
    "which it is split, or the tokenizer's files are damaged."
)


@dataclass(frozen=True)
class TokenizerSettings:
    """What a model folder says about its tokenizer besides the vocabulary."""

    special_strings: Mapping[str, str] = field(default_factory=dict)  # bos_token, eos_token, ...
    chat_template: str | dict[str, str] | None = None  # one template, or several by name
    split_special: bool = False  # control tokens in a text are ordinary text, whoever wrote it
    charsmap: CharsMap | None = None  # what is replaced in a text, but in its added tokens


@final
class Tokenizer:
    """Encodes and decodes with one vocabulary; safe to use from several threads."""

    def __init__(self, inner: tokenizers.Tokenizer, settings: TokenizerSettings | None = None) -> None:
        inner.no_truncation()
        inner.no_padding()
        settings = settings or TokenizerSettings()
        inner.encode_special_tokens = settings.split_special
        self.split_special, self._charsmap = settings.split_special, settings.charsmap
        self.unheeded: tuple[str, ...] = ()
        """What the settings ask for and what is not done, in sentences for the log."""
        self._inner = inner
        self._long_text_lock = threading.Lock()
        self.special_strings = dict(settings.special_strings)
        self.chat_template = settings.chat_template
        added = inner.get_added_tokens_decoder()
        self.added_ids = frozenset(added)
        self.base_size = inner.get_vocab_size(with_added_tokens=False)
        self.takes_spaces = {t.content: (t.lstrip, t.rstrip) for t in added.values() if t.lstrip or t.rstrip}
        """Added tokens that take white space (before, behind) them."""
        self.spelt = {index: token.content for index, token in added.items()}
        """How texts spell the added tokens."""
        self.respelt = inner.normalizer is not None and any(t.special and t.normalized for t in added.values())
        """Special tokens are looked for in normalised text: other spellings may become them."""
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.vocab_size = max(inner.get_vocab_size(), 1 + max(added, default=-1))
        self.bos_id = self._named_id("bos_token")
        eos = self._named_id("eos_token")
        self.eos_ids: tuple[int, ...] = () if eos is None else (eos,)
        rules = read_rules(_decoder_state(inner))
        self._tables: tuple[PieceTable, PieceTable] | None = None
        if rules is not None:
            shown = PieceTable(rules, self.id_to_token, self.added_ids, frozenset())
            self._tables = shown, PieceTable(rules, self.id_to_token, self.added_ids, self.special_ids)

    def state(self) -> dict[str, Any]:
        """Plain data from which `from_state` makes an equal tokenizer in another process."""
        return {
            "inner": self._inner.to_str(),
            "special_strings": self.special_strings,
            "chat_template": self.chat_template,
            "split_special": self.split_special,
            "eos_ids": list(self.eos_ids),
            "charsmap": None if self._charsmap is None else base64.b64encode(self._charsmap.data).decode(),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Tokenizer:
        """The tokenizer whose `state` this is."""
        said = state["charsmap"]
        table = None if said is None else CharsMap(base64.b64decode(said))
        settings = TokenizerSettings(state["special_strings"], state["chat_template"], state["split_special"], table)
        made = cls(tokenizers.Tokenizer.from_str(state["inner"]), settings)
        made.eos_ids = tuple(state["eos_ids"])
        return made

    @property
    def kind(self) -> str:
        """The library's name for how texts become tokens: BPE, Unigram, ..."""
        return type(self._inner.model).__name__

    @cached_property
    def control_ids(self) -> frozenset[int]:
        """Ids that text encoded with allow_special=False never contains."""
        return control_ids(self._inner)

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token. A text of more characters than this has more than one token."""
        return max((len(self.token_bytes(index)) for index in range(self.vocab_size)), default=1)

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        return plain_twin(self._inner)

    @cached_property
    def _inside(self) -> tokenizers.Tokenizer:
        return inside_twin(plain_twin(self._inner))

    @cached_property
    def _lone(self) -> LonePieces:
        return LonePieces(self._inner)

    def encode_inside(self, text: str) -> list[int]:
        """Ids of a text that continues another one: nothing is put before it. Control tokens stay ordinary text."""
        row = self._many(self._inside, [self._read(text, special=False)], False)[0]
        return self._without_controls(row, framed=False)

    @cached_property
    def _later(self) -> tuple[tokenizers.Tokenizer, tokenizers.Tokenizer]:
        return later_twin(self._plain), later_twin(self._inner)

    def encode_later(self, text: str, *, allow_special: bool = True) -> list[int]:
        """Ids of a text that follows a control token."""
        row = self._rows(self._later[allow_special], [self._read(text, special=allow_special)], False)[0]
        return row if allow_special else self._without_controls(row, framed=False)

    def encode(self, text: str, *, add_special_tokens: bool = True, allow_special: bool = True) -> list[int]:
        """Token ids of a text; with allow_special=False, spelled-out control tokens stay ordinary text."""
        return self.encode_batch([text], add_special_tokens=add_special_tokens, allow_special=allow_special)[0]

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True, allow_special: bool = True
    ) -> list[list[int]]:
        """encode() for several texts at once, on several cores. Long texts are encoded in pieces."""
        inner = self._inner if allow_special else self._plain
        read = [self._read(text, special=allow_special) for text in texts]
        rows = self._rows(inner, read, add_special_tokens)
        return rows if allow_special else [self._without_controls(row, add_special_tokens) for row in rows]

    def _read(self, text: str, *, special: bool) -> str:
        """A text as the library may read it. special: control tokens in it are tokens, and stay as they are."""
        text = _well_formed(text)
        return text if self._charsmap is None else self._charsmap.apply(text, self._kept[special])

    @cached_property
    def _kept(self) -> tuple[re.Pattern[str] | None, re.Pattern[str] | None]:
        """What finds the added tokens in a text: those that people may type, and all."""
        added = self._inner.get_added_tokens_decoder()
        typed = [token.content for index, token in added.items() if index not in self.control_ids]
        every = typed if self.split_special else [token.content for token in added.values()]
        return _any_of(typed), _any_of(every)

    def _rows(self, inner: tokenizers.Tokenizer, texts: list[str], framed: bool) -> list[list[int]]:
        rows = self._many(inner, texts, framed)
        for place, text in enumerate(texts):
            found = self._lone.find(text, lambda more: _encoded(inner, [more], False)[0])
            if found is not None:
                before, after = self.frame if framed else ((), ())
                rows[place] = [*before, *found, *after]
        return rows

    def _many(self, inner: tokenizers.Tokenizer, texts: list[str], framed: bool) -> list[list[int]]:
        if not any(map(is_long, texts)):
            return _encoded(inner, texts, framed)
        before, after = self.frame if framed else ((), ())
        return [[*before, *self._long_row(inner, text), *after] for text in texts]

    def _long_row(self, inner: tokenizers.Tokenizer, text: str) -> list[int]:
        def encode(part: str) -> list[int]:
            # A long text without cuts takes much memory, so such texts are encoded one at a time.
            with self._long_text_lock if is_long(part) else nullcontext():
                return _encoded(inner, [part], False)[0]

        return encode_in_pieces(text, encode)

    def probe(self) -> None:
        """Encode and decode a little text, so that errors that the library finds only then are found now."""
        for text in ("", "a", "Plain text, 12 words.\n", "é 中 \U0001f600\u200d \x00"):
            self.decode(self.encode(text))

    def _without_controls(self, ids: list[int], framed: bool) -> list[int]:
        if self.control_ids.isdisjoint(ids):
            return ids
        before, after = self.frame if framed else ((), ())
        stop = len(ids) - len(after)
        body = [index for index in ids[len(before) : stop] if index not in self.control_ids]
        return [*before, *body, *after]

    @cached_property
    def frame(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The special ids that the post-processor puts before and after a text."""
        bare = self._plain.encode("a", add_special_tokens=False).ids
        full = self._plain.encode("a", add_special_tokens=True).ids
        at = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
        return tuple(full[:at]), tuple(full[at + len(bare) :])

    def decode(
        self,
        ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """The text of some ids; broken UTF-8 becomes U+FFFD, unknown ids vanish. The second option only matters to
        decoders that put spaces between tokens: then False joins neighbouring added tokens without one."""
        table = self.piece_table(skip_special_tokens)
        if table is not None:
            return table.text(ids)
        kept = [index for index in ids if self.shows(index, skip_special_tokens)]
        joined = spaces_between_special_tokens or skip_special_tokens
        runs = [kept] if joined else _cut_between(kept, self.added_ids)
        return "".join(self._inner.decode(run, skip_special_tokens=False) for run in runs)

    def piece_table(self, skip_special_tokens: bool) -> PieceTable | None:
        """The table id -> bytes; None for the few decoders whose tokens have no fixed bytes."""
        return self._tables[skip_special_tokens] if self._tables else None

    def shows(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Does this id take part in a decoded text?"""
        hidden = skip_special_tokens and token_id in self.special_ids
        return not hidden and self.id_to_token(token_id) is not None

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes that a token adds in the middle of a text; b"" for an unknown id."""
        if self._tables is not None:
            return self._tables[0][token_id]
        token, decoder = self.id_to_token(token_id), self._inner.decoder
        if token is None:
            return b""
        text = decoder.decode(["a", token]) if decoder is not None else f"a {token}"
        return text[1:].encode()

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary entry as it is stored (not its text); None for an unknown id."""
        return self._inner.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None

    def token_to_id(self, token: str) -> int | None:
        """The id of a vocabulary entry as it is stored."""
        return self._inner.token_to_id(token)

    def _named_id(self, name: str) -> int | None:
        token = self.special_strings.get(name)
        return None if token is None else self._inner.token_to_id(token)


def _decoder_state(inner: tokenizers.Tokenizer) -> dict[str, Any] | None:
    if inner.decoder is None:
        return None
    state: dict[str, Any] = json.loads(inner.decoder.__getstate__())
    return state


def _encoded(inner: tokenizers.Tokenizer, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
    """Rows of well-formed texts. Only the batch call lets other threads run, so one text goes through it, too."""
    try:
        found = inner.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise UserError(_FAILED) from error
    return [item.ids for item in found]


def _well_formed(text: str) -> str:
    # JSON may carry half of a surrogate pair, which no tokenizer accepts.
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _any_of(names: list[str]) -> re.Pattern[str] | None:
    """Finds the longest of the names, as a group."""
    wanted = sorted({*names} - {""})
    try:
        return re.compile(f"({_one_of(wanted)})") if wanted else None
    except RecursionError:  # hundreds of names that each begin with the one before
        return re.compile(f"({'|'.join(map(re.escape, reversed(wanted)))})")


def _one_of(names: list[str]) -> str:
    """A pattern of sorted names that looks at each character of a text once: one begins with what the others do."""
    parts = []
    for first, group in groupby(names, key=lambda name: name[:1]):
        alike = list(group)
        start = commonprefix(alike)  # noqa: RUF071 - these are no paths
        if first:
            parts.append(re.escape(start) + (_one_of([name[len(start) :] for name in alike]) if len(alike) > 1 else ""))
    return f"(?:{'|'.join(parts)})" + ("?" if "" in names else "")


def _cut_between(ids: list[int], added: frozenset[int]) -> list[list[int]]:
    """Cut a row between every two neighbouring ids of `added`."""
    runs: list[list[int]] = [[]]
    for before, after in zip([-1, *ids], ids, strict=False):
        if before in added and after in added:
            runs.append([])
        runs[-1].append(after)
    return runs
