"""An Executor over a HashModel. Owns: a device's view of plans (rows, tables, slots), simulated exactly.

K/V slots store (group, position, content); the context is read back through the block table. It asserts what a real
device cannot: that tables cover what is read, that nobody's slot was overwritten, and that grants meet known tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tokenmill.core.sleeping import TAGS, Slept, obey
from tokenmill.core.step import LateInputs, RowStart, StepPlan, StepResult
from tokenmill.testing.hash_model import HashModel

RUBBISH = 1
"""A token that lies behind the known ones although nobody proposed it."""


@dataclass(slots=True)
class Row:
    """What a device knows of one row; `guessed`: the drafts that it left behind the known tokens; `states`: the
    recurrent state by position, behind the lines of the last grant that sampled, and no others."""

    start: RowStart
    tokens: list[int]
    computed: int
    tables: list[list[tuple[int, int]]]
    guessed: list[int] = field(default_factory=list)
    parents: list[int] | None = None
    """If they are a tree: what each goes on from, 1 + an earlier one's number; 0: the newest known token."""
    states: dict[int, int] = field(default_factory=dict)
    taken: dict[int, list[int]] = field(default_factory=dict)
    """By how many: tokens that a drafter's state, left behind these, has taken in."""


@dataclass(slots=True)
class Tree:
    """Drafts with their parents; what is not there is a child of the root. most: so many may stand."""

    drafts: list[int]
    parents: list[int]
    most: int

    def depths(self) -> list[int]:
        """Of the root and each draft."""
        found = [0]
        for j in range(max(len(self.drafts), self.most)):
            found.append(1 + found[self.parents[j] if j < len(self.parents) else 0])
        return found

    def line(self, node: int) -> list[int]:
        """What a node descends from, itself included, the root first."""
        found = [node]
        while found[-1]:
            found.append(self.parents[found[-1] - 1] if found[-1] <= len(self.parents) else 0)
        return found[::-1]

    def child(self, node: int, token: int) -> int | None:
        """The first child that is this token."""
        for j, draft in enumerate(self.drafts):
            if draft == token and (self.parents[j] if j < len(self.parents) else 0) == node:
                return j + 1
        return None


@dataclass(slots=True)
class HashMemory:
    """What is written down: by pool and slot (group, position, content), by snapshot slot (position, state)."""

    slots: list[dict[int, tuple[int, int, int]]] = field(default_factory=list)
    snapshots: dict[int, tuple[int, int]] = field(default_factory=dict)
    seen: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By slot of group `follows` what a drafter has kept: (position, token)."""
    follows: int = -1
    """The group in whose blocks a drafter keeps what it has seen, so that its holes are found; -1: none."""
    recalls: bool = False
    """The drafter keeps states, too: of each row what it has taken in, as `Row.taken`."""
    asleep: list[str] = field(default_factory=list)


@dataclass(slots=True)
class HashTicket:
    """A result that was computed at submit, handed out at wait."""

    result: StepResult

    def wait(self) -> StepResult:
        return self.result


@dataclass(slots=True)
class HashExecutor:
    """`pools[g]` names the block pool of group g; `fail` holds plan ids that go down half-written. `guess`: the
    device's drafter, which sees a row's tokens and its seed and may leave fewer drafts than a plan grants; with them
    their parents, if they are a tree."""

    model: HashModel
    pools: list[int]
    num_blocks: list[int]
    block_size: int
    depth: int = 1
    overlaps: bool = True
    guess: Callable[[list[int], int], list[int] | tuple[list[int], list[int]]] = lambda tokens, seed: []
    fail: set[int] = field(default_factory=set)
    rows: dict[int, Row] = field(default_factory=dict)
    memory: HashMemory = field(default_factory=HashMemory)
    epoch: int = 0
    failed_epoch: int = -1

    def __post_init__(self) -> None:
        self.memory.slots = [{} for _ in self.num_blocks]

    def submit(self, plan: StepPlan) -> HashTicket:
        if plan.epoch == self.failed_epoch:
            return HashTicket(StepResult(plan_id=plan.id, failure="an earlier plan failed"))
        result = self._run(plan)
        return HashTicket(result)

    def supply(self, plan_id: int, inputs: LateInputs) -> None:
        """The hash model's sampling needs nothing late."""

    def control(self, message: dict) -> dict:
        return obey(self, message) if message.get("what") in ("sleep", "wake") else {}

    def control_all(self, message: dict) -> list[dict]:
        return [self.control(message)]

    @property
    def asleep(self) -> list[str]:
        """Tags that are not here."""
        return self.memory.asleep

    def sleep(self, level: int) -> Slept:
        """What it holds is lost, as keys and values are."""
        self.memory.slots = [{} for _ in self.num_blocks]
        self.memory.asleep = list(TAGS)
        return Slept(list(self.asleep), freed=1000, kept=100 if level == 1 else 0)

    def wake(self, tags: Iterable[str]) -> Slept:
        """These are here again."""
        self.memory.asleep = [tag for tag in self.asleep if tag not in tags]
        return Slept(list(self.asleep))

    def changed(self) -> None:
        """It has no weights."""

    def check(self) -> None:
        """It is in this process."""

    def close(self) -> None:
        self.rows.clear()

    def _run(self, plan: StepPlan) -> StepResult:
        self._apply(plan)
        drafts = [self._drafts(plan, i) for i in range(len(plan.rows))]
        trees = {i: self._tree(plan, i, drafts[i]) for i in plan.nodes}
        for i, row_id in enumerate(plan.rows):
            if i in trees:
                self._store_tree(self.rows[row_id], trees[i], plan.counts[i])
            else:
                self._store(self.rows[row_id], drafts[i], plan.counts[i], plan.samples[i])
            if plan.id in self.fail and i >= len(plan.rows) // 2:
                self.failed_epoch = plan.epoch
                return StepResult(plan_id=plan.id, failure="injected")
        result = StepResult(plan_id=plan.id)
        before: dict[int, int] = {}
        for i, row_id in enumerate(plan.rows):
            row = self.rows[row_id]
            before[row_id] = row.computed
            if i in trees:
                result.tokens.append(self._walk(row, trees[i]))
            else:
                result.tokens.append(self._sample(row, drafts[i], plan.counts[i], plan.samples[i], i, result))
            if plan.samples[i]:
                known, seed = self._contents(row, row.tokens), row.start.sampling.seed
                found = self.guess(known, seed)
                row.guessed, row.parents = found if isinstance(found, tuple) else (found, None)
        if self.memory.follows >= 0:
            self._follow(plan)
        if self.memory.recalls:
            self._recall(plan)
        for save in plan.saves:
            row = self.rows[save.row]
            if before[save.row] < save.position <= row.computed:
                self.memory.snapshots[save.slot] = (save.position, row.states[save.position])
        return result

    def _follow(self, plan: StepPlan) -> None:
        """The drafter takes in what the plan says, and then has seen all but the newest two tokens of rows that it
        guesses for; these it sees now, with its own guesses."""
        seen = self.memory.seen
        for row_id, first, count in plan.follows:
            row = self.rows[row_id]
            for position in range(first, first + count):
                tokens = row.tokens + [RUBBISH] * (first + count - len(row.tokens))
                seen[self._slot(row, self.memory.follows, position)] = position, tokens[position]
        for i in plan.proposes:
            row = self.rows[plan.rows[i]]
            table = row.tables[self.memory.follows]
            for position in range(table[0][1], len(row.tokens) - 2):
                kept = seen.get(self._slot(row, self.memory.follows, position))
                assert kept == (position, row.tokens[position]), f"the drafter holds {kept} at {position}"
            tokens = row.tokens + (row.guessed + [RUBBISH] * plan.depth)[: plan.depth]
            end = min(len(row.tokens) + plan.depth - 1, table[-1][1] + self.block_size)
            depths = [] if row.parents is None else Tree(row.guessed, row.parents, plan.depth).depths()
            for position in range(max(0, len(row.tokens) - 2), end):
                n = position - len(row.tokens)
                stands = position if n < 0 or not depths else len(row.tokens) - 1 + depths[n + 1]
                seen[self._slot(row, self.memory.follows, position)] = stands, tokens[position]

    def _recall(self, plan: StepPlan) -> None:
        """States are taken on from where they were left, and stand where each number of guesses may take the row."""
        for row_id, first, count in plan.follows:
            row, end = self.rows[row_id], first + count
            whole = (row.taken[first] if first else []) + (row.tokens + [RUBBISH] * end)[first:end]
            row.taken = {end - 1: whole[:-1], end: whole}
        for i in plan.proposes:
            row = self.rows[plan.rows[i]]
            known = len(row.tokens)
            taken = row.taken.get(known - 2) if known > 2 else []
            assert taken == row.tokens[: known - 2], f"the drafter's state at {known - 2} is that of {taken}"
            tokens = row.tokens + (row.guessed + [RUBBISH] * plan.depth)[: plan.depth]
            row.taken = {end: tokens[:end] for end in range(known - 1, known + plan.depth)}

    def _drafts(self, plan: StepPlan, i: int) -> list[int]:
        """What grant i verifies: the host's drafts, else what lies in the row, be it rubbish."""
        tried, row = plan.tried(i), self.rows[plan.rows[i]]
        drafts = plan.drafts.get(i, (row.guessed + [RUBBISH] * tried)[:tried])
        assert len(drafts) == tried, "the host counts its own drafts"
        return drafts

    def _tree(self, plan: StepPlan, i: int, drafts: list[int]) -> Tree:
        row = self.rows[plan.rows[i]]
        assert plan.samples[i] and plan.counts[i] == 1 + len(drafts), "a tree begins behind the newest known token"
        assert row.computed + 1 == len(row.tokens), "a tree begins behind the newest known token"
        return Tree(drafts, row.parents or [], plan.guesses[i])

    def _store_tree(self, row: Row, tree: Tree, count: int) -> None:
        """Node j lies j places behind the root, at the position of its depth."""
        known, depths = self._contents(row, row.tokens)[-1:] + tree.drafts, tree.depths()
        for j in range(count):
            for group, pool in enumerate(self.pools):
                kept = group, row.computed + depths[j], known[j]
                self.memory.slots[pool][self._slot(row, group, row.computed + j)] = kept

    def _walk(self, row: Row, tree: Tree) -> list[int]:
        """The samples that stand; what was computed for them moves to where it belongs."""
        new: list[int] = []
        path, root = [0], row.computed
        while True:
            seen = tree.line(path[-1])
            views = [self._read(row, g, root + len(path) - 1, (root, seen)) for g in range(len(self.pools))]
            new.append(self.model.token(views, row.start.sampling.seed))
            child = tree.child(path[-1], new[-1])
            if child is None or len(path) > tree.most:
                break
            path.append(child)
        self._move(row, root, path)
        row.tokens += new
        row.computed = len(row.tokens) - 1
        return new

    def _move(self, row: Row, root: int, path: list[int]) -> None:
        """From the places of these nodes to the positions of their depths."""
        for group, pool in enumerate(self.pools):
            memory: list[dict[int, Any]] = [self.memory.slots[pool]]
            memory += [self.memory.seen] if group == self.memory.follows else []
            for held in memory:
                found = [held.get(self._slot(row, group, root + node)) for node in path]
                for depth, what in enumerate(found):
                    if what is not None:
                        held[self._slot(row, group, root + depth)] = what

    def _apply(self, plan: StepPlan) -> None:
        if plan.epoch != self.epoch:
            self.epoch = plan.epoch
            self.rows.clear()
        for row_id in plan.ended:
            del self.rows[row_id]
        for start in plan.starts:
            assert start.row not in self.rows, "row is in use"
            tables: list[list[tuple[int, int]]] = [[] for _ in self.pools]
            states = {0: self.model.state([])} if start.computed == 0 else {}
            self.rows[start.row] = Row(start, list(start.tokens), start.computed, tables, states=states)
        for edit in plan.edits:
            table = self.rows[edit.row].tables[edit.group]
            assert edit.drop + edit.at <= len(table)
            del table[: edit.drop]
            table[edit.at :] = list(zip(edit.blocks, edit.first, strict=True))
        for row_id, computed in plan.jumps:
            self.rows[row_id].computed = computed
            self.rows[row_id].states = {}
        for row_id, slot in plan.restores:
            position, state = self.memory.snapshots[slot]
            assert position == self.rows[row_id].computed, "this snapshot is of another position"
            self.rows[row_id].states = {position: state}
        for copy in plan.copies:
            memory = self.memory.slots[self.pools[copy.group]]
            for offset in range(self.block_size):
                old = memory.get(copy.src * self.block_size + offset)
                if old is not None:
                    memory[copy.dst * self.block_size + offset] = old
                kept = self.memory.seen.get(copy.src * self.block_size + offset)
                if copy.group == self.memory.follows and kept is not None:
                    self.memory.seen[copy.dst * self.block_size + offset] = kept
        for row_id, tokens in plan.appended.items():
            self.rows[row_id].tokens += tokens

    def _slot(self, row: Row, group: int, position: int) -> int:
        for block, first in reversed(row.tables[group]):
            if first <= position < first + self.block_size:
                return block * self.block_size + position - first
        raise AssertionError(f"no block for position {position} in group {group}")

    def _store(self, row: Row, drafts: list[int], count: int, sample: bool) -> None:
        tokens = row.tokens + drafts
        assert sample == (row.computed + count == len(tokens)), "sampling must coincide with reaching the end"
        assert row.computed + count <= len(tokens), "granted more than is known"
        tokens = self._contents(row, tokens)
        for position in range(row.computed, row.computed + count):
            for group, pool in enumerate(self.pools):
                self.memory.slots[pool][self._slot(row, group, position)] = (group, position, tokens[position])
        if self.model.stateful:
            self._recur(row, tokens, count, kept=1 + len(drafts))

    def _recur(self, row: Row, tokens: list[int], count: int, kept: int) -> None:
        """Take the state through the granted tokens; only those behind the last `kept` of them stay."""
        state, end = row.states[row.computed], row.computed + count
        row.states = {}
        for position in range(row.computed, end):
            state = self.model.advance(state, tokens[position])
            if position >= end - kept:
                row.states[position + 1] = state

    def _contents(self, row: Row, tokens: list[int]) -> list[int]:
        """What the model sees of a row's tokens: a picture's placeholders have contents of their own."""
        known = self.model.contents.get(row.start.sampling.seed, [])
        return known + tokens[len(known) :]

    def _read(self, row: Row, group: int, position: int, line: tuple[int, list[int]] | None = None) -> list[int]:
        """Tokens that a query at `position` sees through the table; line: a root, and the places behind it of what the
        query descends from, by depth."""
        window = self.model.windows[group]
        first = max(0, position - window + 1) if window else 0
        memory = self.memory.slots[self.pools[group]]
        found: list[int] = []
        wanted, last = first, position if line is None else min(position, line[0] - 1)
        for block, start in row.tables[group]:
            while wanted <= last and start <= wanted < start + self.block_size:
                owner, at, token = memory.get(block * self.block_size + wanted - start, (-1, -1, -1))
                assert (owner, at) == (group, wanted), f"slot of ({group}, {wanted}) holds {(owner, at)}"
                found.append(token)
                wanted += 1
        while line is not None and wanted <= position:
            place = self._slot(row, group, line[0] + line[1][wanted - line[0]])
            owner, at, token = memory.get(place, (-1, -1, -1))
            assert (owner, at) == (group, wanted), f"a node's slot for ({group}, {wanted}) holds {(owner, at)}"
            found.append(token)
            wanted += 1
        assert wanted == position + 1, "the table does not cover what is read"
        return found

    def _views(self, row: Row, position: int) -> list[list[int]]:
        """All that the model sees at `position`."""
        views = [self._read(row, g, position) for g in range(len(self.pools))]
        return [*views, [row.states[position + 1]]] if self.model.stateful else views

    def _sample(self, row: Row, drafts: list[int], count: int, sample: bool, i: int, result: StepResult) -> list[int]:
        end = row.computed + count
        if not sample:
            row.computed = end
            return []
        width = row.start.sampling.num_candidates
        if width:
            views = self._views(row, end - 1)
            result.candidates[i] = self.model.candidates(views, width)
            row.computed = end
            return []
        new: list[int] = []
        for n in range(len(drafts) + 1):
            position = end - len(drafts) - 1 + n
            views = self._views(row, position)
            token = self.model.token(views, row.start.sampling.seed)
            new.append(token)
            if n < len(drafts) and token != drafts[n]:
                break
        row.tokens += new
        row.computed = len(row.tokens) - 1
        return new
