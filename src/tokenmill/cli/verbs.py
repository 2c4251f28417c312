"""The verbs of `tokenmill`. Owns: their list, and running one. Must not know: torch; a verb imports it when it runs."""

from __future__ import annotations

import typer
from typer.completion import completion_init  # type: ignore[attr-defined]  # not on typer's list of exports

from tokenmill import __version__
from tokenmill.cli import (
    bench,
    chat,
    completion,
    create,
    distill,
    doctor,
    generate,
    merge,
    plan,
    prune,
    pull,
    quality,
    quantize,
    running_models,
    serve,
    stored_models,
    tune,
)
from tokenmill.cli.command import Verb, Verbs
from tokenmill.cli.errors import USER, is_scarce, with_exit_codes
from tokenmill.cli.loading import say
from tokenmill.cli.missing_streams import escape_lacking_characters, open_missing_streams
from tokenmill.core.config import calm_threads, environment_with, keep_to_own_modules, wants_no_colour
from tokenmill.core.environment import unread_variables
from tokenmill.core.errors import why
from tokenmill.process.leaving import leave

completion_init()  # answer shells that ask what may follow, but without typer's own flags for this
app = typer.Typer(
    name="tokenmill",
    cls=Verbs,
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"tokenmill {__version__}")
        raise typer.Exit


@app.callback()
def common(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", is_eager=True, callback=_version, help="Print the version."),
) -> None:
    """An LLM inference engine you can read.

    `tokenmill chat` talks with the model in the package. `tokenmill serve MODEL` serves a model over HTTP, with a page
    for the browser. `tokenmill VERB --help` lists a verb's common flags, `--help-all` all of them."""
    if wants_no_colour():
        context.color = False  # the contexts of verbs inherit it


app.command("serve", cls=serve.SeveralNames)(with_exit_codes(serve.serve))
for name, verb in (
    ("chat", chat.chat),
    ("generate", generate.generate),
    ("pull", pull.pull),
    ("list", stored_models.list_models),
    ("show", stored_models.show),
    ("create", create.create),
    ("cp", stored_models.cp),
    ("rm", stored_models.rm),
    ("ps", running_models.ps),
    ("stop", running_models.stop),
    ("plan", plan.plan),
    ("doctor", doctor.doctor),
    ("quantize", quantize.quantize),
    ("prune", prune.prune),
    ("merge", merge.merge),
    ("distill", distill.distill),
    ("quality", quality.quality),
    ("tune", tune.tune),
    ("completion", completion.completion),
):
    app.command(name, cls=Verb)(with_exit_codes(verb))
app.add_typer(bench.app, name="bench")


def run_verb() -> None:
    """Run the command line, and end the process. The traceback of a bug ends it as in any Python program."""
    keep_to_own_modules()
    open_missing_streams()
    escape_lacking_characters()
    calm_threads()
    for sentence in unread_variables(environment_with({})):
        say(f"note: {sentence}")
    try:
        app()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            leave(end.code or 0)
        raise
    except OSError as error:  # of what is printed before a verb runs: help, the version
        if not is_scarce(error):
            raise
        say(f"tokenmill: {why(error)}")
        leave(USER)
