"""What users of a server ask. Owns: conversations, made up or read from traces (tokenmill's, ShareGPT's, Mooncake's).

A file is checked completely before anything is sent; errors name the entry. Must not know: servers, engines.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenmill.core.errors import ParameterError
from tokenmill.core.text_file import lines_of, read_text_file
from tokenmill.core.text_values import read_count

HASH_BLOCK = 512
"""Tokens that one hash of a Mooncake trace stands for."""
CHARACTERS_PER_TOKEN = 4
FIRST_ID = 10
"""Made-up prompts leave out the lowest ids, which are often control tokens."""
MOST_CHARS = 4 << 30
_WORDS = ("mill", "grain", "flour", "river", "stone", "wheel", "bread", "wind", "sail", "field", "harvest", "sack")


@dataclass(frozen=True, slots=True)
class UserTurn:
    """The text that the user adds, and the number of tokens in the answer."""

    prompt: list[int] | str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that follow each other, each sent with everything before it. `at`: seconds after the start, from a
    trace."""

    turns: list[UserTurn]
    at: float | None = None


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of token counts: fixed `512`, uniform `128:1024`, `normal:512:100`, `lognormal:512:0.8`."""

    kind: str
    first: float
    second: float = 0.0

    def draw(self, source: random.Random) -> int:
        """Draw one length, at least 1."""
        match self.kind:
            case "uniform":
                return source.randint(int(self.first), int(self.second))
            case "normal":
                return max(1, round(source.gauss(self.first, self.second)))
            case "lognormal":
                return max(1, round(self.first * source.lognormvariate(0.0, self.second)))
        return int(self.first)


def read_lengths(text: str, name: str) -> Lengths:
    """Read a distribution. A lognormal one states its median first, then sigma."""
    parts = text.split(":")
    numbers = [read_count(part) or 0 for part in parts]
    try:
        if parts[0] in ("normal", "lognormal"):
            kind, (first, second) = parts[0], (numbers[i] or float(parts[i]) for i in range(1, len(parts)))
        else:
            kind = "fixed" if len(parts) == 1 else "uniform"
            first, second = (numbers[0], numbers[-1]) if len(parts) <= 2 else (0, 0)
    except ValueError:
        first, second = 0.0, 0.0
        kind = ""
    if not (first >= 1 and 0 <= second < 1e9 and first < 1e9) or (kind == "uniform" and second < first):
        raise ParameterError(
            f"{name} takes a length (512 or 4k), a range (128:1024), normal:MEAN:DEVIATION or lognormal:MEDIAN:SIGMA; "
            f"got {text!r}."
        )
    return Lengths(kind, first, second)


@dataclass(frozen=True, slots=True)
class Made:
    """A made-up load: lengths, turns, and `prefixes` different system prompts of `prefix` tokens that users share."""

    count: int
    inputs: Lengths
    outputs: Lengths
    turns: int = 1
    prefix: int = 0
    prefixes: int = 1
    vocab: int = 1000
    text: bool = False
    seed: int = 0


def make_conversations(load: Made) -> list[Conversation]:
    """Make the conversations. The same arguments give the same ones."""
    source = random.Random(load.seed)
    shared = [_tokens(source, load, load.prefix) for _ in range(load.prefixes)]
    found = []
    for _ in range(load.count):
        opening = source.choice(shared)
        turns = []
        for index in range(load.turns):
            words = _tokens(source, load, load.inputs.draw(source))
            turns.append(UserTurn(_joined(opening if index == 0 else [], words, load.text), load.outputs.draw(source)))
        found.append(Conversation(turns))
    return found


def _tokens(source: random.Random, load: Made, count: int) -> list[Any]:
    if load.text:
        return [source.choice(_WORDS) for _ in range(count)]
    return [source.randrange(FIRST_ID, max(load.vocab, FIRST_ID + 1)) for _ in range(count)]


def _joined(opening: list[Any], said: list[Any], text: bool) -> list[int] | str:
    return " ".join([*opening, *said]) if text else [*opening, *said]


@dataclass(slots=True)
class Reader:
    """Reads one trace. `vocab` limits the ids of prompts for which a trace gives only the length."""

    path: Path
    vocab: int = 1000
    notes: set[str] = field(default_factory=set)

    def read(self) -> list[Conversation]:
        """Every conversation of the file, in its order."""
        every = [self._entry(place, entry) for place, entry in self._entries()]
        found = [talk for talk in every if talk.turns]
        if not found:
            raise ParameterError(f"--workload {self.path} is empty: it needs at least one request.")
        if len(every) > len(found):
            self.notes.add(f"{len(every) - len(found)} conversations without a question and its answer are left out")
        start = min((c.at for c in found if c.at is not None), default=0.0)
        return [Conversation(c.turns, None if c.at is None else c.at - start) for c in found]

    def _entries(self) -> Iterable[tuple[str, Any]]:
        """JSON lines, or one JSON array."""
        text = read_text_file(self.path, "--workload", MOST_CHARS)
        if text.lstrip().startswith("["):
            try:
                entries = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise ParameterError(f"--workload {self.path} is not JSON: {error}.") from error
            yield from ((f"{self.path}, entry {number}", entry) for number, entry in enumerate(entries, 1))
            return
        for number, line in lines_of(text):
            place = f"{self.path}, line {number}"
            try:
                yield place, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ParameterError(f"{place} is not JSON: {getattr(error, 'msg', error)}.") from error

    def _entry(self, place: str, entry: Any) -> Conversation:
        if not isinstance(entry, dict):
            raise ParameterError(f"{place} must be a JSON object.")
        if "conversations" in entry:
            return self._sharegpt(place, entry["conversations"])
        if "input_length" in entry:
            return self._mooncake(place, entry)
        return self._plain(place, entry)

    def _plain(self, place: str, entry: dict[str, Any]) -> Conversation:
        """{"prompt_token_ids": [...] or "prompt": "...", "max_tokens": N, "at": seconds}"""
        prompt = entry.get("prompt_token_ids", entry.get("prompt"))
        ids = isinstance(prompt, list) and all(_whole(i, 0) for i in prompt)
        if not prompt or not (ids or isinstance(prompt, str)):
            raise ParameterError(f"{place} needs `prompt_token_ids` (a list of token ids) or `prompt`, not empty.")
        return Conversation([UserTurn(prompt, _count(place, entry, "max_tokens"))], _time(place, entry, "at", 1.0))

    def _mooncake(self, place: str, entry: dict[str, Any]) -> Conversation:
        """{"timestamp": ms, "input_length": N, "output_length": M, "hash_ids": [...]}: equal hashes become equal
        tokens."""
        length, output = _count(place, entry, "input_length"), _count(place, entry, "output_length")
        hashes = entry.get("hash_ids", [])
        if not isinstance(hashes, list) or not all(_whole(i, 0) for i in hashes):
            raise ParameterError(f"{place}: hash_ids must be a list of whole numbers.")
        ids: list[int] = []
        for block in hashes[: -(-length // HASH_BLOCK)]:
            ids += self._random(block, HASH_BLOCK)
        ids = ids[:length] + self._random(place, max(0, length - len(ids)))
        return Conversation([UserTurn(ids, output)], _time(place, entry, "timestamp", 1000.0))

    def _random(self, seed: int | str, count: int) -> list[int]:
        source = random.Random(seed)
        return [source.randrange(FIRST_ID, max(self.vocab, FIRST_ID + 1)) for _ in range(count)]

    def _sharegpt(self, place: str, said: Any) -> Conversation:
        """[{"from": "human" | "gpt", "value": text}, ...]: answers get the length of those in the trace."""
        if not isinstance(said, list) or not all(isinstance(s, dict) and isinstance(s.get("value"), str) for s in said):
            raise ParameterError(f"{place}: conversations must be a list of objects with `from` and `value`.")
        turns, asked = [], ""
        for part in said:
            if part.get("from") in ("human", "user", "system"):
                asked += part["value"]
            elif asked:
                turns.append(UserTurn(asked, max(1, round(len(part["value"]) / CHARACTERS_PER_TOKEN))))
                asked = ""
        self.notes.add(f"answers are as long as the trace's, at {CHARACTERS_PER_TOKEN} characters per token")
        return Conversation(turns)


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _count(place: str, entry: dict[str, Any], name: str) -> int:
    value = entry.get(name)
    if not _whole(value, 1):
        raise ParameterError(f"{place}: {name} must be a positive integer, got {value!r}.")
    return int(value)  # type: ignore[arg-type]


def _time(place: str, entry: dict[str, Any], name: str, per_second: float) -> float | None:
    value = entry.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:
        raise ParameterError(f"{place}: {name} must be a time from 0 on, got {value!r}.")
    return value / per_second
