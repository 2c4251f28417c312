"""Names that are refused when their value would have an effect. Owns: the lists, with reasons and neutral values.

Keys of REFUSED name objects: an API's folder and a schema, or an object that has no schema (`request_rules.py`).
Neutral values are those that change nothing, and the defaults of the API that a name comes from: its clients write
them into every request. Must not know: schemas, HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmill.core.object_rules import Refusal
from tokenmill.text.messages.names import CALL, MESSAGE, PART

Refusals = Mapping[str, Refusal]


def _refuse(why: str, *names: str, **neutral: tuple[Any, ...]) -> dict[str, Refusal]:
    """Names that are refused, each with the values that ask for nothing."""
    return {name: Refusal(why, neutral.get(name, ())) for name in (*names, *neutral)}


def _loud(why: str, *names: str, **neutral: tuple[Any, ...]) -> dict[str, Refusal]:
    """Names of which every value except null and the neutral ones asks for something (false, too)."""
    return {name: Refusal(why, neutral.get(name, ()), loud=True) for name in (*names, *neutral)}


SAMPLERS: Refusals = {
    **_refuse("use samplers", "sampler_priority", "sampler_order", "sampler_seq"),
    **_refuse(
        "this sampling method is not available",
        "dynamic_temperature",
        "logits_processors",
        "force_words_ids",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "exponential_decay_length_penalty",
        diversity_penalty=(0,),
        num_beam_groups=(1,),
        top_p_decay=(1,),
        tfs_z=(1,),
        tfs=(1,),
        encoder_no_repeat_ngram_size=(0,),
        penalty_alpha=(0,),
        guidance_scale=(1,),
        cfg_scale=(1,),
        encoder_repetition_penalty=(1,),
        adaptive_target=(-1,),
        min_keep=(0, 1),
    ),
    **_refuse(
        "use repeat_last_n",
        "repetition_context_size",
        repetition_penalty_range=(0, -1),
        rep_pen_range=(0, -1),
    ),
    **_refuse("use use_beam_search and n", num_beams=(1,), beam_width=(1,)),
    **_refuse("use bad_words", "bad_words_ids"),
    **_refuse("use logit_bias", "suppress_tokens", "begin_suppress_tokens", "sequence_bias"),
    **_refuse("use mirostat_tau", "mirostat_target"),
    **_refuse("use mirostat_eta", "mirostat_lr"),
    **_refuse("penalties always count prompt and answer", "penalty_prompt"),
    **_loud("all tokens are penalised alike", penalize_nl=(True,), penalize_newline=(True,)),
}

ENGINES: Refusals = {
    **_refuse(
        "it is a feature of another engine",
        "logprob_token_ids",
        "repetition_detection",
        "watermarking",
        "return_token_offsets",
        "return_mm_kwargs",
        "routed_experts_prompt_start",
        "kv_transfer_params",
        "ec_transfer_params",
        "vllm_xargs",
        "stop_regex",
        "no_stop_trim",
        "session_params",
        "custom_logit_processor",
        "custom_params",
        "extra_key",
        "return_hidden_states",
        "return_routed_experts",
        "return_cached_tokens_details",
        "return_meta_info",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "disagg_prefill_dp_rank",
        "custom_labels",
        "response_fields",
        "return_progress",
        "post_sampling_probs",
        "grammar_lazy",
        "grammar_triggers",
        "preserved_tokens",
        "input_extra",
        "input_prefix",
        "input_suffix",
        "image_data",
        "multimodal_data",
        "disaggregated_params",
        "lora_request",
        "perf_metrics_in_response",
        "return_perf_metrics",
        "raw_output",
        "deferred",
        early_stopping=(),
        min_length=(0,),
        n_indent=(0,),
    ),
    **_loud("it is a feature of another engine", detokenize=(True,), parse_tool_calls=(True,)),
    **_refuse("name the adapter as the model", "lora_path", "lora", "adapter_id", "adapter"),
    **_refuse("use the header X-data-parallel-rank", "data_parallel_rank", "routed_dp_rank"),
    **_refuse("use request_id", "rid"),
    **_refuse("use prompt at /v1/completions", "input_ids"),
    **_refuse("use logprobs", n_probs=(0,)),
    **_refuse("use return_token_ids", "return_tokens", "return_prompt_token_ids"),
    **_refuse("use n", num_return_sequences=(1,), n_cmpl=(1,)),
    **_refuse("use stop", "stop_words"),
    **_refuse("use truncate_prompt_tokens", "prompt_truncate_len"),
    **_refuse("use reasoning_effort", "prompt_mode"),
    **_refuse("there are no tools that run on the server", "search_parameters"),
    **_refuse("use timeout", "max_time", t_max_predict_ms=(0, -1)),
    **_refuse("--enable-per-request-metrics gives times", "timings_per_token"),
    **_refuse("use max_tokens", "max_length"),
    **_refuse("use response_format", "guided_json_object"),
    **_refuse("use separate_reasoning", "reasoning_in_content", reasoning_format=("auto", "deepseek")),
    **_refuse("use thinking_token_budget", "thinking_budget", "thinking_budget_tokens", reasoning_budget=(-1,)),
    **_loud("use chat_template_kwargs", "enable_thinking"),
    **_refuse("send its contents as fields of the request", "extra_body", "extra_headers", "extra_query"),
    **_refuse(
        "it is for another provider's router",
        "transforms",
        "models",
        "route",
        "provider",
        "plugins",
        "preset",
        "fallbacks",
    ),
    **_refuse("use the chat's system message", "system_prompt", "safe_prompt"),
}
GENERATING: Refusals = {**SAMPLERS, **ENGINES}
"""Names that every endpoint that makes text refuses."""

_TIER = _refuse("there is one tier", service_tier=("auto", "default", "standard_only"))
_IMAGES = "this model reads only text"
_NO_PLACE = _refuse(
    "this API's answers have no place for it",
    "logprobs",
    "prompt_logprobs",
    "echo",
    "return_tokens_as_token_ids",
    "return_token_ids",
    "stream_options",
    "stream_interval",
    "request_id",
)
_SUFFIX = _refuse("this model's format cannot take text after a gap", "suffix")
_NO_TOOLS = "there are no tools that run on the server"
_SERVER_TOOLS = {
    **_refuse(_NO_TOOLS, "mcp_servers", "container", "max_tool_calls"),
    **_loud(_NO_TOOLS, "web_search_options"),  # {} asks for a search
}
_TOOL = _refuse("every tool is shown to the model at once", "defer_loading")

_BY_MEANING = {
    **_loud("scores have one form, from 0 to 1", use_activation=(True,), activation=(True,), softmax=(True,)),
    **_refuse("scores have one form, from 0 to 1", "raw_scores"),
    **_refuse("one key's texts share its prompt cache", "cache_salt"),
    **_refuse("send the header X-Request-Id", "request_id"),
    **_loud("texts are read as the tokenizer does", add_special_tokens=(True,)),
    **_refuse(_IMAGES, "mm_processor_kwargs", "media_io_kwargs"),
}
"""What other servers' requests for scores and labels hold."""
_SCORES = {
    **_BY_MEANING,
    **_refuse("use instruction", "chat_template", "chat_template_kwargs", "score_template"),
    **_refuse("/classify asks which label is the likeliest", "label_token_ids", "apply_softmax", "item_first"),
    **_refuse("use truncate_prompt_tokens", max_tokens_per_doc=(0, 4096), max_chunks_per_doc=(10,), truncation=(True,)),
}

REFUSED: dict[str, Refusals] = {
    "openai.ChatRequest": {
        **GENERATING,
        **_TIER,
        **_SERVER_TOOLS,
        **_SUFFIX,
        **_refuse(_IMAGES, "media_io_kwargs", "mm_processor_kwargs", "audio", modalities=(["text"],)),
        **_refuse(_IMAGES, "max_dynamic_patch", "min_dynamic_patch"),
        **_refuse("use tools", "functions", function_call=("none",)),
        **_refuse("predicted outputs are not available", "prediction"),
        **_refuse("models here are not trained for it", verbosity=("medium",)),
        **_refuse("it is a feature of another engine", "return_assistant_tokens_mask", stream_reasoning=(True,)),
    },
    "openai.CompletionRequest": {
        **GENERATING,
        **_TIER,
        **_refuse("this model reads token ids or text", "prompt_embeds"),
        **_refuse("completions have no reasoning", thinking_token_budget=(-1,)),
    },
    "openai.Message": MESSAGE.refused,
    "openai.TextPart": PART.refused,
    "openai.ToolCall": CALL.refused,
    "openai.Tool": {**_TOOL, **_refuse("tools are functions here", "custom")},
    "openai.FunctionDefinition": _TOOL,
    "openai.EmbeddingRequest": {
        **_refuse("vectors are float32", embed_dtype=("float32",), output_dtype=("float", "float32")),
        **_refuse("a vector is that of a text: send it as input", "messages"),
        **_refuse(_IMAGES, "images", "mm_processor_kwargs", "media_io_kwargs"),
        **_refuse("name the adapter as the model", "lora_path"),
        **_refuse("use the header X-data-parallel-rank", "data_parallel_rank"),
        **_refuse("put it into the text", "task", "input_type", "prompt_name", "late_chunking", "instruction"),
        **_refuse("use truncate_prompt_tokens", "truncate", truncation=(True,)),
        **_loud(
            "vectors have length one",
            normalize=(True,),
            normalized=(True,),
            use_activation=(True,),
            activation=(True,),
            softmax=(True,),
        ),
        **_refuse("base64 holds little-endian numbers", endianness=("native", "little")),
        **_refuse("vectors are float32", embedding_types=(["float"],), embedding_type=("float",)),
        **_refuse("use dimensions", "output_dimension", "output_dimensionality"),
        **_refuse("there is one vector for a text", "return_multivector"),
        **_refuse("use request_id", "rid"),
        **_refuse("one key's texts share its prompt cache", "cache_salt"),
    },
    "llamacpp.EmbeddingRequest": {
        **_loud("vectors have length one", embd_normalize=(2,)),
        **_refuse("/v1/embeddings has it", "dimensions", encoding_format=("float",)),
    },
    "openai.TokenizeRequest": {
        **_refuse("the server's template is used", "chat_template", "documents"),
        **_refuse("use chat_template_kwargs", "reasoning_effort"),
        **_loud("use chat_template_kwargs", "enable_thinking"),
        **_refuse(_IMAGES, "media_io_kwargs", "mm_processor_kwargs"),
    },
    "responses.ResponsesRequest": {
        **GENERATING,
        **_TIER,
        **_SERVER_TOOLS,
        **_refuse("it names a template stored elsewhere: send the input itself", "prompt"),
        **_refuse("use truncation, or /v1/responses/compact", "context_management"),
        **_refuse("this server does not moderate texts", "moderation", "access_programs"),
        **_refuse("background runs begin at once", "background_options"),
        **_refuse("use input, and GET /v1/responses/{id}/input_items", "previous_input_messages"),
        **_refuse("an answer never holds its prompt", "enable_response_messages"),
        **_refuse(_IMAGES, "modalities", "audio", "image", "mm_processor_kwargs", "media_io_kwargs"),
    },
    "responses.TalkRequest": {
        **_refuse("use instructions", "personality"),
        **_refuse("it names a template stored elsewhere: send the input itself", "prompt"),
    },
    "responses.CompactRequest": {**_TIER, **_refuse(_IMAGES, "image")},
    "responses.Reasoning": {
        **_refuse("reasoning is always given in full", summary=("auto",), generate_summary=("auto",)),
        **_refuse("models here are not trained for it", context=("auto",), mode=("standard",)),
    },
    "responses.Text": _refuse("models here are not trained for it", verbosity=("medium",)),
    "responses.Tool": _TOOL,
    "responses.Part": _refuse(_IMAGES, "image_url", "file_id", "file_data", "file_url", "input_audio"),
    "anthropic.MessagesRequest": {
        **GENERATING,
        **_TIER,
        **_SERVER_TOOLS,
        **_refuse("the prompt is never edited", "context_management"),
        **_refuse("use output_config.format", "output_format"),
        **_refuse("the server's place cannot be chosen", "inference_geo"),
        **_refuse("there is one speed", speed=("standard",)),
    },
    "anthropic.CountRequest": {
        **_SERVER_TOOLS,
        **_refuse("the prompt is never edited", "context_management"),
        **_refuse("use thinking", "chat_template_kwargs"),
    },
    "anthropic.Turn": _refuse("end with a message of the assistant instead", "prefix"),
    "anthropic.Block": _refuse(_IMAGES, "source", "citations", "file_id"),
    "anthropic.Tool": {
        **_TOOL,
        **_refuse("put examples into the description", "input_examples"),
        **_refuse("only the model calls tools", allowed_callers=(["direct"],)),
    },
    "anthropic.Thinking": _refuse("reasoning is always shown in full", display=("summarized",)),
    "anthropic.OutputConfig": _refuse("use max_tokens", "task_budget"),
    "anthropic.ResultPart": _refuse(_IMAGES, "source"),
    "ollama.GenerateRequest": {
        **GENERATING,
        **_refuse("it is not accepted from requests", "template"),
        **_refuse("they need a model that reads images", "images"),
        **_refuse("it is not kept: send the conversation to /api/chat", "context"),
        **_refuse("this model writes text", width=(0,), height=(0,), steps=(0,)),
    },
    "ollama.ChatRequest": {
        **GENERATING,
        **_refuse("it is not accepted from requests", "template"),
    },
    "ollama.PullRequest": _refuse("the server uses its own hub token (HF_TOKEN)", "username", "password"),
    "ollama.CreateRequest": {
        **_refuse("`tokenmill quantize` writes a smaller model, which can be pulled", "quantize", "quantization"),
        **_refuse("paths are not read from clients: send the text as modelfile", "path"),
        **_refuse("the chat template decides how answers are read", "renderer", "parser", "requires"),
        **_refuse("models are made from files on this machine", "remote_host", "info"),
    },
    "ollama.Options": {
        **GENERATING,
        **_refuse("the model's files set it", rope_frequency_base=(), rope_frequency_scale=()),
        **_refuse("the model is loaded to write text", "vocab_only", "logits_all", "embedding_only"),
    },
    "ollama.Message": _refuse("they need a model that reads images", "images"),
    "tgi.TgiRequest": {
        **_refuse("this path has TGI's API: use inputs", "text"),
        **_refuse("this path has TGI's API: use parameters", "sampling_params"),
        **_refuse("/v1/completions takes token ids as prompt", "input_ids"),
    },
    "tgi.Parameters": {
        **GENERATING,
        **_refuse("texts are not watermarked", "watermark"),
        **_refuse("use max_new_tokens", "max_tokens", "max_length"),
    },
    "scoring.RerankRequest": {
        **_SCORES,
        **_refuse("only a document's text is read", rank_fields=(["text"],)),
        **_refuse("/v1/embeddings gives them", "return_embeddings"),
        **_refuse("send texts in place of documents for TEI's form", "truncate", "return_text"),
        **_refuse("use top_n", "top_k"),
        **_refuse("use query and documents", "texts"),
    },
    "scoring.EmbedRequest": {
        **_loud("vectors have length one", normalize=(True,)),
        **_refuse("put it into the text", "prompt_name"),
    },
    "scoring.SimilarityRequest": _refuse("texts are read as they are, and not cut", "parameters"),
    "scoring.TeiRerankRequest": {
        **_refuse("scores are cosines", "raw_scores"),
    },
    "scoring.ScoreRequest": {**_SCORES, **_refuse("/rerank has it", "top_n", "return_documents")},
    "scoring.ClassifyRequest": {
        **_BY_MEANING,
        **_refuse("send texts as input", "messages", "inputs"),
        **_refuse("texts are not cut: shorten them", "truncate_prompt_tokens", "truncation_side", "truncate"),
        **_refuse("each label gets its share of one whole", "multi_label"),
        **_refuse("use instruction", "hypothesis_template", "chat_template", "chat_template_kwargs"),
        **_refuse("the answer holds the shares of all labels", "top_k"),
    },
    "scoring.Document": _refuse(_IMAGES, "image", "image_url", "content"),
    "kserve.Tensor": _refuse("values are JSON in data", "parameters"),
    "kserve.Output": _refuse("values are JSON in data", "parameters"),
}
REFUSED["tgi.VllmRequest"] = {**REFUSED["openai.CompletionRequest"], **_NO_PLACE}
REFUSED["kserve.Parameters"] = {
    **REFUSED["tgi.VllmRequest"],
    **_refuse("the path names the model", "model"),
    **_refuse("use text_input", "prompt"),
    **_refuse("its entries are parameters of their own here", "sampling_parameters"),
    **_refuse("an answer never holds its prompt", exclude_input_in_output=(True,)),
    **_refuse("this server keeps no sequences", "sequence_start", "sequence_end", sequence_id=(0,)),
}
_LLAMA_READS = (
    "lora",
    "n_probs",
    "return_tokens",
    "input_prefix",
    "input_suffix",
    "input_extra",
    "return_token_ids",
    "logprobs",
    "response_fields",
)
_ONE_TEXT = _refuse("the answer has room for one text", n=(1,), n_cmpl=(1,), best_of=(0, 1))
REFUSED["llamacpp.CompletionRequest"] = {
    **{name: why for name, why in REFUSED["tgi.VllmRequest"].items() if name not in _LLAMA_READS},
    **_ONE_TEXT,
    **_refuse("it is for /infill", "input_prefix", "input_suffix", "input_extra"),
}
REFUSED["llamacpp.InfillRequest"] = {
    **{name: why for name, why in REFUSED["llamacpp.CompletionRequest"].items() if name not in _LLAMA_READS},
    **_refuse("use input_suffix", "suffix"),
    **_refuse("the text around a gap is not cut", "truncate_prompt_tokens", truncation_side=("left", "right")),
}
REFUSED["llamacpp.TextObject"] = _refuse(_IMAGES, "multimodal_data")
REFUSED["llamacpp.TemplateRequest"] = REFUSED["openai.TokenizeRequest"]
REFUSED["openai.PoolingRequest"] = {
    name: why for name, why in REFUSED["openai.EmbeddingRequest"].items() if name != "task"
}
