"""Models that sleep, over fake engines: who sleeps for others, who wakes whom, and that nobody's request is lost."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.pure.server.conftest import until
from tests.pure.server.server_many_helpers import SAYS, City, build  # noqa: F401
from tokenmill.server.many_models.entry import State
from tokenmill.testing.hostile import VALID

ABLE = {"enable_sleep_mode": True}
HELD = {"prompt": "x", "max_tokens": 500}


async def ask(city: City, name: str, **more: Any) -> str:
    answer = await city.post("/v1/completions", {"model": name, "prompt": "x", "max_tokens": 40, **more})
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def states(city: City) -> dict[str, str]:
    return {name: city.entry(name).state.value for name in SAYS}


async def post(city: City, path: str) -> tuple[int, str]:
    answer = await city.client.post(path)
    return answer.status_code, answer.text


async def test_the_least_recently_used_sleeps_and_wakes_by_itself(build: Any) -> None:  # noqa: F811
    city = build(engine=ABLE)
    for _ in range(3):
        for name, said in SAYS.items():
            assert await ask(city, name) == said
    assert sorted(states(city).values()) == ["ready", "ready", "sleeping"]
    assert [len(links) for links in city.links.values()] == [1, 1, 1], "each was loaded once"
    entries = [city.entry(name) for name in SAYS]
    assert all(e.life.loads == 1 for e in entries) and sum(e.rest.wakes for e in entries) == 6
    told = {each["id"]: each for each in (await city.get("/v1/models"))["data"]}
    asleep = next(name for name, state in states(city).items() if state == "sleeping")
    assert told[asleep]["status"] == {"value": "sleeping"} and told[asleep]["tokenmill"]["kept"] == 7
    assert asleep not in [each["name"] for each in (await city.get("/api/ps"))["models"]]
    assert f'tokenmill:model_state{{model="{asleep}",state="sleeping"}} 1.0' in (await city.client.get("/metrics")).text


async def test_sleepers_are_unloaded_where_the_hosts_memory_ends(build: Any) -> None:  # noqa: F811
    city = build(engine=ABLE, memory=10, sleep_memory=7)
    for name in (*SAYS, *SAYS):
        await ask(city, name)
    assert list(states(city).values()).count("sleeping") == 1
    assert [len(links) for links in city.links.values()] == [2, 2, 2]


async def test_one_that_cannot_sleep_is_unloaded_and_one_that_cannot_wake_is_told(build: Any) -> None:  # noqa: F811
    city = build(engine=ABLE, memory=10)
    await ask(city, "red")
    city.options["red"].restless = "the disk is full."
    assert await ask(city, "green") == SAYS["green"] and states(city)["red"] == "unloaded"
    await ask(city, "blue")
    city.options["green"].restless = "something took the memory."
    answer = await city.post("/v1/completions", {"model": "green", **HELD})
    assert answer.status_code == 503 and "something took" in answer.text and "retry-after" in answer.headers
    assert states(city)["green"] == "sleeping"
    city.options["green"].restless = ""
    assert await ask(city, "green") == SAYS["green"] and len(city.links["green"]) == 1


async def falling_asleep(make: Any) -> tuple[Any, asyncio.Future[str], asyncio.Future[Any]]:
    """A city whose pinned model is told to sleep and waits for its open request; both answers are to come."""
    city = make(engine=ABLE, models_control=True, pin="red")
    await city.shared.models.start()
    held = asyncio.ensure_future(ask(city, "red"))
    city.options["red"].hung = True
    await until(lambda: city.links["red"][0].commands)
    going = asyncio.ensure_future(post(city, "/sleep?model=red"))
    await until(lambda: city.entry("red").state is State.DRAINING)
    return city, held, going


async def test_by_hand(build: Any) -> None:  # noqa: F811
    city, held, going = await falling_asleep(build)
    waiting = asyncio.ensure_future(city.post("/v1/completions", {"model": "red", **HELD}))
    await until(lambda: city.entry("red").life.waiting)
    city.options["red"].hung = False
    assert await going == (200, "") and await held == SAYS["red"], "what was open has ended first"
    refused = await waiting
    assert refused.status_code == 503 and "POST /wake_up" in refused.text and refused.headers["retry-after"]
    assert await city.get("/is_sleeping?model=red") == {"is_sleeping": True}
    assert (await city.client.get("/health")).status_code == 200
    assert await post(city, "/wake_up?model=red&tags=weights") == (200, "")
    assert city.entry("red").rest.asleep == ("kv_cache",) and states(city)["red"] == "sleeping"
    assert await post(city, "/sleep?model=red&level=2") == (200, "")
    assert city.entry("red").rest.asleep == ("weights", "kv_cache") and city.entry("red").rest.level == 2
    assert await post(city, "/wake_up?model=red&tags=weights&tags=kv_cache") == (200, "")
    assert await ask(city, "red") == SAYS["red"] and len(city.links["red"]) == 1
    assert await post(city, "/wake_up?model=red") == (200, ""), "it is awake"
    # one that is not pinned wakes by itself
    await ask(city, "blue")
    assert await post(city, "/sleep?model=blue") == (200, "")
    assert await ask(city, "blue") == SAYS["blue"]


async def test_mode_abort_ends_what_runs(build: Any) -> None:  # noqa: F811
    city = build(engine=ABLE, models_control=True)
    await ask(city, "red")
    city.options["red"].step_s = 0.001
    SAID = asyncio.ensure_future(city.post("/v1/completions", {"model": "red", **HELD}))
    city.options["red"].hung = True
    await until(lambda: city.entry("red").unit is not None and city.entry("red").unit.open_requests())
    going = asyncio.ensure_future(post(city, "/sleep?model=red&mode=abort"))
    await until(lambda: not city.entry("red").unit.open_requests())
    city.options["red"].hung = False
    assert await going == (200, "")
    assert (await SAID).json()["choices"][0]["finish_reason"] == "abort"


OPENAI = ("/v1/chat/completions", "/v1/completions")
STREAMED = ("/v1/responses", "/v1/messages", "/api/chat", "/api/generate", "/completion", "/")
PIECES = ("/generate_stream", "/v2/models/{model}/generate_stream")
WHOLE = (
    *STREAMED,
    "/generate",
    "/v2/models/{model}/generate",
    "/v2/models/{model}/infer",
    "/v1/embeddings",
    "/pooling",
)
WHOLE += ("/embed", "/api/embed", "/api/embeddings", "/embedding", "/rerank", "/score", "/classify", "/similarity")


async def test_a_part_never_passes_for_the_whole(build: Any) -> None:  # noqa: F811
    """Vectors that had not come were an internal error; other APIs called a cut answer complete."""
    city = build(engine=ABLE, models_control=True)
    await ask(city, "red")
    asked: dict[tuple[str, str], asyncio.Task[Any]] = {}

    def send(kind: str, path: str, **more: Any) -> None:
        named = {} if path.startswith("/v2") else {"model": "red"}  # KServe names it in the path
        body = {**VALID[path][0], **named, **more}
        asked[kind, path] = asyncio.ensure_future(city.post(path.replace("{model}", "red"), body))

    city.options["red"].hung = True
    for path in OPENAI:
        send("said", path)
        send("said in events", path, stream=True)
    for path in WHOLE:
        send("whole", path, **({"stream": False} if path.startswith("/api") else {}))
    for path in (*STREAMED, *PIECES):
        send("events", path, **({"stream": True} if path in STREAMED else {}))
    send("whole", "/v1/completions", echo=True, logprobs=1)  # the prompt's scores had not come
    unit = city.entry("red").unit
    pairs = 4  # rerank, score, classify and similarity read two texts each
    await until(lambda: unit is not None and unit.open_requests() == len(asked) + pairs)
    going = asyncio.ensure_future(post(city, "/sleep?model=red&mode=abort"))
    await until(lambda: unit is not None and not unit.open_requests())
    city.options["red"].hung = False
    assert await going == (200, "")
    for (kind, path), task in asked.items():
        answer = await task
        if kind == "said":
            assert answer.json()["choices"][0]["finish_reason"] == "abort"
        elif kind == "said in events":
            assert '"finish_reason":"abort"' in answer.text
        elif kind == "whole":
            assert answer.status_code == 503 and "put to sleep" in answer.text, (path, answer.text)
            assert answer.headers["retry-after"] == "1"
        else:
            assert "put to sleep" in answer.text and "error" in answer.text, (path, answer.text)


async def test_what_is_refused(build: Any) -> None:  # noqa: F811
    city = build(models_control=True)
    assert (await post(city, "/sleep?model=red"))[0] == 404
    city = build(engine=ABLE)
    status, said = await post(city, "/sleep?model=red")
    assert status == 404 and "--models-control" in said
    city = build(engine=ABLE, models_control=True)
    for path, words in (
        ("/sleep?model=red", "not loaded"), ("/sleep?model=red&level=3", "level must be 1"),
        ("/sleep?model=red&level=x", "level must be"), ("/sleep?model=red&mode=keep", "not frozen"),
        ("/wake_up?model=red&tags=all", "tags must be among"),
    ):  # fmt: skip
        status, said = await post(city, path)
        assert status == 400 and words in said
    assert (await post(city, "/sleep?model=pink"))[0] == 404
    await ask(city, "red")
    city.options["red"].restless = "the disk is full."
    status, said = await post(city, "/sleep?model=red")
    assert status == 503 and "the disk is full" in said and states(city)["red"] == "ready"
    city.options["red"].restless = ""
    assert await ask(city, "red") == SAYS["red"]


async def test_a_sleeping_engine_that_dies_is_loaded_when_it_is_woken(build: Any) -> None:  # noqa: F811
    city = build(engine=ABLE, models_control=True, pin="red")
    await city.shared.models.start()
    assert await post(city, "/sleep?model=red") == (200, "")
    city.links["red"][-1].die()
    fleet: Any = city.entry("red").unit.fleet
    await until(lambda: not fleet.engines[0].ready)
    await asyncio.sleep(0)
    assert len(city.links["red"]) == 1 and states(city)["red"] == "sleeping", "its memory is somebody else's"
    assert (await city.client.get("/health")).status_code == 200
    assert await post(city, "/wake_up?model=red") == (200, "")
    assert await ask(city, "red") == SAYS["red"] and len(city.links["red"]) == 2
    # one that dies awake is started again at once
    city.links["red"][-1].die()
    assert await ask(city, "red") == SAYS["red"] and len(city.links["red"]) == 3


async def test_an_engine_that_dies_before_it_sleeps_is_no_reason_to_refuse(build: Any) -> None:  # noqa: F811
    """It has given its memory back, which is what the caller wants."""
    city, held, going = await falling_asleep(build)
    city.links["red"][0].die()
    await until(lambda: len(city.links["red"]) == 2)
    city.options["red"].hung = False
    assert await held == SAYS["red"] and await going == (200, "")
    assert await post(city, "/wake_up?model=red") == (200, "")
    city.options["red"].hung = True
    going = asyncio.ensure_future(post(city, "/sleep?model=red"))  # the engine is told and does not answer
    await until(lambda: city.links["red"][1].commands)
    city.links["red"][1].die()
    assert await going == (200, "") and states(city)["red"] == "sleeping" and len(city.links["red"]) == 2
    city.options["red"].hung = False
    assert await post(city, "/wake_up?model=red") == (200, "") and await ask(city, "red") == SAYS["red"]
    city.links["red"][2].die()
    await until(lambda: len(city.links["red"]) == 4)  # it loads: sleep does not wait for it
    fleet: Any = city.entry("red").unit.fleet
    fleet.engines[0].ready = False
    assert await post(city, "/sleep?model=red") == (200, "") and fleet.engines[0].link is None
    assert await post(city, "/wake_up?model=red") == (200, "") and await ask(city, "red") == SAYS["red"]


async def test_an_unused_sleeper_goes_after_its_time_and_unloading_ends_a_sleep(build: Any) -> None:  # noqa: F811
    city = build(engine=ABLE, memory=10, ttl=0.05, models_control=True)
    await ask(city, "red")
    await ask(city, "green")
    await until(lambda: states(city)["red"] == "unloaded")
    city.entry("green").life.keep = -1.0
    await ask(city, "green")
    assert await post(city, "/sleep?model=green") == (200, "")
    assert (await city.post("/models/unload", {"model": "green"})).status_code == 200
    assert states(city)["green"] == "unloaded" and city.entry("green").rest.kept == 0
    assert await ask(city, "green") == SAYS["green"]
