"""Is `bench serve` right? JSON on stdout; wants a quiet machine.

python bench/server/client.py [REQUESTS] [STREAMS]     (default 400 2000)

delays: a scripted server in a process of its own draws the time to the first token and the gap of each request from
wide distributions and keeps what it did by its own clock; percentiles must agree within 2 % or 1 ms.
streams: that many requests at once from one process; the client is the bottleneck if it sends late or reads late.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import pathlib
import random
import statistics
import sys
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tests" / "cpu" / "measure"))
from fake_server import Fake, running

from tokenmill.cli.bench_serve import allow_sockets
from tokenmill.measure.client import Target
from tokenmill.measure.conversations import Lengths, Made, make_conversations
from tokenmill.measure.server_load import Pattern, serve_load
from tokenmill.measure.stats import summary_ms

TOKENS = 40


class Drawn(Fake):
    """A server whose first token takes 20 to 400 ms and whose later ones come every 5 to 40 ms, drawn per request."""

    async def _stream(self, request: Any, body: dict, kind: Any, times: list[float]) -> Any:
        source = random.Random(len(self.times))
        own = Fake(source.uniform(0.02, 0.4), source.uniform(0.005, 0.04))
        return await own._stream(request, body, kind, times)


def serve(fake: Fake, pipe: Any) -> None:
    """The server's process: says where it listens, and at the end what it did."""

    async def main() -> None:
        allow_sockets()
        async with running(fake) as url:
            pipe.send(url)
            await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
            pipe.send(fake.times)

    asyncio.run(main())


def against(fake: Fake, count: int, users: int, tokens: int) -> tuple[dict[str, Any], list[list[float]]]:
    """-> what the client says, and the server's times."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=serve, args=(fake, theirs))
    process.start()
    target = Target(ours.recv(), "", extras=True, timeout=120.0)
    load = make_conversations(Made(count, Lengths("fixed", 20), Lengths("fixed", tokens)))
    result = asyncio.run(serve_load(target, load, Pattern(users=users), slo=None, warmup=1))
    ours.send("enough")
    times = ours.recv()
    process.join()
    return result, times[1:]


def delays(count: int) -> dict[str, Any]:
    """Percentiles of the client against those of the server."""
    result, times = against(Drawn(), count, 16, TOKENS)
    true = {
        "ttft_ms": summary_ms([t[1] - t[0] for t in times]),
        "tpot_ms": summary_ms([(t[-1] - t[1]) / (len(t) - 2) for t in times]),
        "itl_ms": summary_ms([b - a for t in times for a, b in itertools.pairwise(t[1:])]),
        "e2e_ms": summary_ms([t[-1] - t[0] for t in times]),
    }
    rows = {}
    for name, expected in true.items():
        for percent, value in expected.items():
            off = result[name][percent] - value  # type: ignore[operator]
            good = abs(off) <= max(1.0, 0.02 * value)  # type: ignore[operator]
            rows[f"{name} {percent}"] = {"true": value, "measured": result[name][percent], "good": good}
    return {"all_good": all(row["good"] for row in rows.values()), "rows": rows}


def streams(count: int) -> dict[str, Any]:
    """That many streams at once, ten tokens a second each."""
    allow_sockets()
    begin = time.perf_counter()
    result, times = against(Fake(first=0.5, gap=0.1), count, count, TOKENS)
    true = statistics.median((t[-1] - t[1]) / (len(t) - 2) for t in times) * 1e3
    return {
        "streams": count,
        "most_open": result["most_open"],
        "errors": result["errors"],
        "client_late_p99_ms": result["client_late_ms"]["p99"],
        "tpot_p50_ms": {"true": round(true, 3), "measured": result["tpot_ms"]["p50"]},
        "output_tokens_per_s": result["output_tokens_per_s"],
        "seconds": round(time.perf_counter() - begin, 2),
    }


if __name__ == "__main__":
    sizes = [int(a) for a in sys.argv[1:]] + [400, 2000][len(sys.argv) - 1 :]
    print(json.dumps({"delays": delays(sizes[0]), "streams": streams(sizes[1])}, indent=1))
