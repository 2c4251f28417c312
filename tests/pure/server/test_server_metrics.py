"""/metrics: vLLM's names and labels are there under load, and our dashboard asks for nothing that is not."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.pure.server.conftest import Starter
from tokenmill.server import request_job
from tokenmill.server.backend import EngineStats
from tokenmill.server.engines.state import FleetOptions
from tokenmill.testing.fake_generator import FakeOptions

DASHBOARD = Path(__file__).parents[3] / "docs" / "grafana.json"
PATH = "/v1/completions"
HISTOGRAMS = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_time_per_output_token_seconds",
    "request_inference_time_seconds",
    "request_prefill_kv_computed_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "iteration_tokens_total",
)
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_requests_waiting_by_reason")
COUNTERS = (
    *("prompt_tokens_total", "generation_tokens_total", "request_success_total", "num_preemptions_total"),
    *("prefix_cache_queries_total", "prefix_cache_hits_total", "prompt_tokens_cached_total"),
    *("prompt_tokens_by_source_total", "external_prefix_cache_queries_total", "external_prefix_cache_hits_total"),
    *("mm_cache_queries_total", "mm_cache_hits_total", "corrupted_requests_total", "engine_sleep_state"),
    *("spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total", "spec_decode_num_drafts_total"),
    *("estimated_flops_per_gpu_total", "estimated_read_bytes_per_gpu_total", "estimated_write_bytes_per_gpu_total"),
)
"""What vLLM's shipped dashboards, and boards that people have made, ask for."""


async def test_vllms_dashboards_find_their_series_under_load(start: Starter) -> None:
    served = await start(FakeOptions(step_s=0.2, max_rows=4))
    work = [asyncio.create_task(served.post(PATH, {"prompt": "abc", "max_tokens": 30})) for _ in range(12)]
    load = (0.0, 0.0)
    for _ in range(2000):  # the twelve arrive when the machine lets them
        text = (await served.client.get("/metrics")).text
        load = (_value(text, "vllm:num_requests_running"), _value(text, "vllm:num_requests_waiting"))
        if load == (4, 8):
            break
        await asyncio.sleep(0.01)
    assert load == (4, 8)
    assert _value(text, "vllm:kv_cache_usage_perc") > 0
    served.options.step_s = 0.0
    await asyncio.gather(*work)
    text = (await served.client.get("/metrics")).text
    for name in (*GAUGES, *COUNTERS):
        assert re.search(rf'^vllm:{name}{{[^}}]*engine="0"[^}}]*model_name="fake"[^}}]*}} ', text, re.M), name
    for name in HISTOGRAMS:
        assert _value(text, f"vllm:{name}_count") > 0, name
    assert _value(text, "vllm:generation_tokens_total") == 360
    assert {"process_resident_memory_bytes", "process_open_fds"} <= {line.split(" ")[0] for line in text.splitlines()}
    assert _value(text, "http_requests_total") > 12 and _value(text, "http_request_size_bytes_count") > 12
    edges = re.findall(r'time_to_first_token_seconds_bucket{engine="0",le="([^"]+)"', text)
    assert len(edges) == 23 and edges[0] == "0.001" and edges[-2] == "2560.0"


async def test_every_engine_has_its_own_series_and_together_they_are_the_models(start: Starter) -> None:
    """They begin at zero, and every request counts for the engine that worked on it."""
    served = await start(FakeOptions(step_s=0.001), FleetOptions(engines=3))
    begun = (await served.client.get("/metrics")).text
    bodies = [{"prompt": "abc" * (1 + i % 5), "max_tokens": 5, "ignore_eos": True} for i in range(24)]
    await asyncio.gather(*(served.post(PATH, body) for body in bodies))
    await served.post(PATH, {"prompt": "abc", "max_tokens": 5, "ignore_eos": True}, **{"X-data-parallel-rank": "2"})
    text = (await served.client.get("/metrics")).text
    for name in HISTOGRAMS:
        assert [_of_engine(begun, f"vllm:{name}_count", number) for number in range(3)] == [0] * 3, name
        assert all(_of_engine(text, f"vllm:{name}_count", number) > 0 for number in range(3)), name
    for name in ("request_prompt_tokens_count", "e2e_request_latency_seconds_count", "request_success_total"):
        assert sum(_of_engine(text, f"vllm:{name}", number) for number in range(3)) == 25, name
    for number in range(3):
        requests, tokens = (
            _of_engine(text, f"vllm:{name}", number) for name in ("request_params_n_count", "generation_tokens_total")
        )
        assert 5 * requests == tokens == _of_engine(text, "vllm:request_generation_tokens_sum", number)


async def test_outputs_side_by_side_are_no_long_output(start: Starter) -> None:
    served = await start(FakeOptions(step_s=0.001), enable_per_request_metrics=True)
    body = {"prompt": "abc", "max_tokens": 6, "ignore_eos": True}
    one = (await served.post(PATH, body)).json()["metrics"]
    many = (await served.post(PATH, {**body, "n": 3})).json()["metrics"]
    for times in (one, many):
        assert times["mean_itl_ms"] == pytest.approx(times["generation_time_ms"] / 5)
    text = (await served.client.get("/metrics")).text
    assert _value(text, "vllm:request_generation_tokens_sum") == 24
    assert _value(text, "vllm:request_max_num_generation_tokens_sum") == 12
    per, whole = (
        _value(text, f"vllm:{n}_seconds_sum") for n in ("request_time_per_output_token", "request_decode_time")
    )
    assert per == pytest.approx(whole / 5)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PATH, {"prompt": "abc", "max_tokens": 0, "echo": True}),
        (PATH, {"prompt": "abc", "max_tokens": 0, "echo": True, "stream": True}),
        ("/completion", {"prompt": "abc", "n_predict": 0}),
        ("/rerank", {"query": "a", "documents": ["b", "c"], "method": "likelihood"}),
    ],
)
async def test_a_token_that_nobody_sees_is_no_output(path: str, body: dict[str, object], start: Starter) -> None:
    """The engine makes one wherever a prompt is only read."""
    served = await start()
    answer = await served.post(path, body)
    text = (await served.client.get("/metrics")).text
    assert answer.status_code == 200 and _value(text, "vllm:request_prompt_tokens_sum") > 0 == _value(
        text, "vllm:request_generation_tokens_sum"
    )


async def test_paths_with_ids_count_as_their_route(start: Starter) -> None:
    """Whatever the answer is; clients cannot make more series than there are routes."""
    client = (await start(api_key=["k"])).client
    for path, key in (("/v1/models/fake", "k"), ("/v1/models/a/b", "k"), ("/v1/models/fake", "no"), ("/v1/x/y", "k")):
        await client.get(path, headers={"Authorization": f"Bearer {key}"})
    for path in ("/v1/responses/resp_1", "/v1/responses/resp_2/cancel", "/v2/models/fake/infer", "/v1/models/fake/"):
        await client.post(path, headers={"Authorization": "Bearer k"}, json={})
    text = (await client.get("/metrics", headers={"Authorization": "Bearer k"})).text
    found = re.findall(r'^http_requests_total{handler="([^"]+)",method="(\w+)",status="(\w+)"} (\S+)$', text, re.M)
    assert sorted(found) == [
        ("/v1/models/{name:path}", "GET", "2xx", "1.0"),
        ("/v1/models/{name:path}", "GET", "4xx", "2.0"),
        ("/v1/models/{name:path}", "POST", "4xx", "1.0"),
        ("/v1/responses/{response_id}", "POST", "4xx", "1.0"),
        ("/v1/responses/{response_id}/cancel", "POST", "4xx", "1.0"),
        ("/v2/models/{model}/infer", "POST", "4xx", "1.0"),
        ("other", "GET", "4xx", "1.0"),
    ]


async def test_every_series_says_what_it_is(start: Starter) -> None:
    text = (await (await start()).client.get("/metrics")).text
    helps = dict(re.findall(r"^# HELP (\S+) (.*)$", text, re.M))
    assert len(helps) > 60 and not [name for name, said in helps.items() if said in (name, name.removesuffix("_total"))]


async def test_drafts_count_by_place_over_all_lives(start: Starter) -> None:
    engine = (await start()).fake.fleet.engines[0]
    engine.before = EngineStats(drafts=2, drafted=6, accepted=3, accepted_at=[2, 1, 0])
    engine.stats = EngineStats(drafts=1, drafted=4, accepted=4, accepted_at=[1, 1, 1, 1])
    total = engine.totals()
    assert (total.drafts, total.accepted, total.accepted_at) == (3, 7, [3, 2, 1, 1])


async def test_energy_is_told_where_the_device_tells_it(start: Starter) -> None:
    served = await start()
    assert "joules" not in (await served.client.get("/metrics")).text
    engine = served.fake.fleet.engines[0]
    engine.before = EngineStats(joules=40.0, output_tokens=10)
    engine.stats = EngineStats(joules=60.0, watts=12.5, output_tokens=30)
    text = (await served.client.get("/metrics")).text
    told = [_value(text, f"tokenmill:{name}") for name in ("energy_joules_total", "power_watts", "joules_per_token")]
    assert told == [100.0, 12.5, 2.5]


async def test_calls_count_once_per_output(start: Starter) -> None:
    call = '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    served = await start(FakeOptions(script=call), tool_call_parser="hermes")
    body = {"messages": [{"role": "user", "content": "a"}], "tools": tools, "max_tokens": 200}
    for more in ({"n": 2}, {"stream": True}, {"max_tokens": 3}, {"tools": None}):
        await served.post("/v1/chat/completions", {**body, **more})
    await served.post("/v1/responses", {"input": "a", "tools": [{"type": "function", **tools[0]["function"]}]})
    found = re.findall(
        r"^vllm:tool_call_parser_invocations_total{(.*)} (.*)$", (await served.client.get("/metrics")).text, re.M
    )
    labels = [(re.findall(r'(mode|outcome|request_type)="(.*?)"', text), float(count)) for text, count in found]
    assert {(*(value for _, value in pairs), count) for pairs, count in labels} == {
        ("non_streaming", "tool_call", "chat_completions", 2.0),
        ("streaming", "tool_call", "chat_completions", 1.0),
        ("non_streaming", "no_tool_call", "chat_completions", 1.0),
        ("non_streaming", "tool_call", "responses", 1.0),
    }


async def test_many_prompts_are_counted_a_few_at_a_time(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_job, "COUNTED", 2)
    served = await start()
    assert (await served.post(PATH, {"prompt": ["a"] * 7, "max_tokens": 1})).status_code == 200
    for _ in range(3):  # (a client in the same process does not let others run)
        await asyncio.sleep(0)
    assert _value((await served.client.get("/metrics")).text, "vllm:request_success_total") == 7


async def test_our_dashboard_names_only_what_is_exported(start: Starter) -> None:
    served = await start(max_num_queued_reqs=2)
    await served.post(PATH, {"prompt": "abc", "max_tokens": 3})
    families = text_string_to_metric_families((await served.client.get("/metrics")).text)
    exported = {sample.name for family in families for sample in family.samples} | {"tokenmill:rejected_total"}
    asked = [t["expr"] for p in json.loads(DASHBOARD.read_text())["panels"] for t in p["targets"]]
    names = {
        name for expression in asked for name in re.findall(r"(?:vllm|tokenmill):\w+|http_\w+|process_\w+", expression)
    }
    assert len(names) > 20 and names <= exported, names - exported


def _of_engine(text: str, name: str, number: int) -> float:
    """The sum over all other labels."""
    found = re.findall(rf'^{name}{{[^}}]*engine="{number}"[^}}]*}} (.*)$', text, re.M)
    assert found, (name, number)
    return sum(map(float, found))


def _value(text: str, name: str) -> float:
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name + "{"))
