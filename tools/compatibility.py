"""docs/compatibility.md: what other engines' programs find here, written from lists that tests enumerate.

`python -m tools.compatibility --write` writes the page; a test compares it. Owns: how the page looks.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from tools.vllm_surface import FIELDS, FLAGS, METHODS, Verdict, of_field, of_flag

import tokenmill
from tokenmill.core.arguments import ENGINE

PAGE = Path(__file__).resolve().parent.parent / "docs" / "compatibility.md"
HEAD = """# What programs for other engines find here

This page is written by `tools/compatibility.py` from the lists that the code itself reads. A name is **done** (it has
its effect), **harmless** (taken, and of no effect, because none is missing) or **refused** (an error names it and says
why, unless its value asks for nothing; values in brackets pass). The fields of every HTTP API are in
[fields.md](fields.md).
"""


def page() -> str:
    """The whole page."""
    text = [HEAD, "## vLLM offline\n", f"`from tokenmill import ...`: {_names(tokenmill.__all__)}.\n"]
    text += ["### Methods of `LLM`\n", *_table(METHODS)]
    text += ["### Fields of `SamplingParams`\n", *_grouped({name: of_field(name) for name in FIELDS})]
    text += ["### Flags of `vllm serve`\n"]
    text += ["Keyword arguments of `LLM` and `EngineArgs` are the engine's flags with underscores.\n"]
    text += _grouped({f"--{name}": of_flag(name) for name in FLAGS})
    older = sorted(name for name in ENGINE if name.replace("_", "-") not in FLAGS)
    text += [f"Older arguments, on the same lists: {_names(older)}.\n"]
    return "\n".join(text).rstrip() + "\n"


def _table(verdicts: Mapping[str, Verdict]) -> Iterable[str]:
    yield "| name | | |\n|---|---|---|"
    for name, verdict in verdicts.items():
        yield f"| `{name}` | {verdict.kind} | {verdict.why} |"
    yield ""


def _grouped(verdicts: Mapping[str, Verdict]) -> Iterable[str]:
    """By kind and reason, so that a reason is told once."""
    for kind in ("done", "harmless", "refused"):
        found = defaultdict(list)
        for name, verdict in verdicts.items():
            if verdict.kind == kind:
                found[verdict.why].append(name)
        yield f"**{kind.capitalize()}**\n"
        yield from (f"- {f'{why}: ' if why else ''}{_names(names)}" for why, names in found.items())
        yield ""


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{PAGE}: {len(page().splitlines())} lines\n")
