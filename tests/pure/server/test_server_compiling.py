"""Grammars compile beside the engine's loop: nobody waits for them, and what cannot be compiled is refused once."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from tokenmill.core.errors import OUR_FAULT, OVER_LIMIT, OWN_FAULT, EngineDeadError, ParameterError
from tokenmill.core.request import Request, SamplingParams
from tokenmill.engine.running.loop import EngineLoop
from tokenmill.engine.running.wire import Abort, Add, Refused, Report
from tokenmill.server.errors import describe_error
from tokenmill.server.request_job import _failure


class Admission:
    """Hands out futures by request id; `checked` are the requests that came through."""

    def __init__(self) -> None:
        self.futures: dict[str, Future[None]] = {}
        self.checked: list[str] = []

    def prepare(self, params: SamplingParams) -> Future[None] | None:
        name = (params.structured_outputs or {}).get("choice")
        return None if name is None else self.futures.setdefault(name[0], Future())

    def check(self, request: Request) -> None:
        self.checked.append(request.id)


def make_loop() -> tuple[EngineLoop, Admission]:
    admission = Admission()
    engine = SimpleNamespace(
        admission=admission,
        add=lambda request, pooling: admission.check(request),
        scheduler=SimpleNamespace(roster=SimpleNamespace(groups={})),
        abort=lambda *args: [],
    )
    facts = SimpleNamespace(device="cpu", device_uuid="")
    adapters = SimpleNamespace(check=lambda number: None, begin=lambda number: None, let_go=lambda: None)
    config = SimpleNamespace(cache=SimpleNamespace(block_size=16))
    sleep = SimpleNamespace()
    return EngineLoop(
        SimpleNamespace(engine=engine, facts=facts, config=config, adapters=adapters, sleep=sleep),
        lambda wait: None,
        lambda news: None,
    ), admission  # type: ignore[arg-type]


def add(name: str, *, grammar: bool) -> Add:
    params = SamplingParams(structured_outputs={"choice": [name]} if grammar else None)
    return Add(Request(id=name, prompt_ids=[1], params=params), ack=True)


def turn(loop: EngineLoop, *commands: Any) -> Report:
    report = Report()
    for command in commands:
        if isinstance(command, Add):
            loop._add(command, report)
        else:
            loop._obey(command, report)
    loop._take_compiled(report)
    return report


def test_a_slow_grammar_delays_only_its_own_request() -> None:
    loop, admission = make_loop()
    report = turn(loop, add("slow", grammar=True), add("plain", grammar=False))
    assert report.accepted == ["plain"] and admission.checked == ["plain"]
    assert turn(loop).accepted == []
    admission.futures["slow"].set_result(None)
    assert turn(loop).accepted == ["slow"] and turn(loop).accepted == []


def test_what_cannot_be_compiled_is_refused_and_not_tried_again() -> None:
    loop, admission = make_loop()
    turn(loop, add("bad", grammar=True), add("broken", grammar=True))
    admission.futures["bad"].set_exception(ParameterError("no such thing", param="structured_outputs"))
    admission.futures["broken"].set_exception(RuntimeError("secret detail"))
    report = turn(loop)
    assert report.refused == [Refused("bad", "no such thing", "structured_outputs")]
    assert report.failed == {"broken": "the engine could not handle it (RuntimeError)"}, (
        "its caller waits for an answer"
    )
    assert admission.checked == [] and not report.deltas


def test_a_lost_engine_is_not_blamed_on_the_request_that_met_it() -> None:
    """The loop ends, and the server gives its requests to another life."""

    def lost(number: int) -> None:
        raise EngineDeadError("the model's process is gone")

    loop, _ = make_loop()
    loop.built.adapters.begin = lost  # type: ignore[method-assign, assignment]
    with pytest.raises(EngineDeadError):
        turn(loop, add("adapted", grammar=False))
    loop.gauges.read = lambda: lost(0)  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(EngineDeadError):
        loop._stats()


def test_an_aborted_request_is_not_added_later() -> None:
    loop, admission = make_loop()
    turn(loop, add("gone", grammar=True), add("going", grammar=True))
    assert admission.futures["going"].set_running_or_notify_cancel()
    turn(loop, Abort("gone"), Abort("going"))
    assert admission.futures["gone"].cancelled(), "nobody's grammar waits behind one that nobody wants"
    admission.futures["going"].set_result(None)
    assert turn(loop).accepted == [] and admission.checked == []


def test_what_ends_before_it_began_is_not_awaited() -> None:
    loop, _ = make_loop()
    groups = loop.engine.scheduler.roster.groups
    groups["one"] = groups["two"] = None  # type: ignore[assignment]
    turn(loop, add("one", grammar=False), add("two", grammar=False), Abort("one", 0))
    assert loop.queued == {"one", "two"}, "its other outputs may begin"
    groups.clear()
    turn(loop, Abort("one", 1), Abort("two"))
    assert loop.queued == set()


def test_what_failed_in_an_engine_is_worded_by_whose_fault_it_is() -> None:
    for text, status in ((OWN_FAULT, 400), (OVER_LIMIT, 400), (OUR_FAULT, 503), ("the model's logits hold NaN", 500)):
        found = describe_error(_failure(f"{text}x", "1"))
        assert found.status == status and (found.retry_after is not None) == (status == 503)


def test_what_failed_in_an_engine_names_no_folder() -> None:
    found = describe_error(_failure("/home/me/adapters/own: is not a folder.", "1"))
    assert "/home" not in found.message and found.message.endswith(" own: is not a folder.")
