"""Ollama's endpoints. Owns: their paths, and what is said about the served model.

Which models there are is changed in models.py. Must not know: engines.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

import tokenmill
from tokenmill.checkpoint.modelfile_parameters import listed, of_generation
from tokenmill.checkpoint.stored import find_stored
from tokenmill.checkpoint.stored_names import may_be_name
from tokenmill.core.errors import ParameterError
from tokenmill.server.context import Context
from tokenmill.server.errors import renaming_fields
from tokenmill.server.model_lookup import peek_fields, text_of
from tokenmill.server.ollama.answers import LOADED, Answer, error_body, moment, now
from tokenmill.server.ollama.keep_alive import FOREVER, sent_away, set_keep_alive
from tokenmill.server.ollama.models import BLOBS, add_model_routes, around, show_stored, told
from tokenmill.server.ollama.schemas import (
    NAMES,
    ChatRequest,
    EmbeddingsRequest,
    EmbedRequest,
    GenerateRequest,
    Options,
    ShowRequest,
)
from tokenmill.server.ollama.store_changes import Changes, in_thread
from tokenmill.server.ollama.stored_files import read_stored
from tokenmill.server.openai import embeddings
from tokenmill.server.openai.chat import Chat
from tokenmill.server.openai.schemas import EmbeddingRequest
from tokenmill.server.routing import Api, Work, get, json_answer, of_model, post, read_body
from tokenmill.server.switch.listing import ListedModel, list_models
from tokenmill.server.translated_chat import open_translated
from tokenmill.text.fill import find_fill
from tokenmill.text.messages.describe import MessageFormat

RAW = "{% for message in messages %}{{ message.content }}{% endfor %}"
"""A template that leaves a prompt as it is."""
LEVELS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "unknown": "unknown"}


def add_routes(app: FastAPI, context: Context) -> None:
    """/api/generate, chat, embed, tags, show, ps and version."""

    async def generate(request: Request) -> Response:
        """Answer one prompt."""
        return await sent_away(context.shared, request, "prompt", {"response": ""}) or await generate_loaded(request)

    async def chat(request: Request) -> Response:
        """Answer a conversation."""
        empty_message = {"message": {"role": "assistant", "content": ""}}
        return await sent_away(context.shared, request, "messages", empty_message) or await chat_loaded(request)

    async def answer_prompt(request: Request, context: Context) -> Response:
        async with Work(context, request) as work:
            body = await work.read(GenerateRequest)
            set_keep_alive(context.shared, request, body.keep_alive)
            check_room(context, body.options)
            if not body.prompt:
                return json_answer(loaded(context, body.model, {"response": ""}))
            if body.suffix:
                chat = await _fill(context, work, body, body.suffix)
            else:
                plain, read = context, None
                if body.raw or not has_template(context):
                    plain, read = untouched(context), partial(_as_it_is, context, body)
                chat = await open_translated(plain, body.as_chat, work.job, work.base(), read, names=NAMES)
            answer = Answer(chat, body.model, generate=True)
            return work.lines(answer.lines()) if body.stream else json_answer(await answer.whole())

    async def answer_chat(request: Request, context: Context) -> Response:
        async with Work(context, request) as work:
            body = await work.read(ChatRequest)
            set_keep_alive(context.shared, request, body.keep_alive)
            check_room(context, body.options)
            if not body.messages:
                return json_answer(loaded(context, body.model, {"message": {"role": "assistant", "content": ""}}))
            opened = await open_translated(context, body.as_chat, work.job, work.base(), names=NAMES)
            answer = Answer(opened, body.model, generate=False)
            return work.lines(answer.lines()) if body.stream else json_answer(await answer.whole())

    async def embed(request: Request, context: Context) -> Response:
        """Unit vectors of texts."""
        async with Work(context, request) as work:
            body = await work.read(EmbedRequest)
            set_keep_alive(context.shared, request, body.keep_alive)
            check_room(context, body.options)
            found = await vectors(context, work, body.model, body.input, body)
            return json_answer(
                {
                    "model": body.model,
                    "embeddings": [entry["embedding"] for entry in found["data"]],
                    "total_duration": round((time.monotonic() - work.job.began) * 1e9),
                    "load_duration": LOADED,
                    "prompt_eval_count": found["usage"]["prompt_tokens"],
                }
            )

    async def old_embeddings(request: Request, context: Context) -> Response:
        """Return one vector, in the older form."""
        async with Work(context, request) as work:
            body = await work.read(EmbeddingsRequest)
            set_keep_alive(context.shared, request, body.keep_alive)
            with renaming_fields({"input": "prompt"}):
                found = await vectors(context, work, body.model, body.prompt, None)
            return json_answer({"embedding": found["data"][0]["embedding"] if found["data"] else []})

    generate_loaded, chat_loaded = of_model(answer_prompt), of_model(answer_chat)
    post(app, "/api/generate", generate, GenerateRequest)
    post(app, "/api/chat", chat, ChatRequest)
    post(app, "/api/embed", embed, EmbedRequest)
    post(app, "/api/embeddings", old_embeddings, EmbeddingsRequest)
    changes = Changes(context)
    changes.add_stored()
    add_model_routes(app, context, changes)
    _add_telling(app, context, changes)


def _add_telling(app: FastAPI, context: Context, changes: Changes) -> None:
    """Add the paths that list and describe models, and those of the store if clients may change it."""

    async def tags(request: Request) -> Response:
        """List all models, loaded or not."""
        await changes.sync()
        found = list_models(context.shared, request)
        return json_answer({"models": await in_thread(lambda: [listed_entry(changes, each) for each in found])})

    async def running(request: Request) -> Response:
        """List the loaded models, and when they will be unloaded."""
        loaded = [each for each in list_models(context.shared, request) if each.info is not None]
        shown_models = await in_thread(lambda: [{**listed_entry(changes, each), **_presence(each)} for each in loaded])
        return json_answer({"models": shown_models})

    async def show(request: Request) -> Response:
        """Describe a model. A stored one need not be loaded for this."""
        fields = await peek_fields(context.shared, request)
        other = changes.unloaded(request, text_of(fields, "model") or text_of(fields, "name") or "")
        if other is None:
            return await show_loaded(request)
        (await read_body(context, request, ShowRequest)).named()
        return json_answer(await in_thread(lambda: show_stored(changes.store, other)))

    async def answer_show(request: Request, context: Context) -> Response:
        """The same for a loaded model."""
        body = await read_body(context, request, ShowRequest)
        return json_answer(await in_thread(partial(_shown, context, body.named())))

    async def version(request: Request) -> Response:
        """This server's version."""
        return json_answer({"version": tokenmill.__version__})

    show_loaded = of_model(answer_show, ("model", "name"))
    post(app, "/api/show", show, ShowRequest)
    get(app, "/api/tags", tags)
    get(app, "/api/ps", running)
    get(app, "/api/version", version)


OLLAMA = Api(
    add_routes,
    generating=frozenset({"/api/generate", "/api/chat", "/api/embed", "/api/embeddings"}),
    prefixes=("/api/",),
    streamed=(BLOBS,),
    error=error_body,
    any_type=True,
)


def _shown(context: Context, name: str) -> dict[str, Any]:
    """The description of a loaded model, with what its manifest adds if it is stored."""
    found = described(context, served(context, name))
    known = find_stored(name) if may_be_name(name) else None
    if known is None or known.options["model"] != context.backend.info.root:
        return found
    manifest_facts = around(known.entry)
    return {**found, **manifest_facts, "template": manifest_facts["template"] or found["template"]}


def listed_entry(changes: Changes, shown: ListedModel) -> dict[str, Any]:
    """A model in a list. If it is stored, its manifest describes it."""
    other = changes.stored(shown.name)
    return entry(shown) if other is None else {**told(changes.store, other), **_called(shown.name)}


def _called(name: str) -> dict[str, str]:
    tagged = name if ":" in name else f"{name}:latest"
    return {"name": tagged, "model": tagged}


def served(context: Context, name: str) -> str:
    """The served name for a name of Ollama's, whose tag `latest` may be left out."""
    return context.check_model(name.removesuffix(":latest"))


async def _fill(context: Context, work: Work, body: GenerateRequest, suffix: str) -> Chat:
    """An answer between two texts. A template and a system message have no place there."""
    if body.system:
        raise ParameterError("system cannot be combined with suffix.", param="system")
    if body.truncate:
        raise ParameterError("truncate cannot be combined with suffix.", param="truncate")
    ends = context.text.fill_ends()
    return await open_translated(
        untouched(context),
        lambda: {**body.as_chat(), "stop_token_ids": ends},
        work.job,
        work.base(),
        lambda: context.text.fill((body.prompt, suffix)),
        names=NAMES,
    )


async def _as_it_is(context: Context, body: GenerateRequest) -> tuple[str, list[int]]:
    """The prompt behind the system message. Control tokens in it are tokens: whoever leaves out the template writes
    them."""
    text = (body.system or "") + body.prompt
    return text, (await context.text.read(text, any_length=bool(body.truncate)))[1]


def check_room(context: Context, options: Options | None) -> None:
    """Accept num_ctx up to the context's length, and refuse more."""
    most = context.backend.info.max_model_len
    if options is not None and options.num_ctx is not None and options.num_ctx > most:
        raise ParameterError(
            f"num_ctx is {options.num_ctx}, and the context here is {most} tokens (--max-model-len).",
            param="options.num_ctx",
        )


def has_template(context: Context) -> bool:
    """Has the model a chat template?"""
    tokenizer = context.backend.info.tokenizer
    return bool(context.chat_template or (tokenizer is not None and tokenizer.chat_template))


def untouched(context: Context) -> Context:
    """The same context with prompts left as they are."""
    plain = replace(context.config, messages=replace(context.config.messages, opening=None))
    return replace(context, config=plain, chat_template=RAW, form=MessageFormat())


def loaded(context: Context, model: str, empty: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request without a prompt, with which Ollama's clients load a model."""
    served(context, model)
    return {"model": model, "created_at": now(), **empty, "done": True, "done_reason": "load"}


async def vectors(context: Context, work: Work, model: str, texts: Any, more: EmbedRequest | None) -> dict[str, Any]:
    """OpenAI's embeddings of these texts. Nothing is asked with no text, and has no vector."""
    if not texts:
        served(context, model)
        return {"data": [], "usage": {"prompt_tokens": 0}}
    fields: dict[str, Any] = {"model": served(context, model), "input": texts}
    if more is not None:
        fields["dimensions"] = more.dimensions
        fields |= more.cut()
    body = await context.bodies.run_in_thread(work.job.size, lambda: EmbeddingRequest.model_validate(fields))
    return await embeddings.embed(context, body, work.job, work.base())


def _presence(shown: ListedModel) -> dict[str, Any]:
    """The part of a description that only a loaded model has."""
    assert shown.info is not None
    left = shown.entry.expires_in
    return {
        "size_vram": shown.info.details.get("weight_bytes", 0),
        "context_length": shown.info.max_model_len,
        "expires_at": FOREVER if left is None else moment(time.time() + left),
    }


def entry(shown: ListedModel) -> dict[str, Any]:
    """A model in a list."""
    name = shown.name
    files = _files_of(shown.root)
    known = shown.info.details if shown.info is not None else {}
    return {
        **_called(name),
        "modified_at": now() if files is None else moment(files.modified),
        "size": known.get("weight_bytes", shown.entry.size) if files is None else files.size,
        "digest": hashlib.sha256(f"{shown.root}\0{name}".encode()).hexdigest(),
        "details": details(shown.root, known),
    }


def details(root: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """Family, size and format, the same whether the model is loaded or not where its files lie here. `known`: the facts
    of a loaded engine, if there is one."""
    files = _files_of(root)
    family = (files.family if files is not None else "") or str(known.get("family") or "unknown")
    _, _, tag = root.partition(":")  # owner/model:Q4_K_M names a GGUF file of the hub
    form = files.format if files is not None else "gguf" if tag or root.endswith(".gguf") else "safetensors"
    level = known.get("quantization") or (files.level if files is not None else tag) or known.get("dtype", "unknown")
    count = files.parameters if files is not None else 0
    return {
        "parent_model": "",
        "format": form,
        "family": family,
        "families": [family],
        "parameter_size": _count(count or float(known.get("flops_per_token", 0.0)) / 2),
        "quantization_level": LEVELS.get(str(level), str(level).upper()),
    }


def described(context: Context, name: str) -> dict[str, Any]:
    """The answer of /api/show: the parameters that apply unless a request sets them, the template, and the
    capabilities."""
    info = context.backend.info
    template = context.chat_template or (info.tokenizer.chat_template if info.tokenizer is not None else None) or ""
    can = ["completion", "embedding"]
    if context.form.calls is not None:
        can.append("tools")
    if context.form.thinking is not None:
        can.append("thinking")
    if find_fill(info.tokenizer) is not None:
        can.append("insert")
    about = details(info.root, info.details)
    family, files = about["family"], _files_of(info.root)
    return {
        "modelfile": f"FROM {name}\n",
        "parameters": listed(of_generation(info.generation)),
        "template": template if isinstance(template, str) else "",
        "details": about,
        "model_info": {
            "general.architecture": family,
            f"{family}.context_length": info.max_model_len,
            f"{family}.vocab_size": info.vocab_size,
            **(files.model_info(family) if files is not None else {}),
        },
        "capabilities": can,
        "modified_at": now(),
    }


_files_of = lru_cache(maxsize=64)(read_stored)


def _count(weights: float) -> str:
    """1234567 -> 1.2M"""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if weights >= size:
            return f"{weights / size:.1f}{unit}"
    return str(round(weights))
