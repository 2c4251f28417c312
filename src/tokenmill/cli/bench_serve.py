"""`tokenmill bench serve`: load for any OpenAI-compatible server. Owns: its flags and its table."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import typer

from tokenmill.cli.bench_common import (
    JSON,
    MOST_LEN,
    MOST_REQUESTS,
    MOST_ROWS,
    MOST_RUNS,
    PLOT,
    BenchProgress,
    check_outputs,
    end,
    save,
)
from tokenmill.cli.flags import flag, with_flags
from tokenmill.cli.loading import show_waiting
from tokenmill.core.errors import ParameterError

HERE = "http://127.0.0.1:8000"
LOCAL = ("127.0.0.1", "localhost", "::1")
Arrivals = Literal["closed", "constant", "poisson", "bursty", "trace"]
TARGET = {
    "model": flag("model", str, "Name of the model (default: the first that the server lists)."),
    "key": flag("api_key", str, "Key for the server."),
    "chat": flag("chat", bool, "Use /v1/chat/completions; prompts are then text."),
    "plain": flag("plain", bool, "Send only standard fields: answers may end early, and each event counts as a token."),
    "ignore_eos": flag(
        "ignore_eos",
        bool,
        "Answers have their full length (default), or end where the model ends them.",
        spelled="--ignore-eos/--respect-eos",
    ),
    "timeout": flag("timeout", float, "Seconds after which a request has failed (default: 600).", min=0.1),
    "slo": flag(
        "slo", str, "Count the requests that meet this, such as ttft=500ms,tpot=50ms.", spelled="--slo --goodput"
    ),
    "percentiles": flag(
        "percentiles",
        str,
        "Percentiles to report (default: 50,90,95,99).",
        spelled="--percentiles --metric-percentiles",
    ),
    "device": flag("device", str, "The server's device, for mbu and mfu, in the form that `plan` takes."),
    "warmup": flag(
        "warmup", int, "Requests before the run, one after the other (default: 1).", min=0, max=MOST_REQUESTS
    ),
    "temperature": flag("temperature", float, "Sampling temperature (default: 0).", min=0.0),
}
ASKED = {
    "inputs": flag("input_len", str, "Prompt tokens: 512, 128:1024, normal:512:100, lognormal:512:0.8 (default: 128)."),
    "outputs": flag("output_len", str, "Output tokens, in the same form (default: 128)."),
    "count": flag(
        "num_prompts",
        int,
        "Conversations of a made-up load (default: 64) or of a trace (all).",
        min=1,
        max=MOST_REQUESTS,
    ),
    "turns": flag(
        "turns",
        int,
        "Questions per conversation. Each is sent with everything before it (default: 1).",
        min=1,
        max=MOST_RUNS,
    ),
    "prefix": flag("prefix_len", int, "Tokens of a system prompt that users share (default: 0).", min=0, max=MOST_LEN),
    "prefixes": flag(
        "num_prefixes", int, "How many different system prompts there are (default: 1).", min=1, max=MOST_REQUESTS
    ),
    "vocab": flag("vocab_size", int, "Made-up token ids stay below this (default: 1000).", min=16),
    "text": flag("text", bool, "Make up text instead of token ids."),
    "seed": flag("seed", int, "Seed of made-up prompts and arrivals (default: 0).", min=0),
}
COMING = {
    "arrivals": flag("arrivals", Arrivals, "When requests arrive (default: closed with --users, poisson with --rate)."),
    "sweep": flag("sweep", bool, "Raise --rate until the server falls behind."),
    "duration": flag("duration", float, "Seconds of each rate of a --sweep (default: 10).", min=0.1),
    "users": flag(
        "users", int, "Closed loop: this many users, each asking when its last answer has ended.", min=1, max=MOST_ROWS
    ),
    "rate": flag(
        "rate",
        float,
        "Open loop: requests per second (inf: all at once); for traces, how many times their speed.",
        spelled="--rate --request-rate",
    ),
    "shape": flag("burstiness", float, "Bursty arrivals; smaller is burstier, 1 is poisson (default: 0.25)."),
    "think": flag(
        "think_time", float, "Seconds between an answer and the next question of its user (default: 0).", min=0.0
    ),
    "max_open": flag(
        "max_concurrency", int, "No more requests than this at once; alone, like --users.", min=1, max=MOST_ROWS
    ),
}


@with_flags("target", TARGET)
@with_flags("asked", ASKED)
@with_flags("coming", COMING)
def serve(
    url: str = typer.Argument(None, metavar="URL", help=f"The server (default: {HERE})."),
    base_url: str = typer.Option(None, "--base-url", help="The server, as a flag."),
    workload: Path = typer.Option(
        None,
        "--workload",
        "--dataset-path",
        help="A trace: JSON lines like those of bench throughput, ShareGPT's or Mooncake's format.",
    ),
    json_path: Path = JSON,
    plot: Path = PLOT,
    *,
    target: dict[str, Any],
    asked: dict[str, Any],
    coming: dict[str, Any],
) -> None:
    """Put load on a server and measure what its users see."""
    check_outputs(json_path, plot)
    if url is not None and base_url not in (None, url):
        raise ParameterError(f"Two servers are named: {url} and --base-url {base_url}. Give one of them.")
    _check_address(base_url or url or HERE)
    with show_waiting("Getting ready"):
        from tokenmill.measure import server_load as loads
        from tokenmill.measure.slo import read_slo
        from tokenmill.measure.stats import PERCENTILES, read_percentiles

    chat, sweep = target.get("chat", False), coming.pop("sweep", False)
    duration = coming.pop("duration", None)
    pattern = _pattern(coming.pop("arrivals", None), coming, asked.get("seed", 0), sweep)
    more, notes = _conversations(workload, asked, chat)
    conversations = more(asked.get("count"), 0)
    longest = max(len(c.turns) for c in conversations)
    _refuse_idle({
        "--duration is the time of each rate of a --sweep": duration is not None and not sweep,
        "--num-prefixes needs --prefix-len": "prefixes" in asked and not asked.get("prefix"),
        "--vocab-size is for token ids, and prompts are text here": "vocab" in asked and (chat or "text" in asked),
        "--think-time needs conversations of several questions (--turns)": "think" in coming and longest == 1,
    })  # fmt: skip
    wanted = _target(url or base_url or HERE, target, want_ids=longest > 1 and not chat)
    objective = read_slo(target["slo"]) if "slo" in target else None
    allow_sockets()
    percentiles = read_percentiles(target["percentiles"]) if "percentiles" in target else PERCENTILES
    device = _device(target["device"]) if "device" in target else None
    shared: dict[str, Any] = {"slo": objective, "warmup": target.get("warmup", 1), "percentiles": percentiles}
    with BenchProgress() as progress, asyncio.Runner(loop_factory=_loop()) as runner:
        if sweep:
            seconds = duration or loads.SWEEP_SECONDS
            work = loads.sweep(wanted, more, pattern, seconds=seconds, progress=progress, **shared)
        else:
            work = loads.serve_load(wanted, conversations, pattern, progress=progress, **shared)
        result = runner.run(work)
    with show_waiting("Measuring this machine"):
        result["notes"] = [*notes, *_utilise(result, device)]
    _show(result, [f"p{p:g}" for p in percentiles])
    save(result, json_path, plot)
    end(result, "runs" if sweep else "requests")


def _refuse_idle(idle: dict[str, bool]) -> None:
    """Refuse flags that would have no effect: why, and whether it is so."""
    for why, found in idle.items():
        if found:
            raise ParameterError(f"{why}: leave it out.")


def allow_sockets() -> None:
    """Raise the number of open files to the most that the system allows this process."""
    try:
        import resource
    except ImportError:
        return  # there is no such module on Windows
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _loop() -> Any:
    """The factory of uvloop's event loops if there are such: they keep up with more streams."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _pattern(arrivals: str | None, coming: dict[str, Any], seed: int, sweep: bool) -> Any:
    from tokenmill.measure.server_load import Pattern

    if "max_open" in coming and not {"rate", "users"} & coming.keys() and arrivals in (None, "closed") and not sweep:
        coming = {**coming, "users": coming["max_open"]}
        del coming["max_open"]
    usual = "bursty" if "shape" in coming else "poisson"
    kind = arrivals or (usual if "rate" in coming else "closed")
    if "shape" in coming and (kind != "bursty" or not coming["shape"] > 0):
        raise ParameterError("--burstiness is for open loops with --arrivals bursty, and must be above 0.")
    if kind == "closed" and "max_open" in coming:
        raise ParameterError("--users says how many requests there are at once: leave out --max-concurrency.")
    if not coming.get("rate", 1.0) > 0:
        raise ParameterError(f"--rate must be above 0, got {coming['rate']}.")
    if sweep and math.isinf(coming.get("rate", 1.0)):
        raise ParameterError("--sweep begins at a finite --rate.")
    if kind == "closed" and ("rate" in coming or sweep):
        raise ParameterError("A closed loop has no rate: leave out --rate and --sweep, or choose other --arrivals.")
    if kind in ("constant", "poisson", "bursty") and not coming.get("rate", 0) > 0:
        raise ParameterError(f"--arrivals {kind} needs --rate, requests per second.")
    if kind != "closed" and "users" in coming:
        raise ParameterError("--users is for closed loops: leave it out, or leave out --rate and --arrivals.")
    if kind == "trace" and sweep:
        raise ParameterError("--sweep chooses its own rates; choose other --arrivals than the trace's.")
    return Pattern(kind=kind, seed=seed, **coming)


def _conversations(workload: Path | None, asked: dict[str, Any], chat: bool) -> tuple[Any, list[str]]:
    """A function (how many or None, number of the run) -> conversations, and notes. A trace begins again at its end."""
    from tokenmill.measure import conversations as talk

    if workload is not None:
        made_only = set(asked) - {"vocab", "seed", "count"}
        if made_only:
            raise ParameterError("--workload brings its own prompts: leave out flags for made-up ones.")
        reader = talk.Reader(workload, asked.get("vocab", 1000))
        found = reader.read()
        if chat and any(not isinstance(turn.prompt, str) for c in found for turn in c.turns):
            raise ParameterError("--chat needs text, and this trace has token ids or lengths only.")
        notes = sorted(reader.notes)
        return lambda count, _: list(itertools.islice(itertools.cycle(found), count or len(found))), notes
    inputs = talk.read_lengths(asked.get("inputs", "128"), "--input-len")
    outputs = talk.read_lengths(asked.get("outputs", "128"), "--output-len")
    plain = {name: asked[name] for name in ("turns", "prefix", "prefixes", "vocab") if name in asked}
    text, seed = chat or asked.get("text", False), asked.get("seed", 0)

    def make(count: int | None, number: int) -> list[Any]:
        # Each rate of a sweep has prompts of its own: repeated ones would be found in the prefix cache.
        load = talk.Made(count or 64, inputs, outputs, **plain, text=text, seed=seed + 7919 * number)
        return talk.make_conversations(load)

    return make, ["prompt lengths are words"] if text else []


def _target(base_url: str, given: dict[str, Any], *, want_ids: bool) -> Any:
    from tokenmill.measure.client import Target

    kept = {name: given[name] for name in ("key", "chat", "timeout", "temperature") if name in given}
    return Target(
        base_url=base_url.rstrip("/").removesuffix("/v1"),
        model=given.get("model", ""),
        extras=not given.get("plain", False),
        ignore_eos=given.get("ignore_eos", True),
        want_ids=want_ids,
        **kept,
    )


def _check_address(url: str) -> None:
    if not url.startswith(("http://", "https://")):
        raise ParameterError(f"The server's address must begin with http:// or https://, got {url!r}.")


def _device(name: str) -> Any:
    """An entry of the hardware table, or a file that `doctor --measure --json` wrote on the server's machine."""
    from tokenmill.measure.ceilings import load_measured
    from tokenmill.measure.devices import find_device

    return load_measured(Path(name)) if name.endswith(".json") else find_device(name)


def _utilise(result: dict[str, Any], device: Any) -> list[str]:
    """Fill in mbu and mfu. Returns what to say about them. This machine's own CPU is measured now, after the run."""
    from tokenmill.measure import server_work
    from tokenmill.measure.ceilings import measure_device
    from tokenmill.measure.devices import ABOVE, products_in, recognise
    from tokenmill.measure.result_files import STOPPED

    if result["flops"] is None:
        return [server_work.CUT_OFF if STOPPED in result and result["bench"] == "serve" else server_work.UNTOLD]
    server_device = result["server_device"]
    kind, dtype = server_device.get("device", "cuda"), server_device.get("dtype") or "bfloat16"
    device = device or recognise(server_device.get("device_name", "") or "-")
    if device is None and kind == "cpu" and urlsplit(result["base_url"]).hostname in LOCAL:
        device = measure_device(
            "cpu", tuple(dict.fromkeys((dtype, products_in("cpu", dtype, server_device["quantization"]))))
        )
    if device is None:
        return ["mbu and mfu are null: what the server's device can do is not known here; name it with --device"]
    wanted = products_in("cpu" if device.kind == "cpu" else "gpu", dtype, server_device.get("quantization"))
    wanted = wanted if wanted in device.flops else dtype
    honest = server_work.fill_shares(result, device, wanted)
    rate = device.flops_in(wanted)
    shown = "" if rate is None else f", {rate / 1e12:.3g} TFLOP/s in {wanted}"
    limits = f"ceilings of {device.title}: {device.bytes_per_s / 1e9:.1f} GB/s{shown} ({device.source})"
    basis = "mbu and mfu: by the server's own estimate of what its steps moved and computed"
    return [limits, basis] if honest else [limits, basis, ABOVE]


def _show(result: dict[str, Any], percentiles: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    from tokenmill.measure.result_files import STOPPED

    console = Console(highlight=False)
    if result["bench"] == "sweep":
        console.print(_sweep_table(result["runs"]))
        knee = result["knee_rate"]
        found = f"The knee, and what users see there: {knee:.3g} requests/s." if knee else None
        other = "The knee was not reached." if STOPPED in result else "The server falls behind at the first rate."
        console.print(found or other)
    table = Table(title=f"{result['model']} at {result['base_url']}, {result['workload']}", show_header=False)
    for name, text in _rows(result, percentiles):
        table.add_row(name, text)
    console.print(table)
    for note in [*result["notes"], *_warnings(result)]:
        console.print(f"note: {note}")


def _rows(result: dict[str, Any], percentiles: list[str]) -> list[tuple[str, str]]:
    rows = [
        ("requests", f"{result['completed']} of {result['requests']} in {result['seconds']:.2f} s"),
        ("errors", ", ".join(f"{kind}: {n}" for kind, n in result["errors"].items()) or "none"),
        ("requests/s, /min", f"{result['requests_per_s']:.2f}, {result['requests_per_minute']:.0f}"),
        ("output tokens/s", f"{result['output_tokens_per_s']:.1f}"),
        ("total tokens/s", f"{result['total_tokens_per_s']:.1f}"),
    ]
    for head, key in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("ITL", "itl_ms"), ("end to end", "e2e_ms")):
        ms = result[key]
        if ms["mean"] is not None:
            shown = ", ".join(f"{name} {ms[name]:.1f}" for name in (*percentiles, "mean"))
            rows.append((f"{head}, ms", shown))
    if result["goodput"] is not None:
        good = result["goodput"]
        rows.append(("goodput", f"{good['requests_per_s']:.2f} requests/s, {good['share']:.1%} meet the objective"))
    if result["mbu"] is not None:
        rows.append(("mbu, mfu", f"{result['mbu']:.3f}, " + ("-" if result["mfu"] is None else f"{result['mfu']:.3f}")))
    return rows


def _sweep_table(runs: list[dict[str, Any]]) -> Any:
    from rich.box import SIMPLE
    from rich.table import Table

    from tokenmill.measure.server_load import keeps_up

    table = Table(box=SIMPLE, pad_edge=False)
    for head in ("requests/s", "output tok/s", "TTFT p50", "p99 ms", "TPOT p50", "p99 ms", "goodput", "kept up"):
        table.add_column(head, justify="right")
    for run in runs:
        times = [run[key][p] for key in ("ttft_ms", "tpot_ms") for p in ("p50", "p99")]
        good = "-" if run["goodput"] is None else f"{run['goodput']['share']:.0%}"
        rates = [run["offered_rate"], run["output_tokens_per_s"]]
        cells = ["-" if value is None else f"{value:.2f}" for value in (*rates, *times)]
        table.add_row(*cells, good, "yes" if keeps_up(run) else "no")
    return table


def _warnings(result: dict[str, Any]) -> list[str]:
    found = []
    late = result["client_late_ms"]["p99"]
    if late is not None and late > 20:
        found.append(f"the client itself sent requests late (p99 {late:.0f} ms): it may be the bottleneck")
    if result["tokens_counted"] is False:
        found.append("the server did not count its events' tokens: each event counts as one until the final usage")
    return found
