"""The engines of an AsyncLLM. Owns: one service for each, and putting another one in the place of a lost one.

It knows nothing of its AsyncLLM, which may be dropped while engines load. Must not know: prompts, HTTP.
"""

from __future__ import annotations

from functools import partial

from tokenmill.core.config import EngineConfig
from tokenmill.engine.options.checks import check_companions
from tokenmill.engine.running.build import Built, build_all, build_engine, replicas_of
from tokenmill.engine.running.service import Service
from tokenmill.engine.running.successors import Successors


class Crew:
    """See the module's text."""

    def __init__(self, config: EngineConfig) -> None:
        check_companions(config)
        self.configs = replicas_of(config)
        self.successors = Successors(self._make, self._take_in)
        self.services: list[Service] = []
        """One service for each engine of data_parallel_size."""
        for number, built in enumerate(build_all(self.configs)):
            self.services.append(self._serve(number, built))

    @property
    def alive(self) -> list[Service]:
        """The engines that have not died; if all have, the first, which says so."""
        return [service for service in self.services if service.dead is None] or self.services[:1]

    @property
    def must_wait(self) -> bool:
        """Have all engines died, and will another one come?"""
        return self.alive[0].dead is not None and (self.successors.expected or self.alive[0].dead is None)

    def close(self) -> None:
        """Stop all engines."""
        self.successors.close()
        for service in self.services:
            service.close()

    def _serve(self, number: int, built: Built) -> Service:
        if len(self.configs) == 1:
            return Service(built)
        return Service(built, alone=False, died=partial(self.successors.lost, number))

    def _make(self, number: int) -> Built:
        """What is left of the lost engine (other ranks, their memory) goes first."""
        self.services[number].engine.close()
        return build_engine(self.configs[number])

    def _take_in(self) -> None:
        """Let engines serve that have loaded, with the adapters of the others."""
        for number, built in self.successors.take():
            others = (service for service in self.services if service.dead is None)
            known = next(others, self.services[number]).built.adapters
            built.adapters.follow(known)
            self.services[number] = service = self._serve(number, built)
            service.commands.put(partial(built.adapters.follow, known))  # what has come in between
            if self.successors.closed:  # whoever closed all may not have seen it
                service.close()
