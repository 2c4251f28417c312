"""A rank's process whose second rank cannot collect the results of its first step."""

from __future__ import annotations

from typing import Any

from tokenmill.engine import worker


def run_worker() -> None:
    load = worker.load_runner

    def load_failing(*given: Any, mesh: Any) -> Any:
        runner, facts = load(*given, mesh=mesh)
        collect = runner._collect

        def collect_once_not(running: Any) -> Any:
            runner._collect = collect
            collect(running)
            raise RuntimeError("a fault of one rank")

        if mesh.rank == 1:
            runner._collect = collect_once_not
        return runner, facts

    worker.load_runner = load_failing
    worker.run_worker()
