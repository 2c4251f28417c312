"""What test_server_fields_done.py and other tests share."""

from __future__ import annotations

from typing import Any

from tests.pure.server.probes import USER
from tokenmill.testing.hostile import STANDING

CONVERSATION = STANDING["conversation_id"]
SPOKEN: dict[str, dict[str, Any]] = {"messages": [USER]}
BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "openai.ChatRequest": ("/v1/chat/completions", {"messages": [USER], "seed": 3, "max_completion_tokens": 6}),
    "stored.UpdateRequest": (f"/v1/chat/completions/{STANDING['completion_id']}", {"metadata": {}}),
    "openai.CompletionRequest": ("/v1/completions", {"prompt": "Hi", "seed": 3, "max_tokens": 6}),
    "openai.EmbeddingRequest": ("/v1/embeddings", {"input": "Hi"}),
    "openai.PoolingRequest": ("/pooling", {"input": "Hi"}),
    "openai.TokenizeRequest": ("/tokenize", {"prompt": "Hi"}),
    "openai.DetokenizeRequest": ("/detokenize", {"tokens": [70]}),
    "responses.TalkRequest": ("/v1/responses/input_tokens", {"input": "Hi"}),
    "responses.CompactRequest": ("/v1/responses/compact", {"input": "Hi"}),
    "responses.CreateConversation": ("/v1/conversations", {}),
    "responses.UpdateConversation": (f"/v1/conversations/{CONVERSATION}", {"metadata": {}}),
    "responses.CreateItems": (f"/v1/conversations/{CONVERSATION}/items", {"items": [USER]}),
    "responses.ResponsesRequest": ("/v1/responses", {"input": "Hi", "seed": 3, "max_output_tokens": 6}),
    "anthropic.CountRequest": ("/v1/messages/count_tokens", {"model": "fake", **SPOKEN}),
    "anthropic.MessagesRequest": ("/v1/messages", {"model": "fake", "max_tokens": 6, **SPOKEN}),
    "ollama.GenerateRequest": ("/api/generate", {"model": "fake", "prompt": "Hi", "stream": False}),
    "ollama.ChatRequest": ("/api/chat", {"model": "fake", "stream": False, **SPOKEN}),
    "ollama.Options": ("/api/chat", {"model": "fake", "stream": False, **SPOKEN}),
    "ollama.EmbedOptions": ("/api/embed", {"model": "fake", "input": "Hi"}),
    "ollama.EmbedRequest": ("/api/embed", {"model": "fake", "input": "Hi"}),
    "ollama.EmbeddingsRequest": ("/api/embeddings", {"model": "fake", "prompt": "Hi"}),
    "ollama.ShowRequest": ("/api/show", {"model": "fake"}),
    "ollama.PullRequest": ("/api/pull", {"model": "weights"}),
    "ollama.CreateRequest": ("/api/create", {"model": "mine", "from": "weights", "stream": False}),
    "ollama.CopyRequest": ("/api/copy", {"source": "here", "destination": "there"}),
    "ollama.DeleteRequest": ("/api/delete", {}),
    "tgi.TgiRequest": ("/", {"inputs": "Hi"}),
    "tgi.Parameters": ("/generate", {"inputs": "Hi"}),
    "tgi.VllmRequest": ("/generate", {"prompt": "Hi", "seed": 3, "max_tokens": 6}),
    "llamacpp.CompletionRequest": ("/completion", {"prompt": "Hi", "seed": 3, "max_tokens": 6}),
    "llamacpp.InfillRequest": ("/infill", {"input_prefix": "Hi", "input_suffix": "x", "seed": 3, "max_tokens": 6}),
    "llamacpp.TemplateRequest": ("/apply-template", SPOKEN),
    "llamacpp.EmbeddingRequest": ("/embedding", {"content": "Hi"}),
    "scoring.RerankRequest": ("/rerank", {"query": "a", "documents": ["b", "c"]}),
    "scoring.EmbedRequest": ("/embed", {"inputs": "Hi"}),
    "scoring.SimilarityRequest": ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}}),
    "scoring.TeiRerankRequest": ("/rerank", {"query": "a", "texts": ["b", "c"]}),
    "scoring.ScoreRequest": ("/score", {"text_1": "a", "text_2": "b"}),
    "scoring.ClassifyRequest": ("/classify", {"input": "Hi", "labels": ["a", "b"]}),
    "lora.LoadAdapterRequest": ("/v1/load_lora_adapter", {"lora_name": "four", "lora_path": "adapter"}),
    "lora.UnloadAdapterRequest": ("/v1/unload_lora_adapter", {}),
    "switch.ModelRequest": ("/models/load", {"model": "fake"}),
    "kserve.InferRequest": (
        "/v2/models/fake/infer",
        {"inputs": [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["Hi"]}]},
    ),
    "kserve.GenerateRequest": ("/v2/models/fake/generate", {"text_input": "Hi"}),
    "kserve.Parameters": ("/v2/models/fake/generate", {"text_input": "Hi"}),
}
UNDER = {
    "ollama.Options": "options",
    "ollama.EmbedOptions": "options",
    "tgi.Parameters": "parameters",
    "kserve.Parameters": "parameters",
}
"""Objects that lie under a name of their base."""
