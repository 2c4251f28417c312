"""Small vocabularies, trained once, that stand for the three families of tokenizer files."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

LINES = [
    "The mill grinds grain into flour, and flour becomes bread.",
    "Words go in at the top; tokens fall out at the bottom, 1234 of them!",
    "It's a windy day: the sails turn 7 times, then 77, then 777.",
    "def grind(grain):\n    return [flour for flour in grain]\n",
    "Der Müller mahlt täglich. Où est le moulin à café ? 風車が回る。",
    "   spaces    in    rows   and\ttabs\n\n\nand lines",
]


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    """Byte-level BPE with special, steering and plain added tokens."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    inner.train_from_iterator(LINES, trainer)
    inner.add_special_tokens(["<|start|>", "<|end|>"])
    inner.add_tokens([AddedToken("<think>", special=False), AddedToken("café au lait", special=False)])
    return inner


@pytest.fixture(scope="session")
def sentencepiece_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with a real tokenizer.model: BPE and Unigram, both with byte fallback."""
    found = {}
    for kind in ("bpe", "unigram"):
        folder = tmp_path_factory.mktemp(kind)
        data = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([line.replace("\n", " ") for line in LINES] * 4),
            model_writer=data,
            model_type=kind,
            vocab_size=350 if kind == "unigram" else 380,
            byte_fallback=True,
            character_coverage=0.98,
            user_defined_symbols=["<tool>"],
            remove_extra_whitespaces=kind == "unigram",
            normalization_rule_name="identity" if kind == "bpe" else "nmt_nfkc",
            hard_vocab_limit=False,
            minloglevel=2,
        )
        (folder / "tokenizer.model").write_bytes(data.getvalue())
        found[kind] = folder
    return found


@pytest.fixture(scope="session")
def word_piece() -> Tokenizer:
    """A decoder without a byte table."""
    words = ["[UNK]", "[A]", "[B]", "mill", "##s", "the", "turn", "##ing", ".", "wind"]
    inner = Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.decoder = decoders.WordPiece()
    inner.add_special_tokens(["[UNK]", "[A]", "[B]"])
    return inner
