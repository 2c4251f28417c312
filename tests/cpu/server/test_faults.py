"""Faults inside a real engine process cost no one else anything."""

from __future__ import annotations

import concurrent.futures
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cpu.server.conftest import Running
from tests.cpu.server.server_process_helpers import stream_text
from tokenmill.testing.tiny import make_tiny

Launch = Callable[..., Running]
GUILTY = (250, 251, 250)
BODIES: list[dict[str, Any]] = [
    {"prompt": [20 + i, 40, 60 + i], "max_tokens": 24, "ignore_eos": True, "temperature": float(i % 2), "seed": i}
    for i in range(31)
]


def texts(running: Running, bodies: list[dict[str, Any]]) -> list[str]:
    """The texts of streams that run together."""
    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        return list(pool.map(lambda body: stream_text(running.url, body), bodies))


@pytest.fixture(scope="module")
def undisturbed(launch: Launch) -> Running:
    return launch("--max-num-seqs", "64")


@pytest.fixture(scope="module")
def calm(undisturbed: Running) -> list[str]:
    """What an undisturbed server says."""
    return texts(undisturbed, BODIES)


def bad_request(running: Running, body: dict[str, Any]) -> str:
    """A request that must fail alone: 500, opaque, with an id; -> its message."""
    answer = running.post("/v1/completions", body)
    assert answer.status_code == 500, answer.text
    error = answer.json()["error"]
    assert error["code"] == 500 and "cmpl-" in error["message"] and "Traceback" not in answer.text
    return error["message"]


def test_a_step_that_does_not_fit_is_done_again_and_one_of_32_breaks_its_steps(launch: Launch, calm: list[str]) -> None:
    running = launch(faults=f"raise@12;raise:{','.join(map(str, GUILTY))}")
    assert texts(running, BODIES) == calm
    assert running.metric("tokenmill:failed_steps_total") >= 1
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        others = pool.submit(texts, running, BODIES)
        broken = pool.submit(bad_request, running, {"prompt": [7, *GUILTY, 8], "max_tokens": 24, "ignore_eos": True})
        assert "cannot be computed" in broken.result()
        assert others.result() == calm
    assert running.metric("tokenmill:engine_restarts") == 0
    assert running.metric("vllm:kv_cache_usage_perc") == 0


def test_a_hang_and_a_death_at_a_step(launch: Launch, calm: list[str], tmp_path: Path) -> None:
    once = tmp_path / "done"
    running = launch("--watchdog-timeout", "3", faults=f"hang@15;kill@200;once={once}")
    assert texts(running, BODIES) == calm
    hung = running.metric("tokenmill:engine_restarts")
    assert hung >= 1 and "faults.py" in running.log.read_text()  # it was asked where it stood before it was ended
    once.unlink()
    while running.metric("tokenmill:engine_restarts") == hung:  # its next life comes to that step
        assert texts(running, BODIES) == calm
    assert once.exists()


def test_a_step_that_computes_for_ever_ends(launch: Launch, calm: list[str], tmp_path: Path) -> None:
    running = launch("--watchdog-timeout", "1", faults=f"spin@15;once={tmp_path / 'done'}")
    assert texts(running, BODIES) == calm
    assert running.metric("tokenmill:engine_restarts") >= 1 and "no progress for" in running.log.read_text()


def test_a_broken_device_ends_its_engine_at_once(launch: Launch, calm: list[str], tmp_path: Path) -> None:
    """Every later step would fail too, and one request after another would be blamed."""
    running = launch(faults=f"cuda@15;once={tmp_path / 'done'}")
    assert texts(running, BODIES) == calm
    assert running.metric("tokenmill:engine_restarts") == 1
    assert "device-side assert" in running.log.read_text()


@pytest.fixture(scope="module")
def unsaid(undisturbed: Running) -> int:
    """A token that none of the requests says or holds."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        asked = [{**body, "return_token_ids": True} for body in BODIES]
        answers = [each.json() for each in pool.map(lambda body: undisturbed.post("/v1/completions", body), asked)]
    said = {token for answer in answers for token in answer["choices"][0]["token_ids"]}
    return next(token for token in range(319, 100, -1) if token not in said)


@pytest.fixture(scope="module")
def corrupt(tmp_path_factory: pytest.TempPathFactory, unsaid: int) -> Path:
    """A model that has no number for one token."""
    folder = make_tiny(tmp_path_factory.mktemp("corrupt") / "tiny")
    weights = load_file(folder / "model.safetensors")
    table = weights["model.embed_tokens.weight"]
    if "lm_head.weight" not in weights:  # the output table is the same tensor: keep that one whole
        weights["lm_head.weight"] = table.clone()
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    table[unsaid] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_corrupt_weight_spoils_only_those_who_use_it(
    launch: Launch, calm: list[str], corrupt: Path, unsaid: int
) -> None:
    running = launch(model=corrupt)
    assert "model.embed_tokens.weight holds NaN or infinity" in running.log.read_text()  # told before it is served
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        others = pool.submit(texts, running, BODIES)
        for place in (0, 5, 40):
            asked = {"prompt": [30] * place + [unsaid, 31], "max_tokens": 8}
            assert "NaN or infinity" in bad_request(running, asked)
        forced = {"prompt": [30, 31], "max_tokens": 8, "allowed_token_ids": [unsaid]}
        assert "NaN or infinity" in bad_request(running, forced)  # on the step after it was said
        assert others.result() == calm
    assert texts(running, BODIES) == calm  # and nothing of it is left in the cache


def test_a_quarter_of_the_memory_is_enough(launch: Launch, undisturbed: Running) -> None:
    bodies = [{**BODIES[i % 31], "prompt": [20 + i, 40, 60 + i] * 20, "max_tokens": 60} for i in range(32)]
    wanted = texts(undisturbed, bodies)
    demand = 32 * (-(-(60 + 60) // 16))
    tight = launch("--max-num-seqs", "64", "--num-gpu-blocks-override", str(demand // 4), "--max-model-len", "256")
    assert texts(tight, bodies) == wanted
    assert tight.metric("vllm:num_preemptions_total") > 0
    assert tight.metric("vllm:kv_cache_usage_perc") == 0
