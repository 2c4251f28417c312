"""Slots of adapters: pinned while rows use them, the least recently used given away, drained where all are in use."""

from __future__ import annotations

from tokenmill.scheduler.adapters import AdapterSlots


def begin(slots: AdapterSlots, adapter: int) -> bool:
    """A row of a new request starts, if it can."""
    if not slots.has_room(adapter, begun=False):
        return False
    slots.take(adapter)
    return True


def test_rows_without_an_adapter_need_no_slot() -> None:
    slots = AdapterSlots()
    assert begin(slots, 0) and slots.slot_of(0) == 0 and not slots.pending


def test_the_least_recently_used_gives_way() -> None:
    slots = AdapterSlots(2)
    assert begin(slots, 7) and begin(slots, 8)
    assert slots.pending == [(1, 7), (2, 8)]
    slots.release(7)
    slots.release(8)
    assert begin(slots, 7)
    slots.release(7)
    assert begin(slots, 9)
    assert set(slots.held) == {7, 9}, "8 was used longest ago"
    assert slots.pending[-1] == (2, 9)
    assert begin(slots, 7) and slots.pending == [(1, 7), (2, 9)], "it is there already"


def test_slots_in_use_stay_and_one_is_drained_for_who_waits() -> None:
    slots = AdapterSlots(2)
    assert begin(slots, 1) and begin(slots, 1) and begin(slots, 2)
    assert not begin(slots, 3)
    assert not begin(slots, 2), "the slot with the fewest rows is drained"
    assert slots.has_room(2, begun=True), "but not against rows of a request that runs"
    assert begin(slots, 1), "the other slot is open"
    slots.release(2)
    assert not begin(slots, 4), "it is not for those that came later"
    assert begin(slots, 3)
    assert slots.slot_of(3) == 2
    assert not slots.draining or slots.held[1].drained_for == 4


def test_nobody_waits_for_ever_for_who_has_left() -> None:
    slots = AdapterSlots(1)
    assert begin(slots, 1) and not begin(slots, 2) and not begin(slots, 1)
    slots.still_wait({1})
    assert begin(slots, 1)


def test_after_a_failure_everything_is_loaded_again() -> None:
    slots = AdapterSlots(1)
    assert begin(slots, 1)
    slots.release(1)
    slots.forget()
    assert not slots.pending
    assert begin(slots, 1) and slots.pending == [(1, 1)]


def test_what_goes_before_it_was_loaded_is_not_loaded() -> None:
    slots = AdapterSlots(1)
    for adapter in (1, 2):  # 2 takes the slot of 1 before a plan was made
        assert begin(slots, adapter)
        slots.release(adapter)
    assert slots.pending == [(1, 2)]
    slots.drop(2)
    assert not slots.pending and begin(slots, 3) and slots.pending == [(1, 3)]


def test_everybody_gets_a_turn() -> None:
    """Five adapters, two slots, rows that last three rounds, and requests that keep coming for two of them."""
    slots, waiting, running, served = AdapterSlots(2), [3, 4, 5], [], set()
    for round_ in range(60):
        running = [(adapter, left - 1) for adapter, left in running]
        for adapter, left in running:
            if not left:
                slots.release(adapter)
        running = [each for each in running if each[1]]
        waiting += [1, 2] if round_ % 2 else []
        slots.still_wait(set(waiting))
        for adapter in list(waiting):
            if begin(slots, adapter):
                waiting.remove(adapter)
                running.append((adapter, 3))
                served.add(adapter)
    assert served == {1, 2, 3, 4, 5}
