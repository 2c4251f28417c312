"""`tokenmill serve`: the HTTP server. Owns: its flags, the configuration file, and what a person sees at start.

Must not know: torch, endpoints.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tokenmill.cli.command import Verb
from tokenmill.cli.flags import (
    engine_flags,
    model_names,
    option_flags,
    other_flags,
    resolve_stored,
    resolve_vllm_flags,
    with_flags,
)
from tokenmill.cli.loading import say, show_waiting, size
from tokenmill.cli.unloaded_model import lacks_template, look_for, look_for_one_of_several, plain_name
from tokenmill.core.config import (
    GROUPS,
    SERVER_GROUPS,
    ListenOptions,
    ServerConfig,
    all_options,
    make_server_config,
)
from tokenmill.core.config_file import read_config_file
from tokenmill.core.errors import ParameterError, UserError

if TYPE_CHECKING:
    from tokenmill.server.access import Rights
    from tokenmill.server.backend import ModelInfo
    from tokenmill.server.many_models.entry import Spec

MODELS = typer.Argument(
    None,
    metavar="MODEL",
    help="Folder, .gguf file, stored or hub name, or `demo` (the default). Several are loaded when asked for.",
    autocompletion=model_names,
)
SERVER_FLAGS = option_flags(SERVER_GROUPS)
NAMES = "--served-model-name"
MODULES = "--lora-modules"


class SeveralNames(Verb):
    """`serve MODEL --served-model-name a b`: the words after that flag are names, as in vLLM. The same holds for
    adapters."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Turn the words into the form that click reads: the names as one word with commas."""
        if args and not args[0].startswith("-"):
            args = spread_modules(joined_names(args))
        return super().parse_args(ctx, args)


def joined_names(args: list[str]) -> list[str]:
    """Join all words after the flag into one, wherever it stands."""
    names: list[str] = []
    kept: list[str] = []
    reading = False
    for word in args:
        reading = (reading and not word.startswith("-")) or word == NAMES
        if not reading:
            kept.append(word)
        elif word != NAMES:
            names.append(word)
    return [*kept, NAMES, ",".join(names)] if names else args


def spread_modules(args: list[str]) -> list[str]:
    """Give every word after the flag for adapters a flag of its own."""
    kept: list[str] = []
    reading = False
    for word in args:
        if word.startswith("-"):
            reading = word == MODULES
        elif reading and kept[-1] != MODULES:
            kept.append(MODULES)
        kept.append(word)
    return kept


@engine_flags
@with_flags("server", SERVER_FLAGS)
@with_flags("others", other_flags([*all_options(GROUPS), *SERVER_FLAGS]))
def serve(
    model: list[str] = MODELS,
    config: Path = typer.Option(None, "--config", help="YAML file with any of these options (flags win over it)."),
    *,
    server: dict[str, Any],
    options: dict[str, Any],
    others: dict[str, Any],
) -> None:
    """Serve a model over HTTP with OpenAI's API, or several models, each loaded when a request asks for it."""
    _, filed = read_config_file(config)
    meant = resolve_vllm_flags(others)
    ours = {name: meant.pop(name) for name in SERVER_FLAGS.keys() & meant.keys()}
    merged = {**filed, **ours, **server}
    server_config = make_server_config(**merged)
    given = {**meant, **options, "config": config}
    if server_config.models.models or len(model or ()) > 1:
        _serve_many(model or [], given, server_config)
        return
    settled = resolve_stored(model[0] if model else None, given)
    engine_config = settled.config
    if settled.stored is not None:
        server_config = make_server_config(**{**settled.stored.server, **merged})
    from tokenmill.server.logs import set_up_logs
    from tokenmill.server.run import Hooks, serve

    if lacks_template(engine_config) and not server_config.serve.chat_template:
        say(
            f"note: {engine_config.model.model} has no chat template, so it only continues text (/v1/completions); "
            "--chat-template FILE gives it one"
        )
    set_up_logs(server_config.serve)
    keyed = bool(server_config.listen.api_key)
    with contextlib.ExitStack() as waiting:

        def loading(name: str) -> None:
            say(f"tokenmill: loading {name} ...")
            waiting.enter_context(show_waiting(f"Loading {name}"))

        def serving(url: str, info: ModelInfo | None) -> None:
            waiting.close()
            assert info is not None
            chats = bool(server_config.serve.chat_template or (info.tokenizer and info.tokenizer.chat_template))
            say("\n".join(banner(url, info, keyed=keyed, chats=chats)))
            for line in open_doors(server_config.listen):
                typer.secho(line, fg="yellow", err=True)

        status = serve(engine_config, server_config, Hooks(loading, serving, _tell_end))
    if status:
        raise typer.Exit(status)


def _serve_many(models: list[str], given: dict[str, Any], server: ServerConfig) -> None:
    """Serve the models of a file, or several that were typed."""
    from tokenmill.server.logs import set_up_logs
    from tokenmill.server.many_models.models_file import name_models, read_models
    from tokenmill.server.run import Hooks, serve_models

    filed, _ = read_config_file(given["config"])
    base = {**filed, **{name: value for name, value in given.items() if name != "config"}}
    rights: dict[str, Rights] = {}
    if "served_model_name" in base:
        raise ParameterError("--served-model-name names one model; a file of models (--models) has names and aliases.",
                             param="served_model_name")  # fmt: skip
    if server.models.models:
        if models or "model" in base:
            raise ParameterError("Give --models FILE or a MODEL, not both.", param="models")
        specs, rights, keys = read_models(Path(server.models.models), base, server)
        if not set(keys).isdisjoint(server.listen.api_key or ()):
            raise ParameterError(
                "A key under `keys` of --models is also an --api-key, which may use every model: give it in one place.",
                param="api_key",
            )
        server = replace(server, listen=replace(server.listen, api_key=[*(server.listen.api_key or ()), *keys] or None))
        specs = [replace(spec, server=replace(spec.server, listen=server.listen)) for spec in specs]
        _tell_of_absent(specs)
    else:
        models = [plain_name(name) for name in models]
        for name in models:
            look_for(name)
            look_for_one_of_several(name)
        specs = name_models(models, base, server)
    set_up_logs(server.serve)

    def serving(url: str, info: ModelInfo | None) -> None:
        say("\n".join(catalogue_banner(url, specs, keyed=bool(server.listen.api_key))))
        for line in open_doors(server.listen):
            typer.secho(line, fg="yellow", err=True)

    hooks = Hooks(lambda name: say(f"tokenmill: loading {name} ..."), serving, _tell_end)
    if status := serve_models(specs, server, hooks, rights=rights):
        raise typer.Exit(status)


def _tell_of_absent(specs: Sequence[Spec]) -> None:
    """Name models of a file that could not be loaded now. They may come later: a disk, or a download."""
    for spec in specs:
        try:
            look_for(spec.engine.model.model)
        except UserError as error:
            say(f"note: {spec.names[0]} cannot be loaded yet: {error}")


def catalogue_banner(url: str, specs: Sequence[Spec], *, keyed: bool) -> list[str]:
    """Lines that list the models and the address."""
    count = "1 model" if len(specs) == 1 else f"{len(specs)} models"
    lines = [f"{count}; one that is not loaded loads when it is asked for"]
    lines += [f"  {spec.names[0]}{' (loaded, and stays)' if spec.pin else ''}" for spec in specs[:20]]
    if len(specs) > 20:
        lines.append(f"  and {len(specs) - 20} more: /v1/models lists them")
    where = (
        f"listening on {url}" if url.startswith("unix:") else f"listening on {url}/v1, web page at {reachable(url)}/"
    )
    return [*lines, where, f"  {curl(url, specs[0].names[0], keyed=keyed)}"]


def banner(url: str, info: ModelInfo, *, keyed: bool, chats: bool = True) -> list[str]:
    """Lines with what a person needs first: the model, what fits, the address, and a command to paste."""
    facts = info.details
    lines = [
        f"{info.names[0]}: {size(facts.get('weight_bytes', 0))} of weights in {facts.get('dtype')} on "
        f"{facts.get('device_name') or facts.get('device')}, loaded in {facts.get('load_s', 0.0):.1f} s",
    ]
    blocks = facts.get("num_blocks") or []
    if blocks and facts.get("block_size"):
        held = min(blocks) * facts["block_size"]
        full = held // max(1, info.max_model_len)
        taken = sum(blocks) * facts.get("kv_block_bytes", 0.0)
        lines.append(
            f"context {info.max_model_len:,} tokens; K/V cache of {held:,} tokens ({size(taken)}): {full:,} full "
            f"contexts at once, at most {info.max_rows} requests in a batch"
        )
    lines += [f"note: {reason}" for reason in facts.get("reasons", ())]
    if url.startswith("unix:"):
        lines.append(f"listening on {url}")
    else:
        lines.append(f"listening on {url}/v1, web page at {reachable(url)}/")
    what = _VECTOR if facts.get("headless") else _CHAT if chats else _TEXT if info.tokenizer else _IDS
    lines.append(f"  {curl(url, info.names[0], keyed=keyed, what=what)}")
    return lines


def reachable(url: str) -> str:
    """An address that a browser on this machine can open, which "every address" is not."""
    return url.replace("//0.0.0.0", "//localhost").replace("//[::]", "//localhost")


def open_doors(listen: ListenOptions) -> list[str]:
    """Warnings about a server that other machines can reach."""
    here = listen.uds is not None or listen.host in ("localhost", "::1") or listen.host.startswith("127.")
    if here or listen.api_key:
        return []
    return [
        f"warning: {listen.host} can be reached from other machines, and there is no key: whoever reaches it may use "
        "the model. --api-key KEY asks for one, --host 127.0.0.1 keeps others out."
    ]


def _tell_end(open_answers: int, seconds: float) -> None:
    if open_answers:
        answers = "1 answer" if open_answers == 1 else f"{open_answers} answers"
        say(f"\ntokenmill: waiting for {answers} to end, {seconds:g} s at most; Ctrl-C again ends them now")
    else:
        say("\ntokenmill: stopping; no answer is open")


_CHAT = "chat/completions", '"messages": [{"role": "user", "content": "Hello!"}]'
_TEXT = "completions", '"prompt": "Once upon a time"'
_IDS = "completions", '"prompt": [1, 2, 3], "return_token_ids": true'
_VECTOR = "embeddings", '"input": "Once upon a time"'
"""Questions to models of each kind: a path and the fields that it needs."""


def curl(url: str, model: str, *, keyed: bool, what: tuple[str, str] = _CHAT) -> str:
    """A command that gets an answer."""
    url = reachable(url)
    where = f"--unix-socket {url.removeprefix('unix:')} http://localhost" if url.startswith("unix:") else url
    key = " -H 'Authorization: Bearer KEY'" if keyed else ""
    path, asked = what
    body = f'{{"model": "{model}", {asked}}}'
    return f"curl {where}/v1/{path}{key} -H 'Content-Type: application/json' -d '{body}'"
