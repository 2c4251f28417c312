"""What bodies cost the server before a token is made: CPU time, memory at its peak and lag of the event loop, by shape.

    python bench/server/validation.py [--json OUT] [--size 16777216] [--routes /v1/completions,...] [--shapes ones,...]

The server runs in a process of its own over fake engines. Each body is sent alone. The control is a body of the same
size whose bytes mean nothing, while another process uses as much CPU time: what the loop's lag is without validation.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tokenmill.testing.hostile import SHAPES, VALID, body, path_of

BUDGET_CPU_S, BUDGET_LAG_S = 0.5, 0.05
AGAIN = 3
PROMPT = 32 << 20
"""What one admitted prompt may need beside four times the body."""


def counted(name: str) -> int:
    """Bytes, as the kernel counts them for this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def server(pipe: Connection) -> None:
    """Serve until the pipe closes; answers `begin` and `end` with figures since then."""
    import uvloop

    async def main() -> None:
        from tokenmill.core.config import make_server_config
        from tokenmill.server.app import make_app, make_context
        from tokenmill.server.listener import HttpServer
        from tokenmill.server.loop_lag import watch_lag
        from tokenmill.server.run import _bind
        from tokenmill.testing.fake_generator import FakeOptions, fake_fleet

        config = make_server_config({}, port=0, log_level="error", max_body_bytes=64 << 20)
        fake = await fake_fleet(FakeOptions(max_model_len=32_768, step_s=0.01))
        sock = _bind(config)
        http = HttpServer(make_app(make_context(fake.fleet, config)), config, sock)
        await http.start()
        late = [0.0]
        began = [0.0, 0.0]

        def saw(seconds: float) -> None:
            late[0] = max(late[0], seconds)

        def heard() -> None:
            if pipe.recv() == "begin":
                Path("/proc/self/clear_refs").write_text("5")
                began[:] = [time.process_time(), float(counted("VmRSS"))]
                late[0] = 0.0
                pipe.send(None)
            else:
                figures = time.process_time() - began[0], counted("VmHWM") - int(began[1]), late[0]
                pipe.send(figures)

        napper = asyncio.get_running_loop().create_task(watch_lag(saw, 0.005))
        asyncio.get_running_loop().add_reader(pipe.fileno(), heard)
        pipe.send(sock.getsockname()[1])
        await napper

    uvloop.run(main())


def burn(seconds: float) -> None:
    """Use so much CPU time."""
    while time.process_time() < seconds:
        pass


def ask(port: int, path: str, data: bytes) -> int:
    """-> the status."""
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(data))
        sock.sendall(data)
        said = b""
        while part := sock.recv(1 << 16):
            said = said or part[:16]
    return int(said.split()[1])


def measure(pipe: Connection, port: int, path: str, data: bytes) -> dict[str, Any]:
    """One body: what it cost."""
    pipe.send("begin")
    pipe.recv()
    status = ask(port, path, data)
    time.sleep(0.02)  # the napper wakes once more
    pipe.send("end")
    cpu, peak, lag = pipe.recv()
    memory = max(0, peak) / len(data)
    return {"status": status, "mb": len(data) / 1e6, "cpu_s": cpu, "memory": memory, "lag_ms": lag * 1e3}


def control(pipe: Connection, port: int, size: int, cpu_s: float) -> float:
    """The loop's lag in ms while another process computes and a body of that size comes."""
    other = multiprocessing.get_context("fork").Process(target=burn, args=(time.process_time() + cpu_s,))
    other.start()
    data = body({"prompt": "abc", "max_tokens": 1}, "no", b'"' + b"a" * size + b'"')
    found = measure(pipe, port, "/v1/completions", data)
    other.join()
    return float(found["lag_ms"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--size", type=int, default=16 << 20)
    parser.add_argument("--routes", default="")
    parser.add_argument("--shapes", default="")
    parser.add_argument("--fields", type=int, default=9, help="so many fields of each route")
    given = parser.parse_args()
    routes = given.routes.split(",") if given.routes else [route for route, (valid, _) in VALID.items() if valid]
    shapes = given.shapes.split(",") if given.shapes else list(SHAPES)
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=server, args=(there,), daemon=True)
    process.start()
    port = here.recv()
    rows = []
    calm = control(here, port, given.size, 0.2)
    for route in routes:
        valid, fields = VALID[route]
        for field in fields[: given.fields]:
            for shape in shapes:
                data = body(valid, field, SHAPES[shape](given.size))
                found = measure(here, port, path_of(route), data)
                for _ in range(AGAIN if found["lag_ms"] > calm + BUDGET_LAG_S * 1e3 else 0):  # a neighbour's fault?
                    found = min(found, measure(here, port, path_of(route), data), key=lambda one: float(one["lag_ms"]))
                rows.append({"route": route, "field": field, "shape": shape, **found})
    calm = max(calm, control(here, port, given.size, 0.2))
    process.terminate()
    report(rows, calm)
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps({"control_lag_ms": calm, "rows": rows}, indent=1))
    over = [row for row in rows if is_over(row, calm)]
    for row in over:
        print("OVER", row)
    sys.exit(bool(over))


def is_over(row: dict[str, Any], calm: float) -> bool:
    """Is one of the budgets spent?"""
    room = 4 + PROMPT / (row["mb"] * 1e6)
    return row["cpu_s"] > BUDGET_CPU_S or row["lag_ms"] > calm + BUDGET_LAG_S * 1e3 or row["memory"] > room


def report(rows: list[dict[str, Any]], calm: float) -> None:
    """The worst of each shape over all routes and fields, and of each route over all shapes."""
    for key in ("shape", "route"):
        print(f"{key:32} {'bodies':>6} {'cpu s':>7} {'memory / size':>14} {'lag ms':>7}")
        for name in dict.fromkeys(row[key] for row in rows):
            part = [row for row in rows if row[key] == name]
            worst = [max(row[figure] for row in part) for figure in ("cpu_s", "memory", "lag_ms")]
            print(f"{name:32} {len(part):6} {worst[0]:7.3f} {worst[1]:14.2f} {worst[2]:7.1f}")
    print(f"control: lag {calm:.1f} ms")


if __name__ == "__main__":
    main()
