"""Log lines. Owns: their two forms (JSON, and for people), and what a line may hold: never prompts, outputs or keys.

Must not know: requests.
"""

from __future__ import annotations

import json
import logging
import os
import time
from typing import Any

from tokenmill.core.config import ServeOptions, wants_no_colour
from tokenmill.server.log_writer import LogWriter

NAMES = ("tokenmill.server", "tokenmill.access")


class JsonFormatter(logging.Formatter):
    """One JSON object per line. Of an exception only its place is logged, never its message, which may quote a
    prompt."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(self.fields(record), ensure_ascii=False)

    def fields(self, record: logging.LogRecord) -> dict[str, Any]:
        """The fields of the line."""
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "data", {}),
        }
        if record.exc_info and record.exc_info[0] is not None:
            line["error"] = record.exc_info[0].__name__
            trace = record.exc_info[2]
            places = []
            while trace is not None:
                code = trace.tb_frame.f_code
                places.append(f"{code.co_filename.rpartition('/')[2]}:{trace.tb_lineno}")
                trace = trace.tb_next
            line["at"] = places[-6:]
        return line


class PlainFormatter(JsonFormatter):
    """The same for people: `14:03:07 POST /v1/chat/completions 200 35 ms`."""

    def __init__(self, *, coloured: bool = False) -> None:
        super().__init__()
        self.coloured = coloured

    def format(self, record: logging.LogRecord) -> str:
        line = self.fields(record)
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        level, event = line.pop("level"), line.pop("event")
        line.pop("time")
        head = clock if level in ("info", "debug") else f"{clock}  {level}:"
        if event == "request" and "status" in line:
            event = f"{line.pop('method')} {line.pop('path')}  {line.pop('status')}  {line.pop('ms'):.0f} ms"
            if line.get("key") == "anonymous":
                del line["key"]
            line.pop("id")
        rest = "  ".join(f"{name} {_shown(value)}" for name, value in line.items())
        text = _harmless(f"{head}  {event}  {rest}".rstrip())
        return f"\x1b[{_COLOURS[level]}m{text}\x1b[0m" if self.coloured and level in _COLOURS else text


_COLOURS = {"warning": 33, "error": 31, "critical": 31, "debug": 2}


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _harmless(text: str) -> str:
    """One line without characters that control a terminal."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def set_up_logs(options: ServeOptions) -> None:
    """Write our log lines to standard error."""
    handler = LogWriter()
    at_terminal = os.isatty(handler.descriptor)
    as_json = not at_terminal if options.log_json is None else options.log_json
    handler.setFormatter(JsonFormatter() if as_json else PlainFormatter(coloured=at_terminal and not wants_no_colour()))
    for name in NAMES:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(options.log_level.upper())
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
