"""`serve --record FILE`: live traffic as a workload. Owns: the file and what goes into it.

One JSON line per ended request, in Mooncake's format, which `bench serve --workload` reads: when it came, lengths, and
numbers that are equal where prompts begin equally. With --record-content the prompts' token ids are kept instead, in
the format of `bench throughput --workload`; that file then holds what people wrote.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from tokenmill.core.errors import UserError
from tokenmill.core.request import Request

log = logging.getLogger("tokenmill.server")
HASH_BLOCK = 512
"""Tokens per hash, as in Mooncake's traces."""
MOST_PREFIXES = 1 << 18
"""Most beginnings of prompts that are remembered. The one that was unused for longest is forgotten first, and gets a
new number if it comes again."""


class Recorder:
    """Appends to one file. Every line is written in one piece."""

    def __init__(self, path: str, *, content: bool = False) -> None:
        self.content = content
        self.began = time.monotonic()
        self.broken = False
        self._known: OrderedDict[tuple[int, bytes], int] = OrderedDict()
        self._next = 1
        try:
            self._file: IO[str] = Path(path).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115  (lives as long as the server)
        except OSError as error:
            raise UserError(f"--record {path} cannot be written: {error.strerror or error}.") from error

    def note(self, request: Request, arrival: float, output_tokens: int) -> None:
        """Write a request that has ended. `arrival` is on the monotonic clock."""
        if not output_tokens or self.broken:
            return
        ids, at = request.prompt_ids, max(0.0, arrival - self.began)
        line: dict[str, object]
        if self.content:
            line = {"prompt_token_ids": list(ids), "max_tokens": output_tokens, "at": round(at, 3)}
        else:
            line = {"timestamp": round(1000 * at), "input_length": len(ids), "output_length": output_tokens}
            line["hash_ids"] = self._numbers(ids)
        try:
            self._file.write(json.dumps(line) + "\n")
        except (OSError, ValueError) as error:  # a full disk must not end requests
            if not self.broken:
                log.error("--record stops: the file cannot be written", extra={"data": {"reason": str(error)}})
            self.broken = True

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _numbers(self, ids: Sequence[int]) -> list[int]:
        """One number per whole block of the prompt. It stands for the block and everything before it."""
        found, before = [], 0
        for start in range(0, len(ids) - HASH_BLOCK + 1, HASH_BLOCK):
            block = array("q", ids[start : start + HASH_BLOCK]).tobytes()
            key = (before, hashlib.blake2b(block, digest_size=16).digest())
            if key in self._known:
                self._known.move_to_end(key)
            else:
                self._known[key] = self._next
                self._next += 1
                if len(self._known) > MOST_PREFIXES:
                    self._known.popitem(last=False)
            before = self._known[key]
            found.append(before)
        return found
