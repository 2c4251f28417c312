"""Sleep and wake of one runner. Owns: which of its memory is given back, and what is kept of it and where.

Addresses stay, so recorded steps stay valid. On a CPU pages are given back to the system in place (host_pages.py). On a
GPU weights and cache lie in arenas from the load on (arena.py). Adapters, recordings and the process stay. Must not
know: requests, who decides.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from tokenmill.compute.model import CausalLM
from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import ParameterError, UserError
from tokenmill.core.sleeping import CACHE, TAGS, WEIGHTS, NoSleep, Sleeper, Slept, check_level, check_tags
from tokenmill.device.arena import Arena, CudaPages, Pages, relocate
from tokenmill.device.host_pages import HostPages, can_drop
from tokenmill.device.memory import records, release, total_bytes
from tokenmill.engine.load.inplace import LayerMaker, held, refill, weights_of
from tokenmill.engine.load.model_source import ModelSource
from tokenmill.kvcache.zeros import zeros
from tokenmill.models.decoder import Decoder
from tokenmill.runner.runner import Runner
from tokenmill.runner.stage import FromInbox

if TYPE_CHECKING:
    from tokenmill.compute.drafting import DeviceDrafter
    from tokenmill.compute.forward import Kernels

Zeros = Callable[[int, int, str], Tensor]


class Bed(Protocol):
    """Decides where a runner's memory goes during sleep. `zeros` makes the cache's memory."""

    zeros: Zeros

    def take(self, model: CausalLM, drafter: DeviceDrafter | None, kernels: Kernels) -> None:
        """Called when the model has been loaded and nothing has run yet."""
        ...

    def lay(self, runner: Runner, level: int) -> tuple[int, int]:
        """Give all memory back; returns (bytes of device memory given back, bytes of pinned memory taken instead)."""
        ...

    def raise_weights(self) -> None: ...
    def raise_cache(self) -> None: ...
    def changed(self) -> None:
        """Weights were changed in place."""
        ...


class NoBed:
    """The Bed of an engine that does not sleep."""

    zeros: Zeros = staticmethod(zeros)

    def take(self, model: CausalLM, drafter: DeviceDrafter | None, kernels: Kernels) -> None:
        """Move nothing."""


class HostBed:
    """On a CPU: gives back the pages that tensors lie on. `folder`: where the file that keeps weights lies."""

    zeros: Zeros = staticmethod(zeros)

    def __init__(self, folder: str | None) -> None:
        self.folder = folder
        self.weights: HostPages | None = None
        self.beside: HostPages | None = None

    def take(self, model: CausalLM, drafter: DeviceDrafter | None, kernels: Kernels) -> None:
        """Move nothing."""

    def lay(self, runner: Runner, level: int) -> tuple[int, int]:
        model = inner(runner.model)
        weights = weights_of(model) if isinstance(model, Decoder) else []
        caches = _caches(runner)
        apart = {t.untyped_storage().data_ptr() for t in (*weights, *caches)}
        bound: list[object] = getattr(runner.kernels, "bound", list)()
        every = held([runner.model, runner.drafter, bound], {id(runner.pool), id(runner.rows)})
        rest = [t for t in every if t.device.type == "cpu" and t.untyped_storage().data_ptr() not in apart]
        found = HostPages(weights)
        if self.weights is not None and self.weights.kept == found.kept:
            found = self.weights  # its file may exist already
        self.weights, self.beside = found, HostPages(rest)
        if level == 1:
            found.save(self.folder)
        else:
            found.forget()
        self.beside.save(self.folder)
        pages = [found, self.beside, HostPages(caches)]
        for each in pages:
            each.drop()
        return sum(each.size_bytes for each in pages), 0

    def raise_weights(self) -> None:
        assert self.weights is not None and self.beside is not None
        self.weights.restore()
        self.beside.restore()
        self.beside.forget()

    def raise_cache(self) -> None:
        """Do nothing: the pages come back as zeros when they are touched."""

    def changed(self) -> None:
        if self.weights is not None:
            self.weights.forget()
            self.weights = None


class DeviceBed:
    """On a GPU: arenas for weights, for a drafter's own weights, and for the cache."""

    def __init__(self, pages: Pages, most: int) -> None:
        self.weights, self.beside, self.cache = (Arena(pages, most) for _ in range(3))
        self.zeros: Zeros = self.cache.zeros

    def take(self, model: CausalLM, drafter: DeviceDrafter | None, kernels: Kernels) -> None:
        """Move weights into their arena. Recordings are made afterwards, because they name addresses."""
        if not isinstance(model, Decoder):
            raise ParameterError(
                "--enable-sleep-mode is not built for models that Transformers computes on a GPU.",
                param="enable_sleep_mode",
            )
        kind = self.weights.pages.device.type
        with torch.inference_mode():
            weights = [t for t in weights_of(model) if t.device.type == kind]
            relocate(weights, self.weights)
            places = {t.untyped_storage().data_ptr() for t in weights}
            rest = [t for t in held(drafter, {id(kernels)}) if t.device.type == kind]
            relocate((t for t in rest if t.untyped_storage().data_ptr() not in places), self.beside)
        self.weights.pages.trim()

    def lay(self, runner: Runner, level: int) -> tuple[int, int]:
        if level == 1:
            self.weights.save()
        else:
            self.weights.forget()
        self.beside.changed()
        self.beside.save()
        arenas = self.weights, self.beside, self.cache
        given = sum(each.mapped for each in arenas)
        for each in arenas:
            each.drop()
        return given, self.weights.host_bytes + self.beside.host_bytes

    def raise_weights(self) -> None:
        self.weights.restore()
        self.beside.restore()

    def raise_cache(self) -> None:
        self.cache.restore()

    def changed(self) -> None:
        self.weights.changed()


def make_bed(config: EngineConfig, device: str) -> NoBed | HostBed | DeviceBed:
    """The Bed that --enable-sleep-mode asks for; refuses devices whose memory cannot be given back and taken again."""
    if not config.execute.enable_sleep_mode:
        return NoBed()
    if device == "cpu" and can_drop():
        return HostBed(config.files.sleep_folder)
    if not records(device):
        raise ParameterError(
            f"--enable-sleep-mode is built for CPUs under Linux and for NVIDIA's GPUs, not for {device} here.",
            param="enable_sleep_mode",
        )
    return DeviceBed(CudaPages(device), total_bytes(device))


class RunnerSleep:
    """A runner's Sleeper."""

    def __init__(self, runner: Runner, bed: Bed, maker: LayerMaker, source: ModelSource) -> None:
        self.runner, self.bed, self.maker, self.source = runner, bed, maker, source
        self.level = 0
        self.asleep: list[str] = []
        """Tags whose memory is given back."""
        self.updated = False

    def sleep(self, level: int) -> Slept:
        """Give memory back. From level 1 it may go on to level 2, but not the other way round."""
        check_level(level)
        if self.asleep == list(TAGS) and level <= self.level:
            return Slept(list(self.asleep))
        if level == 2 and not isinstance(inner(self.runner.model), Decoder):
            raise UserError("level 2 is not built for models that Transformers computes: sleep at level 1.")
        if self.asleep:
            self.wake(TAGS)
        freed, kept = self.bed.lay(self.runner, level)
        self.asleep, self.level = list(TAGS), level
        release(self.maker.device)
        return Slept(list(self.asleep), freed, kept)

    def wake(self, tags: Iterable[str]) -> Slept:
        """Take memory again, with its old contents; only the cache is empty."""
        wanted = check_tags(tags)
        if WEIGHTS in self.asleep and WEIGHTS in wanted:
            self.bed.raise_weights()
            if self.level == 2:
                self._read_again()
                release(self.maker.device)
            self.asleep.remove(WEIGHTS)
        if CACHE in self.asleep and CACHE in wanted:
            self.bed.raise_cache()
            self.asleep.remove(CACHE)
        return Slept(list(self.asleep))

    def _read_again(self) -> None:
        model = self.maker.config.model
        found = self.source.checkpoint(model.load_format, seed=model.seed, device=self.maker.device)
        with contextlib.closing(found) as checkpoint:
            refill(inner(self.runner.model), checkpoint, self.maker)
        self.bed.changed()
        if self.updated:  # everything made from the old numbers is useless
            self.updated = False
            self.runner.forget_weights()

    def changed(self) -> None:
        """Weights were changed in place."""
        self.updated = True
        self.bed.changed()


def inner(model: CausalLM) -> CausalLM:
    """The model itself, also for a later stage, where another object around it reads the inbox."""
    return model.model if isinstance(model, FromInbox) else model


def _caches(runner: Runner) -> list[Tensor]:
    pools = [each for each in (runner.pool.states, runner.pool.drafter_states) if each is not None]
    kept = [part for states in pools for layer in (*states.views, *states.kept) for part in layer]
    return [*runner.pool.storage, *kept]


def sleeper_of(runner: Runner, bed: NoBed | HostBed | DeviceBed, maker: LayerMaker, source: ModelSource) -> Sleeper:
    """The Sleeper of a runner that has been loaded."""
    return NoSleep() if isinstance(bed, NoBed) else RunnerSleep(runner, bed, maker, source)
