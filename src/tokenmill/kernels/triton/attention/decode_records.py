"""The arguments of the decode kernel, grouped into records. Owns: the records, nothing else."""

from __future__ import annotations

from typing import Any, NamedTuple


class Pages(NamedTuple):
    """One layer's keys and values, and their scales; helpers are given those of one head as a plain tuple."""

    key: Any
    value: Any
    key_scale: Any
    value_scale: Any


class Strides(NamedTuple):
    """Of pages, in units (see Shape); of scales, in numbers."""

    key_block: Any
    key_head: Any
    key_row: Any
    value_block: Any
    value_head: Any
    value_row: Any
    key_scale_block: Any
    key_scale_head: Any
    key_scale_row: Any
    value_scale_block: Any
    value_scale_head: Any
    value_scale_row: Any


class Plan(NamedTuple):
    """Which keys each sequence has. shared: table entries that all have in common; slot: where a new key goes; roots,
    places: where keys of trees lie."""

    table: Any
    first: Any
    entries: Any
    start: Any
    length: Any
    shared: Any
    slot: Any
    roots: Any
    places: Any


class Bends(NamedTuple):
    """Per query head, what bends scores."""

    sink: Any
    slope: Any


class Turns(NamedTuple):
    """What norms, rotates and tempers new heads."""

    q_norm: Any
    k_norm: Any
    v_norm: Any
    cos: Any
    sin: Any
    temper: Any


class Epsilons(NamedTuple):
    """Of these norms."""

    q: Any
    k: Any
    v: Any


class Partial(NamedTuple):
    """Parts of one sequence and head lie together, [PARTS, GROUP, DV]; their maxima and sums beside them; counters."""

    part: Any
    top: Any
    count: Any


class Shape(NamedTuple):
    """Query heads, those of one key/value head, widths, positions of a block; and the same as powers of two. UNIT: as
    many numbers, or words of narrow ones, are a unit of pages; INDEX: the type that counts units."""

    H: int
    GROUP: int
    D: int
    DV: int
    SIZE: int
    BH: int
    BN: int
    BD: int
    BV: int
    UNIT: int
    INDEX: Any


class Cut(NamedTuple):
    """How a sequence is cut: splits, parts before them and in all, least tiles of one; tiles to bring near by lines."""

    SPLITS: int
    BEFORE: int
    PARTS: int
    PARTS_BLOCK: int
    LEAST: int
    STAGES: int
    NEAR: int
    LINE: int
    LINES: int


class Seen(NamedTuple):
    """Is there a first position of each table entry, a window, a cap of scores, sinks, a slope by distance? Are
    sequences nodes of trees?"""

    FIRST: bool
    WINDOW: bool
    SOFTCAP: bool
    SINKS: bool
    ALIBI: bool
    TREE: bool
