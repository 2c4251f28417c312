"""The rules for the names in all requests. Owns: which schemas there are, names of objects without a schema, other
spellings, and names that belong to another API. Must not know: HTTP, how requests are answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel

from tokenmill.core.object_rules import ObjectRules, Refusal
from tokenmill.server.anthropic.schemas import CountRequest, MessagesRequest
from tokenmill.server.inputs.companions import COMPANIONS
from tokenmill.server.inputs.harmless import HARMLESS
from tokenmill.server.inputs.refused import REFUSED
from tokenmill.server.inputs.schema_names import parts, schema_name, spellings
from tokenmill.server.kserve import schemas as kserve
from tokenmill.server.llamacpp import schemas as llamacpp
from tokenmill.server.lora.schemas import LoadAdapterRequest, UnloadAdapterRequest
from tokenmill.server.ollama import schemas as ollama
from tokenmill.server.openai import schemas as openai
from tokenmill.server.openai.stored.schemas import UpdateRequest
from tokenmill.server.responses import schemas as responses
from tokenmill.server.scoring.schemas import (
    RERANK,
    ClassifyRequest,
    EmbedRequest,
    RerankRequest,
    ScoreRequest,
    SimilarityRequest,
    TeiRerankRequest,
)
from tokenmill.server.switch.schemas import ModelRequest
from tokenmill.server.tgi import schemas as tgi

OBJECTS: dict[str, tuple[str, dict[str, str]]] = {
    "openai.ToolChoice": (
        "type function allowed_tools",
        {"function": "openai.ChosenFunction", "allowed_tools": "openai.AllowedTools"},
    ),
    "openai.ChosenFunction": ("name", {}),
    "openai.AllowedTools": ("mode tools", {"tools": "openai.AllowedTool"}),
    "openai.AllowedTool": ("type function", {"function": "openai.ChosenFunction"}),
    "responses.ToolChoice": ("type name mode tools", {"tools": "responses.AllowedTool"}),
    "responses.AllowedTool": ("type name", {}),
    "responses.Item": (
        "type role content name arguments call_id output encrypted_content",
        {"content": "responses.Part", "output": "responses.Part"},
    ),
    "responses.Part": ("type text refusal", {}),
    "responses.Tool": ("type name description parameters strict", {}),
    "responses.Format": ("type name description schema strict", {}),
    "responses.StreamOptions": ("", {}),
    "anthropic.OutputConfig": ("effort format", {"format": "anthropic.OutputFormat"}),
    "anthropic.OutputFormat": ("type schema", {}),
    "anthropic.ResultPart": ("type text", {}),
    "ollama.Tool": ("type function", {"function": "ollama.FunctionDefinition"}),
    "ollama.FunctionDefinition": ("name description parameters strict", {}),
    "ollama.EmbedOptions": ("num_ctx", {}),
    "kserve.Output": ("name", {}),
}
"""Objects that handlers read by hand: the names that they read, and what lies under them."""

_FORMS = ("tgi.VllmRequest", "kserve.Parameters", "llamacpp.CompletionRequest", "llamacpp.InfillRequest")
"""Bodies, or objects in them, that have the fields of a completion."""

_COMMON = {"repeat_penalty": "repetition_penalty", "random_seed": "seed", "typ_p": "typical_p", "nsigma": "top_n_sigma"}
_COMMON |= {"mirostat_mode": "mirostat"}
_LONGEST = dict.fromkeys(("n_predict", "max_new_tokens", "max_output_tokens"), "max_tokens")
_OPENAI = {**_COMMON, **_LONGEST, "stop_sequences": "stop"}
_LLAMA = {**_OPENAI, "max_completion_tokens": "max_tokens", "n_probs": "logprobs", "return_tokens": "return_token_ids"}
ALIASES: dict[str, Mapping[str, str]] = {
    "openai.ChatRequest": _OPENAI,
    "openai.CompletionRequest": {**_OPENAI, "max_completion_tokens": "max_tokens"},
    "tgi.VllmRequest": {**_OPENAI, "max_completion_tokens": "max_tokens"},
    "kserve.Parameters": {**_OPENAI, "max_completion_tokens": "max_tokens"},
    "llamacpp.CompletionRequest": _LLAMA,
    "llamacpp.InfillRequest": _LLAMA,
    "llamacpp.EmbeddingRequest": {"input": "content"},
    "scoring.RerankRequest": {"instruct": "instruction"},
    "scoring.ScoreRequest": {
        **dict.fromkeys(("queries", "query", "data_1"), "text_1"),
        **dict.fromkeys(("documents", "items", "data_2"), "text_2"),
    },
}
"""Spellings of other engines, and the fields here that they mean."""

ENDPOINTS: dict[str, tuple[type[BaseModel], ...]] = {
    "/v1/chat/completions": (openai.ChatRequest,),
    "/v1/chat/completions/{completion_id}": (UpdateRequest,),
    "/v1/completions": (openai.CompletionRequest,),
    "/v1/embeddings": (openai.EmbeddingRequest,),
    "/pooling": (openai.PoolingRequest,),
    "/invocations": (openai.ChatRequest, openai.CompletionRequest, openai.EmbeddingRequest),
    "/tokenize": (openai.TokenizeRequest,),
    "/detokenize": (openai.DetokenizeRequest,),
    "/v1/responses": (responses.ResponsesRequest,),
    "/v1/responses/input_tokens": (responses.TalkRequest,),
    "/v1/responses/compact": (responses.CompactRequest,),
    "/v1/conversations": (responses.CreateConversation,),
    "/v1/conversations/{conversation_id}": (responses.UpdateConversation,),
    "/v1/conversations/{conversation_id}/items": (responses.CreateItems,),
    "/v1/messages": (MessagesRequest,),
    "/v1/messages/count_tokens": (CountRequest,),
    "/api/generate": (ollama.GenerateRequest,),
    "/api/chat": (ollama.ChatRequest,),
    "/api/embed": (ollama.EmbedRequest,),
    "/api/embeddings": (ollama.EmbeddingsRequest,),
    "/api/show": (ollama.ShowRequest,),
    "/api/pull": (ollama.PullRequest,),
    "/api/create": (ollama.CreateRequest,),
    "/api/copy": (ollama.CopyRequest,),
    "/api/delete": (ollama.DeleteRequest,),
    "/generate": (tgi.TgiRequest, tgi.VllmRequest),
    "/generate_stream": (tgi.TgiRequest,),
    "/": (tgi.TgiRequest,),
    "/embed": (EmbedRequest,),
    "/similarity": (SimilarityRequest,),
    **dict.fromkeys(RERANK, (RerankRequest, TeiRerankRequest)),
    **dict.fromkeys(("/score", "/v1/score"), (ScoreRequest,)),
    "/classify": (ClassifyRequest,),
    "/v2/models/{model}/versions/1/infer": (kserve.InferRequest,),
    "/v2/models/{model}/versions/1/generate": (kserve.GenerateRequest,),
    "/v2/models/{model}/versions/1/generate_stream": (kserve.GenerateRequest,),
    "/v2/models/{model}/infer": (kserve.InferRequest,),
    "/v2/models/{model}/generate": (kserve.GenerateRequest,),
    "/v2/models/{model}/generate_stream": (kserve.GenerateRequest,),
    "/completion": (llamacpp.CompletionRequest,),
    "/completions": (llamacpp.CompletionRequest,),
    "/infill": (llamacpp.InfillRequest,),
    "/embedding": (llamacpp.EmbeddingRequest,),
    "/embeddings": (llamacpp.EmbeddingRequest,),
    "/apply-template": (llamacpp.TemplateRequest,),
    "/v1/load_lora_adapter": (LoadAdapterRequest,),
    "/v1/unload_lora_adapter": (UnloadAdapterRequest,),
    "/models/load": (ModelRequest,),
    "/models/unload": (ModelRequest,),
}
"""Every path that takes a body, and the schemas that the body may have."""

_WRITERS = {
    "openai.ChatRequest": "/v1/chat/completions",
    "openai.CompletionRequest": "/v1/completions",
    "responses.ResponsesRequest": "/v1/responses",
    "anthropic.MessagesRequest": "/v1/messages",
    "ollama.ChatRequest": "/api/chat",
    "ollama.GenerateRequest": "/api/generate",
    "ollama.Options": "the options of /api/chat",
    "tgi.Parameters": "the parameters of /generate",
}
_ALSO = (*_FORMS, "tgi.TgiRequest", "kserve.GenerateRequest", "kserve.InferRequest")
"""Rules of requests that make text. A field of one of them is refused in another that does not read it."""
_INTO = {
    "ollama.ChatRequest": ("ollama.Options", "options"),
    "ollama.GenerateRequest": ("ollama.Options", "options"),
    "tgi.TgiRequest": ("tgi.Parameters", "parameters"),
    "kserve.GenerateRequest": ("kserve.Parameters", "parameters"),
    "kserve.InferRequest": ("kserve.Parameters", "parameters"),
}
"""Requests whose sampling fields lie in an object of their own."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "do_sample": (True,),
    "n": (1,),
    "best_of": (1,),
    "temperature": (1,),
    "top_p": (1,),
    "typical_p": (1,),
    "min_p": (0,),
    "top_k": (0, -1),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "repeat_penalty": (1,),
    "thinking_token_budget": (-1,),
    **dict.fromkeys(("top_n_sigma", "nsigma"), (0, -1)),
    **dict.fromkeys(("mirostat", "mirostat_mode", "top_a", "epsilon_cutoff", "eta_cutoff", "xtc_probability"), (0,)),
    **dict.fromkeys(("dry_multiplier", "dynatemp_range", "smoothing_factor", "no_repeat_ngram_size"), (0,)),
    "repeat_last_n": (-1, 64),
    "samplers": (
        ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
        ["dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
        "edskypmxt",
        "edkypmxt",
    ),
    "num_predict": (-1,),
}
_LOUD = frozenset({"prompt", "inputs", "think", "do_sample", "parallel_tool_calls", "add_generation_prompt"})
"""Fields whose default is null and whose false has an effect."""


@cache
def make_request_rules() -> Mapping[str, ObjectRules]:
    """The rules of every object by its name. They depend on nothing, so they are made once."""
    made: dict[str, ObjectRules] = {}
    for schemas in ENDPOINTS.values():
        for schema in schemas:
            _add(schema, made)
    completion = made["openai.CompletionRequest"]
    for name in _FORMS:
        own = made[name].fields if name in made else frozenset({"stream"})
        inside = made[name].inside if name in made else {}
        made[name] = _completion_like(name, completion, own, inside)
    for name in (*_WRITERS, *_ALSO):
        rules = made[name]
        known = rules.fields | rules.harmless.keys() | rules.aliases.keys()
        more = {given: why for given, why in _foreign(made, name).items() if given not in known}
        if name in _INTO:
            made_of, where = _INTO[name]
            for given in (made[made_of].done | made[made_of].aliases.keys()) - known:
                old = more.get(given, Refusal("", _NEUTRAL.get(given, ()), given in _LOUD))
                more[given] = replace(old, why=f"it belongs into {where}")
        made[name] = replace(rules, refused={**more, **rules.refused})
    return MappingProxyType(_relinked(made))


def _add(part: type[BaseModel] | str, made: dict[str, ObjectRules]) -> ObjectRules:
    """The rules of a schema, or of an object without one, and of everything in it."""
    name = part if isinstance(part, str) else schema_name(part)
    if name in made:
        return made[name]
    inside: dict[str, ObjectRules] = {}
    if isinstance(part, str):
        words, within = OBJECTS[part]
        fields = frozenset(words.split())
        inside = {each: _add(rules, made) for each, rules in within.items()}
    else:
        found = spellings(part)
        fields = frozenset(found)
        for each, info in found.items():
            for under in parts(info):
                inside[each] = _add(under, made)
    judged = (HARMLESS.get(name, {}), REFUSED.get(name, {}), ALIASES.get(name, {}))
    by_hand, needs = isinstance(part, str), COMPANIONS.get(name, {})
    made[name] = ObjectRules(name, fields, *judged, inside, validated=not by_hand, companions=needs)
    return made[name]


def _completion_like(
    name: str, completion: ObjectRules, own: frozenset[str], within: Mapping[str, ObjectRules]
) -> ObjectRules:
    """A body with the fields of a completion, except those for which its answers have no place."""
    fields = (completion.fields | own) - REFUSED[name].keys()
    inside = {each: rules for each, rules in completion.inside.items() if each in fields} | dict(within)
    needs = {each: companion for each, companion in completion.companions.items() if each in fields}
    return ObjectRules(name, fields, HARMLESS[name], REFUSED[name], ALIASES[name], inside, companions=needs)


def _foreign(made: Mapping[str, ObjectRules], asked: str) -> dict[str, Refusal]:
    """Fields that some request reads, and why another one refuses them. A client that sends them expects them to
    work."""
    defaults: dict[str, Any] = {}
    for schemas in ENDPOINTS.values():
        for schema in schemas:
            defaults |= {name: info.default for name, info in spellings(schema).items()}
    found: dict[str, Refusal] = {}
    family = asked.split(".")[0]
    for writer, where in sorted(_WRITERS.items(), key=lambda item: not item[0].startswith(family)):
        for name in sorted(made[writer].done | made[writer].aliases.keys()):
            neutral = (*_NEUTRAL.get(name, ()), *([True] if defaults.get(name) is True else []))
            loud = name in _LOUD or defaults.get(name) is True
            found.setdefault(name, Refusal(f"it belongs to {where}", neutral, loud))
    return found


def _relinked(made: dict[str, ObjectRules]) -> dict[str, ObjectRules]:
    """Some rules contain others: each gets the final form of what it contains."""
    done: dict[str, ObjectRules] = {}

    def link(rules: ObjectRules) -> ObjectRules:
        if rules.name not in done:
            rules = made[rules.name]
            inside = {name: link(under) for name, under in rules.inside.items()}
            done[rules.name] = replace(rules, inside=inside)
        return done[rules.name]

    for rules in made.values():
        link(rules)
    return done
