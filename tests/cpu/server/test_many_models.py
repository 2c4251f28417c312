"""Many real models behind one address: right answers while they come and go, and sizes that are known before a load."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cpu.server.conftest import Running, _descendants
from tokenmill.core.config import make_config, make_server_config
from tokenmill.measure.devices import CONTEXT_BYTES
from tokenmill.measure.memory_needs import find_needs, find_places
from tokenmill.server.app import make_app, make_front
from tokenmill.server.engines.child import build_default
from tokenmill.server.many_models.entry import Spec
from tokenmill.server.many_models.survey import Survey
from tokenmill.server.run import ModelLoader
from tokenmill.testing.tiny import make_tiny

NAMES = ("one", "two", "three")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three models that say different things."""
    root = tmp_path_factory.mktemp("many")
    return {name: make_tiny(root / name, seed=number) for number, name in enumerate(NAMES, 1)}


@pytest.fixture
async def city(folders: dict[str, Path]) -> AsyncIterator[tuple[ModelLoader, httpx.AsyncClient]]:
    """Engines in threads of this process, and memory for two of the three."""
    server = make_server_config({}, engines=0, models_memory=20, models_patience=120.0)
    options = {"kv_cache_memory_bytes": 4 << 20, "max_num_seqs": 8, "max_model_len": 128, "device": "cpu", "threads": 1}
    specs = [Spec(make_config({}, model=str(path), served_model_name=name, **options), server, memory=10)
             for name, path in folders.items()]  # fmt: skip
    loader = ModelLoader(server, build_default, {})
    models = loader.catalogue(specs)
    transport = httpx.ASGITransport(app=make_app(make_front(await loader.server_context())), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=300) as client:
        yield loader, client
    await models.close()


async def say(client: httpx.AsyncClient, name: str, prompt: list[int]) -> list[int]:
    body = {"model": name, "prompt": prompt, "max_tokens": 6, "temperature": 0, "return_token_ids": True}
    answer = await client.post("/v1/completions", json={**body, "ignore_eos": True})
    assert answer.status_code == 200 and answer.json()["model"] == name, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


async def test_two_hundred_requests_over_three_models_with_memory_for_two(
    city: tuple[ModelLoader, httpx.AsyncClient],
) -> None:
    loader, client = city
    assert loader.models is not None
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    right = {(name, i): await say(client, name, prompt) for name in NAMES for i, prompt in enumerate(prompts)}
    assert len({str(tokens) for tokens in right.values()}) == 6

    async def ask(number: int) -> None:
        for turn in range(25):
            name, i = NAMES[(number + turn // 5) % 3], turn % 2
            assert await say(client, name, prompts[i]) == right[name, i]

    await asyncio.gather(*(ask(number) for number in range(8)))
    entries = loader.models.entries.values()
    assert sum(entry.reserved for entry in entries) <= 2 < sum(entry.life.loads for entry in entries)
    assert not any(entry.life.open or entry.life.waiting for entry in entries)


async def test_two_models_take_turns_asleep(folders: dict[str, Path]) -> None:
    """Memory for one of two: each is loaded once, sleeps while the other answers, and says what it said."""
    server = make_server_config({}, engines=0, models_memory=10, models_patience=120.0)
    options: dict[str, Any] = {"kv_cache_memory_bytes": 4 << 20, "max_num_seqs": 8, "max_model_len": 128}
    options |= {"device": "cpu", "threads": 1, "enable_sleep_mode": True}
    specs = [Spec(make_config({}, model=str(folders[name]), served_model_name=name, **options), server, memory=10)
             for name in NAMES[:2]]  # fmt: skip
    loader = ModelLoader(server, build_default, {})
    models = loader.catalogue(specs)
    transport = httpx.ASGITransport(app=make_app(make_front(await loader.server_context())), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=300) as client:
        right = {name: await say(client, name, [5, 6, 7, 8]) for name in NAMES[:2]}

        async def ask(number: int) -> None:
            for turn in range(10):
                name = NAMES[(number + turn) % 2]
                assert await say(client, name, [5, 6, 7, 8]) == right[name]

        await asyncio.gather(*(ask(number) for number in range(4)))
        entries = list(models.entries.values())
        assert all(entry.life.loads == 1 and entry.rest.wakes for entry in entries)
        text = (await client.get("/metrics")).text
        assert 'sleep_state="weights_offloaded"' in text
    await models.close()


@pytest.mark.parametrize("several", [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
async def test_what_is_predicted_is_what_is_measured(several: dict[str, int], folders: dict[str, Path]) -> None:
    """Of a CPU's ranks all together: they are processes in one memory."""
    server = make_server_config({}, engines=0)
    options: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 128, "device": "cpu", "threads": 1, **several}
    specs = [Spec(make_config({}, model=str(folders[name]), **options), server) for name in NAMES[:2]]
    loader = ModelLoader(server, build_default, {})
    models = loader.catalogue(specs)

    async def ask(asked: Any) -> Any:
        return find_needs(*asked)

    survey = Survey(lambda: specs, 2 << 30, ask)
    models.predict = survey.size_of
    entry = models.first
    predicted = await survey.size_of(entry)
    try:
        await models.load(entry)
        assert entry.measured and predicted > entry.beside > 0
        assert abs(entry.size - predicted) <= 0.02 * predicted
        assert entry.size // CONTEXT_BYTES["cpu"] == (2 if several else 1)
    finally:
        await models.close()


SLOW = pytest.mark.skipif(not os.environ.get("TOKENMILL_RELIABILITY"), reason="TOKENMILL_RELIABILITY=1 runs it")


@SLOW
def test_a_killed_engine_of_one_model_disturbs_no_other(
    folders: dict[str, Path], tmp_path: Path, launch_many: Callable[..., Running]
) -> None:
    running = launch_many(tmp_path, folders)
    body: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 100, "ignore_eos": True, "return_token_ids": True}
    right = {name: running.post("/v1/completions", {"model": name, **body}).json() for name in NAMES[:2]}
    with running.client.stream(
        "POST", running.url + "/v1/completions", json={"model": "two", "stream": True, **body}
    ) as stream:
        lines = stream.iter_lines()
        next(lines)
        engines = [pid for pid in running.children() if pid in _descendants(running.process.pid)]
        os.kill(min(engines), signal.SIGKILL)  # the one that was started first
        assert any("[DONE]" in line for line in lines)
    again = running.post("/v1/completions", {"model": "one", **body}).json()
    assert again["choices"][0]["token_ids"] == right["one"]["choices"][0]["token_ids"]
    assert running.metric("tokenmill:engine_restarts") == 1


@pytest.fixture
def launch_many(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server process of a file of models."""
    import subprocess
    import sys

    from tests.cpu.server.conftest import _wait_for_url

    made: list[Running] = []

    def start(root: Path, folders: dict[str, Path]) -> Running:
        path, log = root / "models.yaml", root / "server.log"
        entries = "".join(f"  {name}: {{model: {folder}}}\n" for name, folder in folders.items())
        path.write_text(f"models:\n{entries}")
        code = "from tokenmill.cli.main import main; main()"
        flags = ["--models", str(path), "--port", "0", "--max-model-len", "256", "--models-memory", str(8 << 30)]
        with log.open("wb") as out:
            process = subprocess.Popen([sys.executable, "-c", code, "serve", *flags], stdout=out,
                                       stderr=subprocess.STDOUT,
                                       env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})  # fmt: skip
        made.append(Running(process, _wait_for_url(process, log), log))
        return made[-1]

    yield start
    for running in made:
        running.client.close()
        running.process.terminate()
        running.process.wait()


def test_names_of_a_device() -> None:
    assert find_places(["auto", "cpu", "cpu:0", "nowhere"]) == dict.fromkeys(["auto", "cpu", "cpu:0"], "cpu")
