"""The same programs against a server say what they say in this process."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tokenmill.demo import demo_dir
from tokenmill.program import Session

EXAMPLES = Path(__file__).parents[3] / "examples"
TASKS = {
    "tools": ("What is the weather in Paris?", "21"),
    "self_consistency": ("What is 48 plus 27?", "75"),
    "tree_of_thought": ((12, 5, 9), "26"),
    "system_2_attention": ("I think Anna loves Spain. Today is a sunny day. Anna lives in Rome.", "Italy"),
}


@pytest.fixture(scope="module")
def session(launch):
    return Session(launch("--engines", "0", model=Path(demo_dir())).url, tool_call_parser="hermes")


@pytest.mark.parametrize("name", TASKS)
def test_examples_against_a_server(name, session):
    spec = importlib.util.spec_from_file_location(f"served_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    given, wanted = TASKS[name]
    assert wanted in str(module.solve(session, given))


def test_select_by_likelihood(session):
    talk = session.talk().user("What is the capital of France?").assistant("The capital of France is")
    assert talk.select("city", [" Rome", " Paris"])["city"] == " Paris"
