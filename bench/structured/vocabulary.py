"""A vocabulary of any size without a download: bytes, pieces of this repository's own texts, then joined pieces."""

from __future__ import annotations

import random
import re
from collections import Counter
from pathlib import Path

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


def made_up(size: int) -> Vocabulary:
    """The vocabulary, with one end token behind the pieces; texts are cut into the longest pieces."""
    table = pieces(size - 1)
    ids = {piece: i for i, piece in enumerate(table)}

    def encode(text: str) -> list[int]:
        data, at, out = text.encode(), 0, []
        while at < len(data):
            end = next(e for e in range(min(len(data), at + 24), at, -1) if data[at:e] in ids)
            out.append(ids[data[at:end]])
            at = end
        return out

    return Vocabulary.of([*table, b""], {size - 1}, (size - 1,), encode)
