"""A step while it is planned and until it is committed. Owns: what the scheduler must remember of it.

Must not know: how steps are planned.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenmill.core.sequence import Sequence
from tokenmill.core.step import StepPlan
from tokenmill.kvcache.radix import Node
from tokenmill.kvcache.snapshots import Kept
from tokenmill.scheduler.device_drafts import DraftBudget


@dataclass(slots=True)
class Flight:
    """A submitted plan, the sequence of each grant, the cache nodes that the plan published, the states that it keeps,
    and the sequences whose siblings begin with it (`spawning`). left: what the device drafter may still do in this
    step; used while it is planned. drafts: those of the host for the next grant. prompt_room: how many tokens of
    prompts the step may still take."""

    plan: StepPlan
    left: DraftBudget
    prompt_room: int
    seqs: list[Sequence] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    spawning: list[Sequence] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
