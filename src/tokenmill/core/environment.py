"""Environment variables that nothing reads: with tokenmill's prefix, and other servers' keys. Owns: finding them, and
what is said of each.

Must not know: the command line.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

from tokenmill.core.config import GROUPS, SERVER_GROUPS, all_options

PREFIX = "TOKENMILL_"
PLACES = ("CACHE", "HOME", "FAULTS")
"""Variables that are no options."""
TESTS = ("AXE", "DRAWS", "FAMILIES", "FUZZ_", "LOST_RANKS", "ONLY", "QUANTISE", "RELIABILITY", "SANITIZE", "SWEEP",
         "SWITCH_", "THIS_MACHINE", "WEB_TIMEOUT_S")  # fmt: skip
"""How names begin that only this project's tests and benchmarks read."""

KEYS = ("VLLM_API_KEY", "LLAMA_API_KEY")
"""What vLLM and llama.cpp take a server's key from: whoever comes from them may think that there is one."""


def unread_variables(environment: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each variable that looks like one of ours and is none."""
    for variable in KEYS:
        if environment.get(variable) and not environment.get(f"{PREFIX}API_KEY"):
            yield f"{variable} is set, and nothing reads it: a server takes its key from --api-key or {PREFIX}API_KEY."
    ours = [variable for variable in sorted(environment) if variable.startswith(PREFIX)]
    if not ours:  # every command starts here
        return
    known = [name.upper() for name in (*all_options(GROUPS), *all_options(SERVER_GROUPS))] + list(PLACES)
    for variable in ours:
        name = variable.removeprefix(PREFIX)
        if name in known or name.startswith(TESTS):
            continue
        close = difflib.get_close_matches(name.upper(), known, n=1)
        hint = f"; did you mean {PREFIX}{close[0]}?" if close else "."
        yield f"{variable} is set, and nothing reads it{hint}"
