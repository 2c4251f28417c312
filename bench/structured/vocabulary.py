"""Vocabularies of any size without a download: bytes, pieces of this repository's own texts, then joined pieces; or
trained, as models have them.

    python bench/structured/vocabulary.py OUT.json FOLDER ... [--size 128000] [--megabytes 60]

trains a byte-level BPE on the text files of these folders and writes a tokenizer.json (a minute on two cores).
"""

from __future__ import annotations

import argparse
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tokenmill.structured.vocabulary import Vocabulary

ROOT = Path(__file__).parents[2]


def pieces(size: int) -> list[bytes]:
    """`size` different byte strings, the commonest first, as a byte-level BPE has them."""
    words: Counter[str] = Counter()
    for path in [*ROOT.glob("docs/*.md"), *ROOT.glob("src/tokenmill/**/*.py"), *ROOT.glob("train/demo/authored/*")]:
        words.update(re.findall(r" ?[^\W\d_]+| ?\d{1,3}| ?[^\w\s]{1,4}|\s+", path.read_text(errors="ignore")))
    found: dict[bytes, None] = {bytes([i]): None for i in range(256)}
    for word, _ in words.most_common():
        for end in range(2, len(word) + 1):
            found.setdefault(word[:end].encode())
    listed = [w for w, _ in words.most_common(4000)]
    rng = random.Random(0)
    while len(found) < size:
        found.setdefault((rng.choice(listed) + rng.choice(listed)).encode()[:24])
    return list(found)[:size]


WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def train(size: int, folders: list[Path], characters: int) -> Tokenizer:
    """A byte-level BPE over the text files of some folders, in an order that a seed shuffles."""
    files = [p for folder in folders for p in sorted(folder.rglob("*")) if p.suffix in (".py", ".md", ".txt", ".json")]
    random.Random(0).shuffle(files)

    def texts() -> Iterator[str]:
        left = characters
        for path in files:
            text = path.read_text(errors="ignore") if path.is_file() else ""
            yield text[:left]
            left -= len(text)
            if left <= 0:
                return

    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORDS), "isolated")
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytewise])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(texts(), trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet))
    return tokenizer


def byte_letters() -> dict[str, int]:
    """How tokenizer.json spells bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + n): b for n, b in enumerate(others)}


def from_file(path: Path) -> Vocabulary:
    """A byte-level tokenizer.json, with one end token behind its own."""
    tokenizer = Tokenizer.from_file(str(path))
    letters = byte_letters()
    size = tokenizer.get_vocab_size(with_added_tokens=False)
    table = [bytes(letters[c] for c in tokenizer.id_to_token(i) or "") for i in range(size)]
    return Vocabulary.of([*table, b""], {size}, (size,), lambda text: tokenizer.encode(text).ids)


def longest_pieces(table: Sequence[bytes]) -> Callable[[str], list[int]]:
    """A tokenizer that cuts texts into the longest pieces of a table, which holds every byte."""
    ids = {piece: i for i, piece in enumerate(table)}

    def encode(text: str) -> list[int]:
        data, at, out = text.encode(), 0, []
        while at < len(data):
            end = next(e for e in range(min(len(data), at + 24), at, -1) if data[at:e] in ids)
            out.append(ids[data[at:end]])
            at = end
        return out

    return encode


def made_up(size: int) -> Vocabulary:
    """The vocabulary, with one end token behind the pieces; texts are cut into the longest pieces."""
    table = pieces(size - 1)
    return Vocabulary.of([*table, b""], {size - 1}, (size - 1,), longest_pieces(table))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--size", type=int, default=128_000)
    parser.add_argument("--megabytes", type=int, default=60)
    options = parser.parse_args()
    train(options.size, options.folders, options.megabytes * 10**6).save(str(options.out))


if __name__ == "__main__":
    main()
