"""`tokenmill doctor`: what this machine has, and which kernels run. Owns: printing the findings."""

from __future__ import annotations

import json

import typer

from tokenmill.cli.errors import FAILED
from tokenmill.cli.loading import spinner

_MARKS = {"ok": ("ok  ", "green"), "note": ("note", "yellow"), "bad": ("BAD ", "red")}


def doctor(as_json: bool = typer.Option(False, "--json", help="Print the findings as JSON.")) -> None:
    """Look at this machine: devices, memory, kernels, extras; each finding says what to do about it."""
    with spinner("Looking around ..."):
        from tokenmill.measure.doctor import examine

        findings = examine()
    if as_json:
        print(json.dumps({"findings": [vars(finding) for finding in findings]}, indent=2))
    else:
        for finding in findings:
            mark, colour = _MARKS[finding.status]
            typer.secho(mark, fg=colour, nl=False)
            typer.echo(f"  {finding.name}: {finding.detail}")
            if finding.advice:
                typer.echo(f"      -> {finding.advice}")
    if any(finding.status == "bad" for finding in findings):
        raise typer.Exit(FAILED)
