"""What every endpoint needs. Owns: one record per server; made in `app.py`. Must not know: anything else."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import tokenmill
from tokenmill.core.config import ServeOptions, ServerConfig
from tokenmill.server.backend import Backend
from tokenmill.server.bodies import Bodies
from tokenmill.server.errors import HttpError
from tokenmill.server.gate import Gate
from tokenmill.server.history import History
from tokenmill.server.metrics import Metrics
from tokenmill.server.prices import Prices, read_prices
from tokenmill.server.record import Recorder
from tokenmill.server.store import Store
from tokenmill.server.text import TextWorkers
from tokenmill.server.traces import Traces
from tokenmill.text.messages.describe import MessageFormat


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Ceilings that flags set."""

    n: int = 128
    logprobs: int = 20
    stop: int = 16


@dataclass(frozen=True, slots=True)
class Past:
    """What is remembered of requests: figures of all, and what clients want kept."""

    history: History = field(default_factory=History)
    store: Store = field(default_factory=Store)


@dataclass(slots=True)
class Context:
    """One server's parts."""

    backend: Backend
    config: ServerConfig
    gate: Gate
    metrics: Metrics
    text: TextWorkers
    bodies: Bodies
    limits: RequestLimits
    chat_template: str | None = None
    past: Past = field(default_factory=Past)
    recorder: Recorder | None = None
    form: MessageFormat = field(default_factory=MessageFormat)
    traces: Traces | None = None

    @property
    def history(self) -> History:
        """Figures of recent requests."""
        return self.past.history

    @property
    def store(self) -> Store:
        """What clients want kept."""
        return self.past.store

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
        """What decides which text comes of equal requests: this program's version, the model, its type and device."""
        info = self.backend.info
        facts = {name: info.details.get(name) for name in ("family", "dtype", "quantization", "device")}
        return f"fp_{zlib.crc32(repr((tokenmill.__version__, info.root, facts)).encode()):08x}"

    @property
    def scoped(self) -> bool:
        """Does every key have cached prompts of its own? Timing must not tell one key what another has asked."""
        listen = self.config.listen
        return len(listen.api_key or ()) > 1 and not listen.share_prefix_cache

    def adapter_of(self, name: object) -> int:
        """The number of the adapter that a model's name stands for; 0: it is none."""
        adapters = self.backend.info.adapters
        if not adapters or not isinstance(name, str):
            return 0
        return adapters.get(name) or adapters.get(name.removesuffix(":latest"), 0)

    def check_model(self, name: str | None) -> str:
        """The name that the answer carries; 404 for one that is not served."""
        names = self.backend.info.names
        if name is None or name == "":
            return names[0]
        if name not in names:
            shown = name[:100]
            raise HttpError(
                404, f"The model {shown!r} does not exist here; this server has {names[0]!r}.", param="model"
            )
        return name
