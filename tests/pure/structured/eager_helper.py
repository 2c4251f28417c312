"""The helper process with the usual priority. The real one works last, by design: beside busy cores it gets a twentieth
of one."""

from __future__ import annotations

from tokenmill.structured import worker


def run_helper() -> None:
    """As a process of its own."""
    worker.NICE = 0
    worker.run_helper()
