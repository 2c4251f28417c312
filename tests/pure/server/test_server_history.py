"""What a server remembers of requests: bounded by number and by bytes, one key's never another's, newest first."""

from __future__ import annotations

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.server.backend import Timeline
from tokenmill.server.byte_ring import ByteRing
from tokenmill.server.history import MOST_PROMPTS, History, PromptFigures


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.integers(1, 6), st.lists(st.integers(0, 70), max_size=80))
def test_a_ring_holds_the_newest(size: int, most: int, lengths: list[int]) -> None:
    ring, whole = ByteRing(size, most), deque[bytes]()
    for i, length in enumerate(lengths):
        data = bytes([i]) * length
        ring.add(data)
        if 0 < length <= size:
            whole.append(data)
        kept = list(ring.newest(b""))
        assert kept == list(reversed(whole))[: len(kept)] and len(kept) == len(ring) <= most
        assert sum(map(len, kept)) <= size
        if kept and len(kept) < min(most, len(whole)):  # nothing is dropped that leaves room for the next string
            assert sum(map(len, kept)) + len(whole[-len(kept) - 1]) + max(map(len, whole)) > size
        assert list(ring.newest(bytes([i]))) == ([data] if 0 < length <= size else [])


def test_ended_records_are_those_that_were_open() -> None:
    history = History(most=8)
    record = history.begin("one", "ann", 10.0)
    record.prompts.append(
        PromptFigures(Timeline(10.0, 10.5, 11.0, 12.0, 12.0, prefill=[(10.75, 3)]), 3, 2, 1, reasons=["stop"])
    )
    assert history.find("one", "ann")["state"] == "open"
    history.end(record, 13.0)
    shown = history.find("one", "ann")
    assert shown["state"] == "ended" and shown["duration_ms"] == 3000.0
    assert shown["prompts"][0]["prefill"] == [{"at_ms": 750.0, "tokens": 3}]
    assert shown["prompts"][0]["finish_reasons"] == ["stop"] and "drafts" not in shown["prompts"][0]
    assert [e["event"] for e in shown["prompts"][0]["events"]] == [
        *("accepted", "started", "first_token", "last_token", "ended")
    ]
    assert not history.open and history.find("one", "bob") is None and history.find("on", "ann") is None


def test_drafts_are_told_where_there_were_any() -> None:
    history = History(most=8)
    record = history.begin("one", "ann", 10.0)
    record.prompts.append(PromptFigures(Timeline(10.0), 3, 9, 0, 12, 5, 0.25))
    assert history.find("one", "ann")["prompts"][0]["drafts"] == {"tried": 12, "right": 5, "saved_ms": 250.0}


def test_a_request_of_many_prompts_shows_the_first() -> None:
    history = History(most=8)
    record = history.begin("one", "ann", 10.0)
    record.prompts += [PromptFigures(Timeline(10.0), 3, i, 0) for i in range(MOST_PROMPTS + 2)]
    shown = history.find("one", "ann")
    assert len(shown["prompts"]) == MOST_PROMPTS and shown["prompts_left_out"] == 2


def test_newest_first_by_beginning_and_by_owner() -> None:
    history = History(most=8)
    records = [history.begin(f"r{i}", "ann" if i % 2 else "an", float(i)) for i in range(6)]
    for i in (3, 1, 4):
        history.end(records[i], 9.0)
    assert [r["id"] for r in history.recent("ann", 9)] == ["r5", "r3", "r1"]
    assert [r["id"] for r in history.recent("an", 2)] == ["r4", "r2"]
    again = history.begin("r3", "ann", 7.0)
    assert history.find("r3", "ann")["state"] == "open"
    history.end(again, 7.5)
    assert history.find("r3", "ann")["duration_ms"] == 500.0


def test_history_is_bounded_by_number_and_bytes() -> None:
    history = History(most=100, size=20_000)
    for i in range(300):
        record = history.begin(f"r{i}", "ann", float(i))
        record.prompts.append(PromptFigures(Timeline(float(i), prefill=[(0.0, n) for n in range(i % 40)]), 1))
        history.end(record, i + 1.0)
    assert 10 < len(history) < 100 and len(history.recent("ann", 1000)) == len(history)
    assert history.find("r299", "ann") and not history.find("r0", "ann")


def test_two_keys_that_choose_the_same_id() -> None:
    history = History(most=8)
    ann, bob = history.begin("same", "ann", 1.0), history.begin("same", "bob", 2.0)
    assert history.find("same", "ann")["state"] == history.find("same", "bob")["state"] == "open"
    history.end(ann, 3.0)
    assert history.find("same", "ann")["state"] == "ended" and history.find("same", "bob")["state"] == "open"
    history.end(bob, 4.0)
    assert history.find("same", "ann")["duration_ms"] == history.find("same", "bob")["duration_ms"] == 2000.0


def test_a_busy_key_does_not_push_out_what_another_did() -> None:
    history = History(owners=2)
    history.end(history.begin("mine", "modest", 0.0), 1.0)
    for i in range(3000):
        history.end(history.begin(f"r{i}", "greedy", float(i)), i + 1.0)
    assert history.find("mine", "modest") and len(history.recent("greedy", 5000)) == 500
