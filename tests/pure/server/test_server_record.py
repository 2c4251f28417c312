"""--record: live traffic becomes a workload file."""

from __future__ import annotations

import json

import pytest

from tokenmill.core.errors import UserError
from tokenmill.measure.conversations import Reader
from tokenmill.measure.workloads import read_workload
from tokenmill.server.traffic_recorder import HASH_BLOCK, Recorder


async def test_lengths_and_times_only(start, tmp_path):
    path = tmp_path / "traffic.jsonl"
    served = await start(record=str(path))
    common = [20 + i % 100 for i in range(HASH_BLOCK)]
    for tail, count in (([5, 6, 7], 3), ([8, 9], 4), ([30 + i % 90 for i in range(HASH_BLOCK)], 2)):
        body = {"prompt": common + tail, "max_tokens": count, "ignore_eos": True}
        assert (await served.post("/v1/completions", body)).status_code == 200
    assert (await served.post("/v1/completions", {"prompt": [], "max_tokens": 1})).status_code == 400
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(x["input_length"], x["output_length"]) for x in lines] == [(515, 3), (514, 4), (1024, 2)]
    assert [x["hash_ids"] for x in lines] == [[1], [1], [1, 2]]
    assert set(lines[0]) == {"timestamp", "input_length", "output_length", "hash_ids"}
    asked = Reader(path).read()
    assert asked[0].turns[0].prompt[:HASH_BLOCK] == asked[2].turns[0].prompt[:HASH_BLOCK]
    assert asked[2].turns[0].max_tokens == 2


async def test_content_when_asked_for(start, tmp_path):
    path = tmp_path / "traffic.jsonl"
    served = await start(record=str(path), record_content=True)
    await served.post("/v1/completions", {"prompt": [7, 8, 9], "max_tokens": 5, "n": 2, "ignore_eos": True})
    assert read_workload(path).lines == [([7, 8, 9], 5)]


def test_files_that_cannot_be_written(tmp_path, start):
    with pytest.raises(UserError, match="cannot be written"):
        Recorder(str(tmp_path / "missing" / "x.jsonl"))


async def test_a_full_disk_ends_the_record_and_nothing_else(start, tmp_path):
    served = await start(record=str(tmp_path / "x.jsonl"))
    served.context.recorder.close()  # every write fails from here
    assert (await served.post("/v1/completions", {"prompt": [7], "max_tokens": 2})).status_code == 200
    assert served.context.recorder.broken
    with pytest.raises(UserError, match="needs --record FILE"):
        await start(record_content=True)
