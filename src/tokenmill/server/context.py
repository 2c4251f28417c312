"""What every endpoint needs. Owns: one record per server (ServerContext) and one per loaded model (Context).
`app.py` makes them.

Must not know: how endpoints answer, how the parts work.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import tokenmill
from tokenmill.core.config import ServeOptions, ServerConfig
from tokenmill.server.access import Rights
from tokenmill.server.activity import Activity
from tokenmill.server.backend import Backend
from tokenmill.server.bodies import Bodies
from tokenmill.server.errors import HttpError
from tokenmill.server.gate import Gate
from tokenmill.server.history import History
from tokenmill.server.many_models.catalogue import Catalogue
from tokenmill.server.many_models.entry import Unit
from tokenmill.server.metrics import Metrics
from tokenmill.server.prices import Prices, read_prices
from tokenmill.server.server_metrics import ServerMetrics
from tokenmill.server.store import Store
from tokenmill.server.text_workers import TextWorkers
from tokenmill.server.traces import Traces
from tokenmill.server.traffic_recorder import Recorder
from tokenmill.text.messages.describe import MessageFormat

LATEST = ":latest"
"""Ollama's tag, which may follow any name."""
MOST_NAMED = 8
"""Most models that an error message names."""
MISSING = "does not exist here"


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Ceilings of a request's fields, as flags set them."""

    n: int = 128
    logprobs: int = 20
    stop: int = 16


@dataclass(frozen=True, slots=True)
class Past:
    """What the server remembers of past requests: figures of all of them, and what clients asked to have stored."""

    history: History = field(default_factory=History)
    store: Store = field(default_factory=Store)


class Model(Unit, Protocol):
    """A loaded model, as endpoints see it."""

    context: Context

    def end_all(self, reason: str) -> None:
        """End every open request now, with an error that says why."""


@dataclass(slots=True)
class ServerContext:
    """What all models of one server share."""

    config: ServerConfig
    models: Catalogue[Model]
    gate: Gate
    metrics: ServerMetrics
    bodies: Bodies
    past: Past = field(default_factory=Past)
    recorder: Recorder | None = None
    rights: dict[str, Rights] = field(default_factory=dict)
    """The restricted keys, by their names in logs. Other keys may do everything."""
    series: dict[str, Metrics] = field(default_factory=dict)
    """Metrics by model name, loaded or not."""


@dataclass(slots=True)
class Context:
    """The parts of one loaded model."""

    shared: ServerContext
    backend: Backend
    config: ServerConfig
    """The server's configuration with this model's own options."""
    metrics: Metrics
    text: TextWorkers
    limits: RequestLimits
    activity: Activity
    chat_template: str | None = None
    form: MessageFormat = field(default_factory=MessageFormat)
    traces: Traces | None = None

    @property
    def gate(self) -> Gate:
        """Which requests may enter."""
        return self.shared.gate

    @property
    def bodies(self) -> Bodies:
        """Threads that read bodies."""
        return self.shared.bodies

    @property
    def recorder(self) -> Recorder | None:
        """Where `--record` writes requests."""
        return self.shared.recorder

    @property
    def history(self) -> History:
        """Figures of recent requests."""
        return self.shared.past.history

    @property
    def store(self) -> Store:
        """What clients asked to have stored."""
        return self.shared.past.store

    @property
    def options(self) -> ServeOptions:
        """How the server behaves."""
        return self.config.serve

    @property
    def prices(self) -> Prices | None:
        """What tokens cost."""
        return read_prices(self.config.limits.prices)

    @property
    def fingerprint(self) -> str:
        """A hash of everything that decides which text equal requests give: the program's version, the model, its
        dtype, its device."""
        info = self.backend.info
        facts = {name: info.details.get(name) for name in ("family", "dtype", "quantization", "device")}
        return f"fp_{zlib.crc32(repr((tokenmill.__version__, info.root, facts)).encode()):08x}"

    @property
    def scoped(self) -> bool:
        """Does every key have its own prefix cache? Otherwise timing could tell one key what another has asked."""
        listen = self.config.listen
        return len(listen.api_key or ()) > 1 and not listen.share_prefix_cache

    def adapter_of(self, name: object) -> int:
        """The number of the adapter that this model name stands for; 0: it stands for none."""
        adapters = self.backend.info.adapters
        if not adapters or not isinstance(name, str):
            return 0
        return next((adapters[each] for each in self.shared.models.spellings.of(name) if each in adapters), 0)

    def check_model(self, name: str | None) -> str:
        """The model name for the answer. Raises 404 for a name that is not served."""
        names = self.backend.info.names
        if name is None or name == "":
            return names[0]
        found = next((each for each in self.shared.models.spellings.of(name) if each in names), None)
        if found is None:
            raise no_such_model(name.removesuffix(LATEST), names)
        return found


def no_such_model(name: str, others: Sequence[str] = ()) -> HttpError:
    """The 404 for an unknown model; its message lists some models that exist."""
    shown = ", ".join(map(repr, others[:MOST_NAMED]))
    rest = len(others) - MOST_NAMED
    more = f"; this server has {shown}" if shown else ""
    more += f" and {rest} more (GET /v1/models)" if rest > 0 else ""
    return HttpError(404, f"The model {name[:100]!r} {MISSING}{more}.", param="model")
