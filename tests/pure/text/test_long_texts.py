"""Long texts are encoded piece by piece: the same tokens, in little memory."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from tests.pure.text.conftest import LINES

from tokenmill.core.errors import TooLargeError
from tokenmill.demo.files import demo_dir
from tokenmill.text import pieces
from tokenmill.text.codec import Tokenizer
from tokenmill.text.tokenizer import load_tokenizer

ODD = [*LINES, "<|start|><|end|>", "café au lait", "<think>", "<tool>", "e\u0301 \u200d", "\U0001f600" * 40, "a" * 700]


@pytest.mark.parametrize("kind", ["byte_level", "bpe", "unigram", "word_piece", "demo"])
def test_pieces_have_the_tokens_of_the_whole(
    kind: str,
    byte_level: tokenizers.Tokenizer,
    word_piece: tokenizers.Tokenizer,
    sentencepiece_files: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if kind in sentencepiece_files:
        tokenizer = load_tokenizer(sentencepiece_files[kind])
    elif kind == "demo":
        tokenizer = load_tokenizer(demo_dir())
    else:
        tokenizer = Tokenizer({"byte_level": byte_level, "word_piece": word_piece}[kind])
    monkeypatch.setattr(pieces, "PIECE", 300)
    draw = random.Random(kind)
    for _ in range(12):
        text = "".join(draw.choice(ODD) + draw.choice(["", " ", "\n", "  ", ". "]) for _ in range(60))
        options = [
            {"add_special_tokens": framed, "allow_special": special}
            for framed in (True, False)
            for special in (True, False)
        ]
        cut = [tokenizer.encode_inside(text), *(tokenizer.encode(text, **each) for each in options)]
        with monkeypatch.context() as whole:
            whole.setattr(pieces, "PIECE", len(text))
            assert cut == [tokenizer.encode_inside(text), *(tokenizer.encode(text, **each) for each in options)]
        longest = 0

        def encode(part: str) -> list[int]:
            nonlocal longest
            longest = max(longest, len(part))
            return tokenizer.encode(part)

        pieces.encode_in_pieces(text, encode)
        assert longest < len(text) // 2


def test_a_word_without_end_is_refused(byte_level: tokenizers.Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE", 100)
    monkeypatch.setattr(pieces, "MOST_WHOLE", 1000)
    tokenizer = Tokenizer(byte_level)
    for word in ("a" * 1001, "é" * 501, " " * 1001):
        with pytest.raises(TooLargeError, match="more than 1000 bytes"):
            tokenizer.encode(f"Before. {word}")
        assert tokenizer.encode(f"Before. {word[:400]} {word[:400]} after.")


@pytest.mark.parametrize("unit", ["1 ", "The mill turns.\n", "é, "])
def test_memory_for_millions_of_characters(unit: str) -> None:
    """Whole, they take 500 to 800 MB."""
    program = f"""
import resource
from tokenmill.demo.files import demo_dir
from tokenmill.text.tokenizer import load_tokenizer
tokenizer = load_tokenizer(demo_dir())
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
tokenizer.encode("before")
before = peak()
assert len(tokenizer.encode({unit!r} * (2_000_000 // len({unit!r})))) > 100_000
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) < 150
