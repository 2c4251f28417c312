"""Adapters on their way to engines that die, and how many there may be. No engines."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.pure.server.conftest import until
from tests.pure.server.server_many_helpers import build  # noqa: F401
from tokenmill.core.config import AdapterOptions, make_config
from tokenmill.core.errors import BusyError, EngineDeadError, NotHereError, ParameterError, TooLargeError
from tokenmill.core.request import Request, SamplingParams
from tokenmill.engine.running.wire import Refused, Report, encode_news, read_news
from tokenmill.server import adapters
from tokenmill.server.adapters import AdapterBook
from tokenmill.server.engines import adapters as traffic
from tokenmill.server.engines.adapters import AdapterTraffic
from tokenmill.server.errors import describe_error
from tokenmill.server.lora import routes
from tokenmill.server.many_models.entry import Spec


@dataclass
class Engine:
    number: int
    ready: bool = True
    told: list[Any] = field(default_factory=list)

    @property
    def link(self) -> Engine:
        return self

    def send(self, command: Any) -> None:
        self.told.append((command.number, command.path))


@dataclass
class Crew:
    engines: list[Engine]
    open_requests: dict[str, Any] = field(default_factory=dict)
    broken: str | None = None
    names: int = 0

    def tell_names(self) -> None:
        self.names += 1


def make(count: int = 2) -> tuple[Crew, AdapterTraffic]:
    crew = Crew([Engine(number) for number in range(count)])
    return crew, AdapterTraffic(crew, AdapterBook(AdapterOptions(enable_lora=True)))  # type: ignore[arg-type]


async def test_an_engine_that_dies_while_it_reads_is_asked_once_more() -> None:
    crew, way = make()
    loading = asyncio.create_task(way.load("a", Path("/a")))
    await until(lambda: crew.engines[1].told == [(1, "/a")])
    way.heard(crew.engines[0], {1: ""})  # type: ignore[arg-type]
    way.introduce(crew.engines[1])  # type: ignore[arg-type]
    assert crew.engines[1].told == [(1, "/a")] * 2 and not loading.done() and "a" not in way.book.by_name
    way.heard(crew.engines[1], {1: ""})  # type: ignore[arg-type]
    assert (await loading).number == 1 and way.book.by_name["a"].number == 1 and crew.names == 1
    # A file that kills whoever reads it does so twice, and what it was to replace goes on.
    loading = asyncio.create_task(way.load("a", Path("/b"), instead=True))
    await until(lambda: crew.engines[1].told[-1] == (2, "/b"))
    for _ in range(traffic.MOST_DEATHS):
        way.introduce(crew.engines[1])  # type: ignore[arg-type]
    with pytest.raises(EngineDeadError, match="died while they read"):
        await loading
    assert way.book.by_name["a"].number == 1 and (2, "/b") not in [(c.number, c.path) for c in way.book.commands()]


async def test_nobody_waits_for_engines_that_never_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "LOOK_S", 0.001)
    crew, way = make()
    loading = asyncio.create_task(way.load("a", Path("/a")))
    await until(lambda: bool(crew.engines[1].told))
    crew.broken = "engines died 5 times"
    with pytest.raises(EngineDeadError, match="5 times"):
        await loading
    assert not way.book.by_name and not way.book.coming and not way.waiting


async def test_names_change_while_a_prompt_is_read() -> None:
    crew, way = make(1)
    for number, instead in enumerate((False, True, True), 1):
        loading = asyncio.create_task(way.load("a", Path("/a"), instead=instead))
        await until(lambda: bool(way.waiting))
        way.heard(crew.engines[0], {number: ""})  # type: ignore[arg-type]
        await loading
    chosen = Request(id="x", prompt_ids=[1], params=SamplingParams(), adapter=1)
    assert way.current(chosen).adapter == 3
    way.unload("a")
    with pytest.raises(NotHereError, match="unloaded") as found:
        way.current(chosen)
    assert found.value.param == "model"
    assert way.current(msgspec.structs.replace(chosen, adapter=0)).adapter == 0


async def test_adapters_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "MOST", 2)
    crew, way = make(1)
    for name in ("a", "b"):
        loading = asyncio.create_task(way.load(name, Path("/a")))
        await until(lambda: bool(way.waiting))
        way.heard(crew.engines[0], {way.book.count: ""})  # type: ignore[arg-type]
        await loading
    with pytest.raises(TooLargeError, match="unload some"):
        await way.load("c", Path("/a"))
    way.unload("a")
    assert way.book.add("c", Path("/a")).number == 3


async def test_a_name_is_taken_while_its_adapter_is_read(build: Any, tmp_path: Path) -> None:  # noqa: F811
    """Neither another model's adapter nor a new model gets it meanwhile."""
    (tmp_path / "own").mkdir()
    city = build(memory=None, engine={"enable_lora": True}, lora_folder=str(tmp_path))
    models, path = city.shared.models, "/v1/load_lora_adapter"
    for name in ("red", "green"):
        await city.post("/v1/completions", {"model": name, "prompt": "x"})
    bodies = [{"lora_name": "new", "lora_path": "own", "model": name} for name in ("red", "green")]
    answers = await asyncio.gather(*(city.post(path, body) for body in bodies))
    assert sorted(answer.status_code for answer in answers) == [200, 400]
    assert sum("new" in each.book.by_name for each in models.entries.values()) == 1
    loading = asyncio.create_task(city.post(path, {"lora_name": "third", "lora_path": "own", "model": "red"}))
    async with asyncio.timeout(30):
        while "third" not in models.coming:
            await asyncio.sleep(0)
    with pytest.raises(ParameterError, match="'third'"):
        models.add(Spec(make_config({}, model="blue", served_model_name="third"), city.shared.config))
    assert (await loading).status_code == 200
    failed = await city.post(path, {"lora_name": "none", "lora_path": "absent", "model": "red"})
    assert failed.status_code == 404 and not models.coming.books


def test_what_is_gone_is_a_404_on_either_side_of_the_socket() -> None:
    for error, status in ((NotHereError("a", param="model"), 404), (BusyError("b"), 503), (ParameterError("c"), 400)):
        over = read_news(encode_news(Report(refused=[Refused.by("x", error)]))).refused[0].error()  # type: ignore[union-attr]
        for each in (error, over):
            found = describe_error(each)
            assert (found.status, found.message, found.param) == (status, str(error), error.param)


@pytest.mark.parametrize("root", ["loras", "./loras", ".", "..", "/", "{home}/loras"])
def test_errors_show_nothing_of_this_machine(root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a folder that was given relative to another one, every second server showed where it runs."""
    (tmp_path / "loras" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    given = root.replace("{home}", str(tmp_path))
    home = Path(given).resolve()
    said = routes._without(given, f"{(tmp_path / 'loras' / 'mine').resolve()}: has no adapter_config.json")
    assert said == f"{(tmp_path / 'loras' / 'mine').resolve().relative_to(home)}: has no adapter_config.json"
