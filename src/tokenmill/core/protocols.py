"""Every seam by name. Owns: this list; each protocol stands in the module of its domain.

Each optional feature is an object behind one of these with a null object (NoDrafter, SoloGroup, Sampling, ...); a
feature flag is read where an engine is built, in `engine/`, only.
"""

from __future__ import annotations

from tokenmill.core.constraint import Constraint, ConstraintCompiler
from tokenmill.core.drafting import DeviceDrafter, DraftControl, HostDrafter, RowState
from tokenmill.core.execution import Executor, TextGenerator, Ticket
from tokenmill.core.forward import FusedMixture, Kernels, Weight
from tokenmill.core.model import CausalLM, Checkpoint, Group
from tokenmill.core.policy import SchedulePolicy
from tokenmill.core.sequence import Search

__all__ = [
    "CausalLM",
    "Checkpoint",
    "Constraint",
    "ConstraintCompiler",
    "DeviceDrafter",
    "DraftControl",
    "Executor",
    "FusedMixture",
    "Group",
    "HostDrafter",
    "Kernels",
    "RowState",
    "SchedulePolicy",
    "Search",
    "TextGenerator",
    "Ticket",
    "Weight",
]
