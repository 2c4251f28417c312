"""The process in which a stranger's patterns are tried (see patterns.py): stands alone, ends by itself.

Reads a JSON list of patterns; after each that is usable, writes one word.
"""

from __future__ import annotations

import json
import resource
import string
import sys

CPU_S = 3
MEMORY_BYTES = 4 << 30
LENGTH = 3000
ENDS = ("", "!", "b!", f"x!{string.printable}é中!")
"""The last ones hold what a pattern may look for before it begins to try."""
UNITS = ("a", " ", "0", "-", "\n", "x", "A", "ab", "a ", "A1", "é", "中", "'s", "\r\n", "\t ")
TEXTS = (
    *(unit * (LENGTH // len(unit)) + end for unit in UNITS for end in ENDS),
    "The quick brown fox, aged 12345, doesn't jump.\n\n" * 20,
)


def main() -> None:
    """Try what comes from standard input."""
    wanted = json.loads(sys.stdin.buffer.read())
    from tokenizers import Regex, normalizers, pre_tokenizers

    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for pattern in wanted:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        replace = normalizers.Replace(Regex(pattern), "x")
        for text in TEXTS:
            split.pre_tokenize_str(text)
            replace.normalize_str(text)
        sys.stdout.write("fine\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
