"""Every endpoint of the APIs that clients of this server speak, from their documentation. Owns: the list alone."""

from __future__ import annotations

_ID = "an-id"

PATHS: dict[str, tuple[str, ...]] = {
    "OpenAI": (
        "POST /v1/chat/completions", "GET /v1/chat/completions", "GET /v1/chat/completions/{id}",
        "POST /v1/chat/completions/{id}", "DELETE /v1/chat/completions/{id}", "GET /v1/chat/completions/{id}/messages",
        "POST /v1/completions", "POST /v1/embeddings", "GET /v1/models", "GET /v1/models/{id}",
        "POST /v1/responses", "GET /v1/responses/{id}", "DELETE /v1/responses/{id}", "POST /v1/responses/{id}/cancel",
        "GET /v1/responses/{id}/input_items", "POST /v1/responses/input_tokens", "POST /v1/responses/compact",
        "POST /v1/conversations", "GET /v1/conversations/{id}", "POST /v1/conversations/{id}",
        "DELETE /v1/conversations/{id}", "GET /v1/conversations/{id}/items", "POST /v1/conversations/{id}/items",
        "GET /v1/conversations/{id}/items/{id}", "DELETE /v1/conversations/{id}/items/{id}",
        "POST /v1/audio/speech", "POST /v1/audio/transcriptions", "POST /v1/audio/translations",
        "POST /v1/images/generations", "POST /v1/images/edits", "POST /v1/images/variations", "POST /v1/videos",
        "POST /v1/moderations", "POST /v1/files", "GET /v1/files", "GET /v1/files/{id}/content", "POST /v1/uploads",
        "POST /v1/batches", "GET /v1/batches/{id}", "POST /v1/fine_tuning/jobs", "POST /v1/evals",
        "POST /v1/vector_stores", "POST /v1/assistants", "POST /v1/threads", "POST /v1/threads/{id}/runs",
        "POST /v1/realtime/sessions", "POST /v1/containers", "POST /v1/skills", "POST /v1/chatkit/sessions",
        "GET /v1/organization/usage/completions", "POST /v1/edits", "GET /v1/engines", "POST /v1/fine-tunes",
    ),
    "Anthropic": (
        "POST /v1/messages", "POST /v1/messages/count_tokens", "GET /v1/models", "GET /v1/models/{id}",
        "POST /v1/messages/batches", "GET /v1/messages/batches/{id}/results", "POST /v1/complete", "POST /v1/files",
        "POST /v1/skills", "GET /v1/organizations/me",
    ),
    "Ollama": (
        "POST /api/generate", "POST /api/chat", "POST /api/embed", "POST /api/embeddings", "GET /api/tags",
        "GET /api/ps", "POST /api/show", "GET /api/version", "POST /api/pull", "POST /api/push", "POST /api/create",
        "POST /api/copy", "DELETE /api/delete", "POST /api/blobs/{id}", "POST /api/me", "POST /api/signout",
        "POST /api/web_search", "POST /api/web_fetch", "GET /",
    ),
    "llama.cpp": (
        "GET /health", "GET /v1/health", "POST /completion", "POST /completions", "POST /chat/completions",
        "POST /tokenize", "POST /detokenize",
        "POST /apply-template", "POST /embedding", "POST /embeddings", "POST /infill", "GET /props", "POST /props",
        "GET /slots", "POST /slots/{id}", "GET /lora-adapters", "POST /lora-adapters", "GET /metrics", "POST /rerank",
        "POST /reranking", "POST /v1/rerank", "POST /v1/reranking", "GET /models", "POST /models/load",
        "POST /models/unload", "GET /tools", "GET /cors-proxy", "POST /v1/audio/transcriptions",
    ),
    "TGI": (
        "POST /", "POST /generate", "POST /generate_stream", "POST /chat_tokenize", "POST /tokenize", "GET /info",
        "GET /health", "GET /metrics", "POST /invocations", "POST /v1/chat/completions", "GET /v1/models",
    ),
    "TEI": (
        "POST /embed", "POST /embed_all", "POST /embed_sparse", "POST /predict", "POST /rerank", "POST /similarity",
        "POST /tokenize", "POST /decode", "GET /info", "GET /health", "GET /metrics", "POST /v1/embeddings",
    ),
    "KServe v2, Triton": (
        "GET /v2", "GET /v2/health/live", "GET /v2/health/ready", "GET /v2/models/{id}", "GET /v2/models/{id}/ready",
        "POST /v2/models/{id}/infer", "POST /v2/models/{id}/generate", "POST /v2/models/{id}/generate_stream",
        "POST /v2/repository/index", "POST /v2/repository/models/{id}/load", "GET /v2/systemsharedmemory/status",
        "GET /v2/cudasharedmemory/status", "GET /v2/trace/setting", "GET /v2/logging",
    ),
    "vLLM": (
        "GET /health", "GET /ping", "POST /ping", "GET /load", "GET /version", "GET /metrics", "POST /tokenize",
        "POST /detokenize", "GET /tokenizer_info", "POST /pooling", "POST /classify", "POST /score", "POST /v1/score",
        "POST /rerank", "POST /v1/rerank", "POST /v2/rerank", "POST /invocations", "POST /generate",
        "POST /v1/audio/transcriptions", "GET /v1/realtime", "POST /reset_prefix_cache", "POST /reset_mm_cache",
        "POST /reset_encoder_cache", "GET /server_info", "POST /sleep", "POST /wake_up", "GET /is_sleeping",
        "POST /pause", "POST /resume", "GET /is_paused", "POST /collective_rpc", "POST /start_profile",
        "POST /stop_profile", "POST /v1/load_lora_adapter", "POST /v1/unload_lora_adapter", "POST /scale_elastic_ep",
        "POST /is_scaling_elastic_ep", "POST /inference/v1/generate", "POST /v1/chat/completions/render",
        "POST /v1/completions/render", "POST /abort_requests", "POST /init_weight_transfer_engine",
        "POST /update_weights", "GET /get_world_size",
    ),
}  # fmt: skip
"""`{id}` stands for any id."""
