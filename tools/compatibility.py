"""docs/compatibility.md: what other engines' programs find here, written from lists that tests enumerate.

`python -m tools.compatibility --write` writes the page; a test compares it. Owns: how the page looks.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from unittest.mock import MagicMock

from fastapi import FastAPI
from starlette.routing import Match
from tools.peer_paths import PATHS
from tools.vllm_surface import FIELDS, FLAGS, METHODS, Verdict, of_field, of_flag

import tokenmill
from tokenmill.core.vllm_arguments import ENGINE
from tokenmill.server.absent import ABSENT, why_absent
from tokenmill.server.app import APIS
from tokenmill.server.ollama.models import PUSH

PAGE = Path(__file__).resolve().parent.parent / "docs" / "compatibility.md"
HEAD = """# What programs for other engines find here

This page is written by `tools/compatibility.py` from the lists that the code itself reads. A name is **done** (it has
its effect), **harmless** (taken, and of no effect, because none is missing) or **refused** (an error names it and says
why, unless its value asks for nothing; values in brackets pass). The fields of every
HTTP API are in [fields.md](fields.md).
"""

ENDPOINTS = """An error of the path's own API says why it is refused.
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
    text += ["## Endpoints\n", ENDPOINTS]
    for api, lines in PATHS.items():
        text += [f"### {api}\n", *_grouped({line: _known(line) for line in lines})]
    return "\n".join(text).rstrip() + "\n"


@cache
def _application() -> FastAPI:
    """The server's routes, without a server."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    for api in APIS:
        api.add(app, MagicMock())
    return app


def verdict_of_path(line: str) -> Verdict | None:
    """What becomes of "METHOD /path"; None: nobody has thought of it."""
    method, path = line.replace("{id}", "an-id").split(" ")
    path = next((api.renamed[path] for api in APIS if path in api.renamed), path)
    scope = {"type": "http", "method": method, "path": path, "root_path": "", "headers": []}
    matched = [route for route in _application().routes if route.matches(scope)[0] == Match.FULL]
    if path in ABSENT or not matched:
        why = why_absent(method, path)
        return None if why is None else Verdict("refused", why)
    return Verdict("refused", PUSH.rstrip(".")) if path == "/api/push" else Verdict("done")


def _known(line: str) -> Verdict:
    found = verdict_of_path(line)
    assert found is not None, f"{line} is neither here nor on the list of what is not"
    return found


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
