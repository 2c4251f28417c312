"""`tokenmill tune`: find good options by short runs. Owns: its flags, the YAML file, and the table of trials."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from tokenmill.cli.bench import MADE, WORKLOAD, workloads
from tokenmill.cli.bench_common import JSON, BenchProgress, check_outputs, check_place, end, save
from tokenmill.cli.errors import INTERRUPTED
from tokenmill.cli.flags import MODEL, engine_flags, flag, resolve_options, spelling, with_flags
from tokenmill.cli.interrupts import hear_time_limits
from tokenmill.cli.loading import say, show_waiting
from tokenmill.cli.named_files import write_named
from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import ParameterError

SEARCH = {
    "out": flag("out", Path, "Write the options here, for serve --config (default: tuned.yaml)."),
    "minutes": flag("minutes", float, "How long to search (default: 5).", min=0.05),
    "trial": flag("trial_seconds", float, "Seconds for which each set of options runs (default: 10).", min=0.1),
    "lossy": flag("lossy", bool, "Also try quantised weights and K/V, which change answers."),
}


@engine_flags
@with_flags("made", MADE)
@with_flags("search", SEARCH)
def tune(
    model: str = MODEL,
    slo: str = typer.Option(
        "",
        "--slo",
        help="The limits that 90 % of the requests must keep, such as ttft=500ms,tpot=50ms: the time to the first "
        "token, and the time per further one. (required)",
    ),
    users: int = typer.Option(
        None, "--users", min=1, help="Users at a time. Each asks again when its answer has ended. (required)"
    ),
    workload: list[Path] = WORKLOAD,
    json_path: Path = JSON,
    *,
    made: dict[str, int],
    search: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """Search for the options with which so many users get the most tokens per second within limits of time.

    Options that are given stay as they are. With --kernel-search load, search instead for the fastest matrix products
    of MODEL on this GPU, for all of --minutes."""
    hear_time_limits()
    config, keywords = resolve_options(model, options)
    if config.tuning.kernel_search != "off":
        idle = {"--slo": slo, "--users": users, "--workload": workload, "--json": json_path}
        named = [name for name, given in idle.items() if given]
        named += [spelling({**MADE, **SEARCH}[name].name) for name in (*made, *search) if name != "minutes"]
        if named:
            raise ParameterError(f"{named[0]} has no effect with --kernel-search: leave one of them out.")
        tune_kernels(config, keywords, 60 * search.get("minutes", 5.0))
        return
    if not slo or not users:
        raise ParameterError("tune needs --slo and --users, or --kernel-search load.")
    check_outputs(json_path, None)
    out = search.get("out", Path("tuned.yaml"))
    check_place(out, "--out")
    plans = workloads(workload, made, config.model.seed)
    if len(plans) > 1:
        raise ParameterError("tune takes one --workload.")
    with show_waiting("Getting ready"):
        from tokenmill.device.memory import pick_device
        from tokenmill.measure import tune as tuning
        from tokenmill.measure.calibrate import calibrated
        from tokenmill.measure.devices import efficiency_of
        from tokenmill.measure.plan import Setup, speed_types
        from tokenmill.measure.slo import read_slo

    lossy = search.get("lossy", False)
    goal = tuning.Goal(users, read_slo(slo), 60 * search.get("minutes", 5.0), search.get("trial", 10.0), lossy)
    with BenchProgress() as progress:
        progress.start("measuring this machine", 1)
        types = dict.fromkeys((*speed_types(config), *(("int8", "int4") if lossy else ())))
        device = calibrated(
            pick_device(config.execute.device),
            tuple(types),
            lambda what: progress.start(f"measuring this machine: {what}", 1),
        )
        setup = Setup(device=device, ranks=1, efficiency=efficiency_of(device))
        result = tuning.tune(keywords, plans[0], goal, setup, progress)
    _show(result)
    try:
        write_named(out, as_yaml(result))
    except ParameterError:  # what was found in minutes is not lost
        typer.echo(as_yaml(result))
        raise
    typer.echo(f"Written: {out}\n  tokenmill serve --config {out}")
    save(result, json_path, None)
    end(result, "trials")


def tune_kernels(config: EngineConfig, keywords: dict[str, Any], seconds: float) -> None:
    """Search for the fastest products of the model on this GPU, and store them where engines find them."""
    with show_waiting("Getting ready"):
        from tokenmill.device.memory import pick_device
        from tokenmill.engine.interfaces.llm import LLM
    device = pick_device(config.execute.device)
    if not device.startswith("cuda"):
        raise ParameterError(f"--kernel-search looks among the products of a GPU; this engine runs on {device}.")
    try:
        with show_waiting(f"Searching for {seconds / 60:g} minutes"):
            llm = LLM(**{**keywords, "kernel_search_seconds": seconds})
    except KeyboardInterrupt:
        say("tokenmill: stopped; faster products that had been found are kept")
        raise typer.Exit(INTERRUPTED) from None
    try:
        for reason in llm.built.facts.reasons:
            if "--kernel-search" in reason:
                typer.echo(reason)
    finally:
        llm.close()


def as_yaml(result: dict[str, Any]) -> str:
    """A file for `serve --config`, with the figures that these options reached."""
    import yaml

    terms = ", ".join(f"{name} <= {ms:g} ms" for name, ms in result["slo_ms"].items())
    found = result["measured"]
    lines = [
        "# Written by `tokenmill tune`; `tokenmill serve --config` takes it.",
        f"# {result['users']} users, {result['workload']}, on {result['device']}.",
        f"# {terms}: met by {found['share']:.0%} of the requests at {found['output_tokens_per_s']:.1f} output tokens/s "
        f"({result['worth']:.2f} times the options as given).",
        *(["# The search was stopped before its time."] if result.get("stopped") else []),
    ]
    plain = {name.replace("_", "-"): value for name, value in result["options"].items() if value is not None}
    return "\n".join(lines) + "\n" + yaml.safe_dump(json.loads(json.dumps(plain)), sort_keys=True)


def _show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{result['model']} on {result['device']}, {result['users']} users, {result['workload']}")
    for head in ("tried", "predicted tok/s", "measured tok/s", "within the objective", ""):
        table.add_column(head, justify="left" if head in ("tried", "") else "right", overflow="fold")
    for trial in result["trials"]:
        changed = f"{trial['tried']} {_short(trial['options'][trial['tried']])}" if trial["tried"] else "(as given)"
        found, hoped = trial["measured"], trial["predicted"]
        table.add_row(
            changed,
            "-" if hoped is None else f"{hoped['output_tokens_per_s']:.1f}",
            "-" if found is None else f"{found['output_tokens_per_s']:.1f}",
            "-" if found is None else f"{found['share']:.0%}",
            trial["why"] or ("kept" if trial["kept"] else ""),
        )
    console = Console(highlight=False)
    console.print(table)
    if not result["met"]:
        console.print("[red]No options met the objective[/]; the nearest ones are written.")
    console.print(f"{result['worth']:.2f} times the tokens of the options as given.")


def _short(value: Any) -> str:
    return str(value.get("method", value)) if isinstance(value, dict) else str(value)
