"""Packed rows. Owns: tokenising cases into rows of fixed length and the background workers that write them."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from corpus import load_corpus
from mixture import Mixture
from render import Segment, case_segments
from tokenizers import Tokenizer

START = 256  # flag in the weight word: this token begins a document


@dataclass(frozen=True)
class Feed:
    """What a stream of rows is made of."""

    tokenizer: str
    corpus: str | None
    length: int
    rows: int
    long: bool
    seed: int


SHORT = 28
"""Segments of so few characters (roles, ends, short answers) come again and again: their ids are kept."""
_KNOWN: dict[str, list[int]] = {}


def _ids(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """The ids of each text."""
    if len(_KNOWN) > 20_000:
        _KNOWN.clear()
    new = list({t for t in texts if t not in _KNOWN})
    made = dict(zip(new, (e.ids for e in tokenizer.encode_batch(new, add_special_tokens=False)), strict=True))
    out = [made[text] if text in made else _KNOWN[text] for text in texts]
    _KNOWN.update((t, ids) for t, ids in made.items() if len(t) <= SHORT)
    return out


def encode(tokenizer: Tokenizer, cases: list[list[Segment]]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Token ids and weight words (ten times the weight, plus START on the first) of each case."""
    flat = [text for case in cases for text, _ in case]
    encoded = iter(_ids(tokenizer, flat))
    for case in cases:
        ids: list[int] = []
        weights: list[int] = []
        for _, weight in case:
            piece = next(encoded)
            ids += piece
            weights += [round(10 * weight)] * len(piece)
        weights[0] |= START
        yield np.asarray(ids, np.uint16), np.asarray(weights, np.uint16)


class Packer:
    """First fit into a few open rows; a document is never split."""

    def __init__(self, length: int, bins: int = 24) -> None:
        self.length, self.bins = length, bins
        self.open: list[list] = []
        self.full: list[np.ndarray] = []

    def add(self, ids: np.ndarray, weights: np.ndarray) -> None:
        """Put one document into a row; documents longer than a row are dropped."""
        size = len(ids)
        if size > self.length:
            return
        for row in self.open:
            if row[0] + size <= self.length:
                self._put(row, ids, weights)
                return
        if len(self.open) >= self.bins:
            fullest = max(range(len(self.open)), key=lambda i: self.open[i][0])
            self.full.append(self.open.pop(fullest)[1])
        row = [0, np.zeros((2, self.length), np.uint16)]
        self.open.append(row)
        self._put(row, ids, weights)

    def _put(self, row: list, ids: np.ndarray, weights: np.ndarray) -> None:
        at = row[0]
        row[1][0, at : at + len(ids)] = ids
        row[1][1, at : at + len(ids)] = weights
        row[0] = at + len(ids)
        if row[0] < self.length:
            # Padding is its own document, so that nothing attends into it.
            row[1][1, row[0]] = START


def rows_of(feed: Feed, worker: int, workers: int) -> Iterator[np.ndarray]:
    """Endless blocks [rows, 2, length] of one worker; the same worker and seed give the same blocks."""
    rng = random.Random(f"{feed.seed}/{worker}/{workers}/{feed.length}")
    mixture = Mixture(load_corpus(feed.corpus), feed.long)
    tokenizer = Tokenizer.from_file(feed.tokenizer)
    packer = Packer(feed.length)
    used = long_used = 1
    while True:
        cases = []
        for _ in range(200):
            if feed.long and long_used < 0.5 * used:
                case = case_segments(mixture.draw_long(rng, feed.length)[1])
                long_used += sum(len(t) for t, _ in case)
            else:
                case = case_segments(mixture.draw(rng)[1])
            used += sum(len(t) for t, _ in case)
            cases.append(case)
        for ids, weights in encode(tokenizer, cases):
            packer.add(ids, weights)
        while len(packer.full) >= feed.rows:
            block, packer.full = packer.full[: feed.rows], packer.full[feed.rows :]
            yield np.stack(block)


def _work(feed: Feed, worker: int, workers: int, folder: str, ahead: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.nice(5)  # the compiler of the training process goes first
    for index, block in enumerate(rows_of(feed, worker, workers)):
        while index - _position(folder) > ahead:
            time.sleep(0.02)
        temporary = f"{folder}/tmp{worker}.npy"
        np.save(temporary, block)
        os.replace(temporary, f"{folder}/{worker}_{index}.npy")


def wait_for(path: Path, seconds: float = 1500) -> None:
    """Return when the file exists: a companion compiles while the model that it needs is still in training."""
    begin = time.time()
    while not path.exists():
        if time.time() - begin > seconds:
            raise TimeoutError(f"{path} did not appear")
        time.sleep(0.2)


def _position(folder: str) -> int:
    try:
        return int(Path(folder, "position").read_text() or 0)
    except FileNotFoundError:
        return 0


class Stream:
    """Row blocks in a fixed order, made by background workers (or inline with none)."""

    def __init__(self, feed: Feed, workers: int, folder: str, ahead: int = 60) -> None:
        self.feed, self.workers, self.folder = feed, workers, folder
        self.count = 0
        self.waited = 0.0
        self.processes = []
        if workers == 0:
            self.inline = rows_of(feed, 0, 1)
            return
        Path(folder).mkdir(parents=True, exist_ok=True)
        context = get_context("spawn")
        for worker in range(workers):
            process = context.Process(target=_work, args=(feed, worker, workers, folder, ahead), daemon=True)
            process.start()
            self.processes.append(process)

    def next(self) -> np.ndarray:
        """The next block [rows, 2, length]."""
        if self.workers == 0:
            return next(self.inline)
        worker, index = self.count % self.workers, self.count // self.workers
        path = f"{self.folder}/{worker}_{index}.npy"
        begin = time.time()
        while not os.path.exists(path):
            if self.processes[worker].exitcode is not None:
                raise RuntimeError(f"worker {worker} has ended: see its error above")
            time.sleep(0.002)
        self.waited += time.time() - begin
        block = np.load(path)
        os.remove(path)
        self.count += 1
        if worker == 0:
            temporary = f"{self.folder}/position.tmp"
            Path(temporary).write_text(str(index))
            os.replace(temporary, f"{self.folder}/position")
        return block

    def close(self) -> None:
        """Stop the workers."""
        for process in self.processes:
            process.terminate()
