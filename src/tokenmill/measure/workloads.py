"""What a benchmark asks for. Owns: reading workload files, and making up uniform workloads.

A file is checked completely before any model loads; errors name the line. Must not know: engines, tensors.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeGuard

from tokenmill.core.errors import ParameterError, why

MAX_LINE_BYTES = 64 << 20
Encode = Callable[[str], list[int]]
Job = tuple[list[int], int]
"""The token ids of a prompt, and how many tokens to generate."""


@dataclass(frozen=True, slots=True)
class FileWorkload:
    """The lines of a file. Prompts are token ids or text."""

    name: str
    lines: list[tuple[list[int] | str, int]]

    @property
    def has_text(self) -> bool:
        """Does a prompt need a tokenizer?"""
        return any(isinstance(prompt, str) for prompt, _ in self.lines)

    def jobs(self, encode: Encode | None, vocab_size: int) -> list[Job]:
        """The jobs, with texts tokenised. `encode` is None if there is no tokenizer."""
        found = []
        for number, (prompt, count) in enumerate(self.lines, 1):
            if isinstance(prompt, str):
                if encode is None:
                    raise ParameterError(
                        f"{self.name}, line {number}: text needs a tokenizer, and this model has none: "
                        "give prompt_token_ids."
                    )
                prompt = encode(prompt)
            found.append((prompt, count))
        return found


@dataclass(frozen=True, slots=True)
class Uniform:
    """`requests` prompts of `inputs` random tokens each, with `outputs` tokens to generate."""

    requests: int
    inputs: int
    outputs: int
    seed: int = 0
    has_text: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """The name in tables."""
        return f"{self.requests} x ({self.inputs} in, {self.outputs} out)"

    def jobs(self, encode: Encode | None, vocab_size: int) -> list[Job]:
        """The jobs. The same seed gives the same prompts."""
        if self.requests * (self.inputs + self.outputs) > MOST_TOKENS:
            raise ParameterError(
                f"{self.name} are more than {MOST_TOKENS:,} tokens: ask for fewer requests, or for shorter ones."
            )
        source = random.Random(self.seed)
        ids = [[source.randrange(vocab_size) for _ in range(self.inputs)] for _ in range(self.requests)]
        return [(prompt, self.outputs) for prompt in ids]


MOST_TOKENS = 1 << 26
"""Most tokens of a made-up workload, which is made before it runs."""
Workload = FileWorkload | Uniform


def read_workload(path: Path) -> FileWorkload:
    """Read a workload from a file of JSON lines."""
    lines: list[tuple[list[int] | str, int]] = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), ""), 1):
                if line.strip():
                    lines.append(_line(f"{path}, line {number}", line))
    except OSError as error:
        raise ParameterError(f"--workload {path} cannot be read: {why(error)}.") from error
    except UnicodeDecodeError as error:
        raise ParameterError(f"--workload {path} is not UTF-8 text.") from error
    if not lines:
        raise ParameterError(f"--workload {path} is empty: it needs at least one request.")
    return FileWorkload(path.name, lines)


def _line(place: str, text: str) -> tuple[list[int] | str, int]:
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ParameterError(f"{place} is not JSON: {getattr(error, 'msg', error)}.") from error
    if not isinstance(entry, dict):
        raise ParameterError(f"{place} must be a JSON object.")
    ids, prompt, count = entry.get("prompt_token_ids"), entry.get("prompt"), entry.get("max_tokens")
    if not _is_count(count):
        raise ParameterError(f"{place}: max_tokens must be a positive integer, got {count!r}.")
    if isinstance(ids, list) and ids and all(_is_count(i) or i == 0 for i in ids):
        return ids, count
    if ids is None and isinstance(prompt, str) and prompt:
        return prompt, count
    raise ParameterError(f"{place} needs `prompt_token_ids` (a list of token ids) or `prompt` (text), not empty.")


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
