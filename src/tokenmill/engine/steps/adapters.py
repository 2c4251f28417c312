"""Adapters by name. Owns: which names there are, their numbers and files, and whether devices can use them yet.

A number stands for one adapter's files as long as the engine lives and is never used again. Rows, cached prefixes and
requests know adapters by number. Must not know: tensors, HTTP.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmill.core.config import AdapterOptions
from tokenmill.core.errors import NotHereError, ParameterError, UserError, shown
from tokenmill.core.execution import Executor
from tokenmill.core.params import LoRARequest
from tokenmill.core.request import check_integer
from tokenmill.engine.options.adapter_names import check_name, located, read_modules
from tokenmill.scheduler.scheduler import Scheduler

log = logging.getLogger("tokenmill.engine")
ASK_S = 0.02
"""The time between questions to the devices whether an adapter has been read."""


@dataclass(slots=True, eq=False)
class RegisteredAdapter:
    """A registered adapter."""

    number: int
    name: str
    path: str
    ready: bool = False
    given: int = 0
    """The caller's own number for it, as vLLM has them."""


class AdapterDesk:
    """Names, numbers and states of the adapters of one engine."""

    def __init__(self, executor: Executor, scheduler: Scheduler, options: AdapterOptions) -> None:
        self.executor, self.scheduler, self.enabled = executor, scheduler, options.enable_lora
        self.names: dict[str, RegisteredAdapter] = {}
        self.numbers: dict[int, RegisteredAdapter] = {}
        self.next_number = 1
        self.asked = 0.0
        self.leaving: list[RegisteredAdapter] = []
        """Adapters that have lost their name and are still used by open requests."""
        self.failed: dict[int, str] = {}
        """By number, why an adapter could not be read the last time. Several requests may ask for it."""
        self.in_use: Callable[[], Iterable[int]] = lambda: ()
        """Adapters of requests that the scheduler has not got yet: they may wait for a grammar."""
        self.check_awake: Callable[[], None] = lambda: None
        """Refuses to read an adapter while the model sleeps: some (DoRA) are fitted to its weights."""
        for name, path in read_modules(options.lora_modules or []):
            self.register(name, path)

    # ------------------------------------------------------------ names

    def register(self, name: str, path: str, number: int | None = None) -> int:
        """Register a name for an adapter's files; returns its number, which is the old one if both are known
        already."""
        if not self.enabled:
            raise ParameterError(
                "this engine was loaded without adapters: enable_lora=True (--enable-lora) takes them.",
                param="lora_request",
            )
        check_name(name)
        known = self.names.get(name)
        if known is not None and known.path == path:
            return known.number
        if known is not None:
            raise ParameterError(
                f"the adapter {name!r} lies at another path; remove it first, or choose another name.",
                param="lora_request",
            )
        if not Path(located(path)).exists():
            raise ParameterError(f"{path}: there is no such adapter.", param="lora_request")
        self.let_go()
        number = self.next_number if number is None else number
        self.next_number = max(self.next_number, number + 1)
        self.names[name] = self.numbers[number] = RegisteredAdapter(number, name, path)
        return number

    def serve(self, name: str, path: str, number: int) -> None:
        """The same for callers that give numbers. The name now belongs to this adapter; its former owners stay until
        dismissed."""
        if number not in self.numbers:
            self.names.pop(name, None)
            self.register(name, path, number)

    def follow(self, other: AdapterDesk) -> None:
        """Have the adapters of another engine, under their numbers. None is given again, because prefixes are cached by
        them."""
        known = dict(other.numbers)
        self.next_number = max(self.next_number, other.next_number)
        for entry in known.values():
            if entry not in other.leaving and entry.number not in self.numbers:
                try:
                    self.serve(entry.name, entry.path, entry.number)
                except UserError as error:
                    log.error("the adapter %r is not taken over: %s", entry.name, error)
                else:
                    self.numbers[entry.number].given = entry.given
        for number in self.numbers.keys() - known.keys():
            self.dismiss(number)

    def dismiss(self, number: int) -> None:
        """Remove this adapter as soon as no request uses it."""
        entry = self.numbers.get(number)
        if entry is None or entry in self.leaving:
            return
        if self.names.get(entry.name) is entry:
            del self.names[entry.name]
        self.leaving.append(entry)
        self.let_go()

    def take(self, request: Any) -> int:
        """The number for vLLM's LoRARequest (0 for None), after its adapter has been read; refuses one that cannot be
        read."""
        if request is None:
            return 0
        number = self.note(self.checked(request))
        self.wait(number)
        return number

    def checked(self, request: Any) -> LoRARequest:
        """Return the LoRARequest; refuse anything else."""
        if not isinstance(request, LoRARequest):
            raise ParameterError(
                f"lora_request must be a LoRARequest(name, id, path), not {type(request).__name__}.",
                param="lora_request",
            )
        check_integer("lora_int_id", request.lora_int_id, 1, 2**63 - 1)
        if not isinstance(request.lora_path, str) or not request.lora_path:
            raise ParameterError(
                f"lora_path must be the adapter's PEFT folder or GGUF file, got {shown(request.lora_path)}.",
                param="lora_path",
            )
        return request

    def note(self, request: LoRARequest, number: int | None = None) -> int:
        """The number of a LoRARequest's adapter, without reading it. number: the one that another engine uses for
        it."""
        number = self.register(request.lora_name, request.lora_path, number)
        self.numbers[number].given = request.lora_int_id
        return number

    def remove_given(self, given: int) -> bool:
        """Remove an adapter by vLLM's number; False: there was none."""
        names = [entry.name for entry in self.names.values() if given and entry.given == given]
        return len([name for name in names if self.remove(name)]) > 0

    def list_given(self) -> set[int]:
        """vLLM's numbers of all adapters."""
        return {entry.given for entry in self.names.values() if entry.given}

    def remove(self, name: str) -> bool:
        """Remove the name now, and its adapter when no request uses it any more; False: there was none."""
        entry = self.names.get(name)
        if entry is None:
            return False
        self.dismiss(entry.number)
        return True

    def let_go(self) -> None:
        """Forget adapters without a name that no open request uses."""
        if not self.leaving:
            return
        used = {group.request.adapter for group in self.scheduler.roster.groups.values()}
        used |= {seq.group.request.adapter for flight in self.scheduler.flying for seq in flight.seqs}
        used.update(self.in_use())
        for entry in [entry for entry in self.leaving if entry.number not in used]:
            self.leaving.remove(entry)
            self.scheduler.roster.adapters.drop(entry.number)
            self.executor.control_all({"what": "adapter", "op": "drop", "id": entry.number})
            del self.numbers[entry.number]
            self.failed.pop(entry.number, None)

    def forget_fits(self) -> None:
        """The base has other weights: everything computed from the old ones must be computed again."""
        if not self.enabled:
            return
        self.scheduler.roster.adapters.forget()
        for entry in self.numbers.values():
            entry.ready = False
        self.executor.control_all({"what": "adapter", "op": "forget"})

    # ------------------------------------------------------------ states

    def check(self, number: int) -> None:
        """Refuse a request with an unknown adapter."""
        if number and number not in self.numbers:
            raise NotHereError("The adapter is not loaded.", param="model")

    def begin(self, number: int) -> Reading | None:
        """Let the devices start to read an adapter; None: they have read it already."""
        if not number or number not in self.numbers:
            return None
        entry = self.numbers[number]
        if entry.ready and not self.scheduler.roster.adapters.held.get(number):
            entry.ready = number in self._state([number], wait=False)  # its copy may have been dropped
        if entry.ready:
            return None
        self.check_awake()
        self.failed.pop(number, None)  # it is read anew; who waited for the last reading waits for this one
        self.executor.control_all({"what": "adapter", "op": "read", "id": number, "path": located(entry.path)})
        return Reading(self, number)

    def wait(self, number: int) -> None:
        """Read an adapter now; raises its error if it is unusable."""
        reading = self.begin(number)
        if reading is not None:
            self.ask([number], wait=True)
            error = reading.exception()
            if error is not None:
                raise error

    def settle(self) -> None:
        """Wait for adapters that are being read: weights are about to go."""
        if self.enabled:
            self.executor.control_all({"what": "adapter", "op": "settle"})

    def ask(self, numbers: Iterable[int], *, wait: bool) -> None:
        """Ask the devices which of these they have read."""
        now = time.monotonic()
        if wait or now - self.asked >= ASK_S:
            self._state(list(numbers), wait=wait)
            self.asked = time.monotonic()

    def _state(self, numbers: list[int], *, wait: bool) -> list[int]:
        found = self.executor.control_all({"what": "adapter", "op": "state", "ids": numbers, "wait": wait})
        for each in found:
            self.failed.update(each["failed"])
        ready = [number for number in numbers if all(number in each["ready"] for each in found)]
        for number in ready:
            nowhere = unknown_to_all([each["elsewhere"][number] for each in found])
            if nowhere:
                self.failed[number] = nowhere[0]
                self.executor.control_all({"what": "adapter", "op": "drop", "id": number})
            elif number in self.numbers:
                self.numbers[number].ready = True
        return [number for number in ready if number not in self.failed]


def unknown_to_all(said: list[dict[str, str]]) -> list[str]:
    """The messages about modules that no rank has. said: each rank's messages about modules that it lacks."""
    return [why for module, why in said[0].items() if all(module in each for each in said)]


class Reading:
    """An adapter that devices are reading, with the interface of a Future."""

    def __init__(self, desk: AdapterDesk, number: int) -> None:
        self.desk, self.number = desk, number

    def done(self) -> bool:
        """Has it been read, or is it known to be unusable?"""
        entry = self.desk.numbers.get(self.number)
        if entry is None or entry.ready or self.number in self.desk.failed:
            return True
        self.desk.ask([self.number], wait=False)
        return entry.ready or self.number in self.desk.failed

    def exception(self) -> BaseException | None:
        """What is wrong with it."""
        said = self.desk.failed.get(self.number)
        if said is not None:
            return ParameterError(said, param="lora_request")
        if self.number not in self.desk.numbers:
            return NotHereError("The adapter has been removed.", param="model")
        return None
