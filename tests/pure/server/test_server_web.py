"""The page's files: keyless, fenced in, whole, small, and nobody's but ours; the figures behind it need the key."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections import deque

import pytest

from tests.pure.server.conftest import Served, Starter
from tokenmill.server.activity import COLUMNS, MAX_SAMPLES, Activity, quantiles, whole
from tokenmill.server.backend import EngineStats
from tokenmill.server.events import Events
from tokenmill.server.web.files import STATIC, policy
from tokenmill.server.web.routes import FILES, PATHS
from tokenmill.testing.fake_generator import FakeOptions

KEYS = ["first-key-aaaaaaaaaaaaaaaaaaaa", "second-key-bbbbbbbbbbbbbbbbbb"]
AUTH = {"authorization": f"Bearer {KEYS[0]}"}
OWN = [name for name in FILES if name.endswith((".js", ".css", ".html")) and not name.startswith("vendor/")]
MODULES = [name for name in OWN if name.endswith(".js")]
PAGE = FILES["index.html"].body.decode()


async def test_files_need_no_key_and_figures_do(start: Starter) -> None:
    served = await start(api_key=KEYS)
    for path in PATHS:
        assert (await served.client.get(path)).status_code == 200, path
        head = await served.client.head(path)
        assert head.status_code == 200
    for path in (
        "/v1/engine",
        "/v1/card",
        "/v1/requests",
        "/v1/models",
        "/metrics",
        "/static/../routes.py",
        "/static/nothing.js",
    ):
        assert (await served.client.get(path)).status_code == 401, path
    for path in PATHS:
        assert (await served.client.post(path, json={})).status_code == 401, path
    assert (await served.client.get("/v1/engine", headers=AUTH)).status_code == 200
    assert (await served.client.get("/static/nothing.js", headers=AUTH)).status_code == 404


async def test_the_page_is_fenced_in(start: Starter) -> None:
    served = await start()
    answer = await served.client.get("/")
    rules = dict(rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; "))
    assert rules["default-src"] == "'none'" and rules["connect-src"] == "'self'" and rules["style-src"] == "'self'"
    assert rules["frame-ancestors"] == "'none'" and rules["require-trusted-types-for"] == "'script'"
    inline = re.findall(r"<script(?![^>]*src)[^>]*>(.*?)</script>", PAGE, re.S)
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in inline]
    assert rules["script-src"].split() == ["'self'", *(f"'sha256-{h}'" for h in hashes)] and len(hashes) == 2
    for header, value in {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}.items():
        assert answer.headers[header] == value
    assert "http" not in policy(b"<script>1</script>") and "unsafe" not in answer.headers["content-security-policy"]
    foreign = await served.client.get("/", headers={"host": "rebound.example"})
    assert foreign.status_code == 403


async def test_files_are_sent_small_and_once(start: Starter) -> None:
    served = await start()
    first = await served.client.get("/static/base.css", headers={"accept-encoding": "gzip"})
    assert first.headers["content-encoding"] == "gzip" and first.content == FILES["base.css"].body
    again = await served.client.get("/static/base.css", headers={"if-none-match": first.headers["etag"]})
    assert again.status_code == 304 and again.content == b""
    plain = await served.client.get("/static/base.css", headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers and plain.content == first.content


def test_the_page_is_under_250_kb_on_the_wire() -> None:
    rare = "vendor/letters.woff2"  # comes where a formula has bold or script letters, or a rare sign
    loaded = [file for name, file in FILES.items() if not name.endswith((".txt", ".md")) and name != rare]
    assert len(FILES[rare].body) <= 20_000
    packed = sum(min(len(file.packed), len(file.body)) for file in loaded)
    assert packed <= 228_000  # heads of answers come on top: tests/web measures them, too
    assert sum(len(file.body) for file in loaded) <= 560_000  # for a browser that takes no compression


def test_vendored_files_are_the_published_ones() -> None:
    text = FILES["vendor/VENDORED.md"].body.decode()
    listed = dict(re.findall(r"`([\w.]+)` \| `([0-9a-f]{64})`", text))
    present = {
        name.removeprefix("vendor/"): hashlib.sha256(file.body).hexdigest()
        for name, file in FILES.items()
        if name.startswith("vendor/") and name.endswith((".mjs", ".js", ".css", ".woff2"))
    }
    assert listed == present
    licences = {name.removeprefix("vendor/licences/") for name in FILES if name.startswith("vendor/licences/")}
    assert licences == set(re.findall(r"licences/([\w]+\.txt)", text)) and len(licences) == 6
    kinds = {".html", ".css", ".js", ".mjs", ".svg", ".md", ".txt", ".woff2"}
    assert all(path.suffix in kinds for path in STATIC.rglob("*.*"))


def test_everything_that_the_page_loads_is_here() -> None:
    names = dict(re.findall(r'"([\w/-]+)": "\./static/([\w./-]+)"', PAGE))
    assert set(names.values()) <= set(FILES)
    assert set(re.findall(r'(?:src|href)="static/([\w./-]+)"', PAGE)) <= set(FILES)
    for module in MODULES:
        for wanted in re.findall(r'^import .* from "([^"\n]+)";$', FILES[module].body.decode(), re.M):
            assert (wanted in names) if not wanted.startswith("./") else (wanted[2:] in FILES), (module, wanted)


@pytest.mark.parametrize("name", OWN)
def test_own_files_call_nobody_and_stay_readable(name: str) -> None:
    text = (STATIC / name).read_text(encoding="utf-8")
    assert not re.search(r"https?://|//cdn|@import|url\((?!\"vendor/)", text), name
    assert not re.search(r"\beval\(|new Function|innerHTML|document\.write", text), name
    assert len(text.splitlines()) <= 400


@pytest.mark.parametrize("name", MODULES)
def test_what_is_served_is_the_source_without_comments(name: str) -> None:
    served = iter(FILES[name].body.decode().splitlines())
    for line in (STATIC / name).read_text(encoding="utf-8").splitlines():
        code = line.strip()
        if code and not code.startswith("//"):
            rest = code.removeprefix(next(served))
            assert rest == "" or rest.startswith(" // "), (name, line)
    assert next(served, None) is None


# ---------------------------------------------------------------- figures


async def test_engine_figures_follow_the_work(start: Starter) -> None:
    served = await start(FakeOptions(step_s=0.2, max_rows=2))
    before = (await served.client.get("/v1/engine")).json()
    assert before["columns"] == list(COLUMNS) and before["models"] == ["fake", "other"]
    assert before["engines"][0]["running"] == 0 and before["problem"] is None and before["draining"] is False
    work = [asyncio.create_task(served.post("/v1/completions", {"prompt": "a", "max_tokens": 40})) for _ in range(5)]
    state = before
    while state["engines"][0].get("running") != 2:
        state = (await served.client.get("/v1/engine")).json()
        await asyncio.sleep(0.01)
    assert state["engines"][0]["waiting"] >= 1 and state["open"] >= 3
    served.options.step_s = 0.001  # it has been seen at work: on with it
    await asyncio.gather(*work)
    while state["engines"][0]["running"]:
        await asyncio.sleep(0.01)
        state = (await served.client.get(f"/v1/engine?since={before['now']}")).json()
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in state["samples"]]
    assert all(row["at"] > before["now"] for row in rows)
    assert state["engines"][0]["output_tokens"] == 200


async def test_the_card_says_what_is_served(start: Starter) -> None:
    served = await start(FakeOptions(max_model_len=512))
    found = (await served.client.get("/v1/card")).json()
    assert (found["model"], found["context"], found["rows"], found["device"]) == ("fake", 512, 256, "fake")
    assert found["can"] == {
        **{"chat": True, "tools": False, "thinking": False},
        **{"structure": True, "fill": True, "pictures": False},
    }
    assert found["defaults"]["temperature"] == 1.0 and found["defaults"]["max_tokens"] is None
    assert found["ceilings"] is None and found["parameters"] == 0


async def test_refusals_and_restarts_are_events(start: Starter) -> None:
    served = await start(FakeOptions(step_s=0.05), max_num_queued_reqs=1)
    assert (await served.client.get("/v1/engine")).json()["events"] == []
    held = asyncio.create_task(served.post("/v1/completions", {"prompt": "a", "max_tokens": 60}))
    while not served.context.gate.open:
        await asyncio.sleep(0.005)
    for _ in range(2):
        assert (await served.post("/v1/completions", {"prompt": "b"})).status_code == 503
    (event,) = (await served.client.get("/v1/engine")).json()["events"]
    assert (event["kind"], event["text"], event["count"]) == ("refusal", "Refused: the queue was full.", 2)
    served.options.step_s = 0.001
    await held


def test_events_are_told_apart_by_text_and_time() -> None:
    now = [0.0]
    events = Events(lambda: now[0])
    events.counters({"engine_restarts": 0})
    for at in (1.0, 50.0, 200.0):
        now[0] = at
        events.refused("queue_full")
    events.counters({"engine_restarts": 2})
    events.counters({"engine_restarts": 2})
    assert [(e["kind"], e["at"], e["count"]) for e in events.shown()] == [
        ("refusal", 200.0, 1),
        ("restart", 200.0, 2),
        ("refusal", 50.0, 2),
    ]
    for number in range(300):
        events.refused(f"reason {number}")
    assert len(events.shown()) == 100


async def test_odd_numbers_are_refused(start: Starter) -> None:
    served = await start()
    for query in ("since=x", "since=nan", "since=-1", "since=inf"):
        answer = await served.client.get(f"/v1/engine?{query}")
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "since"
    assert (await served.client.get("/v1/requests?limit=1e9")).status_code == 200


async def test_a_key_sees_its_own_requests_only(start: Starter) -> None:
    served = await start(api_key=KEYS)

    async def ask(key: str) -> None:
        answer = await served.client.post(
            "/v1/completions", json={"prompt": "abc", "max_tokens": 4}, headers={"x-api-key": key}
        )
        assert answer.status_code == 200

    for key in (KEYS[0], KEYS[1], KEYS[0]):
        await ask(key)
    first, second = [await _requests(served, key) for key in KEYS]
    assert (len(first), len(second)) == (2, 1)
    assert first[0]["created"] >= first[1]["created"] and first[0]["prompts"][0]["output_tokens"] == 4
    assert len(await _requests(served, KEYS[0], "?limit=1")) == 1
    one = await served.client.get(f"/v1/requests/{first[0]['id']}", headers=AUTH)
    assert one.json() == first[0]


async def _requests(served: Served, key: str, query: str = "") -> list[dict]:
    return (await served.client.get(f"/v1/requests{query}", headers={"x-api-key": key})).json()["data"]


def test_engines_are_summed_and_blocks_weigh() -> None:
    both = whole([EngineStats(running=2, kv_usage=0.5, kv_blocks=100), EngineStats(running=1, kv_blocks=300, steps=7)])
    assert (both.running, both.kv_blocks, both.steps, both.kv_usage) == (3, 400, 7, 0.125)
    assert whole([]).kv_usage == 0.0


def test_quantiles() -> None:
    assert quantiles([]) == [None, None, None]
    assert quantiles([3.0]) == [3.0, 3.0, 3.0]
    assert quantiles([float(i) for i in range(100)]) == [50.0, 90.0, 99.0]


class _Figures:
    """What a ring reads: one engine, and latencies."""

    def __init__(self) -> None:
        self.one = EngineStats(running=1, output_tokens=5)
        self.recent_ttft: deque[float] = deque([0.5])
        self.recent_gaps: deque[float] = deque([0.1, 0.2])
        self.observe = lambda tokens: None

    def stats(self) -> list[EngineStats]:
        return [self.one]

    def counters(self) -> dict[str, float]:
        return {"engine_restarts": 2.0}


def test_samples_are_taken_when_the_last_is_old_and_latencies_count_once() -> None:
    now = [100.0]
    figures = _Figures()
    activity = Activity(figures, figures, clock=lambda: now[0])  # type: ignore[arg-type]
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in activity.since(0.0)]
    assert len(rows) == 1 and rows[0]["restarts"] == 2 and rows[0]["ttft_p50"] == 0.5 and rows[0]["itl_p99"] == 0.2
    now[0] = 100.2
    assert len(activity.since(0.0)) == 1
    now[0] = 101.0
    assert [row[0] for row in activity.since(100.0)] == [101.0]
    assert dict(zip(COLUMNS, activity.since(100.0)[0], strict=True))["ttft_p50"] is None


def test_the_newest_samples_are_kept() -> None:
    now = [0.0]
    figures = _Figures()
    activity = Activity(figures, figures, clock=lambda: now[0])  # type: ignore[arg-type]
    for second in range(1, MAX_SAMPLES + 51):
        now[0] = float(second)
        activity.take()
    assert [row[0] for row in activity.since(0.0)] == [float(s) for s in range(51, MAX_SAMPLES + 51)]
    assert [row[0] for row in activity.since(MAX_SAMPLES + 48.0)] == [MAX_SAMPLES + 49.0, MAX_SAMPLES + 50.0]


async def test_the_clock_runs_while_engines_work_and_rests_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.server.activity.PERIOD_S", 0.01)
    figures = _Figures()
    heard: list[int] = []
    figures.observe = heard.append  # type: ignore[assignment]
    activity = Activity(figures, figures)  # type: ignore[arg-type]
    activity.watch()
    figures.observe(0)
    assert activity.timer is None and heard == [0]
    figures.observe(3)
    while activity.timer is not None:
        await asyncio.sleep(0.005)
    assert activity.taken == 2 and heard == [0, 3]
