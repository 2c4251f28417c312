"""An engine in numbers. Owns: the present EngineStats, with estimates of what its steps computed and moved.

They are read a few times a second, so each step counts only itself and its tokens. Must not know: who asks.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import replace
from pathlib import Path

from tokenmill.core.sequence import WAITING
from tokenmill.device.energy import energy_reader
from tokenmill.engine.running.build import Built
from tokenmill.engine.running.replicas import Replicas
from tokenmill.engine.running.wire import EngineStats
from tokenmill.engine.steps.engine import Engine
from tokenmill.kvcache.snapshots import Snapshots

SLOW_S = 2.0
"""How often values are read that come from elsewhere (the process, the kernels' counters)."""


class Gauges:
    """The numbers of one engine."""

    def __init__(self, built: Built, *, energy: bool = True) -> None:
        self.engine, self.facts, self.sleep = built.engine, built.facts, built.sleep
        self.block_size = built.config.cache.block_size
        self.steps = 0
        self.tokens = 0
        self.flops = 0.0
        self.read_bytes = 0.0
        self.written_bytes = 0.0
        self.looked_at = -SLOW_S
        self.kernel_calls = 0
        self.fallback_calls = 0
        self.rss_bytes = 0
        self.open_files = 0
        self.energy = energy_reader(built.facts.device, built.facts.device_uuid) if energy else None
        self.measured_at, self.joules, self.watts = time.monotonic(), 0.0, 0.0

    def read(self, *, up: bool = True) -> EngineStats:
        """The current gauges and totals; of an engine that has died (not `up`), its last totals."""
        scheduler = self.engine.scheduler
        roster, c = scheduler.roster, scheduler.counters
        compiler = self.engine.admission.compiler
        held = sum(pool.held for pool in scheduler.tables.pools)
        self._estimate(c.steps, c.prompt_tokens + c.recomputed + c.output_tokens, held)
        now = time.monotonic()
        if up and now - self.looked_at >= SLOW_S:
            self.looked_at = now
            self._look()
            self._measure_energy(now)
        return EngineStats(
            up=int(up),
            running=len(roster.running) * up,
            waiting=sum(up for _, _, seq in roster.waiting if seq.status == WAITING),
            kv_usage=scheduler.tables.usage(),
            kv_blocks=sum(pool.num_blocks for pool in scheduler.tables.pools),
            kv_shared=sum(pool.shared for pool in scheduler.tables.pools),
            kv_idle=sum(len(pool.idle) for pool in scheduler.tables.pools),
            **_states(scheduler.tables.snapshots),
            prompt_tokens=c.prompt_tokens,
            cached_tokens=c.cached_tokens,
            output_tokens=c.output_tokens,
            preemptions=c.preemptions,
            failures=c.failures,
            drafts=c.drafts,
            drafted=c.drafted,
            accepted=c.accepted,
            accepted_at=list(c.accepted_at),
            saved_s=scheduler.ahead.saved,
            spent_s=scheduler.ahead.spent,
            steps=c.steps,
            processed=c.processed,
            balancedness=self.engine.balance.balancedness,
            expert_moves=self.engine.balance.moved,
            flops=self.flops,
            read_bytes=self.read_bytes,
            written_bytes=self.written_bytes,
            kernel_calls=self.kernel_calls,
            fallback_calls=self.fallback_calls,
            grammar_bytes=compiler.bytes if compiler is not None else 0,
            rss_bytes=self.rss_bytes,
            open_files=self.open_files,
            joules=self.joules,
            watts=self.watts,
            awake=int(not self.sleep.asleep),
            offloaded=int(self.sleep.level == 1),
            discarded=int(self.sleep.level == 2),
        )

    def _estimate(self, steps: int, tokens: int, held: int) -> None:
        """Estimate bytes and operations. A step reads the weights once and about as much K/V as the running sequences
        hold; a token writes its K/V once.

        Attention's own operations are left out: until contexts are long, they are few compared with those of the
        matrices.
        """
        facts = self.facts
        new_steps, new_tokens = steps - self.steps, tokens - self.tokens
        self.steps, self.tokens = steps, tokens
        self.flops += new_tokens * facts.flops_per_token
        self.read_bytes += new_steps * (facts.weight_bytes + held * facts.kv_block_bytes)
        self.written_bytes += new_tokens * facts.kv_block_bytes / self.block_size

    def _look(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # a system without /proc
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.rss_bytes = pages * os.sysconf("SC_PAGE_SIZE")
            self.open_files = len(os.listdir("/proc/self/fd"))
        counted = self.engine.executor.control({"what": "counters"})["kernels"].values()
        self.kernel_calls = sum(op["calls"] for op in counted)
        self.fallback_calls = sum(op["fallbacks"] for op in counted)

    def _measure_energy(self, now: float) -> None:
        """Measure joules since this engine's start and watts since the last measurement."""
        if self.energy is None or now <= self.measured_at:
            return
        joules = self.energy()
        self.watts = (joules - self.joules) / (now - self.measured_at)
        self.measured_at, self.joules = now, joules


class AllGauges:
    """The numbers of all engines of a model, each with the totals of those in whose place it came. Nothing is measured
    before the first `read`, so that start-up does not open the device's energy counter."""

    def __init__(self, built: Built) -> None:
        self.built = built
        self.gauges: dict[int, Gauges] = {}
        self.before = [EngineStats() for _ in built.engine.parts]
        if isinstance(built.engine, Replicas):
            built.engine.replaced = self._add_up

    def read(self) -> list[EngineStats]:
        """See Gauges.read."""
        engine = self.built.engine
        for i, part in enumerate(engine.parts):
            if i not in self.gauges:
                self.gauges[i] = Gauges(replace(self.built, engine=part))
        return [self.gauges[i].read(up=i in engine.alive).after(before) for i, before in enumerate(self.before)]

    def _add_up(self, number: int, lost: Engine) -> None:
        """Keep the totals of an engine in whose place another one comes."""
        gauges = self.gauges.pop(number, None) or Gauges(replace(self.built, engine=lost), energy=False)
        self.before[number] = gauges.read(up=False).after(self.before[number])


def _states(snapshots: Snapshots) -> dict[str, int]:
    """Numbers about kept states of recurrent layers, by their names in EngineStats."""
    return {
        "states_kept": len(snapshots.fresh) + len(snapshots.proven),
        "state_slots": snapshots.num_slots,
        "states_saved": snapshots.saved,
        "states_used": snapshots.hits,
        "states_evicted": snapshots.evicted,
    }
