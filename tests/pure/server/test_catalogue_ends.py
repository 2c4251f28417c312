"""Models that go, or whose engines are lost, while something else is done with them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tests.pure.server.catalogue_stories import tell_story
from tests.pure.server.conftest import until
from tests.pure.server.server_catalogue_helpers import Unit, World, catalogue, spec
from tokenmill.core.config import make_config, make_server_config
from tokenmill.core.errors import EngineLostError
from tokenmill.core.sleeping import TAGS
from tokenmill.measure.memory_need import Need
from tokenmill.server.many_models import catalogue as catalogue_module
from tokenmill.server.many_models.catalogue import Catalogue
from tokenmill.server.many_models.entry import Entry, GoneError, Spec, State, UnreadyError
from tokenmill.server.many_models.survey import Survey
from tokenmill.server.run import ModelLoader


@pytest.mark.parametrize("part", range(4))
def test_random_stories(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(part * 80, part * 80 + 80):
        tell_story(seed, monkeypatch)


@pytest.mark.parametrize("what", ["unload", "remove"])
async def test_one_that_shall_go_does_not_stay_for_another_that_gives_up(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue_module, "LEAST_STAY_S", 0.0)
    world = World()
    models = catalogue(world, spec("a"), spec("b"), memory=10, patience_s=0.05)
    a, b = models.entries["a"], models.entries["b"]
    await models.enter(a)
    loading = asyncio.ensure_future(models.load(b))
    await until(lambda: a.state is State.DRAINING)  # it makes room
    going = asyncio.ensure_future(getattr(models, what)(a if what == "unload" else "a"))
    with pytest.raises(UnreadyError, match="no room"):
        await loading
    assert a.stay and not going.done()
    models.leave(a)
    await going
    assert a.state is State.UNLOADED and not world.alive()


async def test_one_that_is_removed_while_a_load_is_asked_for_goes_too() -> None:
    world = World()
    models = catalogue(world, spec("a"), spec("b"))
    b = models.entries["b"]
    asked = asyncio.ensure_future(models.enter(b))
    going = asyncio.ensure_future(models.remove("b"))
    with pytest.raises(GoneError):
        await asked
    await going
    assert world.loads == ["b"] and not world.alive()


async def test_a_model_that_is_gone_takes_no_share_and_another_of_its_name_is_counted_anew() -> None:
    asked: list[tuple[list[int | None], int]] = []

    async def ask(what: Any) -> tuple[int, list[Need]]:
        asked.append(([config.model.max_model_len for config in what[0]], what[2]))
        return 100, [Need(config.model.max_model_len, 8) for config in what[0]]

    def long(name: str, length: int) -> Spec:
        return Spec(make_config({}, model="/nowhere/x", served_model_name=name, max_model_len=length))

    world = World()
    survey = Survey(lambda: [entry.spec for entry in models.entries.values()], 1000, ask)
    models = Catalogue(world.make, predict=survey.size_of)
    world.gate.set()
    models.add(long("other", 10))
    await models.load(models.add(long("a", 20)))
    await models.remove("a")
    again = models.add(long("a", 30))
    await models.load(again)
    await models.load(models.entries["other"])
    assert again.size == 30 and asked == [([20], 2), ([30], 2), ([10], 2)]
    await models.remove("a")
    await models.load(models.add(long("b", 40)))
    assert asked[3:] == [([40], 2)]


def test_engines_of_a_removed_model_end_no_server() -> None:
    loader = ModelLoader(make_server_config({}), Exception, {})
    told: list[str] = []
    loader.broken = told.append
    models: Catalogue[Any] = loader.catalogue([spec("a"), spec("b")])
    b = models.entries.pop("b")
    loader._broken(b, "its engines died too often")
    assert b.lost is not None and not told
    loader._broken(models.first, "its engines died too often")
    assert told == ["its engines died too often"]


async def test_a_model_of_which_a_part_is_awake_takes_its_memory_and_can_be_laid_down_again() -> None:
    world = World()
    sleeper = Spec(make_config({}, model="a", enable_sleep_mode=True), memory=10)
    models = catalogue(world, sleeper, spec("b"), memory=10, patience_s=0.0)
    a, b = models.entries["a"], models.entries["b"]
    await models.load(a)
    unit, slept = a.unit, []
    assert unit is not None

    async def sleep(level: int) -> None:
        slept.append(level)

    async def wake(tags: Sequence[str]) -> list[str]:
        return [tag for tag in TAGS if tag not in tags]

    unit.sleep, unit.wake = sleep, wake  # type: ignore[method-assign]
    await models.sleepers.sleep(a, 1)
    await models.enter(b)
    with pytest.raises(UnreadyError, match="no room"):
        await models.sleepers.wake(a, TAGS[:1])
    assert a.rest.asleep == TAGS and not a.reserved
    models.leave(b)
    await models.sleepers.wake(a, TAGS[:1])  # `b` makes room
    assert a.state is State.SLEEPING and a.rest.asleep == TAGS[1:] and a.reserved and b.unit is None
    await models.sleepers.sleep(a, 1)
    assert slept == [1, 1] and a.rest.asleep == TAGS and not a.reserved
    await models.sleepers.sleep(a, 1)
    assert slept == [1, 1]


async def reach(models: Catalogue[Unit], entry: Entry[Unit], world: World, what: str) -> asyncio.Future[None]:
    """Let the entry load, wake, fall asleep or make room; its engines are lost for good meanwhile."""

    def lost() -> None:
        models.broken(entry, "its engines died too often")

    if what == "load":
        doing = asyncio.ensure_future(models.load(entry))
        await until(lambda: world.loads)
        lost()
        world.gate.set()
        return doing
    world.gate.set()
    await models.load(entry)
    unit = entry.unit
    assert unit is not None
    if what == "make room":
        await models.enter(entry)
        doing = asyncio.ensure_future(models.load(models.entries["b"]))
        await until(lambda: entry.state is State.DRAINING)
        lost()
        with pytest.raises(UnreadyError):
            await doing
        await until(lambda: entry.state is not State.DRAINING)
        models.leave(entry)
        return doing

    async def dies(level: int) -> None:
        lost()
        raise EngineLostError("it died")

    if what == "sleep":
        unit.sleep = dies  # type: ignore[method-assign]
        return asyncio.ensure_future(models.sleepers.sleep(entry, 1))
    await models.sleepers.sleep(entry, 1)
    unit.kill = lost
    return asyncio.ensure_future(models.load(entry))


@pytest.mark.parametrize("what", ["load", "make room", "sleep", "wake"])
async def test_one_whose_engines_are_lost_meanwhile_is_loaded_again(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue_module, "LEAST_STAY_S", 0.0)
    world = World()
    a = Spec(make_config({}, model="a", enable_sleep_mode=True), memory=10)
    models = catalogue(world, a, spec("b"), held_up=True, memory=10, patience_s=0.05)
    models.started = True
    entry = models.entries["a"]
    doing = await reach(models, entry, world, what)
    await asyncio.wait((doing,))
    assert entry.state is State.FAILED
    await until(lambda: not world.alive())
    entry.life.retry_at = 0.0
    for unit in world.units:
        unit.kill = lambda: None
    unit = await models.enter(entry)
    assert not unit.closed and world.loads.count("a") == 2
    models.leave(entry)
