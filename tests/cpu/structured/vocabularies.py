"""Seven kinds of vocabulary as models have them, where is a space put, how are bytes spelled?"""

from __future__ import annotations

import json
from collections.abc import Callable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tokenmill.text.build import WORDS_DIGITS_3

SIZE = 420
MARK = "▁"
END = "</s>"
TEXT = (
    'The mill says {"name": "mill", "age": 7, "kind": "miller", "friend": null} and then {"name": "baker"}.',
    "Words go in at the top; yes, no, tokens fall out: 1234 of them! Hello, user@host.org, maybe [1, 2, 3].",
    '<tool_call>\n{"name": "get_weather", "arguments": {"days": 3, "units": "C"}}\n</tool_call> " a" " b", "c": true',
)


def _sentencepiece(prepend: str) -> Tokenizer:
    """Byte-fallback BPE over words that begin with a mark."""
    special = ["<unk>", "<s>", END, *(f"<0x{i:02X}>" for i in range(256))]
    learner = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    learner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    trainer = trainers.BpeTrainer(vocab_size=SIZE, special_tokens=special, show_progress=False)
    learner.train_from_iterator(TEXT, trainer)
    learner.pre_tokenizer = None
    state = json.loads(learner.to_str())
    state["added_tokens"] = []  # bytes are ordinary pieces
    made = Tokenizer.from_str(json.dumps(state))
    fused = [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prepend == "normalizer":  # Llama 2, TinyLlama, Phi-3
        made.normalizer = normalizers.Sequence([normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)])
        made.decoder = decoders.Sequence([*fused, decoders.Strip(" ", 1, 0)])
    elif prepend in ("first", "always"):  # Mistral; T5-like conversions
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=prepend == "always")
        made.decoder = decoders.Sequence([*fused, decoders.Strip(" ", 1, 0)])
    else:  # Gemma
        made.normalizer = normalizers.Replace(" ", MARK)
        made.decoder = decoders.Sequence(fused)
    made.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", END)])
    return made


def _phi3() -> Tokenizer:
    made = _sentencepiece("normalizer")
    marks = ("<|user|>", "<|assistant|>", "<|end|>")
    made.add_special_tokens([AddedToken(t, special=True, normalized=False, rstrip=True) for t in marks])
    return made


def _bytes(pre_tokenizer: pre_tokenizers.PreTokenizer) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizer
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=SIZE - 1, initial_alphabet=alphabet, show_progress=False)
    )
    made.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return made


def _tiktoken() -> Tokenizer:
    split = pre_tokenizers.Split(Regex(WORDS_DIGITS_3), "isolated")
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return _bytes(pre_tokenizers.Sequence([split, bytewise]))


VOCABULARIES: dict[str, Callable[[], Tokenizer]] = {
    "llama 2": lambda: _sentencepiece("normalizer"),
    "mistral": lambda: _sentencepiece("first"),
    "metaspace": lambda: _sentencepiece("always"),
    "phi 3": _phi3,
    "gemma": lambda: _sentencepiece("none"),
    "byte-level": lambda: _bytes(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "tiktoken": _tiktoken,
}
