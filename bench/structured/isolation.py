"""Neighbours of hostile schemas: inter-token times of plain streams alone, and while bombs and new schemas keep coming.

    python bench/structured/isolation.py [--seconds 10] [--turns 4] [--streams 4] [--every 0] [--json OUT]

A server with the demo model is started here. Alone, with harmless requests and with bombs take turns; gaps of all turns
are pooled. Who throws is a process of its own that gets only time which nobody else wants: what making and sending
bombs costs is not the server's doing. It throws one after the other, as fast as they are answered, or one every so many
seconds; harmless requests come as often as bombs did the turn before, and show what any request costs its neighbours.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from schemas import schema
from speed import quantiles

ROOT = Path(__file__).parents[2]
ASK = [{"role": "user", "content": "Tell me a story about a mill."}]


def chained(count: int) -> dict[str, Any]:
    """Alternatives that double with each step."""
    defs: dict[str, Any] = {f"a{count}": {"type": "string"}}
    for i in range(count):
        after = {"$ref": f"#/$defs/a{i + 1}"}
        defs[f"a{i}"] = {"oneOf": [after, {"properties": {f"x{i}": after}, "required": [f"x{i}"]}]}
    return {"$ref": "#/$defs/a0", "$defs": defs}


def bombs() -> dict[str, dict[str, Any]]:
    """Request fields that ask for too much."""
    cycle = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}
    wide = {"properties": {f"p{i}": {"description": "x" * 60} for i in range(12_000)}}
    product = [{"oneOf": [{"properties": {f"k{i}": {"const": j}}} for j in range(9)]} for i in range(9)]
    return {
        "depth 10,000": {"structured_outputs": {"json": '{"items":' * 10_000 + "{}" + "}" * 10_000}},
        "1 MB": {"structured_outputs": {"json": wide}},
        "100,000 values": {"structured_outputs": {"json": {"enum": [f"v{i}" for i in range(100_000)]}}},
        "minItems 1e9": {"structured_outputs": {"json": {"type": "array", "minItems": 10**9}}},
        "cyclic $ref": {"structured_outputs": {"json": {"$ref": "#/$defs/a", "$defs": cycle}}},
        "product of oneOf": {"structured_outputs": {"json": {"allOf": product}}},
        "doubling oneOf": {"structured_outputs": {"json": chained(40)}},
        "many exclusions": {
            "structured_outputs": {"json": {"not": {"enum": [f"v{i}{'x' * 20}" for i in range(5000)]}}}
        },
        "back-references": {"structured_outputs": {"regex": "(a+)+\\1"}},
        "nested groups": {"structured_outputs": {"regex": "(" * 5000 + "a" + ")" * 5000}},
    }


async def listen(client: httpx.AsyncClient, gaps: list[float], until: float) -> None:
    """Stream again and again; collect the time between events."""
    body = {"messages": ASK, "max_tokens": 200, "temperature": 1, "stream": True, "ignore_eos": True}
    while time.perf_counter() < until:
        last = None
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                now = time.perf_counter()
                if line.startswith("data: {"):
                    if last is not None:
                        gaps.append(now - last)
                    last = now


def shots(kind: str) -> Iterator[tuple[str, bytes]]:
    """Name and body of one request after the other: bombs by turns, each followed by two harmless schemas that nobody
    has sent before; or requests without any structure."""
    plain = {"messages": ASK, "max_tokens": 1}
    bodies = {name: json.dumps({**plain, **fields}).encode() for name, fields in bombs().items()}
    seed = int(time.time() * 1000) % 10**9
    while True:
        for name, body in bodies.items():
            if kind == "harmless":
                yield "", json.dumps(plain).encode()
                continue
            yield name, body
            for _ in range(2):
                seed += 1
                yield "", json.dumps({**plain, "structured_outputs": {"json": schema(seed)}}).encode()


def throw(url: str, seconds: float, kind: str, every: float) -> dict[str, Any]:
    """-> how many were sent, and the longest wait for each refusal."""
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    slow: dict[str, float] = {}
    count, start = 0, time.perf_counter()
    with httpx.Client(base_url=url, timeout=60, headers={"content-type": "application/json"}) as client:
        for name, body in shots(kind):
            began = time.perf_counter()
            if began - start > seconds:
                break
            answer = client.post("/v1/chat/completions", content=body)
            spent = time.perf_counter() - began
            count += 1
            if name:
                assert answer.status_code == 400, (name, answer.status_code, answer.text[:200])
                slow[name] = max(slow.get(name, 0.0), spent)
            time.sleep(max(0.0, start + count * every - time.perf_counter()))
    return {"count": count, "slow": slow}


async def turn(client: httpx.AsyncClient, streams: int, seconds: float, thrower: list[str]) -> tuple[list[float], Any]:
    """Gaps of the streams, and what the thrower says."""
    process = await asyncio.create_subprocess_exec(*thrower, stdout=subprocess.PIPE) if thrower else None
    until = time.perf_counter() + seconds
    gaps: list[float] = []
    await asyncio.gather(*(listen(client, gaps, until) for _ in range(streams)))
    if process is None:
        return gaps, {"count": 0, "slow": {}}
    out, _ = await asyncio.wait_for(process.communicate(), 30)
    return gaps, json.loads(out)


async def measure(url: str, seconds: float, turns: int, streams: int, every: float) -> dict[str, Any]:
    gaps: dict[str, list[float]] = {"alone": [], "with bombs": [], "with harmless requests": []}
    sent = dict.fromkeys(gaps, 0)
    slow: dict[str, float] = {}
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        await listen(client, [], time.perf_counter() + 1)
        base = [sys.executable, __file__, "--throw", url, "--seconds", str(seconds)]
        for number in range(turns):
            pace = every
            for title, found in gaps.items():
                kind = "bombs" if title == "with bombs" else "harmless"
                thrower = [] if title == "alone" else [*base, "--kind", kind, "--every", str(pace)]
                own, said = await turn(client, streams, seconds, thrower)
                found += own
                if title == "with bombs":
                    pace = max(every, seconds / max(1, said["count"]))
                sent[title] += said["count"]
                print(f"turn {number}, {title}: p99 {1e3 * sorted(own)[int(0.99 * len(own))]:.2f} ms", flush=True)
                for name, spent in said["slow"].items():
                    slow[name] = max(slow.get(name, 0.0), spent)
        metrics = (await client.get(url + "/metrics")).text
    cache = re.search(r"^tokenmill:grammar_cache_bytes\S* (\S+)", metrics, re.MULTILINE)
    over = seconds * turns
    rates = {t: {"tokens_per_s": len(g) / over, "sent_per_s": sent[t] / over} for t, g in gaps.items()}
    found_all = {t: {**quantiles(g), **rates[t]} for t, g in gaps.items()}
    return {
        **found_all,
        **{
            f"p99, with bombs over {t}": found_all["with bombs"]["p99"] / found_all[t]["p99"]
            for t in ("alone", "with harmless requests")
        },
        "refused_after_ms": {name: 1e3 * spent for name, spent in slow.items()},
        "grammar_cache_bytes": float(cache[1]) if cache else None,
    }


def serve(log: Path) -> tuple[subprocess.Popen[bytes], str]:
    code = "from tokenmill.cli.main import main; main()"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", code, "serve", "demo", "--port", "0"],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        )
    for _ in range(600):
        match = re.search(r"listening on (http://\S+)/v1", log.read_text())
        if match:
            return process, match[1]
        time.sleep(0.1)
    raise SystemExit(log.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10, help="of each turn")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--every", type=float, default=0, help="seconds between two requests that are thrown")
    parser.add_argument("--throw", help=argparse.SUPPRESS)
    parser.add_argument("--kind", default="bombs", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.throw:
        print(json.dumps(throw(options.throw, options.seconds, options.kind, options.every)))
        return
    with tempfile.TemporaryDirectory() as folder:
        process, url = serve(Path(folder) / "log")
        try:
            found = asyncio.run(measure(url, options.seconds, options.turns, options.streams, options.every))
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)
    print(json.dumps(found, indent=1), flush=True)
    if options.json:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
