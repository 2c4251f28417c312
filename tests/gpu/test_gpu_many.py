"""Two models on one GPU: both at once, and one after the other where memory is for one."""

from __future__ import annotations

from pathlib import Path

import httpx

from tokenmill.core.config import make_config, make_server_config
from tokenmill.server.app import make_app, make_front
from tokenmill.server.engines.child import build_default
from tokenmill.server.many_models.catalogue import Bounds
from tokenmill.server.many_models.entry import Spec
from tokenmill.server.run import ModelLoader
from tokenmill.testing.tiny import make_tiny

NAMES = ("one", "two")


async def say(client: httpx.AsyncClient, name: str) -> list[int]:
    body = {"model": name, "prompt": [5, 6, 7, 8], "max_tokens": 6, "temperature": 0, "return_token_ids": True}
    answer = await client.post("/v1/completions", json={**body, "ignore_eos": True})
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


async def test_two_models_share_a_gpu(tmp_path: Path) -> None:
    server = make_server_config({})
    options = {"max_num_seqs": 8, "max_model_len": 256, "device": "cuda"}
    specs = [
        Spec(
            make_config({}, model=str(make_tiny(tmp_path / name, seed=seed)), served_model_name=name, **options), server
        )
        for seed, name in enumerate(NAMES)
    ]
    loader = ModelLoader(server, build_default, {})
    models = loader.catalogue(specs)
    transport = httpx.ASGITransport(app=make_app(make_front(await loader.server_context())), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=600) as client:
        try:
            right = [await say(client, name) for name in NAMES]
            one, two = models.entries.values()
            assert right[0] != right[1] and one.unit is not None and two.unit is not None
            assert 0 < one.size + two.size <= (models.memory_of("cuda") or 0)
            models.bounds = Bounds(max(one.size, two.size) + 1)
            await models.unload(two)
            for name, tokens in (("two", right[1]), ("one", right[0])):
                assert await say(client, name) == tokens
                assert [entry.name for entry in models.entries.values() if entry.unit is not None] == [name]
        finally:
            await models.close()
