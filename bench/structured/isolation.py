"""Neighbours of hostile schemas: inter-token times of plain streams alone, and while bombs and new schemas keep coming.

    python bench/structured/isolation.py [--seconds 20] [--streams 4] [--json OUT]

A server with the demo model is started here. Also: throughput with and without a grammar, in this process.
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


async def throw(client: httpx.AsyncClient, found: dict[str, list[float]], until: float) -> None:
    """Bombs by turns, and harmless schemas that nobody has sent before."""
    seed = 0
    while time.perf_counter() < until:
        for name, fields in bombs().items():
            began = time.perf_counter()
            answer = await client.post("/v1/chat/completions", json={"messages": ASK, "max_tokens": 1, **fields})
            assert answer.status_code == 400, (name, answer.status_code, answer.text[:200])
            found.setdefault(name, []).append(time.perf_counter() - began)
            for _ in range(20):
                seed += 1
                fresh = {"structured_outputs": {"json": schema(seed)}}
                await client.post("/v1/chat/completions", json={"messages": ASK, "max_tokens": 1, **fresh})
            if time.perf_counter() > until:
                return


async def measure(url: str, seconds: float, streams: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    slow: dict[str, list[float]] = {}
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        await listen(client, [], time.perf_counter() + 1)
        for title in ("alone", "with bombs", "alone again"):
            gaps: list[float] = []
            until = time.perf_counter() + seconds
            work = [listen(client, gaps, until) for _ in range(streams)]
            if title == "with bombs":
                work.append(throw(client, slow, until))
            await asyncio.gather(*work)
            found[title] = {**quantiles(gaps), "tokens_per_s": len(gaps) / seconds}
        found["refused_after_ms"] = {name: 1e3 * max(times) for name, times in slow.items()}
    return found


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


def throughput(count: int = 32, tokens: int = 200) -> dict[str, float]:
    """Tokens a second of one batch, free and held to a grammar."""
    from tokenmill import LLM, SamplingParams

    held = {"json": {"type": "array", "items": {"type": "object", "properties": {"n": {"type": "integer"}}}}}
    found = {}
    with LLM("demo", max_num_seqs=count) as llm:
        for title, structure in (("warm", held), ("free", None), ("held", held), ("free again", None)):
            params = [
                SamplingParams(
                    temperature=1.0, seed=i, max_tokens=tokens, ignore_eos=True, structured_outputs=structure
                )
                for i in range(count)
            ]
            began = time.perf_counter()
            outputs = llm.generate(["Numbers: "] * count, params, use_tqdm=False)
            spent = time.perf_counter() - began
            found[title] = sum(len(o.outputs[0].token_ids) for o in outputs) / spent
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=200, help="of each answer of the throughput part; 0: none")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        process, url = serve(Path(folder) / "log")
        try:
            found = asyncio.run(measure(url, options.seconds, options.streams))
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)
    print(json.dumps(found, indent=1), flush=True)
    if options.tokens:
        found["throughput"] = throughput(tokens=options.tokens)
        print(json.dumps(found["throughput"], indent=1))
    if options.json:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
