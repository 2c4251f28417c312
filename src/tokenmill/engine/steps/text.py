"""What an engine knows about text. Owns: finding its tokenizer, its end tokens, and the vocabulary of constraints.
Must not know: requests, tensors.
"""

from __future__ import annotations

from typing import Any

from tokenmill.checkpoint.hub import Hub
from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import ModelError, shown
from tokenmill.engine.load.model_source import ModelSource, find_source
from tokenmill.engine.steps.admission import Admission
from tokenmill.engine.steps.breakers import BreakerIndex
from tokenmill.models.overriding import overridden
from tokenmill.structured.compile import Compiler
from tokenmill.structured.vocabulary import Vocabulary
from tokenmill.text.tokenizer import Tokenizer


def load_tokenizer(config: EngineConfig, source: ModelSource) -> Tokenizer | None:
    """The model's tokenizer, or another that the options name; None: prompts and answers are token ids."""
    if config.model.skip_tokenizer_init:
        return None
    if config.model.tokenizer is not None:
        hub = Hub(config.files.download_dir, config.files.hf_token)
        return find_source(config.model.tokenizer, config.files.tokenizer_revision, hub).tokenizer()
    if config.model.load_format == "dummy":
        try:
            return source.tokenizer()
        except ModelError:
            return None  # a config alone
    return source.tokenizer()


def give_text(admission: Admission, tokenizer: Tokenizer, check: float) -> None:
    """Give admission what needs the vocabulary: bad words, and constraints (their table is made at first use)."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False, allow_special=False)

    def token_texts() -> list[bytes]:
        size = min(admission.vocab_size, tokenizer.vocab_size)
        return [tokenizer.token_bytes(i) for i in range(size)]

    def vocabulary() -> Vocabulary:
        texts = token_texts()
        size = len(texts)
        marks = {i for i in tokenizer.special_ids | tokenizer.control_ids if i < size}  # only grammars name these
        return Vocabulary.of(texts, marks, tuple(admission.eos_ids), tokenizer.encode_inside)

    admission.encoders = (encode, tokenizer.encode_inside)
    admission.breakers = BreakerIndex(token_texts, tokenizer.encode_inside).find
    admission.compiler = Compiler(vocabulary, check)


def eos_ids_of(
    raw: dict[str, Any],
    generation: dict[str, Any],
    tokenizer: Tokenizer | None,
    overrides: dict[str, Any] | None = None,
) -> frozenset[int]:
    """The end tokens of generation_config.json, config.json (changed by these overrides) and the tokenizer. Where the
    first or the overrides name some, config.json may add tokens that were added to the vocabulary; an ordinary word is
    a leftover there, and would end answers that are not at their end."""
    raw, given = overridden(raw, overrides or {}), overrides or {}
    stated = _ids_of(generation) | _ids_of(given) | _ids_of(given.get("text_config"))
    more = _ids_of(raw) | _ids_of(raw.get("text_config"))
    if tokenizer is not None:
        more = {index for index in more if not stated or index in tokenizer.added_ids} | {*tokenizer.eos_ids}
    return frozenset(stated | more)


def _ids_of(source: Any) -> set[int]:
    value = source.get("eos_token_id") if isinstance(source, dict) else None
    found = value if isinstance(value, list) else [value]
    return {index for index in found if isinstance(index, int) and not isinstance(index, bool) and index >= 0}


def unheeded_ends(
    raw: dict[str, Any], generation: dict[str, Any], vocab_size: int, overrides: dict[str, Any] | None = None
) -> list[str]:
    """One sentence for each end token that can end nothing. (-1 is how some files say that there is none.)"""
    config = overridden(raw, overrides or {})
    files = {"generation_config.json": generation, "config.json": config, "text_config": config.get("text_config")}
    said = []
    for where, source in files.items():
        value = source.get("eos_token_id") if isinstance(source, dict) else None
        for one in value if isinstance(value, list) else [value]:
            usable = isinstance(one, int) and not isinstance(one, bool) and 0 <= one < vocab_size
            if not usable and one not in (None, -1):
                told = f"{where}: 'eos_token_id' = {shown(one)} is none of the model's {vocab_size} tokens"
                said.append(f"{told}: no answer ends with it.")
    return said
