"""Structures that take long are judged by their work, in a process that may be ended; offline as in the server."""

from __future__ import annotations

import resource
import time

import pytest
from tests.cpu_time import TRIES
from tests.pure.structured.bytewise import byte_vocabulary, says

from tokenmill.core.errors import ParameterError
from tokenmill.process import client
from tokenmill.process.client import Helper
from tokenmill.structured import compile, helper
from tokenmill.structured.compile import Compiler

MOST_S = 8.0
"""Several times what is promised: other work on the core makes work dearer. What it guards against takes minutes."""


def patterns(count):
    return {
        "json": {"type": "object", "patternProperties": {f"^p{i}[a-z]+$": {"type": "string"} for i in range(count)}}
    }


def tools(count):
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"enum": ["x", "y"]}}, "required": ["a"]}
    tags = [
        {"type": "tag", "begin": f"<f{i}>", "content": {"type": "json_schema", "json_schema": schema}, "end": "</f>"}
        for i in range(count)
    ]
    return {
        "structural_tag": {
            "type": "structural_tag",
            "format": {"type": "triggered_tags", "triggers": ["<f"], "tags": tags},
        }
    }


def deep_any_of(depth):
    schema = {"type": "integer"}
    for i in range(depth):
        schema = {"anyOf": [schema, {"type": "string", "pattern": f"^x{i}"}]}
    return {"json": schema}


def wide_any_of(count):
    keys = range(10)
    branches = [
        {"properties": {f"k{j}": {"enum": [f"v{i}{j}{n}" for n in range(20)]} for j in keys}, "required": ["k1"]}
        for i in range(count)
    ]
    return {"json": {"anyOf": branches}}


REFUSED = {
    "200 patternProperties": patterns(200),
    "900 patternProperties": patterns(900),
    "a regex of 20,000 long branches": {"regex": "|".join(f"branch{i}x" for i in range(20_000))},
    "a regex of 20,000 classes": {"regex": "|".join(f"[a-z]{i}" for i in range(20_000))},
    "a deep anyOf": deep_any_of(200),
}
EITHER = {
    "a regex of 20,000 branches": {"regex": "|".join(map(str, range(20_000)))},
    "a pattern of 20,000 branches": {"json": {"pattern": f"^({'|'.join(f'b{i}' for i in range(20_000))})$"}},
    "1,000 tools": tools(1000),
    "a wide enum": {"json": {"enum": [f"value number {i}" for i in range(9_999)]}},
    "a wide choice": {"choice": [f"value number {i}" for i in range(9_999)]},
    "numbers": {"json": {"enum": list(range(9_999))}},
    "a wide anyOf": wide_any_of(60),
    "1,000 properties": {"json": {"properties": {f"k{i}": {"pattern": "^[a-z]{1,40}$"} for i in range(1000)}}},
    "a oneOf of 200": {"json": {"oneOf": [{"properties": {"t": {"const": i}}, "required": ["t"]} for i in range(200)]}},
}


def work() -> float:
    """Of this process and of its children that have ended, whoever's they are: hence several tries."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


@pytest.fixture(autouse=True)
def time_enough(monkeypatch):
    """Only work counts here. A helper that works last and is given up soon hardly gets on beside busy cores, and who
    asks again begins anew."""
    monkeypatch.setattr(helper, "HELPER", Helper("eager_helper"))
    monkeypatch.setattr(compile, "NICE", 0)
    monkeypatch.setattr(client, "PATIENCE", 1e9)


def through(compiler, spec, way):
    """Prepared as a server does, or made at once as LLM.generate does."""
    return compiler.prepare(spec).result() if way == "prepare" else compiler.constraint(spec)


WAYS = [*(("prepare", name) for name in (*REFUSED, *EITHER)), *(("constraint", name) for name in list(REFUSED)[:2])]


@pytest.mark.parametrize(("way", "name"), WAYS)
def test_no_structure_takes_long(way, name):
    found: list[float] = []
    while len(found) < TRIES and (not found or found[-1] > MOST_S):
        compiler, error, began = Compiler(byte_vocabulary), None, work()
        try:
            through(compiler, {**REFUSED, **EITHER}[name], way)
        except ParameterError as refused:
            error = refused
        compiler.close()
        found.append(work() - began)
    assert min(found) <= MOST_S, f"{found} s of work"
    assert name in EITHER or error is not None


def test_usual_structures_are_not_slow():
    compiler = Compiler(byte_vocabulary)
    for spec, text in (
        (patterns(40), '{"p3a": "x"}'),
        (tools(100), '<f7>{"a":"x"}</f>'),
        ({"choice": [f"word{i}" for i in range(2000)]}, "word1999"),
    ):
        assert says(compiler.constraint(spec), text)
    compiler.close()
