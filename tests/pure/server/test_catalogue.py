"""The states of many models: who waits, who goes, who never does. No HTTP, no engines."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.pure.server.conftest import until
from tests.pure.server.server_catalogue_helpers import Unit, World, catalogue, spec
from tokenmill.core.config import make_config
from tokenmill.core.errors import EngineFaultError, ParameterError, UserError
from tokenmill.measure.memory_need import Need
from tokenmill.server.many_models.catalogue import TRIES, Bounds, Catalogue
from tokenmill.server.many_models.entry import Entry, GoneError, Spec, State, UnreadyError
from tokenmill.server.many_models.survey import Survey


async def test_many_wait_for_one_load_and_the_queue_is_bounded() -> None:
    world = World()
    models = catalogue(world, spec("a"), held_up=True, queue=3)
    waiting = [asyncio.ensure_future(models.enter(models.first)) for _ in range(3)]
    await until(lambda: world.loads)
    assert models.first.state is State.LOADING
    with pytest.raises(UnreadyError, match="3 requests wait"):
        await models.enter(models.first)
    waiting[0].cancel()  # a client that leaves does not end the load
    world.gate.set()
    units = await asyncio.gather(*waiting[1:])
    assert world.loads == ["a"] and units[0] is units[1] and models.first.life.open == 2
    assert models.first.life.waiting == 0


async def test_least_recently_used_goes_and_pinned_stays() -> None:
    world = World()
    models = catalogue(world, spec("a", pin=True), spec("b"), spec("c"), spec("d"), memory=30)
    for name in ("a", "b", "c", "b", "d"):
        await models.load(models.entries[name])
    assert sorted(world.alive()) == ["a", "b", "d"]
    assert models.entries["c"].state is State.UNLOADED


async def test_nobody_with_open_requests_goes() -> None:
    world = World()
    models = catalogue(world, spec("a"), spec("b"), memory=10, patience_s=0)
    a, b = models.entries.values()
    await models.enter(a)
    with pytest.raises(UnreadyError, match="no room for 'b' now: 'a' must finish open requests first") as found:
        await models.load(b)
    assert found.value.retry_after >= 1 and not found.value.never
    await until(lambda: a.state is State.READY)
    assert world.alive() == ["a"] and b.state is State.UNLOADED
    models.leave(a)
    assert a.unit is not None
    a.unit.background = 1  # nobody waits for it, and it goes on
    with pytest.raises(UnreadyError):
        await models.load(b)
    a.unit.background = 0
    await until(lambda: a.state is State.READY)
    await models.load(b)
    assert world.alive() == ["b"]


async def test_a_busy_model_takes_no_more_until_others_had_their_turn() -> None:
    world = World()
    models = catalogue(world, spec("a"), spec("b"), memory=10)
    a, b = models.entries.values()
    await models.enter(a)
    turn = asyncio.ensure_future(models.enter(b))
    await until(lambda: a.state is State.DRAINING)
    later = asyncio.ensure_future(models.enter(a))
    await asyncio.sleep(0)
    assert a.life.open == 1 and not later.done()
    models.leave(a)
    await turn
    assert world.alive() == ["b"]
    models.leave(b)
    await later
    assert world.alive() == ["a"] and a.life.open == 1


async def test_what_can_never_fit_is_said_at_once() -> None:
    world = World()
    models = catalogue(world, spec("a", pin=True), spec("b", memory=25), spec("c"), memory=30)
    await models.load(models.first)
    await models.load(models.entries["c"])
    with pytest.raises(UnreadyError, match=r"'b' needs .* 'a' keep .* does not fit") as found:
        await models.load(models.entries["b"])
    assert found.value.never and sorted(world.alive()) == ["a", "c"]


async def test_what_was_measured_counts_instead_of_what_was_predicted() -> None:
    world = World(held={"a": 25, "b": 5, "c": 5})

    async def predict(entry: Entry[Unit]) -> int:
        return 10

    models = Catalogue(world.make, Bounds(memory=30), predict)
    world.gate.set()
    for name in ("a", "b", "c"):
        models.add(spec(name, memory=None))
    for name in ("a", "b", "b", "c"):
        await models.load(models.entries[name])
    assert sorted(world.alive()) == ["b", "c"] and models.entries["a"].size == 25


async def test_each_device_has_its_own_memory() -> None:
    world = World()
    models = catalogue(world, spec("a"), spec("b"), memory=10)
    models.add(Spec(make_config({}, model="c", device="cuda:1"), memory=10))
    for name in "abc":
        await models.load(models.entries[name])
    assert world.alive() == ["b", "c"]


async def test_groups_and_loners() -> None:
    world = World()
    groups = frozenset({"big"})
    models = catalogue(world, spec("a", groups=groups), spec("b", groups=groups), spec("c"), spec("d", alone=True))
    seen = []
    for name in ("a", "c", "b", "d", "c"):
        await models.load(models.entries[name])
        seen.append("".join(sorted(world.alive())))
    assert seen == ["a", "ac", "bc", "d", "c"]


def test_pinned_ones_that_exclude_each_other_are_refused() -> None:
    models = catalogue(World(), spec("a", pin=True, alone=True))
    with pytest.raises(ParameterError, match="both pinned"):
        models.add(spec("b", pin=True))
    with pytest.raises(ParameterError, match="Two models are called"):
        models.add(spec("x", aliases=("a",)))


def test_names_that_clients_cannot_tell_apart_or_read_are_refused() -> None:
    """Ollama's clients add a tag to every name, and JSON cannot carry the bytes that a folder's name may hold."""
    models = catalogue(World(), spec("a"), spec("b:latest"))
    for wrong in (spec("x", aliases=("a:latest",)), spec("b")):
        with pytest.raises(ParameterError, match="Two models are called"):
            models.add(wrong)
    for letter in ("\udcff", "\ud800", "\n", "\0"):
        with pytest.raises(ParameterError, match="holds a character that is no text"):
            models.add(spec("x", aliases=(f"y{letter}",)))
    assert models.add(spec("模型\u3000é:b")).name == "模型\u3000é:b"


async def test_a_group_with_a_pinned_member_has_no_other() -> None:
    world, groups = World(), frozenset({"big"})
    models = catalogue(world, spec("a", groups=groups, pin=True), spec("b", groups=groups))
    await models.load(models.first)
    with pytest.raises(UnreadyError, match="may not be loaded beside 'a', which stays") as found:
        await models.load(models.entries["b"])
    assert found.value.never


async def test_a_failed_load_is_told_and_not_tried_at_once() -> None:
    world = World(errors={"a": UserError("There is no such folder.")})
    models = catalogue(world, spec("a"), spec("b"))
    await models.load(models.entries["b"])
    for _ in range(3):
        with pytest.raises(UnreadyError, match="'a' could not be loaded: There is no such folder") as found:
            await models.load(models.first)
        assert found.value.retry_after >= 0.5
    assert world.loads == ["b", "a"] and models.first.state is State.FAILED and world.alive() == ["b"]
    del world.errors["a"]
    models.first.life.retry_at = 0.0
    await models.load(models.first)
    assert models.first.life.failures == 0 and sorted(world.alive()) == ["a", "b"]


async def test_a_request_that_comes_while_a_model_sleeps_deeper_finds_it_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    models = catalogue(world, spec("a"))
    await models.start()
    await models.load(models.first)
    for deeper in (
        lambda: models.sleepers.sleep(models.first, 2),
        lambda: models.sleepers.wake(models.first, ["weights"]),
    ):
        await models.sleepers.sleep(models.first, 1)
        slow = asyncio.Event()
        monkeypatch.setattr(Unit, "sleep", lambda unit, level, slow=slow: slow.wait())
        monkeypatch.setattr(world.units[-1], "wake", lambda tags, slow=slow: _after(slow, tags), raising=False)
        task = asyncio.ensure_future(deeper())
        await asyncio.sleep(0)
        monkeypatch.undo()
        await models.enter(models.first)
        assert models.first.state is State.READY
        slow.set()
        await task
        rest = models.first.rest
        assert (rest.level, rest.asleep, rest.by_hand) == (0, (), False)
        models.leave(models.first)


async def _after(event: asyncio.Event, tags: Sequence[str]) -> list[str]:
    await event.wait()
    return ["kv_cache"]


@pytest.mark.parametrize("asleep", [False, True])
async def test_who_waits_for_an_engine_that_is_killed_gets_the_next_one(asleep: bool) -> None:
    world = World()
    models = catalogue(world, spec("a"), spec("b"))
    await models.start()
    if asleep:
        await models.load(models.first)
        await models.sleepers.sleep(models.first, 1)
    world.kills = TRIES - 1
    waiting = [asyncio.create_task(models.enter(models.first)) for _ in range(3)]
    found = {id(unit) for unit in await asyncio.gather(*waiting)}
    assert found == {id(world.units[-1])} and not world.units[-1].closed and world.alive().count("a") == 1
    assert models.first.state is State.READY and models.first.reserved and not models.first.rest.asleep
    for _ in waiting:
        models.leave(models.first)
    await models.unload(models.first)
    world.kills = TRIES
    with pytest.raises(UnreadyError, match="killed by signal 9"):
        await models.load(models.first)
    assert models.first.state is State.FAILED and not models.first.reserved and not world.kills
    await models.close()


async def test_nobody_waits_for_an_engine_that_is_killed() -> None:
    world = World(kills=1)
    models = catalogue(world, spec("a"), held_up=True)
    models.started = True
    waiting = asyncio.create_task(models.load(models.first))
    await until(lambda: world.loads == ["a"])
    waiting.cancel()
    await asyncio.sleep(0)
    world.gate.set()
    await until(lambda: models.first.state is State.FAILED)
    assert world.loads == ["a"]


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (UserError("/home/me/models/a.gguf: not a usable GGUF file."), "a.gguf: not a usable GGUF file."),
        (UserError("There is no '/home/me/models/a' here."), "There is no 'a' here."),
        (UserError("the file ~/models/x/config.json is no JSON"), "the file config.json is no JSON"),
        (FileNotFoundError(2, "No such file or directory", "/srv/a b/c.bin"), "[Errno 2] No such file"),
        (UserError("owner/name:Q4 is not on the hub, 3/4 of it is (see https://example.org/a/b)."), None),
    ],
)
async def test_where_files_lie_is_not_shown(error: Exception, shown: str | None) -> None:
    models = catalogue(World(errors={"a": error}), spec("a"))
    with pytest.raises(UnreadyError) as found:
        await models.load(models.first)
    assert f"could not be loaded: {shown or error}" in str(found.value)
    assert not any(part in str(found.value) for part in ("/home", "/srv", "~", "models/"))


@pytest.mark.parametrize("kind", [KeyError, EngineFaultError])
async def test_an_inner_error_is_not_shown(kind: type[Exception]) -> None:
    models = catalogue(World(errors={"a": kind("/secret/path")}), spec("a"))
    with pytest.raises(UnreadyError, match="internal error") as found:
        await models.load(models.first)
    assert "secret" not in str(found.value)


async def test_it_goes_after_its_time_and_a_request_may_change_that() -> None:
    world = World()
    models = catalogue(world, spec("a", ttl=1000.0), spec("b", pin=True))
    a, b = models.entries.values()
    await models.load(a)
    assert 990 < (a.expires_in or 0) <= 1000
    await models.enter(a)
    models.keep(a, 0.0)
    await models.enter(a)
    models.keep(a, -1.0)
    models.leave(a)
    models.leave(a)
    await models.load(a)
    assert a.expires_in is None and a.life.expiry is None
    models.keep(a, 0.0)
    await until(lambda: a.state is State.UNLOADED)
    await models.load(a)
    assert a.life.loads == 2 and a.expires_in is not None
    models.keep(b, 0.0)
    assert b.expires_in is None and b.life.expiry is None


async def test_unloading_waits_for_open_requests() -> None:
    world = World()
    models = catalogue(world, spec("a"))
    await models.enter(models.first)
    going = asyncio.ensure_future(models.unload(models.first))
    await until(lambda: models.first.state is State.DRAINING)
    assert world.alive() == ["a"]
    models.leave(models.first)
    await going
    assert not world.alive() and models.first.state is State.UNLOADED


async def test_models_come_and_go_while_it_runs() -> None:
    world = World()
    models = catalogue(world, spec("a"), spec("b"), memory=10, patience_s=0)
    b = models.entries["b"]
    await models.enter(b)
    going = asyncio.ensure_future(models.remove("b"))
    await until(lambda: b.state is State.DRAINING)
    assert models.find("b") is None
    with pytest.raises(GoneError):
        await models.enter(b)
    again = models.add(spec("b"))
    with pytest.raises(UnreadyError):  # the old one's memory is still taken
        await models.load(again)
    models.leave(b)
    await going
    await models.load(again)
    assert world.alive() == ["b"]
    with pytest.raises(GoneError):
        await models.remove("nothing")


async def test_the_end_ends_removed_models_too() -> None:
    world = World()
    models = catalogue(world, spec("a"), spec("b"))
    b = models.entries["b"]
    await models.enter(b)
    going = asyncio.ensure_future(models.remove("b"))
    await until(lambda: b.state is State.DRAINING)
    await models.close()
    assert not world.alive()
    await asyncio.gather(going, return_exceptions=True)


async def test_waiting_requests_of_a_removed_model_are_told() -> None:
    world = World()
    models = catalogue(world, spec("a"), spec("b"), held_up=True)
    waiting = asyncio.ensure_future(models.enter(models.entries["b"]))
    await until(lambda: world.loads)
    going = asyncio.ensure_future(models.remove("b"))
    await asyncio.sleep(0)
    world.gate.set()
    with pytest.raises(GoneError):
        await waiting
    await going
    assert not world.alive()


async def test_a_broken_one_is_tried_again_and_touches_no_other() -> None:
    world = World()
    models = catalogue(world, spec("a"), spec("b"))
    for entry in models.entries.values():
        await models.load(entry)
    models.broken(models.first, "engines died 6 times")
    await until(lambda: world.alive() == ["b"])
    with pytest.raises(UnreadyError, match="engines died"):
        await models.load(models.first)
    models.first.life.retry_at = 0.0
    await models.load(models.first)
    assert world.alive() == ["b", "a"]


async def test_two_hundred_requests_of_eight_clients_with_room_for_two_of_three() -> None:
    world = World()
    models = catalogue(world, *(spec(name) for name in "abc"), memory=20)
    served: list[str] = []

    async def client(number: int) -> None:
        for turn in range(25):
            entry = models.entries["abc"[(number + turn) % 3]]
            unit = await models.enter(entry)
            assert unit.name == entry.name and not unit.closed
            await asyncio.sleep(0)
            assert not unit.closed and sum(each.size for each in models.entries.values() if each.reserved) <= 20
            served.append(unit.name)
            models.leave(entry)

    await asyncio.gather(*(client(number) for number in range(8)))
    assert len(served) == 200 and len(world.alive()) <= 2 < len(world.loads)


async def test_sizes_are_asked_for_once_and_shares_of_the_cache_are_set() -> None:
    asked: list[Any] = []

    async def ask(what: Any) -> tuple[int, list[Need]]:
        asked.append([config.model.model for config in what[0]])
        return 100, [Need(30, 8, 2, fixed=config.cache.kv_cache_memory_bytes is not None) for config in what[0]]

    world, specs = World(held={"demo": 21}), [spec("demo", memory=None), spec("/nowhere/x", memory=None)]
    survey = Survey(lambda: [entry.spec for entry in models.entries.values()], None, ask)
    models = Catalogue(world.make, predict=survey.size_of)
    survey.found_memory = models.limit
    world.gate.set()
    for each in specs:
        models.add(each)
    for entry in models.entries.values():
        await models.load(entry)
    demo, other = models.entries.values()
    assert asked == [["demo"], ["/nowhere/x"]]  # what is not here is asked for when it is needed
    assert models.memory_of("auto") == 100 and demo.size == 21 + 2 and other.size == 30
    assert demo.spec.engine.cache.kv_cache_memory_bytes == 8


async def test_models_that_cannot_be_counted_are_loaded_all_the_same() -> None:
    async def ask(what: Any) -> tuple[int, list[Need]]:
        raise OSError("no more processes")

    world, specs = World(), [spec("a", memory=None)]
    models = Catalogue(world.make, predict=Survey(lambda: specs, None, ask).size_of)
    world.gate.set()
    await models.load(models.add(specs[0]))
    assert world.alive() == ["a"] and models.memory_of("auto") is None


async def test_names_of_one_device_share_its_memory() -> None:
    """`auto` and `cpu` in one file: the memory is counted once, and one model makes room for the other."""
    asked: list[Any] = []

    async def ask(what: Any) -> tuple[int, list[Need]]:
        return 100, [Need(60, 0, 0, fixed=True) for _ in what[0]]

    async def ask_places(names: Any) -> dict[str, str]:
        asked.append(list(names))
        return {"auto": "cpu", "cpu": "cpu"}

    def on(name: str, device: str) -> Spec:
        made = spec(name, memory=None)
        return replace(made, engine=replace(made.engine, execute=replace(made.engine.execute, device=device)))

    world, specs = World(), [on("a", "auto"), on("b", "cpu"), on("c", "nowhere")]
    survey = Survey(lambda: [entry.spec for entry in models.entries.values()], None, ask, ask_places)
    models = Catalogue(world.make, predict=survey.size_of)
    survey.found_memory, models.place_of = models.limit, survey.place_of
    world.gate.set()
    entries = [models.add(each) for each in specs]
    for entry in entries[:2]:
        await models.load(entry)
    assert world.alive() == ["b"] and asked == [["auto", "cpu", "nowhere"]]
    await models.load(entries[2])
    assert sorted(world.alive()) == ["b", "c"] and len(asked) == 1
    assert models.memory_of(models.place_of(entries[0])) == 100
