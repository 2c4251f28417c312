"""Requests that were present at several deaths of engines are tried one after the other."""

from __future__ import annotations

from tokenmill.core.request import Request, SamplingParams
from tokenmill.engine.running.said import PASSED, Said
from tokenmill.engine.running.trials import Trials


class Engines:
    """Requests at engines 0 and 1, some of them suspects, and the trials that they ask."""

    def __init__(self, *suspects: str) -> None:
        self.owners: dict[str, int] = {}
        self.trials = Trials(lambda: self.owners)
        self.said = {name: said(name, deaths=2) for name in suspects}

    def ask(self, *, living: tuple[int, ...] = (0, 1), coming: tuple[int, ...] = ()) -> list[str]:
        """Let all that have no engine ask for one; returns who got one."""
        found = []
        for name, each in self.said.items():
            if name not in self.owners and (able := self.trials.engines(living, each, coming)):
                self.owners[name] = able[0]
                found.append(name)
        return found

    def die(self, engine: int) -> list[str]:
        """The engine dies; returns whom this proves to be the cause."""
        lost = [name for name, number in self.owners.items() if number == engine]
        for name in lost:
            del self.owners[name]
            self.said[name].deaths += 1
        return [name for name in lost if self.trials.died(self.said[name], alone=len(lost) == 1)]

    def speak(self, name: str, tokens: int) -> bool:
        self.said[name].emitted[0] += [1] * tokens
        return self.trials.answered(name)


def said(name: str, deaths: int = 0) -> Said:
    return Said(Request(id=name, prompt_ids=[1], params=SamplingParams(), seed=0), None, emitted=[[]], deaths=deaths)


def test_one_after_the_other_is_tried_on_an_engine_that_is_set_aside() -> None:
    engines = Engines("a", "b")
    assert engines.ask(living=(0,), coming=(1,)) == [] and engines.trials.engine == 1, "nobody runs on the lost one"
    assert engines.ask() == ["a"] and engines.trials.engines((0, 1), None) == [0]
    assert not engines.speak("a", PASSED - 1) and engines.ask() == []
    assert engines.speak("a", 1) and engines.ask() == ["b"], "who has passed goes on beside the next one"
    assert engines.speak("b", PASSED) and engines.trials.engine == -1


def test_who_is_alone_when_the_engine_dies_is_the_cause_and_others_go_free() -> None:
    engines = Engines("a", "b", "c")
    engines.ask(living=(1,))
    assert engines.die(1) == ["a"] and engines.trials.engine == 1
    del engines.said["a"]
    engines.trials.leave("a")
    assert [each.deaths for each in engines.said.values()] == [1, 1] and engines.ask() == ["b", "c"]


def test_where_several_were_present_each_is_tried_to_its_end_and_alone() -> None:
    engines = Engines("a", "b")
    engines.ask(living=(1,))
    engines.speak("a", PASSED)
    assert engines.ask() == ["b"] and engines.die(1) == []
    (first,) = engines.ask(living=(1,))
    assert not engines.speak(first, 10 * PASSED) and engines.ask() == []
    del engines.owners[first]
    engines.trials.leave(first)
    del engines.said[first]
    (second,) = engines.ask(living=(1,))
    assert engines.die(1) == [second]


def test_one_whose_caller_left_may_have_killed_the_engine_of_the_next() -> None:
    engines = Engines("a", "b")
    engines.ask(living=(1,))
    del engines.owners["a"], engines.said["a"]
    engines.trials.leave("a", doubt=True)
    assert engines.ask() == ["b"] and engines.die(1) == []
    assert engines.ask(living=(1,)) == ["b"] and engines.die(1) == ["b"], "now it was alone"
