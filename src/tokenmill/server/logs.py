"""Log lines. Owns: the JSON formatter and what may be in a line. Prompts, outputs and keys never are.

Must not know: requests.
"""

from __future__ import annotations

import json
import logging
import time

from tokenmill.core.config import ServeOptions
from tokenmill.server.outlet import Outlet

NAMES = ("tokenmill.server", "tokenmill.access")


class JsonFormatter(logging.Formatter):
    """One JSON object per line; of an exception only its place, never its message (which may quote a prompt)."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
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
        return json.dumps(line, ensure_ascii=False)


class PlainFormatter(JsonFormatter):
    """The same for people."""

    def format(self, record: logging.LogRecord) -> str:
        line = json.loads(super().format(record))
        rest = " ".join(f"{k}={v}" for k, v in line.items() if k not in ("time", "level", "event"))
        return f"{line['time']} {line['level']:7} {line['event']} {rest}".rstrip()


def set_up_logs(options: ServeOptions) -> None:
    """Send our log lines to standard error."""
    handler = Outlet()
    handler.setFormatter(JsonFormatter() if options.log_json else PlainFormatter())
    for name in NAMES:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(options.log_level.upper())
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
