"""`bench serve` and guidellm on the same load: do they measure the same? JSON on stdout; wants a quiet machine.

python bench/server/beside_guidellm.py GUIDELLM [REQUESTS] [USERS] [--url URL]      (default: 240 requests, 8 users)

GUIDELLM is that program in an environment of its own. Without --url both ask a scripted server (client.py), which draws
the delays of its n-th request from the same seed for both; with --url, a real one, one after the other. Both ask for
completions of 40 tokens after 128, as many users at a time. One request of each goes before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import pathlib
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from client import TOKENS, Drawn, serve

from tokenmill.demo.files import demo_dir
from tokenmill.measure.client import Target
from tokenmill.measure.conversations import Lengths, Made, make_conversations
from tokenmill.measure.server_load import Pattern, serve_load

PROMPT = 128
NAMES = {
    "requests_per_s": "requests_per_second",
    "output_tokens_per_s": "output_tokens_per_second",
    "ttft_ms": "time_to_first_token_ms",
    "itl_ms": "inter_token_latency_ms",
    "e2e_ms": "request_latency",
}
"""Our figures, and guidellm's names of them; its latencies of requests are in seconds, its ITL is a mean per request
(our TPOT)."""


@contextmanager
def server(url: str) -> Iterator[str]:
    """A fresh scripted server in a process of its own, or the one that is there."""
    if url:
        yield url
        return
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=serve, args=(Drawn(), theirs))
    process.start()
    try:
        yield ours.recv()
    finally:
        ours.send("enough")
        ours.recv()
        process.join()


def ours(url: str, model: str, count: int, users: int) -> dict[str, Any]:
    """What bench serve says: text prompts of as many words, as guidellm sends them."""
    target = Target(url, model, extras=True, timeout=120.0)
    load = make_conversations(Made(count, Lengths("fixed", PROMPT), Lengths("fixed", TOKENS), text=True))
    return asyncio.run(serve_load(target, load, Pattern(users=users), slo=None, warmup=1))


def theirs(program: str, url: str, model: str, count: int, users: int) -> dict[str, Any]:
    """What guidellm says, by our names."""
    backend = f"kind=openai_http,target={url},model={model},request_format=/v1/completions"
    data = f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={TOKENS}"
    tokenizer = f"kind=huggingface_auto,model={demo_dir('main')}"
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "found.json"
        command = [
            program, "run", "--backend", backend, "--profile", f"kind=concurrent,streams={users}",
            "--constraint", f"kind=max_requests,count={count}", "--tokenizer", tokenizer, "--data", data,
            "--output", f"kind=json,path={out}", "--disable-console",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr[-3000:] + done.stdout[-2000:])
        (run,) = json.loads(out.read_text())["benchmarks"]
    return run


def compare(mine: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Rows of both figures and their ratio."""
    rows = {}
    for name, their_name in NAMES.items():
        found = other["metrics"][their_name]["successful"]
        if not name.endswith("_ms"):
            rows[name] = _row(mine[name], found["mean"])
            continue
        scale = 1e3 if their_name == "request_latency" else 1.0
        for percent in (50, 90, 95, 99):
            value = mine["tpot_ms" if name == "itl_ms" else name][f"p{percent}"]
            rows[f"{name} p{percent}"] = _row(value, scale * found["percentiles"][f"p{percent}"])
    return rows


def _row(mine: float, other: float) -> dict[str, Any]:
    return {"ours": round(mine, 3), "guidellm": round(other, 3), "ratio": round(mine / other, 4)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("count", nargs="?", type=int, default=240)
    parser.add_argument("users", nargs="?", type=int, default=8)
    parser.add_argument("--url", default="")
    args = parser.parse_args()
    model = "demo" if args.url else "fake"
    with server(args.url) as url:
        other = theirs(args.program, url, model, args.count, args.users)
    with server(args.url) as url:
        mine = ours(url, model, args.count, args.users)
    rows = compare(mine, other)
    worst = max(abs(row["ratio"] - 1) for row in rows.values())
    print(json.dumps({"worst": round(worst, 4), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
