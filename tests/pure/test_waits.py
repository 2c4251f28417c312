"""No test of `make test` waits a fixed time for work, nor a short one: a machine under load would fail it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
OUTSIDE = ("reliability", "gpu", "clients")  # not in `make test`
SUBJECTS = 1.0  # seconds: shorter deadlines are what a test is about
PATIENCE = 60.0  # seconds that work is given at least
LONG = 0.1  # seconds: shorter sleeps let others run
# What may be said on the line of a longer sleep that no loop repeats.
REASONS = ("nothing may happen meanwhile", "what must never happen")


def name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def waits_for_time(call: ast.Call) -> bool:
    """Is it a sleep of the caller, not of an engine?"""
    of = call.func.value if isinstance(call.func, ast.Attribute) else None
    return of is None or (isinstance(of, ast.Name) and of.id in ("time", "asyncio", "anyio"))


def number(node: ast.AST | None) -> float | None:
    return float(node.value) if isinstance(node, ast.Constant) and isinstance(node.value, int | float) else None


def waits(tree: ast.AST, loops: int = 0) -> Iterator[tuple[ast.Call, bool]]:
    """Every call, and whether a loop repeats it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call):
            yield node, loops > 0
        inner = loops + isinstance(node, ast.For | ast.While | ast.AsyncFor)
        yield from waits(node, 0 if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) else inner)


def troubles(source: str) -> list[str]:
    lines, found = source.splitlines(), []
    for call, repeated in waits(ast.parse(source)):
        name, line = name_of(call), lines[call.lineno - 1]
        first = number(call.args[0]) if call.args else None
        second = number(call.args[1]) if len(call.args) > 1 else None
        given = next((number(k.value) for k in call.keywords if k.arg == "timeout"), None)
        if name in ("sleep", "wait_for_timeout") and first is not None and not repeated:
            seconds = first / 1000 if name == "wait_for_timeout" else first
            if name == "sleep" and not waits_for_time(call):
                continue
            if seconds >= LONG and not any(reason in line for reason in REASONS):
                found.append(f"{call.lineno}: a fixed wait of {seconds} s")
        if name == "wait_for" and second is not None and SUBJECTS <= second < PATIENCE:
            found.append(f"{call.lineno}: {second} s for work")
        of_future = name in ("result", "exception") and isinstance(call.func, ast.Attribute)
        if (name in ("wait", "join") or of_future) and first is not None and SUBJECTS <= first < PATIENCE:
            found.append(f"{call.lineno}: {first} s for work")
        if given is not None and SUBJECTS <= given < PATIENCE and name in ("run", "get", "post", "request", "Client"):
            found.append(f"{call.lineno}: {given} s for work")
        if name == "wait_for_function" and call.args and "=>" not in ast.unparse(call.args[0]):
            if not isinstance(
                call.args[0], ast.Name
            ):  # the page's policy forbids what is not a function to be asked twice
                found.append(f"{call.lineno}: an expression where the page's policy wants a function")
    return found


@pytest.mark.parametrize("folder", sorted(p.name for p in TESTS.iterdir() if p.is_dir() and p.name not in OUTSIDE))
def test_no_test_waits_a_fixed_time_for_work(folder: str) -> None:
    found = {str(p.relative_to(TESTS)): troubles(p.read_text()) for p in sorted((TESTS / folder).rglob("*.py"))}
    assert not {name: lines for name, lines in found.items() if lines}


def test_what_is_looked_for_is_found() -> None:
    assert troubles("time.sleep(0.5)") and troubles("await_ = asyncio.wait_for(x, 5)")
    assert troubles("page.wait_for_timeout(500)") and troubles("page.wait_for_function('a === b')")
    assert troubles("httpx.get(url, timeout=5)") and troubles("process.wait(30)") and troubles("f.result(5)")
    assert not troubles("while x:\n    time.sleep(0.5)") and not troubles("asyncio.wait_for(x, 60)")
    assert not troubles("page.wait_for_function('() => a === b')") and not troubles("time.sleep(0.01)")
    assert not troubles("time.sleep(0.3)  # nothing may happen meanwhile")
