"""The adapters of one device. Owns: reading them while steps run, keeping them in host memory, and filling slots.

An adapter's number is never used again. `read` starts reading one in a thread; `state` tells which are ready; a plan's
loads put them into slots. Of host copies beyond `most_kept`, the least recently used are dropped, and read again when a
plan needs them. Must not know: requests, names, who decides about slots.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tokenmill.compute.adapters import AdapterSite
from tokenmill.compute.forward import Kernels
from tokenmill.core.errors import ModelError, UserError
from tokenmill.core.files import present
from tokenmill.lora.config import FILE
from tokenmill.lora.fit import Fill, Fitter
from tokenmill.lora.gguf import read_gguf_adapter
from tokenmill.lora.layout import arranged
from tokenmill.lora.peft import OLD, SAFE, Adapter, read_peft
from tokenmill.lora.sites import Sites, mixing
from tokenmill.models.text_names import is_apart
from tokenmill.models.text_part import TEXT_OF

Mark = list[tuple[str, int, int]]
"""Of each of an adapter's files: its name, its size and the time of its last change."""

log = logging.getLogger("tokenmill.lora")


@dataclass(slots=True)
class Known:
    """An adapter by number: where it lies, and what its files were when it was first read."""

    path: Path
    mark: Mark | None = None


class LoraStore:
    """The adapters that one runner may be asked for."""

    def __init__(self, sites: Sites, kernels: Kernels, most_kept: int | None = None) -> None:
        """most_kept: host copies; None: all."""
        self.sites, self.kernels, self.most_kept = sites, kernels, most_kept
        self.known: dict[int, Known] = {}
        self.kept: OrderedDict[int, list[Fill]] = OrderedDict()
        self.reading: dict[int, Future[list[Fill]]] = {}
        self.slots: dict[int, int] = {}
        self.unrecorded: set[int] = set()
        self.elsewhere: dict[int, dict[str, str]] = {}
        """Of an adapter, modules that this rank has nothing of, with what is to be said if no rank has."""
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    # ------------------------------------------------------------ what the engine asks

    def command(self, message: dict[str, Any]) -> dict[str, Any]:
        """{"op": "read", "id", "path"}: begin; {"op": "state", "ids", "wait"}: -> ready and failed ones, and what of
        ready ones must be elsewhere;
        {"op": "drop", "id"}: it is not used again; {"op": "settle"}: wait for what is being read; {"op": "forget"}:
        read all anew, even what is being read, for it may have been fitted to weights that are gone."""
        op = message["op"]
        if op == "read":
            self._begin(message["id"], Path(message["path"]))
            return {}
        if op == "drop":
            self._drop(message["id"])
            return {}
        if op == "settle":
            wait(self.reading.values())
            return {}
        if op == "forget":
            self.kept.clear()
            for number in list(self.reading):
                self.reading.pop(number).cancel()
            return {}
        assert op == "state", op
        return self._state(message["ids"], wait=bool(message.get("wait")))

    def _begin(self, number: int, path: Path) -> None:
        self.known.setdefault(number, Known(path))
        if number in self.kept:
            self.kept.move_to_end(number)
        elif number not in self.reading:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="tokenmill-adapters")
            self.reading[number] = self._pool.submit(self._read, number)

    def _state(self, numbers: list[int], *, wait: bool) -> dict[str, Any]:
        ready, failed = [], {}
        for number in numbers:
            future = self.reading.get(number)
            if future is not None and (wait or future.done()):
                del self.reading[number]
                try:
                    self._keep(number, future.result())
                except UserError as error:
                    failed[number] = str(error)
                except Exception as error:  # a mistake of ours in reading one adapter concerns nobody else
                    failed[number] = f"the adapter could not be read ({type(error).__name__})"
            if number in self.kept:
                ready.append(number)
            elif number in self.known and number not in self.reading and number not in failed:
                self._begin(number, self.known[number].path)  # dropped for others before all ranks had read it
        return {"ready": ready, "failed": failed, "elsewhere": {n: self.elsewhere.get(n, {}) for n in ready}}

    def _drop(self, number: int) -> None:
        self.kept.pop(number, None)
        self.known.pop(number, None)
        self.elsewhere.pop(number, None)
        future = self.reading.pop(number, None)
        if future is not None:
            future.cancel()

    # ------------------------------------------------------------ host memory

    @torch.inference_mode()
    def _read(self, number: int) -> list[Fill]:
        known = self.known[number]
        mark = mark_of(known.path)
        if known.mark is not None and known.mark != mark:
            raise ModelError(f"{known.path}: the adapter's files have changed since it was loaded: load it anew.")
        fitter = fitted(known.path, self.sites)
        known.mark = mark
        fills, self.elsewhere[number] = list(fitter.fills.values()), fitter.unknown
        # With it goes its hold on the file's tensors: each is freed when it is joined. All at once keep steps waiting.
        del fitter
        for fill in fills:
            fill.join(pin=self.sites.device.type == "cuda")
            if fill.whole is not None:
                fill.whole = fill.whole.settle(self.kernels)
        return fills

    def _keep(self, number: int, fills: list[Fill]) -> None:
        self.kept[number] = fills
        self.kept.move_to_end(number)
        while self.most_kept is not None and len(self.kept) > max(self.most_kept, 1):
            self.kept.popitem(last=False)

    def bytes(self) -> int:
        """Bytes of host copies."""
        return sum(fill.bytes for fills in self.kept.values() for fill in fills)

    # ------------------------------------------------------------ slots

    @torch.inference_mode()
    def load(self, loads: Sequence[tuple[int, int]]) -> bool:
        """Put adapters into slots: (slot, adapter) each. True: recordings do not know all that they must."""
        new = False
        for slot, number in loads:
            fills = self.kept.get(number)
            if fills is None:
                future = self.reading.pop(number, None)
                fills = future.result() if future is not None else self._read(number)
                self._keep(number, fills)
            else:
                self.kept.move_to_end(number)
            new |= self._fill(slot, number, fills)
        return new

    def eager(self, slots: Iterable[int]) -> bool:
        """Does an adapter in these slots change embeddings or experts, or replace whole matrices?"""
        return bool(self.unrecorded) and not self.unrecorded.isdisjoint(slots)

    def _fill(self, slot: int, number: int, fills: list[Fill]) -> bool:
        new = False
        mine = {id(fill.site) for fill in fills}
        for site in self.sites.sites:
            if site.host_ranks and site.host_ranks[slot] and id(site) not in mine:
                _set_rank(site, slot, 0)
            site.whole.pop(slot, None)
            if site.gains is not None and site.shifts is not None:
                site.gains[slot] = 1.0
                site.shifts[slot] = 0.0
        self.unrecorded.discard(slot)
        if any(mixing(module) for module in self.elsewhere.get(number, ())):  # as where these experts are
            self.unrecorded.add(slot)
        for fill in fills:
            site = fill.site
            if fill.rank:
                new |= self.sites.ensure(site)
                fill_site(site, slot, fill)
            if fill.gains or fill.shifts:
                new |= self.sites.ensure_gains(site)
                assert site.gains is not None and site.shifts is not None
                for start, gain in fill.gains:
                    site.gains[slot, start : start + len(gain)] = gain.to(site.gains.device)
                for start, shift in fill.shifts:
                    site.shifts[slot, start : start + len(shift)] += shift.to(site.shifts.device)
            if fill.whole is not None:
                site.whole[slot] = fill.whole
            if fill.whole is not None or not self.sites.recordable(site):
                self.unrecorded.add(slot)
        self.slots[slot] = number
        return new


def fill_site(site: AdapterSite, slot: int, fill: Fill) -> None:
    """One product's share of a slot."""
    assert site.down is not None and site.up is not None and fill.down is not None and fill.up is not None
    site.down[slot, :, : fill.down.shape[1]].copy_(fill.down, non_blocking=True)
    site.up[slot, : fill.rank].copy_(fill.up, non_blocking=True)
    _set_rank(site, slot, fill.rank)


def _set_rank(site: AdapterSite, slot: int, rank: int) -> None:
    assert site.ranks is not None
    if site.host_ranks[slot] != rank:
        site.ranks[slot] = rank
        site.host_ranks[slot] = rank


def fitted(path: Path, sites: Sites) -> Fitter:
    """A file's adapter, made the contents of these sites' slots; raises ModelError for what does not belong there."""
    adapter = read_adapter(path, sites.config)
    adapter.check_numbers()
    if TEXT_OF in sites.config and (count := adapter.drop(is_apart)):
        log.warning("%s: text only: %d modules of what sees and hears are not used.", path, count)
        if next(adapter.numbers(), None) is None:
            raise ModelError(
                f"{path}: the adapter changes only what sees or hears, and the model is served as text alone."
            )
    fitter = Fitter(adapter, sites)
    fitter.fit()
    return fitter


def read_adapter(path: Path, config: Mapping[str, Any]) -> Adapter:
    """A PEFT folder, or a GGUF file, for a base of this config."""
    if not present(path):
        raise ModelError(f"{path}: there is no such adapter; name PEFT's folder (adapter_config.json), or a GGUF file")
    found = read_gguf_adapter(path, config) if path.suffix == ".gguf" else read_peft(path)
    return arranged(found, config)


def mark_of(path: Path) -> Mark:
    """What an adapter's files are now: its config changes it as much as its tensors do."""
    found: Mark = []
    for file in [path] if path.suffix == ".gguf" else [path / FILE, path / SAFE, path / OLD]:
        with contextlib.suppress(OSError):
            stat = file.stat()
            found.append((file.name, stat.st_size, stat.st_mtime_ns))
    return found
