"""Diversity figures of generated text. Owns: distinct word windows, compressed bits a character."""

from __future__ import annotations

import lzma


def distinct_windows(texts: list[str], size: int = 8) -> float:
    """Share of distinct `size`-word windows over all windows of the texts."""
    seen: set[int] = set()
    total = 0
    for text in texts:
        words = text.split()
        for start in range(len(words) - size + 1):
            seen.add(hash(tuple(words[start : start + size])))
            total += 1
    return len(seen) / max(total, 1)


def bits_per_character(texts: list[str]) -> float:
    """Bits a character after lzma over the joined texts."""
    joined = "\n".join(texts)
    return 8 * len(lzma.compress(joined.encode(), preset=6)) / max(len(joined), 1)
