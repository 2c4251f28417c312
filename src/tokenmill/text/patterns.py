"""Patterns by which a tokenizer splits words. Owns: making sure that patterns of an untrusted file neither run for ever
nor crash the process. They are tried in a process of its own, with limits of CPU time and memory, before they are used.

Known patterns, which published tokenizers and the demonstration models have, are not tried: a trial takes a third of a
second of each process that reads a tokenizer. Must not know: files, vocabularies.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenmill.core.errors import MOST_SHOWN, ModelError, why
from tokenmill.text import build, pattern_worker
from tokenmill.text.gguf_patterns import PATTERNS

MAX_PATTERNS = 256
MAX_CHARS = 100_000
DEADLINE_S = 60.0
"""Seconds for the whole trial. CPU time is limited to much less, so only a very busy machine comes near it."""
_FOUND = re.compile(rb'"Regex"\s*:\s*("(?:[^"\\]|\\.)*")')
_SPELLED = re.compile(rb"\\u00(52|65|67|78)")
KNOWN = frozenset(
    {
        *(one for each in PATTERNS.values() if each is not None for one in ([each] if isinstance(each, str) else each)),
        build.WORDS_DEMO,
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        *(r"\p{N}", r"\p{N}{1,3}", r"\s+", r"\S+", " {2,}", r"[\r\n]"),
    }
)


def check_patterns(data: bytes | str) -> None:
    """Raise ModelError (without a file name) if a pattern in the bytes of a tokenizer.json is not usable."""
    raw = data.encode("utf-8", "replace") if isinstance(data, str) else data
    try:
        if _SPELLED.search(raw):  # the name may be hidden in escapes, which no honest writer does
            found = set(_inside(json.loads(raw)))
        else:
            found = {str(json.loads(match[1])) for match in _FOUND.finditer(raw)}
    except (ValueError, RecursionError) as error:
        raise ModelError("it is not valid JSON") from error
    try_patterns(found - KNOWN)


def _inside(value: Any) -> Iterator[str]:
    """Every pattern in a JSON value."""
    if isinstance(value, dict) and isinstance(value.get("Regex"), str):
        yield value["Regex"]
    for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        if isinstance(child, dict | list):
            yield from _inside(child)


def try_patterns(patterns: Iterable[str]) -> None:
    """Split some texts by each pattern in another process; raises ModelError when that fails or does not end."""
    wanted = sorted(patterns)
    if not wanted:
        return
    if len(wanted) > MAX_PATTERNS or sum(map(len, wanted)) > MAX_CHARS:
        raise ModelError(f"it has more than {MAX_PATTERNS} patterns or {MAX_CHARS} characters of them")
    try:
        done = subprocess.run(
            [sys.executable, "-I", str(Path(pattern_worker.__file__))],
            input=json.dumps(wanted).encode(),
            capture_output=True,
            timeout=DEADLINE_S,
            env={"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            check=False,
        )
    except OSError as error:
        raise ModelError(f"its patterns could not be tried: {why(error)}; try again") from None
    except subprocess.TimeoutExpired:
        raise ModelError("its patterns could not be tried: this machine is too busy; try again") from None
    ready, _, said = done.stdout.partition(pattern_worker.READY.encode())
    if ready or not done.stdout:
        raise ModelError(f"its patterns could not be tried: {_last_line(done.stderr)}; try again")
    tried = said.split()
    if done.returncode or len(tried) != len(wanted):
        bad = wanted[min(len(tried), len(wanted) - 1)]
        short = bad if len(bad) <= 80 else f"{bad[:77]}..."
        raise ModelError(f"its pattern {short!r} is not usable: it does not compile, or takes for ever on plain text")


def _last_line(said: bytes) -> str:
    """Why a process ended, as far as it told."""
    lines = said.decode("utf-8", "replace").split("\n")
    return next((line.strip()[:MOST_SHOWN] for line in reversed(lines) if line.strip()), "their process was killed")
