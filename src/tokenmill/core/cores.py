"""Processors. Owns: how many this process may use."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """How many cores the system lets this process run on; a container may grant less of their time."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
