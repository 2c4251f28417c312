"""`tokenmill plan`: memory, speed and cost before loading. Owns: its flags, the table and the sentences around it."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import typer

from tokenmill.cli.bench_common import PLOT, check_outputs, save
from tokenmill.cli.errors import FAILED
from tokenmill.cli.flags import MODEL, engine_flags, flag, resolve_options, with_flags
from tokenmill.cli.loading import show_waiting
from tokenmill.core.errors import ParameterError
from tokenmill.core.text_file import check_file

LOAD = {
    "efficiency": flag(
        "efficiency",
        str,
        "Shares of the ceilings that are reached: MEMORY,COMPUTE, or one for both "
        "(default: the device's, which the result names).",
    ),
    "price": flag("price", float, "US dollars per hour of one device (default: the hardware table's).", min=0.0),
    "contexts": flag(
        "context", list[int], "Prompt tokens per request (may be repeated; default: 1024, 8192, 32768, 131072).", min=1
    ),
    "output": flag("output_len", int, "Output tokens per request (default: 256).", min=1),
    "slo": flag("slo", str, "Find the cheapest set-up that meets this for --users, such as ttft=500ms,tpot=50ms."),
    "again": flag(
        "measure_again",
        bool,
        "Measure this machine completely, even if it was measured within the last 30 days.",
        spelled="--measure --measure-again",
    ),
    "users": flag("users", int, "Users at a time, for --slo, each with the longest prompt of --context.", min=1),
}


@engine_flags
@with_flags("load", LOAD)
def plan(
    model: str = MODEL,
    workload: list[Path] = typer.Option(
        None, "--workload", help="Predict the result of bench throughput for this file (may be repeated)."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
    picture: Path = PLOT,
    *,
    load: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """Predict whether a model fits, its longest context, speed and cost, without loading it.

    --device takes a name of the hardware table (h200, a100, rtx4090, m4, ...), a file that `doctor --measure --json`
    wrote, or what `serve` takes: then this machine is measured.
    """
    on = options.get("device", "auto")
    options = {name: value for name, value in options.items() if name != "device"}
    config, _ = resolve_options(model, options)
    check_outputs(None, picture)
    with show_waiting("Getting ready"):
        from tokenmill.engine.options.checks import check_options
        from tokenmill.measure import plan as planning
        from tokenmill.measure.devices import efficiency_of
        from tokenmill.measure.several_devices import Spread, check_combined
        from tokenmill.measure.slo import cheapest, read_slo
        from tokenmill.measure.workloads import read_workload

    check_options(config)
    _check_together(load, on)
    # a wrong value is reported before this machine is measured
    objective = read_slo(load["slo"]) if "slo" in load else None
    given = config.parallel
    ranks, stages, experts = given.tensor_parallel_size, given.pipeline_parallel_size, given.enable_expert_parallel
    among = Spread(ranks, stages, experts, given.data_parallel_size)
    check_combined(among, {"--slo": objective is not None, "--workload": bool(workload)})
    for path in workload or ():
        check_file(path, "--workload")
    requests = [read_workload(path) for path in workload or ()]
    planner = None
    with show_waiting(f"Reading {config.model.model}"):
        planning.check_counted(config)  # before this machine is measured
        if _is_here(on):
            from tokenmill.device.memory import pick_device

            planner = planning.read_model(config, "cpu" if pick_device(on) == "cpu" else "gpu", ranks)
    types = planning.speed_types(config) if planner is None else planning.types_of(planner)
    device = _device(on, types, again=load.get("again", False))
    setup = planning.Setup(
        device=device,
        ranks=ranks,
        efficiency=efficiency_of(device, load.get("efficiency")),
        contexts=tuple(load.get("contexts", ())),
        output=load.get("output", planning.DEFAULT_OUTPUT),
        price=load.get("price"),
        stages=among.stages,
        whole_experts=among.whole_experts,
        engines=among.engines,
    )
    with show_waiting(f"Reading {config.model.model}"):
        planner = planner or planning.read_model(config, device.kind, ranks)
        found = planning.plan(planner, setup)
        if not found["fits"]:
            found["instead"] = planning.rescued(planner, setup)
    if objective is not None:
        with show_waiting("Looking for the cheapest set-up"):
            found["cheapest"] = cheapest(config, objective, load["users"], setup)
    if workload and found["fits"]:
        with show_waiting("Going through the workload"):
            from tokenmill.measure.simulate import simulate

            found["workloads"] = [simulate(planner, setup, each) for each in requests]
    if picture is not None and found["fits"]:
        save({**found, "bench": "plan"}, None, picture)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        _show(found)
    if not found["fits"]:
        raise typer.Exit(FAILED)


def _check_together(load: dict[str, Any], device: str) -> None:
    """Refuse flags that need another one, or have no effect beside it."""
    from tokenmill.measure.devices import read_shares

    if "efficiency" in load:
        read_shares(load["efficiency"])
    if load.get("again") and not _is_here(device):
        raise ParameterError(
            f"--measure measures this machine, and --device {device} is another: leave one of them out."
        )
    if ("slo" in load) != ("users" in load):
        raise ParameterError("--slo and --users belong together: how fast, and for how many at a time?")


def _is_here(name: str) -> bool:
    """Is this a device of this machine, not one of the table or of a file?"""
    return name in ("auto", "cpu") or name.startswith("cuda")


def _device(name: str, types: tuple[str, ...], *, again: bool = False) -> Any:
    """The device of this name. This machine is measured briefly, or (`again`) completely; otherwise an earlier
    measurement is used."""
    from tokenmill.measure.devices import find_device

    if not _is_here(name):
        if name.endswith(".json"):
            from tokenmill.measure.ceilings import load_measured, now_here

            return now_here(load_measured(Path(name)))
        return find_device(name)
    with show_waiting("Getting ready"):
        from tokenmill.device.memory import describe, pick_device
        from tokenmill.measure.ceilings import now_here, read_measured
        from tokenmill.measure.kept_measurements import EXPERTS, keep_measurement, read_kept

        device = pick_device(name)
        title = describe(device)
        kept = None if again else read_kept(device, title, types)
        if kept is not None:
            with contextlib.suppress(ParameterError):  # the file is damaged, so the machine is measured again
                return now_here(read_measured(kept, f"measured on {device}"))
    short = device == "cpu" and not again
    how = "briefly" if short else "thoroughly, for a minute or more"
    with show_waiting(f"Measuring this machine {how}; the result is kept") as now:
        from tokenmill.measure.calibrate import measure_calibrated

        found = measure_calibrated(device, types, mixture=EXPERTS in types, short=short, now=now)
    if not found["calibration"]["unfinished"]:
        keep_measurement(found, device, title, types)
    return read_measured(found, f"measured on {device}")


def _show(found: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    for line in _sentences(found):
        console.print(line)
    if found["points"]:
        console.print(_table(found["points"]))
        console.print(
            "[dim]TTFT: one prompt on an idle engine. TPOT: a step in the middle of the answers. "
            f"Output tok/s: sustained, answers of {found['load']['output_tokens']} tokens, new prompts in between.[/]"
        )
    for line in _closing(found):
        console.print(line)


def _sentences(found: dict[str, Any]) -> list[str]:
    memory, count = found["memory"], found["devices"]
    each = f" on each of {count} {'processes' if found['shared'] else 'devices'}" if count > 1 else ""
    scheme = f", weights in {found['quantization']}" if found["quantization"] else ""
    head = f"[bold]{found['model']}[/] on {found['device_title']}{each} ({found['dtype']}{scheme})"
    parts = f"weights {_gb(memory['weights'])}, a full step {_gb(memory['activations'])}"
    if not found["fits"]:
        instead = found.get("instead")
        advice = f" It would fit with {instead}." if instead else ""
        size = _gb(memory["total"])
        return [head, f"[red]It does not fit[/] into {size}: {parts}, and no useful K/V cache is left.{advice}"]
    return [
        head,
        f"[green]It fits[/]: {parts}, K/V cache {_gb(memory['kv'])}, {_gb(memory['free'])} left.",
        f"The longest context is {found['max_context']} tokens; {found['max_batch']} requests of "
        f"{found['points'][0]['context']} tokens fit at once.",
        *_together(found["in_all"]),
    ]


def _together(whole: dict[str, Any]) -> list[str]:
    """The figures of several engines together. The other lines are about each engine."""
    if whole["engines"] == 1:
        return []
    where = "one machine, which they share" if whole["devices"] == 1 else f"{whole['devices']} devices"
    return [
        f"These are figures of one of {whole['engines']} engines. In all: {where}, weights {_gb(whole['weights'])}, "
        f"K/V cache {_gb(whole['kv'])}, {whole['max_batch']} requests at once, and "
        f"{whole['output_tokens_per_s']:.1f} output tok/s at the best of these loads."
    ]


def _table(points: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table()
    for head in ("context", "batch", "TTFT ms", "TPOT ms", "output tok/s"):
        table.add_column(head, justify="right")
    table.add_column("limited by")
    for p in points:
        speed, limit = f"{p['output_tokens_per_s']:.1f}", p["limit"]
        if "bubbles" in p:
            limit += f"; waiting: {p['bubbles']['prompt']:.0%} of prompts, {p['bubbles']['decode']:.0%} of tokens"
        table.add_row(str(p["context"]), str(p["batch"]), f"{p['ttft_ms']:.1f}", f"{p['tpot_ms']:.2f}", speed, limit)
    return table


def _closing(found: dict[str, Any]) -> list[str]:
    lines = []
    sent = found["traffic"]
    if found["devices"] > 1:
        parts = {"sums": "sums of slices", "stages": "states between stages"}
        traffic = ", ".join(f"{text} {sent[name] / 1024:.1f} KiB" for name, text in parts.items() if sent[name])
        rate = sent["link_bytes_per_s"] / 1e9
        speed = f"at {rate:g} GB/s" if rate else "which counts as no time: no speed between ranks is known"
        lines.append(f"Each rank sends per token: {traffic}, {speed}.")
    if found["usd_per_million_tokens"] is not None:
        price = f"{found['usd_per_hour']:g} dollars an hour" + (" each" if found["in_all"]["devices"] > 1 else "")
        when = f" (usual in {found['price_date']}; yours: --price)" if found["price_date"] else ""
        cost = f"{found['usd_per_million_tokens']:.3f} dollars per million output tokens at the best of these loads."
        lines.append(f"At {price}{when}: {cost}")
    for run in found.get("workloads", []):
        lines.append(
            f"{run['workload']} is predicted to take {run['seconds']:.2f} s: {run['output_tokens_per_s']:.1f} output "
            f"tokens/s, TTFT p50 {run['ttft_ms']['p50']:.1f} ms, TPOT p50 {run['tpot_ms']['p50'] or 0:.2f} ms."
        )
    if found.get("cheapest") is not None:
        lines += found["cheapest"]["sentences"]
    if found["flags"]:
        lines.append(f"Flags: {' '.join(found['flags'])}")
    lines.append(f"[dim]{_basis(found['efficiency'], found['ceilings']['source'])}[/]")
    if found["efficiency"]["short"]:
        lines.append("[dim]That was a short measurement; `--measure`, or `doctor --measure`, takes a long one.[/]")
    lines += [f"[dim]note: {note}[/]" for note in found["notes"]]
    return lines


def _basis(shares: dict[str, Any], ceilings: str) -> str:
    """What the times are based on."""
    if shares["calibrated"]:
        where = ceilings.removeprefix("measured, ").removeprefix("measured ")
        return f"Times: as this engine's kernels, attention and host were measured ({where})."
    return (
        f"Assumed: {shares['memory']:.0%} of the memory bandwidth, {shares['compute']:.0%} of the products, "
        f"{shares['step_ms']:g} ms around a step ({shares['source']}). "
        f"Ceilings: {ceilings.replace('datasheet', 'data sheet of the maker')}."
    )


def _gb(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
