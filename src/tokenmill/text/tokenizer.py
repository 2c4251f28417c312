"""Finding and reading a model folder's tokenizer. Owns: which files are tried in which order, the meaning of the
settings files beside them, and naming the file in every error. Must not know: how text is encoded, requests, models.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

import tokenizers
from tokenizers import AddedToken, normalizers, pre_tokenizers

from tokenmill.core.errors import MOST_SHOWN, ModelError, why
from tokenmill.core.files import LOOK, open_regular, present, read_object, read_regular, told_by
from tokenmill.text import build
from tokenmill.text.charsmap import CharsMap
from tokenmill.text.codec import Tokenizer, TokenizerSettings
from tokenmill.text.panics import check_frame, check_merges
from tokenmill.text.patterns import check_patterns
from tokenmill.text.rank_files import from_rank_file, from_tekken
from tokenmill.text.sentencepiece import ModelKind, read_sentencepiece

__all__ = ["Tokenizer", "load_tokenizer"]

T = TypeVar("T")
MAX_TOKENIZER_BYTES = 64 << 20
"""Most bytes of a tokenizer.json, which native code reads. The other files are read line by line in Python."""
MAX_VOCABULARY_BYTES = 16 << 20
MAX_SETTINGS_BYTES = 16 << 20
MAX_TEMPLATE_BYTES = 4 << 20
_FLAGS = ("special", "normalized", "lstrip", "rstrip", "single_word")
_SPACED = frozenset(
    f"{name}Tokenizer{fast}" for name in ("GPT2", "GPTNeoX", "CodeGen", "Qwen2") for fast in ("", "Fast")
)
"""Classes that make the step which splits words from the settings."""
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder; raises ModelError that names the file that is missing or broken."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ModelError(f"{folder}: there is no such folder; give the folder that holds the model's tokenizer")
    config = _settings(folder / "tokenizer_config.json")
    strings = _special_strings(folder, config)
    table: list[CharsMap] = []
    inner = _vocabulary(folder, config, strings, table)
    settings = TokenizerSettings(
        strings,
        _chat_template(folder, config),
        _flag(folder, config, "split_special_tokens", False),
        table[0] if table else None,
    )
    try:
        made = Tokenizer(inner, settings)
        made.probe()
        made.unheeded = _unheeded(folder, config, made)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic of the native library is not an Exception
        raise ModelError(f"{folder}: its tokenizer cannot be used ({str(error)[:200]})") from error
    return made


def _vocabulary(
    folder: Path, config: dict[str, Any], strings: dict[str, str], table: list[CharsMap]
) -> tokenizers.Tokenizer:
    """The vocabulary in the form of the library. `strings` gets the names of special tokens that its file tells, and
    `table` what the file replaces before."""
    if present(path := folder / "tokenizer.json"):
        inner = _guarded(path, _native, MAX_TOKENIZER_BYTES)
        _add_tokens(inner, folder, config, strings, whole=True)
        _follow_class(inner, folder, config)
        return inner
    if present(path := folder / "tokenizer.model"):
        if not _is_rank_file(path):
            return _sentencepiece(path, config, strings, table)
        inner = _guarded(path, lambda data: from_rank_file(data, path.name, config))
    elif present(path := folder / "tekken.json"):
        inner, named = _guarded(path, from_tekken, MAX_TOKENIZER_BYTES)
        strings.update({name: text for name, text in named.items() if name not in strings})
        _frame(inner, folder, config, strings, bos=True)
        return inner
    elif found := [*sorted(folder.glob("*.tiktoken")), *filter(present, [folder / "tiktoken.model"])]:
        path = found[0]
        inner = _guarded(path, lambda data: from_rank_file(data, path.name, config))
    elif present(path := folder / "vocab.json"):
        inner = _vocab_and_merges(folder, config)
    else:
        raise ModelError(
            f"{folder}: no tokenizer found; it needs tokenizer.json, tokenizer.model, tekken.json, a .tiktoken "
            "file, or vocab.json with merges.txt"
        )
    _add_tokens(inner, folder, config, strings)
    _frame(inner, folder, config, strings, bos=False)
    return inner


def _follow_class(inner: tokenizers.Tokenizer, folder: Path, config: dict[str, Any]) -> None:
    """The settings may contradict the file on the space before a text. Some classes then follow the settings."""
    said = _flag(folder, config, "add_prefix_space", False)
    step = inner.pre_tokenizer
    if "add_prefix_space" not in config or config.get("tokenizer_class") not in _SPACED or step is None:
        return
    state = json.loads(step.__getstate__())
    if state["type"] == "ByteLevel" and state["add_prefix_space"] != said:
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=said, use_regex=state["use_regex"])


def _unheeded(folder: Path, config: dict[str, Any], made: Tokenizer) -> tuple[str, ...]:
    """Settings without effect. Transformers, too, lets tokenizer.json say what stands around a text."""
    where, found = folder / "tokenizer_config.json", []
    if config.get("clean_up_tokenization_spaces") is True and made.kind != "BPE":
        found.append(f"{where}: clean_up_tokenization_spaces is not done: answers are what the tokens say.")
    for name, side in (("bos", 0), ("eos", 1)) if present(folder / "tokenizer.json") else ():
        said, token = config.get(f"add_{name}_token"), made.special_strings.get(f"{name}_token", "")
        if isinstance(said, bool) and token and said != (made.token_to_id(token) in made.frame[side]):
            does = "no" if said else "a"
            found.append(
                f"{where}: add_{name}_token = {str(said).lower()} is overruled by tokenizer.json, which puts {does} "
                f"{token} around a text."
            )
    return tuple(found)


def _native(data: bytes) -> tokenizers.Tokenizer:
    check_patterns(data)
    check_merges(data)
    inner = tokenizers.Tokenizer.from_buffer(data)
    build.refuse_chance(inner)
    check_frame(inner)
    return inner


def _sentencepiece(
    path: Path, config: dict[str, Any], strings: dict[str, str], table: list[CharsMap]
) -> tokenizers.Tokenizer:
    model = _guarded(path, read_sentencepiece)
    if model.charsmap:
        table.append(_guarded(path, lambda _: CharsMap(model.charsmap)))
    model.add_prefix = _flag(path.parent, config, "add_prefix_space", model.add_prefix)
    model.first_only = not _flag(path.parent, config, "legacy", True)
    inner = _guarded(path, lambda _: build.from_sentencepiece(model))
    for name, index in (("bos_token", model.bos_id), ("eos_token", model.eos_id), ("unk_token", model.unk_id)):
        if 0 <= index < len(model.pieces):
            strings.setdefault(name, model.pieces[index].text)
    _add_tokens(inner, path.parent, config, strings)
    _frame(inner, path.parent, config, strings, bos=model.kind is ModelKind.BPE)
    return inner


def _vocab_and_merges(folder: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    vocab = _settings(folder / "vocab.json", MAX_VOCABULARY_BYTES)
    merges = _guarded(folder / "merges.txt", lambda data: build.read_merges(data.decode()))
    qwen = str(config.get("tokenizer_class", "")).startswith("Qwen")
    pattern = build.WORDS_DIGITS_1 if qwen else None
    inner = _guarded(folder / "vocab.json", lambda _: build.from_merges(vocab, merges, pattern))
    if qwen:
        inner.normalizer = normalizers.NFC()
    elif _flag(folder, config, "add_prefix_space", False):
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return inner


def _frame(
    inner: tokenizers.Tokenizer, folder: Path, config: dict[str, Any], strings: dict[str, str], *, bos: bool
) -> None:
    def wanted(name: str, default: bool) -> list[str]:
        token = strings.get(f"{name}_token")
        on = _flag(folder, config, f"add_{name}_token", default)
        return [token] if on and token is not None and inner.token_to_id(token) is not None else []

    is_t5 = str(config.get("tokenizer_class", "")).startswith("T5")
    build.surround(inner, wanted("bos", bos), wanted("eos", is_t5))


def _add_tokens(
    inner: tokenizers.Tokenizer, folder: Path, config: dict[str, Any], strings: dict[str, str], *, whole: bool = False
) -> None:
    """Add the tokens that the settings list, under the ids they state, and make those special that the settings name;
    what is only named follows the vocabulary, as in Transformers. What the settings say of a token that the vocabulary
    file has as well counts, but for its id if that file is whole: then it has the ids of all its tokens. Other files
    say nothing of tokens, which are then looked for in texts as they are typed."""
    known, fixed = inner.get_added_tokens_decoder(), {} if whole else {"normalized": False}
    special = {name: AddedToken(name, **{**flags, **fixed}) for name, flags in _named(folder, config, strings).items()}
    names = {token.content for token in known.values()}
    stated = sorted(_listed_tokens(folder, config, names, special).items())
    listed = [(index, AddedToken(name, **{**flags, **fixed})) for index, (name, flags) in stated]
    changed = [(index, token) for index, token in listed if repr(known.get(index)) != repr(token)]
    sure = {token.content for _, token in changed if whole and inner.token_to_id(token.content) is not None}
    inner.add_tokens([token for _, token in changed])
    for index, token in changed:
        if (got := inner.token_to_id(token.content)) != index and token.content not in sure:
            raise ModelError(
                f"{folder}: the added token {token.content!r} is listed with id {index} but follows the vocabulary as "
                f"{got}; list the added tokens without gaps or provide a tokenizer.json"
            )
    have = {token.content: token for token in inner.get_added_tokens_decoder().values()}
    named = [have.get(name, token) for name, token in special.items()]
    named = [token for token in named if token.content not in have or not token.special]
    for token in named:
        token.special = True
    inner.add_special_tokens(named)


def _named(folder: Path, config: dict[str, Any], strings: dict[str, str]) -> dict[str, dict[str, bool]]:
    """All tokens that the settings call special with their flags, in the order in which Transformers gives them ids:
    those with a role, those with a name of their own (image_token), and the others."""
    older = _older(folder, config, "special_tokens_map.json")
    roles = [source.get(name) for name in _NAMES for source in (config, older)]
    own = [source[name] for source in (config, older) for name in source if name.endswith("_token")]
    for key in ("model_specific_special_tokens", "extra_special_tokens"):
        own += named.values() if isinstance(named := config.get(key), dict) else ()
    entries = [*(entry for entry in own if entry not in roles), *_further(config, older)]
    flags = {_content(entry): _stated(entry) for entry in (*roles, *entries) if isinstance(entry, dict)}
    found = [*(strings[name] for name in _NAMES if name in strings), *filter(None, map(_content, entries))]
    return {name: flags.get(name, {}) for name in found}


def _further(config: dict[str, Any], older: dict[str, Any]) -> list[Any]:
    """The special tokens that are only listed. Of the settings' two lists the one under the newer name counts, and the
    older file's list under the older name only if the settings have none."""
    name, newer = "additional_special_tokens", "extra_special_tokens"
    chosen = config.get(newer) if isinstance(config.get(newer), list) else None
    chosen = chosen or (config if name in config else older).get(name)
    return [entry for row in (chosen, older.get(newer)) if isinstance(row, list) for entry in row]


def _content(entry: Any) -> str:
    """The name of a token, which stands alone or among its settings; "": neither."""
    name = entry.get("content") if isinstance(entry, dict) else entry
    return name if isinstance(name, str) else ""


def _stated(entry: dict[str, Any]) -> dict[str, bool]:
    """The flags that a token's settings have; the library knows what absent ones mean."""
    return {name: bool(entry[name]) for name in _FLAGS if name in entry}


def _listed_tokens(
    folder: Path, config: dict[str, Any], known: Collection[str], special: Collection[str]
) -> dict[int, tuple[str, dict[str, bool]]]:
    """The added tokens by id, with their flags. known: names of which the older file, which holds names and ids alone,
    says nothing new."""
    listed: dict[int, tuple[str, dict[str, bool]]] = {}
    try:
        for token, index in _older(folder, config, "added_tokens.json").items():
            if token not in known:
                listed[int(index)] = (token, {"special": token in special})
        for index, entry in config.get("added_tokens_decoder", {}).items():
            if not isinstance(name := entry["content"], str):
                raise TypeError(f"{name!r} is no text")
            listed[int(index)] = (name, _stated(entry))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"{folder}: the list of added tokens is malformed ({error})") from error
    return listed


def _flag(folder: Path, config: dict[str, Any], name: str, default: bool) -> bool:
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"{folder / 'tokenizer_config.json'}: {name} must be true or false, not {str(value)[:40]!r}")
    return default if value is None else value


def _special_strings(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """The names of the tokens with a role. Where both files name one, the older file counts."""
    strings: dict[str, str] = {}
    for source in (config, _older(folder, config, "special_tokens_map.json")):
        for name in _NAMES:
            value = source.get(name)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str) and value:
                strings[name] = value
    return strings


def _older(folder: Path, config: dict[str, Any], name: str) -> dict[str, Any]:
    """A file beside the settings that older versions wrote. It does not count beside settings that list their added
    tokens, for these are whole, as in Transformers."""
    return {} if "added_tokens_decoder" in config else _settings(folder / name)


def _chat_template(folder: Path, config: dict[str, Any]) -> str | dict[str, str] | None:
    """The jinja file wins over chat_template.json, which wins over the tokenizer's settings."""
    found = _template_value(config.get("chat_template"), folder / "tokenizer_config.json")
    path = folder / "chat_template.json"
    found = _template_value(_settings(path).get("chat_template"), path) or found
    if present(path := folder / "chat_template.jinja"):
        found = read_regular(path, MAX_TEMPLATE_BYTES).decode("utf-8", "replace")
    extra = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    if not extra:
        return found
    named = {path.stem: read_regular(path, MAX_TEMPLATE_BYTES).decode("utf-8", "replace") for path in extra}
    return {**(found if isinstance(found, dict) else {"default": found} if found else {}), **named}


def _template_value(value: object, path: Path) -> str | dict[str, str] | None:
    if value is None or isinstance(value, str):
        return value
    try:
        if isinstance(value, dict):
            return {str(name): str(text) for name, text in value.items()}
        if isinstance(value, list):
            return {str(entry["name"]): str(entry["template"]) for entry in value}
    except (TypeError, KeyError):
        pass
    raise ModelError(f"{path}: chat_template must be a string or a list of objects with `name` and `template`")


def _is_rank_file(path: Path) -> bool:
    with open_regular(path, MAX_VOCABULARY_BYTES) as file:
        line = file.readline(512).strip()
    word, _, rank = line.partition(b" ")
    return rank.isdigit() and word.isascii() and all(byte > 32 for byte in word)


def _settings(path: Path, limit: int = MAX_SETTINGS_BYTES) -> dict[str, Any]:
    """A JSON object from a file; {} when there is no such file."""
    return read_object(path, limit) if present(path) else {}


def _guarded(path: Path, parse: Callable[[bytes], T], most: int = MAX_VOCABULARY_BYTES) -> T:
    """Run a parser over a file's bytes; whatever it raises becomes a ModelError that names the file."""
    data = read_regular(path, most)
    try:
        return parse(data)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        if other := told_by(data[:LOOK]):
            raise ModelError(f"{path}: is {other}") from error
        if isinstance(error, OSError):  # the bytes are here already, so it is the machine's
            raise ModelError(f"{path}: cannot be used now: {why(error)}") from error
        if isinstance(error, ModelError):
            raise ModelError(f"{path}: {error}") from error
        # The native library reports some broken files by a panic, which is not an Exception.
        raise ModelError(
            f"{path}: not a usable tokenizer file ({str(error)[:MOST_SHOWN]}); download it again"
        ) from error
