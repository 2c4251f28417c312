"""Paths of other servers that do not exist here, and why. Owns: the message for a client that asks for one.

Must not know: the paths that do exist.
"""

from __future__ import annotations

from collections.abc import Mapping

_MEDIA = "the served models read and write text alone"
_FILES = "nothing is stored in files for clients: send what belongs to a request in it"
_BATCHES = "there are no jobs that run later: send requests at once, the engine batches them"
_TRAINING = "models are served here, not trained or judged"
_AGENTS = "agents live in the client: /v1/responses and /v1/conversations keep what they say"
_ACCOUNTS = "there are no accounts: keys are given to the server when it starts"
_LOADING = "models are loaded when they are asked for, or by /models/load"
_ADAPTERS = "an adapter is named as the model of a request; /v1/models lists them"
_PAUSE = "/sleep ends what runs and gives the memory back; a gap without it needs no pause"
_NO_REMOTE = "it would change the engine for everybody: use the Python API (`LLM`) in a process of your own"
_SHARED = "memory is not shared with clients: tensors come in the body"

ABSENT: Mapping[str, str] = {
    **dict.fromkeys(("/v1/audio", "/v1/images", "/v1/videos", "/v1/realtime"), _MEDIA),
    **dict.fromkeys(("/v1/files", "/v1/uploads", "/v1/containers", "/v1/vector_stores"), _FILES),
    **dict.fromkeys(("/v1/batches", "/v1/messages/batches"), _BATCHES),
    **dict.fromkeys(("/v1/fine_tuning", "/v1/evals", "/v1/fine-tunes"), _TRAINING),
    **dict.fromkeys(("/v1/assistants", "/v1/threads", "/v1/skills", "/v1/chatkit"), _AGENTS),
    **dict.fromkeys(("/v1/organization", "/v1/organizations", "/api/me", "/api/signout"), _ACCOUNTS),
    "/v1/moderations": "there is no model that judges content; ask one by /v1/chat/completions or /classify",
    "/v1/complete": "/v1/messages says it",
    "/v1/edits": "/v1/chat/completions says it",
    "/v1/engines": "/v1/models says it",
    **dict.fromkeys(("/api/web_search", "/api/web_fetch", "/tools", "/cors-proxy"), "there are no tools on the server"),
    **dict.fromkeys(("/v2/repository",), _LOADING),
    **dict.fromkeys(("/pause", "/resume", "/is_paused"), _PAUSE),
    **dict.fromkeys(("/collective_rpc", "/start_profile", "/stop_profile", "/update_weights"), _NO_REMOTE),
    **dict.fromkeys(("/init_weight_transfer_engine", "/scale_elastic_ep", "/is_scaling_elastic_ep"), _NO_REMOTE),
    **dict.fromkeys(("/reset_mm_cache", "/reset_encoder_cache"), _MEDIA),
    "/embed_all": "vectors of single tokens are not given; /embed gives one for each text",
    "/embed_sparse": "this model gives dense vectors; /embed has them",
    "/predict": "this model has no labels of its own; /classify takes labels",
    "/decode": "/detokenize says it",
    "/chat_tokenize": "/tokenize with `messages` says it",
    "/inference/v1": "/v1/completions takes token ids as `prompt` and returns them with `return_token_ids`",
    **dict.fromkeys(("/v1/chat/completions/render", "/v1/completions/render"), "/apply-template and /tokenize say it"),
    "/abort_requests": "closing the connection, or POST /v1/responses/{id}/cancel, ends a request",
    **dict.fromkeys(("/v2/systemsharedmemory", "/v2/cudasharedmemory"), _SHARED),
    **dict.fromkeys(("/v2/trace", "/v2/logging"), "flags of the server say it"),
    "/get_world_size": "/metrics says it, by engine",
    "/server_info": "/metrics and /v1/models say it",
    "/reset_prefix_cache": _NO_REMOTE,
    "POST /props": "flags of the server say it",
    "POST /lora-adapters": _ADAPTERS,
    "/slots": "what a slot would save is found in the prefix cache by itself",
    "POST /ping": "GET says it",
}
"""Paths that other servers have and this one lacks, by their first parts. A method is named if this server has the path
with another method."""


def why_absent(method: str, path: str) -> str | None:
    """Why this server has no such path; None: no known server has it."""
    if found := ABSENT.get(f"{method} {path}"):
        return found
    while path:
        if path in ABSENT:
            return ABSENT[path]
        path = path.rpartition("/")[0]
    return None
