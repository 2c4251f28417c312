"""Checks before the model is loaded. Owns: the server's options that name files, formats and keys.

A load may take minutes, so whatever can be refused without the model is refused first. Must not know: sockets (run.py),
engines.
"""

from __future__ import annotations

import logging
import os
import resource
import ssl
from dataclasses import fields
from pathlib import Path

from tokenmill.core.config import ListenOptions, ServeOptions, ServerConfig
from tokenmill.core.errors import ParameterError, UserError, why
from tokenmill.core.text_file import read_text_file
from tokenmill.server.access import MAX_KEY, Access
from tokenmill.server.certificates import out_of_date, validity
from tokenmill.server.opening_messages import check_opening
from tokenmill.server.prices import read_prices
from tokenmill.server.traces import check_endpoint
from tokenmill.text.chat_template import check_template, check_template_kwargs
from tokenmill.text.messages.detect import find_format

log = logging.getLogger("tokenmill.server")

MOST_TEMPLATE_CHARS = 4 << 20
LEAST_FILES = 256
"""The fewest open files that a server needs. Engines, helpers and the reserve leave 64 connections of them."""


def check_before_loading(server: ServerConfig) -> None:
    """Refuse before the load what would be refused after it."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if most != resource.RLIM_INFINITY and most < LEAST_FILES:
        raise UserError(
            f"This process may open {most} files, and a server needs {LEAST_FILES}: ulimit -n {LEAST_FILES}."
        )
    _check_empty(server)
    _check_keys(server.listen)
    Access(server.listen)  # refuses hosts and origins that could never be met
    _check_tls(server.listen)
    check_entry(server)
    _check_record(server.serve)
    for flag, folder in (("--lora-folder", server.limits.lora_folder), ("--model-folder", server.store.model_folder)):
        if folder is not None and not Path(folder).is_dir():
            raise ParameterError(f"{flag} {folder}: there is no such folder.", param=flag[2:].replace("-", "_"))
    read_prices(server.limits.prices)
    if server.serve.otlp_traces_endpoint:
        check_endpoint(server.serve.otlp_traces_endpoint)


def check_effects(server: ServerConfig, *, several: bool, adapters: bool) -> None:
    """Refuse options that have no effect without others. `several`: there is more than one model, or it comes and
    goes; `adapters`: some engine takes them."""
    listen, store, models = server.listen, server.store, server.models
    changes = store.allow_model_changes
    several, adapters = several or changes, adapters or changes
    needs = (
        ("--model-folder", store.model_folder is not None, changes, "without --allow-model-changes"),
        ("--max-blob-bytes", store.max_blob_bytes != type(store)().max_blob_bytes, changes,
         "without --allow-model-changes"),
        ("--lora-folder", server.limits.lora_folder is not None, adapters, "without --enable-lora"),
        ("--models-memory", models.models_memory is not None, several, "with one model"),
        ("--models-queue", models.models_queue != type(models)().models_queue, several, "with one model"),
        ("--models-patience", models.models_patience != type(models)().models_patience, several, "with one model"),
        ("--models-sleep-memory", models.models_sleep_memory is not None, several, "with one model"),
        ("--host", listen.host != type(listen)().host, listen.uds is None, "beside --uds"),
        ("--port", listen.port not in (0, type(listen)().port), listen.uds is None, "beside --uds"),
        ("--share-prefix-cache", listen.share_prefix_cache, len(listen.api_key or ()) > 1, "without several --api-key"),
    )  # fmt: skip
    for flag, given, effective, why_not in needs:
        if given and not effective:
            raise ParameterError(f"{flag} has no effect {why_not}: leave it out.", param=flag[2:].replace("-", "_"))


def check_entry(server: ServerConfig) -> None:
    """The same for options that each of several models may have."""
    path = server.serve.chat_template
    if template := read_template(path):
        check_template(template, f"--chat-template {path}", "chat_template")
    try:
        check_template_kwargs(server.serve.default_chat_template_kwargs or {})
    except ParameterError as error:
        raise ParameterError(
            f"--default-chat-template-kwargs: {error}.", param="default_chat_template_kwargs"
        ) from None
    check_opening(server.messages.opening)
    find_format(None, server.messages.tool_call_parser, server.messages.reasoning_parser)


def read_template(path: str | None) -> str | None:
    """The text of --chat-template: a file's, or its own if it is a template itself. None: it is not given."""
    if path is None or "{{" in path or "{%" in path:
        return path
    text = read_text_file(path, "--chat-template", MOST_TEMPLATE_CHARS, param="chat_template")
    if not text.strip():
        raise ParameterError(f"--chat-template {path} is empty: leave the flag out.", param="chat_template")
    return text


def _check_empty(server: ServerConfig) -> None:
    """Refuse an option without a text, as an unset variable of a shell leaves it: an empty host is every address of
    this machine, an empty folder the one where the server happens to run."""
    for group in fields(server):
        options = getattr(server, group.name)
        for item in fields(options):
            value = getattr(options, item.name)
            if isinstance(value, str) and not value.strip() and item.default != value:
                flag = f"--{item.name.replace('_', '-')}"
                raise ParameterError(f"{flag} is empty: give a value, or leave the flag out.", param=item.name)


def _check_keys(listen: ListenOptions) -> None:
    for key in listen.api_key or ():
        if not key.strip():
            raise ParameterError(
                "--api-key is empty, so anybody could send it: give a key, or leave the flag out.", param="api_key"
            )
        if key != key.strip() or len(key.encode(errors="replace")) > MAX_KEY or not key.isprintable():
            raise ParameterError(
                f"--api-key must be printable text without a space at its ends, of at most {MAX_KEY} bytes: no client "
                "could send it.",
                param="api_key",
            )

    if len(set(listen.api_key or ())) < len(listen.api_key or ()):
        raise ParameterError("--api-key: one key is given twice; it would count as two.", param="api_key")


def _check_tls(listen: ListenOptions) -> None:
    for flag, path in (
        ("--ssl-certfile", listen.ssl_certfile),
        ("--ssl-keyfile", listen.ssl_keyfile),
        ("--ssl-ca-certs", listen.ssl_ca_certs),
    ):
        if path is None:
            continue
        if not listen.ssl_certfile:
            raise ParameterError(f"{flag} needs --ssl-certfile FILE: without one nothing is encrypted.")
        try:
            with Path(path).open("rb"):
                pass
        except OSError as error:
            raise ParameterError(f"{flag} {path} cannot be read: {why(error)}.") from error
    if listen.ssl_certfile:
        _load_tls(listen.ssl_certfile, listen.ssl_keyfile, listen.ssl_ca_certs)
        _tell_dates(listen.ssl_certfile, listen.ssl_ca_certs)


def _load_tls(certificate: str, key: str | None, authority: str | None) -> None:
    context, asked = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), False

    def password() -> str:
        nonlocal asked
        asked = True
        return ""

    try:
        context.load_cert_chain(certificate, key, password)
    except (ssl.SSLError, ValueError) as error:
        if not asked:  # a key with a password is tested when somebody has typed the password
            where = f"--ssl-certfile {certificate} and --ssl-keyfile {key}" if key else f"--ssl-certfile {certificate}"
            if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
                raise ParameterError(
                    f"{where}: the private key is not the one that belongs to the certificate (the file's first one).",
                    param="ssl_keyfile" if key else "ssl_certfile",
                ) from error
            more = "" if key else " (--ssl-keyfile names another file for the key)"
            raise ParameterError(
                f"{where}: there must be a certificate and the private key that belongs to it, in PEM format{more}.",
                param="ssl_certfile",
            ) from error
    if authority:
        try:
            context.load_verify_locations(authority)
        except ssl.SSLError as error:
            raise ParameterError(
                f"--ssl-ca-certs {authority} holds no certificate in PEM format.", param="ssl_ca_certs"
            ) from error


def _tell_dates(certificate: str, authority: str | None) -> None:
    """Warn of what clients will refuse, or what will refuse all clients: a clock may be wrong, so it is no error."""
    for why_not in out_of_date(certificate):
        log.warning("a certificate is out of date, and clients will refuse it", extra={"data": {
            "ssl_certfile": certificate, "reason": why_not,
        }})  # fmt: skip
    if authority is not None and 0 < len(validity(authority)) == len(dates := out_of_date(authority)):
        log.warning("no certificate for clients is in date, so none will be taken", extra={"data": {
            "ssl_ca_certs": authority, "reason": dates[0],
        }})  # fmt: skip


def _check_record(options: ServeOptions) -> None:
    if options.record is None:
        if options.record_content:
            raise UserError("--record-content needs --record FILE.")
        return
    path = Path(options.record).absolute()
    if not path.parent.is_dir():
        reason = "there is no such folder"
    elif path.is_dir():
        reason = "it is a folder; name a file in it"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        reason = "no permission"
    else:
        return
    raise ParameterError(f"--record {options.record} cannot be written: {reason}.", param="record")
