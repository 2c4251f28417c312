"""Log lines: JSON where a program reads them, a short line where a person does, and prompts in neither."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tokenmill.core.config import ServeOptions
from tokenmill.server.logs import NAMES, JsonFormatter, PlainFormatter, set_up_logs

REQUEST = {"id": "x1", "method": "POST", "path": "/v1/completions", "status": 200, "ms": 35.21, "key": "anonymous"}


@pytest.fixture(autouse=True)
def kept() -> Iterator[None]:
    """The loggers as they were."""
    before = {name: (logging.getLogger(name).handlers, logging.getLogger(name).propagate) for name in NAMES}
    yield
    for name, (handlers, propagate) in before.items():
        logging.getLogger(name).handlers, logging.getLogger(name).propagate = handlers, propagate


def line(formatter: logging.Formatter, event: str, data: dict[str, Any], level: str = "INFO") -> str:
    record = logging.makeLogRecord({"msg": event, "levelname": level, "data": data})
    return formatter.format(record)


def test_a_request_is_a_short_line_for_people() -> None:
    text = line(PlainFormatter(), "request", REQUEST)
    assert text[2] == text[5] == ":" and text[8:] == "  POST /v1/completions  200  35 ms"
    assert line(PlainFormatter(), "request", {**REQUEST, "key": "ab12"}).endswith("35 ms  key ab12")
    assert json.loads(line(JsonFormatter(), "request", REQUEST)).items() >= REQUEST.items()


def test_other_lines_tell_all_they_know_and_steer_nothing() -> None:
    text = line(PlainFormatter(), "request failed", {"id": "x\x1b[2J\ny", "n": 3}, "ERROR")
    assert text[8:] == "  error:  request failed  id x\ufffd[2J\ufffdy  n 3"
    coloured = line(PlainFormatter(coloured=True), "draining", {}, "WARNING")
    assert coloured.startswith("\x1b[33m") and coloured.endswith("draining\x1b[0m")
    assert "\x1b" not in line(PlainFormatter(coloured=True), "draining", {})


@pytest.mark.parametrize(("terminal", "option", "form"), [
    (True, None, PlainFormatter), (False, None, JsonFormatter), (True, True, JsonFormatter),
    (False, False, PlainFormatter), (True, False, PlainFormatter), (False, True, JsonFormatter),
])  # fmt: skip
def test_who_reads_decides_unless_told(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, option: bool | None, form: type
) -> None:
    monkeypatch.setattr(os, "isatty", lambda descriptor: terminal)
    set_up_logs(ServeOptions(log_json=option))
    for name in NAMES:
        (handler,) = logging.getLogger(name).handlers
        assert type(handler.formatter) is form
