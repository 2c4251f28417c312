"""vLLM's engine arguments and server flags that are not options here. Owns: what becomes of each, with its reason.

A name is an alias of an option, harmless, or refused when its value would have an effect. Neutral values are those that
change nothing, and vLLM's defaults. `LLM`, `EngineArgs` and the flags of every verb read these lists.
Must not know: the options, what they do.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenmill.core.errors import ParameterError

SWITCHES = frozenset(
    {
        *("aggregate_engine_logging", "allow_credentials", "async_scheduling", "calculate_kv_scales"),
        *("cudagraph_metrics", "data_parallel_external_lb", "data_parallel_hybrid_lb", "disable_async_output_proc"),
        *("disable_cascade_attn", "disable_chunked_mm_input", "disable_custom_all_reduce", "disable_fastapi_docs"),
        *("disable_frontend_multiprocessing", "disable_hybrid_kv_cache_manager", "disable_log_requests"),
        *("disable_mm_preprocessor_cache", "disable_nccl_for_dp_synchronization", "disable_sliding_window"),
        *("disable_uvicorn_access_log", "enable_dbo", "eplb_log_balancedness"),
        *("enable_layerwise_nvtx_tracing", "enable_log_deltas", "enable_log_outputs", "enable_log_requests"),
        *("enable_logging_iteration_details", "enable_lora_bias", "enable_mfu_metrics"),
        *("enable_mm_embeds", "enable_offline_docs", "enable_prompt_adapter", "enable_prompt_embeds"),
        *("enable_prompt_tokens_details", "enable_request_id_headers", "enable_server_load_tracking"),
        *("enable_ssl_refresh", "enable_tokenizer_info_endpoint"),
        *("enable_multimodal_encoder_data_parallel", "enable_return_routed_experts", "kv_sharing_fast_prefill"),
        *(
            "exclude_tools_when_tool_choice_none",
            "fully_sharded_loras",
            "guided_decoding_disable_additional_properties",
        ),
        *("guided_decoding_disable_any_whitespace", "guided_decoding_disable_fallback", "headless", "log_error_stack"),
        *("interleave_mm_strings", "kv_cache_metrics", "language_model_only", "multi_step_stream_outputs"),
        *("allow_deprecated_quantization", "enable_elastic_ep", "enable_flashinfer_autotune", "mm_encoder_only"),
        *("ray_workers_use_nsight", "return_tokens_as_token_ids", "skip_mm_profiling", "tokens_only"),
        *("use_tqdm_on_load", "use_v2_block_manager", "fail_on_environ_validation", "scheduler_reserve_full_isl"),
        "grpc",
    }
)
"""Flags without a value."""

SPELLINGS: Mapping[str, str] = {}
"""Flags that are other names for options of the server."""


@dataclass(frozen=True, slots=True)
class Other:
    """What to do with a name. neutral: values that ask for nothing (None never does). harmless: no value has an
    effect."""

    why: str
    neutral: tuple[Any, ...] = ()
    harmless: bool = False

    def asks(self, value: Any) -> bool:
        """Would this value have an effect?"""
        if self.harmless or value is None:
            return False
        empty: tuple[Any, ...] = (False, "", 0, 0.0, {}, [], (), set())
        return not any(type(value) is type(each) and value == each for each in (*empty, *self.neutral))


def _harmless(why: str, *names: str) -> dict[str, Other]:
    return {name: Other(why, harmless=True) for name in names}


def _refused(why: str, *names: str, **neutral: tuple[Any, ...]) -> dict[str, Other]:
    return {name: Other(why, neutral.get(name, ())) for name in (*names, *neutral)}


ENGINE: Mapping[str, Other] = {
    **_harmless("a preempted request is computed again, so nothing is swapped", "swap_space", "preemption_mode"),
    **_harmless(
        "only about speed, and decided automatically",
        *("async_scheduling", "compilation_config", "cudagraph_capture_sizes", "cuda_graph_sizes"),
        *("max_cudagraph_capture_size", "max_seq_len_to_capture", "optimization_level", "performance_mode"),
        *("disable_async_output_proc", "max_num_partial_prefills", "max_long_partial_prefills"),
        *("num_lookahead_slots", "scheduler_delay_factor", "num_scheduler_steps", "multi_step_stream_outputs"),
        *("stream_interval", "use_v2_block_manager", "prefix_caching_hash_algo", "disable_cascade_attn"),
        *("disable_hybrid_kv_cache_manager", "kv_sharing_fast_prefill", "scheduler_reserve_full_isl"),
        *("attention_backend", "attention_config", "kernel_config", "moe_backend", "enable_flashinfer_autotune"),
        *("tokenizer_pool_size", "tokenizer_pool_type", "tokenizer_pool_extra_config", "renderer_num_workers"),
        *("max_parallel_loading_workers", "safetensors_load_strategy", "pt_load_map_location"),
    ),
    **_harmless(
        "how ranks exchange what they compute is settled by itself",
        *("disable_custom_all_reduce", "disable_nccl_for_dp_synchronization", "all2all_backend"),
        *("expert_placement_strategy", "dbo_decode_token_threshold", "dbo_prefill_token_threshold"),
        *("ubatch_size", "enable_dbo", "dcp_kv_cache_interleave_size", "cp_kv_cache_interleave_size"),
        *("dcp_comm_backend", "distributed_timeout_seconds"),
        *("data_parallel_backend", "ray_workers_use_nsight"),
    ),
    **_harmless("a bar is shown only on a terminal", "use_tqdm_on_load"),
    **_harmless("prompts and answers are never logged", "disable_log_requests", "aggregate_engine_logging"),
    **_harmless("which numbers are shown does not change them", "show_hidden_metrics_for_version", "kv_cache_metrics",
                "kv_cache_metrics_sample", "cudagraph_metrics", "enable_mfu_metrics", "fail_on_environ_validation",
                "enable_logging_iteration_details", "enable_mm_processor_stats"),
    **_harmless("what a file holds is read, however old its form", "allow_deprecated_quantization"),
    **_harmless("code of models is never run, so it has no revision", "code_revision"),
    **_harmless("it limits what is refused here: pictures, sound and video", "limit_mm_per_prompt",
                "allowed_local_media_path", "allowed_media_domains", "media_io_kwargs", "mm_processor_cache_gb",
                "mm_processor_cache_type", "mm_shm_cache_max_object_size_mb", "mm_encoder_tp_mode",
                "mm_encoder_attn_backend", "skip_mm_profiling", "disable_mm_preprocessor_cache", "language_model_only",
                "disable_chunked_mm_input", "interleave_mm_strings", "video_pruning_rate",
                "enable_multimodal_encoder_data_parallel"),
    **_harmless("all backends enforce the same", "guided_decoding_backend", "guided_decoding_disable_fallback",
                "structured_outputs_config"),
    **_harmless("adapters are computed in the model's type, sharded as their matrices are", "lora_dtype",
                "fully_sharded_loras", "enable_lora_bias", "specialize_active_lora", "enable_tower_connector_lora"),
    **_harmless("it bounds prompt adapters, which are not there", "max_prompt_adapters", "max_prompt_adapter_token"),
    **_refused("adapters whose vocabulary is larger than the model's are not read",
               lora_extra_vocab_size=(0, 256)),
    **_refused("adapters change what their files say", "long_lora_scaling_factors", "lora_target_modules"),
    **_harmless("only experimental paths of vLLM use it", "additional_config", "weight_transfer_config"),
    **_refused("give it in eplb_config", "num_redundant_experts", "eplb_log_balancedness",
               eplb_window_size=(1000,), eplb_step_interval=(3000,)),
    **_refused("log-probabilities are those of the model, before any edit", logprobs_mode=("raw_logprobs",)),
    **_refused("the tokenizer is read from the model's own files by one reader", tokenizer_mode=("auto", "slow", "hf")),
    **_refused("config.json is read as hubs have it", config_format=("auto", "hf"), hf_config_path=()),
    **_refused(
        "one engine generates, embeds and scores: leave it out (models with heads of their own are not built)",
        task=("auto", "generate", "embed", "embedding"),
        runner=("auto", "generate", "pooling"),
        convert=("auto", "none", "embed"),
    ),
    **_refused("give hf_overrides with the entries of config.json", "rope_scaling", "rope_theta", "rope_parameters"),
    **_refused("a window is part of the model", "disable_sliding_window"),
    **_refused("vectors in place of text are not read", "enable_prompt_embeds", "enable_mm_embeds"),
    **_refused("this engine reads text and token ids", "mm_processor_kwargs"),
    **_refused("give embed(pooling=...) or PoolingParams", "pooler_config", "override_pooler_config"),
    **_refused("attention is computed in float32 or as the kernels say", "override_attention_dtype"),
    **_refused("plugins are not loaded", "io_processor_plugin", "logits_processor_pattern", "logits_processors",
               "reasoning_parser_plugin", "scheduler_cls", "worker_cls", "worker_extension_cls",
               worker_cls=("auto",), worker_extension_cls=()),
    **_refused("prompt adapters are not built: LoRA adapters are (--enable-lora)", "enable_prompt_adapter",
               "prompt_adapters"),
    **_refused("this engine reads text", "default_mm_loras", "mm_encoder_only"),
    **_refused("weights stay on the device: --quantization makes them smaller", "cpu_offload_gb", "offload_config",
               "cpu_offload_params", "offload_group_size", "offload_params", offload_backend=("auto",),
               offload_num_in_group=(1,), offload_prefetch_step=(1,)),
    **_refused("the number of engines is data_parallel_size, from the start", "enable_elastic_ep"),
    **_refused("keys and values stay on the device: --kv-cache-dtype makes them smaller", "kv_offloading_size",
               kv_offloading_backend=("native",)),
    **_refused("keys and values do not leave the engine", "kv_transfer_config", "kv_events_config",
               "ec_transfer_config"),
    **_refused("scales of stored keys and values are made per token and head", "calculate_kv_scales",
               "kv_cache_dtype_skip_layers", "quantization_param_path"),
    **_refused("states of recurrent layers have one form", mamba_cache_dtype=("auto", "float32"),
               mamba_block_size=(), mamba_cache_mode=("none", "all")),
    **_refused("files are chosen by what a folder holds", "model_loader_extra_config", "ignore_patterns",
               model_loader_extra_config=({},), ignore_patterns=("original/**/*", ["original/**/*"]),
               model_weights=()),
    **_refused(
        "engines and their ranks are processes of one machine: --data-parallel-size, --tensor-parallel-size",
        distributed_executor_backend=("mp", "uni"),
        decode_context_parallel_size=(1,),
        prefill_context_parallel_size=(1,),
        data_parallel_size_local=(1,),
        data_parallel_rank=(),
        data_parallel_start_rank=(),
        data_parallel_address=(),
        data_parallel_rpc_port=(),
        data_parallel_external_lb=(),
        data_parallel_hybrid_lb=(),
        nnodes=(1,),
        node_rank=(),
        master_addr=("127.0.0.1",),
        master_port=(29501,),
    ),
    **_refused("give speculative_config", "speculative_model", "num_speculative_tokens", "ngram_prompt_lookup_max",
               "ngram_prompt_lookup_min"),
    **_refused("set it in requests, beside the schema (structured_outputs)", "guided_decoding_disable_any_whitespace",
               "guided_decoding_disable_additional_properties"),
    **_refused("start_profile() and stop_profile() write a trace", "profiler_config", "enable_layerwise_nvtx_tracing"),
    **_refused("--otlp-traces-endpoint sends a trace of each request", "collect_detailed_traces"),
    **_refused("experts' choices are not told", "enable_return_routed_experts"),
    **_refused("prompts and answers are never logged", "enable_log_requests"),
    **_harmless("offline, as many come as are asked for", "max_logprobs"),
    **_harmless("offline outputs hold the whole text, reasoning too", "reasoning_parser"),
    **_refused("traces are the server's", "otlp_traces_endpoint"),
}  # fmt: skip
"""Keyword arguments of LLM and EngineArgs, and flags of every verb that loads a model."""

SERVER: Mapping[str, Other] = {
    **_harmless("prompts and answers are never logged, so no length of them is", "max_log_len"),
    **_harmless("use --log-level and --log-json", "uvicorn_log_level",
                "disable_uvicorn_access_log", "disable_access_log_for_endpoints", "log_error_stack"),
    **_harmless("it is always so", "enable_prompt_tokens_details", "enable_request_id_headers",
                "enable_server_load_tracking", "enable_tokenizer_info_endpoint"),
    **_harmless("content parts become text for every template", "chat_template_content_format"),
    **_harmless("text work runs in threads of its own", "disable_frontend_multiprocessing"),
    **_harmless("there are no pages of interactive docs", "disable_fastapi_docs", "enable_offline_docs"),
    **_harmless("--max-header-bytes bounds a request's head", "h11_max_incomplete_event_size",
                "h11_max_header_count"),
    **_harmless("a template is not told of tools that may not be called", "exclude_tools_when_tool_choice_none"),
    **_refused("--allowed-origins says which pages may call; methods and headers follow from the API",
               "allow_credentials", allowed_methods=("*", ["*"], '["*"]'), allowed_headers=("*", ["*"], '["*"]')),
    **_refused("prompts and answers are never logged", "enable_log_outputs", "enable_log_deltas", "log_config_file",
               enable_log_deltas=(True,)),
    **_refused("plugins are not loaded", "middleware", "tool_parser_plugin", "tool_server"),
    **_refused("set it in requests: return_tokens_as_token_ids", "return_tokens_as_token_ids"),
    **_refused("certificates are read at the start: restart to renew them", "enable_ssl_refresh"),
    **_refused("--ssl-ca-certs asks clients for a certificate", "ssl_cert_reqs", "ssl_ciphers"),
    **_refused("the server and its engines are one process tree: --engines", "headless", api_server_count=(1,),
               data_parallel_multi_port_external_lb=()),
    **_refused("token ids are read by every endpoint that takes a prompt", "tokens_only"),
    **_refused("the server speaks HTTP; KServe's HTTP form is there", "grpc"),
}  # fmt: skip
"""Flags of `vllm serve` besides the engine's."""

STORED_AS = frozenset(
    {
        *(
            "awq",
            "awq_marlin",
            "gptq",
            "gptq_marlin",
            "compressed-tensors",
            "gguf",
            "fbgemm_fp8",
            "mxfp4",
            "auto-round",
        ),
        *("modelopt", "modelopt_fp4", "gpt_oss_mxfp4"),
    }
)
"""Values of `quantization` that say how a file stores its weights. They are not needed, because the file states it."""

SAME = {("kv_cache_dtype", "fp8_e4m3"): "fp8"}
"""Values that have another name here."""

LOAD_AS = frozenset({"gguf", "hf", "fastsafetensors", "runai_streamer"})
"""Values of `load_format` that say how files are read. They are not needed: it is detected."""


UNSET = frozenset({"enable_prefix_caching", "enable_chunked_prefill"})
"""Options that None leaves at their default."""


def options_alone(given: Mapping[str, Any], others: Mapping[str, Other]) -> dict[str, Any]:
    """Our own options alone, in our spelling. Harmless names are dropped; a value that would be lost is refused."""
    kept: dict[str, Any] = {}
    for name, value in given.items():
        other = others.get(name)
        if value is None and name in UNSET:
            continue
        if other is None:
            kept[name] = _plain(name, value)
            if name == "quantization" and kept[name] is None and value is not None:
                kept["stored_as"] = value
        elif other.asks(value):
            raise ParameterError(f"{name} = {_shown(value)} cannot be used: {other.why}.", param=name)
    return kept


def close_to(name: str, known: list[str]) -> str:
    """A hint for a misspelt name."""
    close = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def parsed(text: Any) -> Any:
    """The value that a flag's text stands for: a number, JSON, or the text."""
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _plain(name: str, value: Any) -> Any:
    """A value in our spelling, given as programs for vLLM write it."""
    if name == "dtype" and not isinstance(value, str):
        return str(value).removeprefix("torch.")  # torch.bfloat16
    if name == "quantization" and isinstance(value, str) and value in STORED_AS:
        return None
    if name == "load_format" and isinstance(value, str) and value in LOAD_AS:
        return "auto"
    if isinstance(value, str) and (name, value) in SAME:
        return SAME[name, value]
    if name == "max_model_len" and value == -1 and not isinstance(value, bool):
        return None  # as much as fits, which is the default here
    if name == "hf_token" and value is True:
        return None  # the one that is stored, or HF_TOKEN
    if name == "served_model_name" and isinstance(value, (list, tuple)) and all(isinstance(n, str) for n in value):
        return ",".join(value)
    if name == "hf_overrides" and callable(value):
        raise ParameterError("hf_overrides must be a dict here: a callable cannot reach other processes.", param=name)
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
