"""Helpers' processes that outlive the server or engine that started them. To start one takes longer than most tests,
and no question changes it. A folder's conftest imports the fixture; a file whose subject is how such processes end has
a fixture of that name of its own."""

from __future__ import annotations

import atexit
import os

import pytest

from tokenmill.process import client
from tokenmill.process.client import Helper, Pool

MOST = 4
_kept: list[client._Process] = []
_take = Pool._take
atexit.register(client._end_all, _kept, os.getpid())


def _taken(pool: Pool, helper: Helper) -> client._Process:
    """One that this pool has, one that an earlier pool had, or a new one."""
    with pool._lock:
        own = any(process.helper == helper for process in pool._idle)
        found = None if own else next((process for process in _kept if process.helper == helper), None)
        if found is not None:
            _kept.remove(found)
            if found.alive():
                return found
            found.end()
    return _take(pool, helper)


def _closed(pool: Pool) -> None:
    with pool._lock:
        pool._closings += 1
        _kept.extend(pool._idle)
        pool._idle.clear()
        while len(_kept) > MOST:
            _kept.pop(0).end()


@pytest.fixture(autouse=True)
def kept_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are idle when their pool ends serve later ones."""
    keep_helpers(monkeypatch)


def keep_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, for single tests of a file."""
    monkeypatch.setattr(Pool, "_take", _taken)
    monkeypatch.setattr(Pool, "close", _closed)
    monkeypatch.setattr(client, "starts_last", lambda: False)  # else they end with the thread that started them
