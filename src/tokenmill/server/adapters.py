"""Adapters that are served. Owns: their names, numbers and folders, and which of them come and go while a server runs.

All engines use the same numbers. The adapters that engines start with count from 1; later ones continue from there. So
a new life of an engine knows the adapter of a replayed request. Must not know: HTTP, engines' processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenmill.core.config import AdapterOptions
from tokenmill.core.errors import NotHereError, ParameterError, TooLargeError, UserError
from tokenmill.engine.options.adapter_names import check_name, read_modules
from tokenmill.engine.running.wire import Adapt

MOST = 1024
"""Most adapters at once. Each takes memory in every engine."""


class NoSuchAdapterError(UserError):
    """There is no adapter of this name, or clients may not use it."""


@dataclass(frozen=True, slots=True)
class Served:
    """A served adapter. started: engines load it at their start."""

    number: int
    name: str
    path: str
    started: bool = False


class AdapterBook:
    """The adapters of one server."""

    def __init__(self, options: AdapterOptions | None = None, names: tuple[str, ...] = ()) -> None:
        """names: of the model itself."""
        self.enabled = options is not None and options.enable_lora
        self.taken = set(names)
        self.by_name: dict[str, Served] = {}
        self.coming: dict[int, Served] = {}
        """Adapters that engines are reading. Requests may not name them yet."""
        self.left: dict[int, Served] = {}
        """Adapters without a name, which open requests still use."""
        self.gone: list[Served] = []
        """Adapters that engines load at their start but must then drop."""
        self.replaced: dict[int, int] = {}
        """The number of an adapter that was replaced -> the number of its replacement."""
        self.count = 0
        for name, path in read_modules((options.lora_modules or []) if options is not None else []):
            if name in self.taken:
                raise ParameterError(f"lora_modules: {name!r} is the model's own name.", param="lora_modules")
            self.count += 1
            self.by_name[name] = Served(self.count, name, path, started=True)

    @property
    def numbers(self) -> Mapping[str, int]:
        """The number of every served name."""
        return {name: served.number for name, served in self.by_name.items()}

    def add(self, name: str, path: Path, *, instead: bool = False) -> Served:
        """Add an adapter that every engine must load. `instead`: the name may be in use; its present adapter is served
        until then."""
        if not self.enabled:
            raise ParameterError(
                "This model takes no adapters: load it with enable_lora (--enable-lora).", param="lora_name"
            )
        check_name(name)
        if name in self.taken or (name in self.by_name and not instead):
            raise ParameterError(f"The name {name!r} is served already: unload it, or choose another one.",
                                 param="lora_name")  # fmt: skip
        if len(self.by_name) >= MOST:
            raise TooLargeError(f"{MOST} adapters are served already: unload some first.", param="lora_name")
        self.count += 1
        served = self.coming[self.count] = Served(self.count, name, str(path))
        return served

    def current(self, number: int) -> int:
        """The adapter to use for a request that chose this one a moment ago. Raises if it has been unloaded since."""
        while number in self.replaced and number not in self.left:
            number = self.replaced[number]
        if number not in self.left and not any(number == served.number for served in self.by_name.values()):
            raise NotHereError("The adapter has just been unloaded.", param="model")
        return number

    def serve(self, served: Served) -> None:
        """Every engine has it: serve it under its name."""
        del self.coming[served.number]
        if served.name in self.by_name:
            self.replaced[self.remove(served.name).number] = served.number
        self.by_name[served.name] = served

    def remove(self, name: str) -> Served:
        """Remove its name. Open requests keep the adapter."""
        served = self.by_name.pop(name, None)
        if served is None:
            raise NoSuchAdapterError(f"There is no adapter {name[:100]!r}.", param="lora_name")
        self.left[served.number] = served
        if served.started:
            self.gone.append(served)
        return served

    def commands(self) -> list[Adapt]:
        """The commands that a newly started engine needs."""
        more = [served for served in (*self.by_name.values(), *self.left.values()) if not served.started]
        return [
            *(Adapt(served.number, served.name, served.path) for served in more),
            *(Adapt(served.number, served.name) for served in self.gone if served.number not in self.left),
        ]


def folder_of(root: str | None, given: str) -> Path:
    """An adapter in the one folder that clients may name. A path outside of it is reported as missing, as if nothing
    were there."""
    if root is None:
        raise ParameterError("Adapters cannot be loaded here: start the server with --lora-folder FOLDER.",
                             param="lora_path")  # fmt: skip
    absent = NoSuchAdapterError("There is no such adapter in the folder for adapters.", param="lora_path")
    if not given or len(given) > 1024 or "\0" in given:
        raise absent
    home = Path(root).resolve()
    try:
        found = (home / given).resolve()
        inside = found != home and found.is_relative_to(home) and found.exists()
    except (OSError, RuntimeError, ValueError):
        inside = False
    if not inside:
        raise absent
    return found
