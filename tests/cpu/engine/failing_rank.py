"""A rank's process whose second rank cannot collect the results of its first step, and cannot begin its fourth one."""

from __future__ import annotations

from typing import Any

from tokenmill.engine.steps import worker


def run_worker() -> None:
    load = worker.load_runner

    def load_failing(*given: Any, mesh: Any) -> Any:
        runner, facts = load(*given, mesh=mesh)
        forward, collect, begun = runner._forward, runner._collect, [0]

        def forward_once_not(running: Any) -> None:
            begun[0] += 1
            if begun[0] == 4:
                raise RuntimeError("a fault of one rank")
            forward(running)

        def collect_once_not(running: Any) -> Any:
            runner._collect = collect
            collect(running)
            raise RuntimeError("a fault of one rank")

        if mesh.rank == 1:
            runner._forward, runner._collect = forward_once_not, collect_once_not
        return runner, facts

    worker.load_runner = load_failing
    worker.run_worker()
