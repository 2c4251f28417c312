"""The tokenizer as programs know it from Transformers. Owns: its names and return types over `text.codec.Tokenizer`.

`LLM.get_tokenizer()` returns one. As in Transformers, control tokens that are typed in a text count as control tokens;
`LLM.chat` is stricter. Attributes that do not exist here are looked up in the tokenizer below. Must not know: engines,
requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tokenmill.core.errors import ParameterError, UserError, shown
from tokenmill.text.codec import Tokenizer

Render = Callable[..., tuple[str, list[int]]]
"""(messages, **options) -> prompt text and ids."""


ROLES = frozenset(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


class Encoding(dict[str, Any]):
    """input_ids and attention_mask, as keys and as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class HubTokenizer:
    """A tokenizer with the names and defaults of Transformers' tokenizers. render: makes a prompt from a conversation;
    size: tokens of the model, which may have more than its tokenizer."""

    is_fast = True
    padding_side = "left"

    def __init__(self, inner: Tokenizer, render: Render, name: str = "", longest: int = 1 << 30, size: int = 0) -> None:
        self.inner = inner
        self._size = max(size, inner.vocab_size)
        self.name_or_path = name
        self.model_max_length = longest
        self._render = render
        self._vocab: dict[str, int] | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "inner":
            raise AttributeError(name)
        role = name.removesuffix("_id")
        if role not in ROLES:
            return getattr(self.inner, name)
        token = self.inner.special_strings.get(role)  # None: there is no such token
        return token if role == name or token is None else self.inner.token_to_id(token)

    # ------------------------------------------------------------ encoding

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        add_special_tokens: bool = True,
        padding: bool | str = False,
        truncation: bool = False,
        max_length: int | None = None,
        return_tensors: str | None = None,
        **more: Any,
    ) -> Encoding:
        """input_ids and attention_mask of one text or of several."""
        if unknown := [name for name, value in more.items() if value not in (None, False, True)]:
            raise ParameterError(f"this tokenizer cannot do {unknown[0]}.", param=unknown[0])
        one = isinstance(text, str)
        texts: list[Any] = list(text) if isinstance(text, (list, tuple)) else [text]
        if not all(isinstance(each, str) for each in texts):
            raise ParameterError("text must be a text or a list of texts.", param="text")
        rows = self.inner.encode_batch(texts, add_special_tokens=add_special_tokens) if texts else []
        if truncation or (max_length is not None and padding != "max_length"):
            rows = [row[: self._length(max_length)] for row in rows]
        wide = self._length(max_length) if padding == "max_length" else max(map(len, rows), default=0)
        masks = [[1] * len(row) for row in rows]
        if padding not in (False, "do_not_pad"):
            pad = self.pad_token_id if self.pad_token_id is not None else self.eos_token_id or 0
            masks = [self._padded(mask, wide, 0) for mask in masks]
            rows = [self._padded(row, wide, pad) for row in rows]
        found = Encoding(input_ids=rows, attention_mask=masks)
        if return_tensors is not None:
            return Encoding({name: _tensor(value, return_tensors) for name, value in found.items()})
        return Encoding({name: value[0] for name, value in found.items()}) if one else found

    def _length(self, wanted: int | None) -> int:
        return self.model_max_length if wanted is None else wanted

    def _padded(self, row: list[int], wide: int, pad: int) -> list[int]:
        fill = [pad] * (wide - len(row))
        return [*fill, *row] if self.padding_side == "left" else [*row, *fill]

    def encode(self, text: str, *, add_special_tokens: bool = True, **options: Any) -> Any:
        """Token ids of a text."""
        if "allow_special" in options:
            return self.inner.encode(text, add_special_tokens=add_special_tokens, **options)
        return self(text, add_special_tokens=add_special_tokens, **options)["input_ids"]

    def tokenize(self, text: str, *, add_special_tokens: bool = False) -> list[str]:
        """A text's tokens, as the vocabulary stores them."""
        ids = self.inner.encode(text, add_special_tokens=add_special_tokens)
        return [self.inner.id_to_token(index) or "" for index in ids]

    # ------------------------------------------------------------ decoding

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> Any:
        """The text of some ids, or of one; of several rows, several texts."""
        ids = _plain(token_ids)
        if isinstance(ids, list) and ids and isinstance(ids[0], list):
            return self.batch_decode(ids, skip_special_tokens, **options)
        spaced = options.get("spaces_between_special_tokens", True)
        row = _checked([ids] if isinstance(ids, int) else ids)
        for index in row:
            if not 0 <= index < self._size:
                raise ParameterError(
                    f"token_ids holds {index}, outside the vocabulary of {self._size}.", param="token_ids"
                )
        return self.inner.decode(row, skip_special_tokens=skip_special_tokens, spaces_between_special_tokens=spaced)

    def batch_decode(self, sequences: Any, skip_special_tokens: bool = False, **options: Any) -> list[str]:
        """The texts of several rows of ids."""
        return [self.decode(row, skip_special_tokens, **options) for row in _plain(sequences)]

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        """The vocabulary's stored entries of these ids; None for unknown ids."""
        plain = _plain(ids)
        if isinstance(plain, int):
            return self.inner.id_to_token(plain)
        kept = [i for i in _checked(plain) if not (skip_special_tokens and i in self.inner.special_ids)]
        return [self.inner.id_to_token(index) for index in kept]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Ids of vocabulary entries; the unknown token's, or None, for others."""
        if isinstance(tokens, str):
            found = self.inner.token_to_id(tokens)
            return self.unk_token_id if found is None else found
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        """The text of vocabulary entries."""
        ids = [self.inner.token_to_id(token) for token in tokens]
        return self.inner.decode([index for index in ids if index is not None], skip_special_tokens=False)

    # ------------------------------------------------------------ the vocabulary

    def get_vocab(self) -> dict[str, int]:
        """Entry -> id, added tokens too."""
        if self._vocab is None:
            entries = ((self.inner.id_to_token(index), index) for index in range(self.inner.vocab_size))
            self._vocab = {token: index for token, index in entries if token is not None}
        return dict(self._vocab)

    def get_added_vocab(self) -> dict[str, int]:
        """The added tokens alone."""
        return {self.inner.id_to_token(index) or "": index for index in sorted(self.inner.added_ids)}

    @property
    def vocab_size(self) -> int:
        """Entries without added tokens."""
        return self.inner.base_size

    def __len__(self) -> int:
        return len(self.get_vocab())

    @property
    def max_token_id(self) -> int:
        """The highest id."""
        return self.inner.vocab_size - 1

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of tokens that have a role or are marked special."""
        named = [self.inner.token_to_id(token) for token in self.inner.special_strings.values()]
        return list(dict.fromkeys([i for i in named if i is not None] + sorted(self.inner.special_ids)))

    @property
    def all_special_tokens(self) -> list[str]:
        """The same as text."""
        return [self.inner.id_to_token(index) or "" for index in self.all_special_ids]

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """Role -> token."""
        return dict(self.inner.special_strings)

    # ------------------------------------------------------------ conversations

    def apply_chat_template(
        self,
        conversation: Any,
        tools: Any = None,
        documents: Any = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **options: Any,
    ) -> Any:
        """The prompt of one conversation or of several: ids, or text with tokenize=False."""
        if not isinstance(conversation, (list, tuple)) or not conversation:
            raise ParameterError("conversation must be a list of at least one message.", param="conversation")
        tensors, as_dict = options.pop("return_tensors", None), options.pop("return_dict", False)
        given = {"tools": tools, "documents": documents, "chat_template": chat_template, **options}
        given = {name: value for name, value in given.items() if value is not None}
        given |= {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        many = isinstance(conversation[0], (list, tuple))
        found = [self._render(each, **dict(given)) for each in (conversation if many else [conversation])]
        if not tokenize:
            return [text for text, _ in found] if many else found[0][0]
        rows = [ids for _, ids in found]
        if tensors is not None:
            whole = Encoding(input_ids=_tensor(rows, tensors), attention_mask=_tensor([[1] * len(r) for r in rows],
                                                                                      tensors))  # fmt: skip
            return whole if as_dict else whole.input_ids
        ids: Any = rows if many else rows[0]
        if not as_dict:
            return ids
        return Encoding(input_ids=ids, attention_mask=[[1] * len(r) for r in rows] if many else [1] * len(ids))

    def get_chat_template(self, chat_template: str | None = None, tools: Any = None) -> str:
        """The template that a conversation would be rendered with."""
        source = chat_template or self.inner.chat_template
        if isinstance(source, dict):
            source = source.get("tool_use" if tools and "tool_use" in source else "default")
        if source is None:
            raise UserError("this model has no chat template: give one with chat_template=")
        return source


def _plain(ids: Any) -> Any:
    """Ids as Python integers, also from a tensor or an array."""
    if hasattr(ids, "tolist"):
        return ids.tolist()
    if isinstance(ids, (int, str, bytes)) or not isinstance(ids, Iterable):
        return ids
    return [_plain(each) for each in ids]


def _checked(ids: Any) -> list[int]:
    """Ids, if each of them is an integer."""
    if not isinstance(ids, list):
        raise ParameterError(f"ids must be integers, or lists of them, got {shown(ids)}.", param="token_ids")
    for index in ids:
        if isinstance(index, bool) or not isinstance(index, int):
            raise ParameterError(f"ids must be integers, or lists of them, got {shown(index)}.", param="token_ids")
    return ids


def _tensor(rows: list[list[int]], kind: str) -> Any:
    if len({len(row) for row in rows}) > 1:
        raise ParameterError("rows of different lengths make no tensor: give padding=True.", param="return_tensors")
    if kind == "pt":
        import torch

        return torch.tensor(rows)
    if kind == "np":
        import numpy

        return numpy.array(rows)
    raise ParameterError("return_tensors must be 'pt' or 'np'.", param="return_tensors")
