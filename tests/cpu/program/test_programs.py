"""Programs in this process: the examples solve their tasks, and steps that can run together do."""

from __future__ import annotations

import importlib.util
import re
import threading
from pathlib import Path
from types import ModuleType

import pytest
from pydantic import BaseModel

from tokenmill import LLM, SamplingParams
from tokenmill.core.errors import ParameterError, UserError
from tokenmill.program import Session

EXAMPLES = Path(__file__).parents[3] / "examples"
TASKS = {
    "tools": ("What is the weather in Paris?", "21"),
    "self_consistency": ("What is 48 plus 27?", "75"),
    "tree_of_thought": ((12, 5, 9), "26"),
    "system_2_attention": ("I think Anna loves Spain. Today is a sunny day. Anna lives in Rome.", "Italy"),
}


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def llm():
    with LLM("demo", max_num_seqs=32, threads=1) as made:
        yield made


@pytest.fixture
def session(llm):
    return Session(llm)


@pytest.mark.parametrize("name", TASKS)
def test_the_examples_work_on_the_demo_model(name, session):
    given, wanted = TASKS[name]
    assert wanted in str(example(name).solve(session, given))


@pytest.mark.parametrize("ask", [
    lambda talk: talk.gen(max_tokens=1 << 20),
    lambda talk: talk.gen(regex="("),
    lambda talk: talk.select("answer", ["yes" * 4000, "no"]),
])  # fmt: skip
def test_a_talk_goes_on_after_a_step_that_was_refused(session, ask):
    talk = session.talk("What is 4 plus 5?")
    with pytest.raises(UserError):
        ask(talk)
    assert isinstance(talk.gen(max_tokens=4)["answer"], str) and not talk.busy


def test_generations_share_steps(llm, session):
    before = llm.engine.scheduler.counters.steps
    talks = [session.talk().user(f"What is {n} plus 5?").gen(max_tokens=30) for n in range(10, 20)]
    answers = session.join(talks)
    steps = llm.engine.scheduler.counters.steps - before
    assert answers == [f"{n} + 5 = {n + 5}." for n in range(10, 20)]
    assert steps < 40, "ten answers of about nine tokens each came one after the other"


def test_forks_share_their_prefix(llm, session):
    base = session.talk().system("You are brief. " * 20).user("What is the capital of France?").gen()
    before = llm.engine.scheduler.counters.cached_tokens
    session.join([t.user("And of Japan?").gen("next") for t in base.fork(3)], "next")
    assert llm.engine.scheduler.counters.cached_tokens - before > 3 * 64


def test_select_takes_the_likeliest(session):
    talk = session.talk().user("What is the capital of France?").assistant("The capital of France is")
    talk.select("city", [" Rome", " Paris", " Berlin"])
    assert talk["city"] == " Paris" and len(talk["city_scores"]) == 3
    assert talk.messages[-1]["content"] == "The capital of France is Paris"
    plain = session.talk("The opposite of hot is").select("word", [" cold", " table"])
    assert plain["word"] == " cold" and plain.text == "The opposite of hot is cold"


def test_forms_and_roles(session):
    class Person(BaseModel):
        name: str
        age: int

    talk = session.talk().user("Extract name and age as JSON: Tom is 30 years old.").gen("person", json=Person)
    assert Person.model_validate_json(talk["person"]) == Person(name="Tom", age=30)
    talk.user("What is 12 plus 5?").assistant("12 + 5 = ").gen("sum", regex="[0-9]+").say("!")
    talk.user("Is the sky blue?").gen("sure", choices=["yes", "no"])
    assert talk["sum"] == "17" and talk["sure"] in ("yes", "no")
    assert [m["role"] for m in talk.messages] == ["user", "assistant"] * 3
    assert talk.messages[3]["content"] == "12 + 5 = 17!"


def test_mistakes_are_named(session):
    with pytest.raises(ParameterError, match="nothing"):
        session.talk().user("x")["nothing"]
    with pytest.raises(ParameterError, match="one of"):
        session.talk().user("x").gen(regex="a", choices=["b"])
    with pytest.raises(ParameterError, match="different"):
        session.talk("x").select("a", ["b", "b"])
    with pytest.raises(ParameterError, match="no field 'colour'"):
        session.talk("x").gen(colour="red")
    with pytest.raises(UserError):
        session.talk("x").gen(max_tokens=10**6)
    with pytest.raises(ParameterError, match="address"):
        Session("demo")
    with pytest.raises(UserError, match="cannot be reached"):
        Session("http://127.0.0.1:9").talk("x").gen()["answer"]


def test_the_document_runs(capsys):
    text = (EXAMPLES.parent / "docs" / "structured.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    found = {}
    exec(compile(code, "structured.md", "exec"), found)
    found["session"].backend.llm.close()
    assert "13 + 5" not in capsys.readouterr().out and found["talk"]["city"] == " Paris"


def test_a_generation_of_the_llm_comes_between(llm, session):
    """What a session has begun and nobody has read is no concern of `generate`, and the other way round."""
    talk = session.talk().user("What is 20 plus 5?").gen(max_tokens=30)
    outputs = llm.generate(["Once upon a time"], SamplingParams(temperature=0.0, max_tokens=40), use_tqdm=False)
    assert len(outputs[0].outputs[0].token_ids) == 40
    assert llm.reset_prefix_cache()
    assert talk["answer"] == "20 + 5 = 25."


def test_generations_come_in_turn(llm, session):
    """First come, first served, whoever shares the engine."""
    llm.llm_engine.add_request("first", "Once upon a time", SamplingParams(max_tokens=2))
    talk = session.talk("x").gen(max_tokens=2)
    first, own = (group.request.arrival for group in llm.engine.scheduler.roster.groups.values())
    assert 0 < first < own
    assert talk["answer"]
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()


def test_two_sessions_on_one_llm(llm):
    one, two = Session(llm), Session(llm)
    talks = [s.talk().user(f"What is {n} plus 5?").gen(max_tokens=30) for n, s in ((10, one), (11, two), (12, one))]
    assert talks[0]["answer"] == "10 + 5 = 15."
    assert talks[2]["answer"] == "12 + 5 = 17.", "steps of one session get the other's on"
    assert talks[1]["answer"] == "11 + 5 = 16."
    assert not one.backend.active
    assert not two.backend.active


def test_a_generation_that_fails_leaves_the_others(llm, session):
    def broken(tokens, logits):
        raise ValueError("no")

    bad = session.talk().user("What is 10 plus 5?").gen(max_tokens=30, logits_processors=[broken])
    good = [session.talk().user(f"What is {n} plus 5?").gen(max_tokens=30) for n in (11, 12)]
    with pytest.raises(UserError, match="failed"):
        bad["answer"]
    assert session.join(good) == ["11 + 5 = 16.", "12 + 5 = 17."]


def test_sessions_in_two_threads(llm):
    found: dict[int, str] = {}

    def ask(number: int) -> None:
        found[number] = Session(llm).talk().user(f"What is {number} plus 5?").gen(max_tokens=30)["answer"]

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(10, 14)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {n: f"{n} + 5 = {n + 5}." for n in range(10, 14)}
