"""How command lines are read and explained. Owns: the one-sentence error for a wrong command line, and the layout of
help.

A flag that a verb lacks is looked up among other programs' flags (foreign.py) before it is refused. Must not know:
verbs.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from tokenmill.cli.errors import USER, exit_code, fail
from tokenmill.cli.foreign import VERBS, RefusedFlag, TypedFlag, as_ours
from tokenmill.cli.help import ALL, page, placeholder, verbs_page
from tokenmill.cli.said_twice import refuse_two_values
from tokenmill.core.config import GROUPS, SERVER_GROUPS, all_options
from tokenmill.core.errors import MOST_SHOWN, ParameterError, TokenmillError
from tokenmill.core.text_values import read_count

TYPED = "tokenmill.typed"
"""The key under which a context keeps the flags as they were typed."""
MOST_CHOICES = 24
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]")
USAGE_ERROR: Any = typer.BadParameter.__mro__[1]
"""What typer raises for a wrong command line, whichever library reads it."""


class CommandLineError(typer.BadParameter):
    """An error in the command line, in one or two sentences."""

    exit_code = USER

    def show(self, file: Any = None) -> None:
        """Print it to standard error, as failures of verbs are."""
        typer.secho(f"tokenmill: {self.message}", fg="red", err=True)


class Verb(TyperCommand):
    """One verb."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Turn the words into the form that typer reads."""
        if ctx.resilient_parsing:  # a shell asks what may follow
            return super().parse_args(ctx, args)
        if ALL in args:
            typer.echo(self._page(ctx, everything=True), color=ctx.color)
            raise typer.Exit
        said: list[TypedFlag] = []
        try:
            group = ctx.parent if ctx.parent is not None and ctx.parent.parent is not None else None
            verb = f"{self.name}" if group is None else f"{group.info_name} {self.name}"
            ours = as_ours(args, self._flags(), verb, said)
            refuse_two_values(said, self.params)
            return super().parse_args(ctx, self._counted(ours, self._named(_typed(said))))
        except CommandLineError:
            raise
        except RefusedFlag as error:
            raise CommandLineError(f"{error}{self._hint(ctx, error.flag)}") from None
        except USAGE_ERROR as error:
            _tell(ctx, error, self._named(_typed(said)))
        finally:
            ctx.meta[TYPED] = _typed(said)

    def invoke(self, ctx: Any) -> Any:
        """Run the verb. An error names flags as they were typed, and tells which of them this verb does not have."""
        try:
            return super().invoke(ctx)
        except TokenmillError as error:
            text, lacking = str(error), self._lacking(str(error))
            if isinstance(error, ParameterError):
                text = as_typed(text, self._named(ctx.meta.get(TYPED, {})), error.param)
            fail(f"{text} (`{self.name}` has no {_listed(lacking)}.)" if lacking else text, exit_code(error))

    def _lacking(self, text: str) -> list[str]:
        """Flags that a message speaks of and this verb lacks. What stands in backquotes is a command of its own."""
        named = _FLAG.findall(re.sub("`[^`]*`", "", text))
        engines = {**all_options(GROUPS), **all_options(SERVER_GROUPS)}
        return [f for f in dict.fromkeys(named) if f not in self._flags() and f[2:].replace("-", "_") in engines]

    def _named(self, typed: Mapping[str, str]) -> dict[str, str]:
        """The names that a message may use for a flag that was typed -> how it was typed."""
        found: dict[str, str] = {}
        for param in self.params:
            names = [*param.opts, *param.secondary_opts]
            typed_name = next((typed[name] for name in names if name in typed), None)
            if typed_name is not None and param.param_type_name == "option":
                field = param.opts[0].removeprefix("--").replace("-", "_")
                found |= dict.fromkeys((param.opts[0], field, str(param.name)), typed_name)
        return found

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help without the flags that few people need."""
        formatter.write(self._page(ctx, everything=False) + "\n")

    def _page(self, ctx: Any, *, everything: bool) -> str:
        return page(_usage(self, ctx), self.help or "", self.get_params(ctx), everything=everything)

    def _flags(self) -> dict[str, bool]:
        """Every flag, and whether a value follows it."""
        found = {"--help": False}
        for param in self.params:
            if param.param_type_name == "option":
                takes = not getattr(param, "is_flag", False)
                found |= dict.fromkeys([*param.opts, *param.secondary_opts], takes)
        return found

    def _counted(self, args: list[str], named: Mapping[str, str]) -> list[str]:
        """The command line with 32k and 2GiB as numbers, behind every flag that takes a whole one."""
        options = [param for param in self.params if param.param_type_name == "option"]
        whole = {name for param in options if placeholder(param) == "N" and not param.metavar for name in param.opts}
        known, words, found = self._flags(), iter(args), []
        for word in words:
            name, equals, joined = word.partition("=")
            if word == "--" or not known.get(name):
                found += [word] if word != "--" else [word, *words]
                continue
            value = joined if equals else next(words, None)
            if name in whole and value is not None:
                count = read_count(value)
                if count is None:
                    said = f"takes a whole number, not {value[:MOST_SHOWN]} (32k and 2GiB are allowed)."
                    raise RefusedFlag(f"{named.get(name, name)} {said}")
                value = str(count)
            found += [word] if value is None else [f"{name}={value}"] if equals else [name, value]
        return found

    def _hint(self, ctx: Any, flag: str | None) -> str:
        """A hint for an unknown flag."""
        if flag is None:
            return ""
        others = [verb for verb in _siblings(ctx) if flag in verb._flags()] if ctx.parent is not None else []
        if others:
            return f" It is a flag of {_listed([str(verb.name) for verb in others])}."
        shown = [name for name in self._flags() if name.startswith("--")]
        close = difflib.get_close_matches(flag, shown, n=1, cutoff=0.8)
        if close:
            return f" Did you mean {close[0]}?"
        if flag.lstrip("-").replace("-", "_") in {**all_options(GROUPS), **all_options(SERVER_GROUPS)}:
            return " It is an option of engines, and this verb starts none."
        return f" `{ctx.command_path} {ALL}` lists the flags."


class Verbs(TyperGroup):
    """The command itself, or a verb with verbs of its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the few flags before the verb."""
        if ALL in args[:1]:
            args = ["--help", *args[1:]]
        if args[:1] == ["-h"]:
            args = ["--help", *args[1:]]
        try:
            return super().parse_args(ctx, args)
        except USAGE_ERROR as error:
            if type(error).__name__ == "NoArgsIsHelpError":
                raise
            name = getattr(error, "option_name", None)
            if name in ("-v", "-V"):
                raise CommandLineError(f"`{ctx.find_root().command_path} --version` prints the version.") from None
            if name is not None:
                raise CommandLineError(
                    f"A verb comes first, flags after it: `{ctx.command_path} {_example(ctx)} {name} ...` "
                    f"({ctx.command_path} --help lists the verbs)."
                ) from None
            _tell(ctx, error)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The verb, or a hint of the verb that was probably meant."""
        if ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        try:
            return super().resolve_command(ctx, args)
        except USAGE_ERROR:
            raise CommandLineError(self._no_verb(ctx, args[0])) from None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the verbs, one per line."""
        verbs = [
            (name, verb.get_short_help_str(200))
            for name, verb in ((n, self.get_command(ctx, n)) for n in self.list_commands(ctx))
            if verb is not None and not verb.hidden
        ]
        rows = [(", ".join(param.opts), getattr(param, "help", None) or "") for param in self.get_params(ctx)]
        formatter.write(verbs_page(_usage(self, ctx), self.help or "", verbs, rows) + "\n")

    def _no_verb(self, ctx: Any, word: str) -> str:
        at_top = ctx.parent is None
        if at_top and word in VERBS:
            return f"There is no verb {word}. {VERBS[word]}"
        if close := difflib.get_close_matches(word, self.list_commands(ctx), n=1, cutoff=0.7):
            return f"There is no verb {word}. Did you mean {close[0]}?"
        if at_top and (word == "demo" or "/" in word or word.endswith(".gguf")):
            return (
                f"{word} is not a verb: `{ctx.command_path} chat {word}` talks with a model, `serve {word}` serves it."
            )
        return f"There is no verb {word}; there are {_listed(self.list_commands(ctx))}."


def _typed(said: list[TypedFlag]) -> dict[str, str]:
    """Every flag that was found, and how it was typed."""
    return {each.ours: each.typed for each in said}


def _siblings(ctx: Any) -> Iterator[Verb]:
    group = ctx.parent.command
    for name in group.list_commands(ctx.parent):
        verb = group.get_command(ctx.parent, name)
        if isinstance(verb, Verb) and verb is not ctx.command:
            yield verb


def _usage(command: Any, ctx: Any) -> str:
    pieces = " ".join(command.collect_usage_pieces(ctx))
    return f"{typer.style('Usage:', bold=True)} {ctx.command_path} {pieces.replace('COMMAND [ARGS]...', 'VERB ...')}"


def _example(ctx: Any) -> str:
    """A verb of this group, as an example."""
    names = ctx.command.list_commands(ctx)
    return "chat" if "chat" in names else str(names[0])


def as_typed(text: str, named: Mapping[str, str], param: str | None = None) -> str:
    """A message with the names of flags as they were typed. The option's own name stays only if the option itself is
    wrong."""
    for name, said in named.items():
        if name.startswith("--"):
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", said.replace("\\", ""), text)
        elif name == param:
            text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?= must | takes | needs | is )", said, text, count=1)
    return text


def _tell(ctx: Any, error: Any, named: Mapping[str, str] | None = None) -> NoReturn:
    """The library's error in our words."""
    text = " ".join(str(error.format_message()).split()).rstrip(".").replace("Value error, ", "")
    text = text.replace("Input should be a valid number, unable to parse string as a number", "it takes a number")
    text = text.replace("Input should be greater than or equal to", "it must be at least")
    text = text.replace("Input should be less than or equal to", "it must be at most")
    said, between, choices = text.partition(" is not one of ")
    text = f"{said}{between}{_nearest(said, choices.replace(chr(39), ''))}"  # many are easier to read without quotes
    text = re.sub(r"'(--?[\w-]+)'(?: / '--?[\w-]+')+", r"'\1'", text)  # one of a flag's names is enough
    if "unexpected extra argument" in text:
        text += _too_many(ctx, text.rpartition("(")[2].rstrip(")").split())
    raise CommandLineError(f"{as_typed(text, named or {})}. `{ctx.command_path} --help` explains it.") from None


def _nearest(said: str, choices: str) -> str:
    """The choices. If there are very many: those most like the given one."""
    every = choices.split(", ")
    if len(every) <= MOST_CHOICES:
        return choices
    close = difflib.get_close_matches(said.rpartition(": ")[2].strip("'"), every, n=6, cutoff=0.5) or every[:6]
    return f"{', '.join(close)}, or {len(every) - len(close)} others"


def _too_many(ctx: Any, words: list[str]) -> str:
    """A guess at what words without a flag may have been meant to be."""
    if words[:1] and words[0].lower() in ("true", "false", "on", "off", "yes", "no", "0", "1"):
        return "; a switch takes no value: --no-... switches it off"
    if "--prompt" in ctx.command._flags():
        return "; the text stands behind --prompt, in quotes"
    if ctx.info_name == "chat":
        return "; what you say to the model is typed when it is ready, or comes from a pipe"
    return "" if len(words) == 1 else "; a text of several words stands behind a flag, in quotes"


def _listed(names: list[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
