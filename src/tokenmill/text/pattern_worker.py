"""The process in which patterns of untrusted files are tried (see patterns.py). It imports nothing of this package and
ends by itself.

It reads a JSON list of patterns and writes one word when it can begin, then one for each usable one.
"""

from __future__ import annotations

import json
import resource
import string
import sys

CPU_S = 3
MEMORY_BYTES = 4 << 30
LENGTH = 3000
READY = "ready\n"
ENDS = ("", "!", "b!", f"x!{string.printable}é中!")
"""Ends of the trial texts. The last ones hold characters that a pattern may need before it starts backtracking."""
UNITS = ("a", " ", "0", "-", "\n", "x", "A", "ab", "a ", "A1", "é", "中", "'s", "\r\n", "\t ")
TEXTS = (
    *(unit * (LENGTH // len(unit)) + end for unit in UNITS for end in ENDS),
    "The quick brown fox, aged 12345, doesn't jump.\n\n" * 20,
)


def main() -> None:
    """Try the patterns from standard input."""
    wanted = json.loads(sys.stdin.buffer.read())
    from tokenizers import Regex, normalizers, pre_tokenizers

    for kind, most in ((resource.RLIMIT_CPU, CPU_S), (resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_CORE, 0)):
        lower = resource.getrlimit(kind)[1]  # it cannot be raised
        most = most if lower == resource.RLIM_INFINITY else min(most, lower)
        resource.setrlimit(kind, (most, most))
    sys.stdout.write(READY)
    sys.stdout.flush()
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
