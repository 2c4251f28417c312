"""Models that go, or whose engines are lost, while something else is done with them."""

from __future__ import annotations

import asyncio

import pytest

from tests.pure.server.catalogue_stories import tell_story
from tests.pure.server.conftest import until
from tests.pure.server.server_catalogue_helpers import Unit, World, catalogue, spec
from tokenmill.core.config import make_config
from tokenmill.core.errors import EngineLostError
from tokenmill.server.many_models import catalogue as catalogue_module
from tokenmill.server.many_models.catalogue import Catalogue
from tokenmill.server.many_models.entry import Entry, GoneError, Spec, State, UnreadyError


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
