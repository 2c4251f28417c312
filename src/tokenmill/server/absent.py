"""Paths of other servers that do not exist here, and why. Owns: the message for a client that asks for one.

Must not know: the paths that do exist.
"""

from __future__ import annotations

from collections.abc import Mapping

_MEDIA = "the served models read and write text alone"
_FILES = "nothing is stored in files for clients: send what belongs to a request in it"
_BATCHES = "there are no batch jobs: send the requests together, and the engine batches them"
_TRAINING = "models are served here, not trained or judged"
_AGENTS = "agents run in the client; /v1/responses and /v1/conversations store their conversations"
_ACCOUNTS = "there are no accounts: keys are given to the server when it starts"
_LOADING = "models are loaded when they are asked for, or by /models/load"
_ADAPTERS = "an adapter is named as the model of a request; /v1/models lists them"
_PAUSE = "use /sleep, which ends open requests and gives the memory back"
_NO_REMOTE = "it would change the engine for everybody: use the Python API (`LLM`) in a process of your own"
_SHARED = "memory is not shared with clients: tensors come in the body"

ABSENT: Mapping[str, str] = {
    **dict.fromkeys(("/v1/audio", "/v1/images", "/v1/videos", "/v1/realtime"), _MEDIA),
    **dict.fromkeys(("/v1/files", "/v1/uploads", "/v1/containers", "/v1/vector_stores"), _FILES),
    **dict.fromkeys(("/v1/batches", "/v1/messages/batches"), _BATCHES),
    **dict.fromkeys(("/v1/fine_tuning", "/v1/evals", "/v1/fine-tunes"), _TRAINING),
    **dict.fromkeys(("/v1/assistants", "/v1/threads", "/v1/skills", "/v1/chatkit"), _AGENTS),
    **dict.fromkeys(("/v1/organization", "/v1/organizations", "/api/me", "/api/signout"), _ACCOUNTS),
    "/v1/moderations": "there is no moderation model; ask a model at /v1/chat/completions or /classify",
    "/v1/complete": "use /v1/messages",
    "/v1/edits": "use /v1/chat/completions",
    "/v1/engines": "use /v1/models",
    **dict.fromkeys(("/api/web_search", "/api/web_fetch", "/tools", "/cors-proxy"), "there are no tools on the server"),
    **dict.fromkeys(("/v2/repository",), _LOADING),
    **dict.fromkeys(("/pause", "/resume", "/is_paused"), _PAUSE),
    **dict.fromkeys(("/collective_rpc", "/start_profile", "/stop_profile", "/update_weights"), _NO_REMOTE),
    **dict.fromkeys(("/init_weight_transfer_engine", "/scale_elastic_ep", "/is_scaling_elastic_ep"), _NO_REMOTE),
    **dict.fromkeys(("/reset_mm_cache", "/reset_encoder_cache"), _MEDIA),
    "/embed_all": "there are no vectors of single tokens; /embed gives one for each text",
    "/embed_sparse": "this model gives dense vectors; /embed has them",
    "/predict": "this model has no labels of its own; /classify takes labels",
    "/decode": "use /detokenize",
    "/chat_tokenize": "use /tokenize with `messages`",
    "/inference/v1": "/v1/completions takes token ids as `prompt` and returns them with `return_token_ids`",
    **dict.fromkeys(("/v1/chat/completions/render", "/v1/completions/render"), "use /apply-template and /tokenize"),
    "/abort_requests": "closing the connection, or POST /v1/responses/{id}/cancel, ends a request",
    **dict.fromkeys(("/v2/systemsharedmemory", "/v2/cudasharedmemory"), _SHARED),
    **dict.fromkeys(("/v2/trace", "/v2/logging"), "flags of the server set it"),
    "/get_world_size": "use /metrics, which counts by engine",
    "/server_info": "use /metrics and /v1/models",
    "/reset_prefix_cache": _NO_REMOTE,
    "POST /props": "flags of the server set it",
    "POST /lora-adapters": _ADAPTERS,
    "/slots": "the prefix cache keeps what a slot would save",
    "POST /ping": "use GET /ping",
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
