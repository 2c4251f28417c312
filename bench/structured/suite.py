"""The official JSON Schema test suite against constraints: passed, refused, false accept, false reject, per case.

    python bench/structured/suite.py DIR/tests/draft7 [--optional] [--json OUT] [--list]

A value counts as admitted if any spelling of it is: members in any order, whole numbers with and without a fraction.
The suite is not shipped; any public copy will do.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenmill.core.errors import UserError
from tokenmill.structured.compile import Compiler
from tokenmill.structured.constraint import GrammarConstraint
from tokenmill.structured.vocabulary import Vocabulary

END = 256
MOST = 200


def spellings(value: Any) -> Iterator[str]:
    """Texts of a value."""
    if isinstance(value, dict):
        for order in itertools.permutations(value.items()):
            parts = [[f"{json.dumps(k, ensure_ascii=False)}: {text}" for text in spellings(v)] for k, v in order]
            for chosen in itertools.product(*parts):
                yield "{" + ", ".join(chosen) + "}"
    elif isinstance(value, list):
        for chosen in itertools.product(*(list(spellings(v)) for v in value)):
            yield "[" + ", ".join(chosen) + "]"
    elif isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        yield from (json.dumps(value), str(int(value)))
    else:
        yield json.dumps(value, ensure_ascii=False)


def says(constraint: GrammarConstraint, text: str) -> bool:
    """Is this a whole answer?"""
    twin = constraint.fork()
    try:
        data = list(text.encode())
    except UnicodeEncodeError:
        return False
    if twin.validate(data) != len(data):
        return False
    twin.accept(data)
    return twin.validate([END]) == 1 or twin.finished()


def run(folder: Path, optional: bool) -> tuple[Counter[str], list[str], Counter[str]]:
    """-> counts per verdict, the false ones and the refused groups by reason."""
    table = [bytes([i]) for i in range(256)] + [b""]
    vocabulary = Vocabulary.of(table, {END}, (END,), lambda text: list(text.encode()))
    compiler = Compiler(lambda: vocabulary)
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    reasons: Counter[str] = Counter()
    for path in sorted(folder.rglob("*.json") if optional else folder.glob("*.json")):
        for group in json.loads(path.read_text()):
            name = f"{path.stem}: {group['description']}"
            try:
                constraint = compiler.constraint({"json": json.dumps(group["schema"])})
            except UserError as error:
                counts["refused"] += len(group["tests"])
                reasons[f"{path.stem}: {str(error)[:160]}"] += len(group["tests"])
                continue
            assert isinstance(constraint, GrammarConstraint)
            for test in group["tests"]:
                texts = spellings(test["data"])
                if path.stem == "zeroTerminatedFloats":  # it is about the spelling
                    texts = iter([json.dumps(test["data"])])
                found = any(says(constraint, t) for t in itertools.islice(texts, MOST))
                verdict = "passed" if found == test["valid"] else "false accept" if found else "false reject"
                counts[verdict] += 1
                if verdict != "passed":
                    wrong.append(f"{verdict} | {name} | {test['description']} | {json.dumps(test['data'])[:80]}")
    return counts, wrong, reasons


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--optional", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    counts, wrong, reasons = run(options.folder, options.optional)
    total = sum(counts.values())
    for verdict in ("passed", "refused", "false accept", "false reject"):
        print(f"{verdict:13} {counts[verdict]:5} {100 * counts[verdict] / total:5.1f} %")
    if options.list:
        print("\n".join([*wrong, "", *(f"{n:3} {why}" for why, n in reasons.most_common())]))
    if options.json:
        options.json.write_text(json.dumps({"counts": counts, "wrong": wrong, "refused": reasons}, indent=1))
    sys.exit(bool(counts["false accept"]))


if __name__ == "__main__":
    main()
