"""What vLLM's documentation names (methods of its `LLM`, fields of its `SamplingParams`, flags of `vllm serve`), and
what becomes of each here. Owns: the names, and the verdicts, read from the code where it holds them.
`docs/compatibility.md` is written from this (tools/compatibility.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.cli.serve import SERVER_FLAGS
from tokenmill.core.config import GROUPS, SERVER_GROUPS, all_options
from tokenmill.core.request import SamplingParams
from tokenmill.core.vllm_arguments import ENGINE, SERVER, SPELLINGS, Other
from tokenmill.core.vllm_fields import SAMPLING


@dataclass(frozen=True, slots=True)
class Verdict:
    """done, refused or harmless; and how, or why."""

    kind: str
    why: str = ""


def done(why: str = "") -> Verdict:
    """It has its effect."""
    return Verdict("done", why)


def refused(why: str) -> Verdict:
    """An error names it."""
    return Verdict("refused", why)


def harmless(why: str) -> Verdict:
    """Taken, and of no effect, because none is missing."""
    return Verdict("harmless", why)


METHODS: dict[str, Verdict] = {
    "generate": done(),
    "chat": done("`tools`, `chat_template`, `continue_final_message`, ...; other names go to the template"),
    "beam_search": done("ranked by log-probability per *output* token to the power of `length_penalty`"),
    "embed": done("unit vectors: the last token's hidden state or the mean, as `pooling` or the model's files say"),
    "encode": done("`pooling_task=\"embed\"`; others need heads that are not built"),
    "classify": done("with `labels=[...]`, by the language model; heads for classification are not built"),
    "score": done("cosine of embeddings, or `method=\"likelihood\"`; the same functions as the server's `/score`"),
    "reward": refused("reward models have a head that is not built"),
    "get_tokenizer": done("with the names of Transformers' tokenizers"),
    "set_tokenizer": refused("give `tokenizer=` to the constructor"),
    "get_default_sampling_params": done(),
    "preprocess_chat": refused("`get_tokenizer().apply_chat_template()` renders a chat"),
    "collective_rpc": done("on the one worker that there is, if it is in this process; no `timeout`"),
    "apply_model": done("the model is not a `torch.nn.Module`"),
    "start_profile": done("torch's profiler, for a model in this process"),
    "stop_profile": done("gives the trace's file"),
    "reset_prefix_cache": done(),
    "reset_mm_cache": harmless("there is no cache of media"),
    "sleep": done("with `enable_sleep_mode=True`; level 2 reads the files again by itself"),
    "wake_up": done(),
    "get_metrics": done("the server's series; histograms are left to requests' own `metrics`"),
    "get_world_size": done(),
    "enqueue": refused("`llm_engine.add_request()` and `step()` do it"),
    "wait_for_completion": refused("`llm_engine.step()` while `has_unfinished_requests()`"),
    "init_weight_transfer_engine": refused("`update_weights()` takes tensors or a file; there are no ranks to connect"),
    "start_weight_update": done(),
    "update_weights": done("pairs of name and tensor, a dict, or a safetensors file or folder"),
    "finish_weight_update": done(),
    "from_engine_args": done(),
    "llm_engine": done("`add_request`, `step`, `has_unfinished_requests`, `abort_request`"),
}  # fmt: skip
"""Of `vllm.LLM`."""

FIELDS: tuple[str, ...] = (
    "n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k",
    "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs",
    "flat_logprobs", "detokenize", "skip_special_tokens", "spaces_between_special_tokens", "logits_processors",
    "include_stop_str_in_output", "truncate_prompt_tokens", "output_kind", "skip_clone", "structured_outputs",
    "guided_decoding", "logit_bias", "allowed_token_ids", "extra_args", "bad_words", "skip_reading_prefix_cache",
    "thinking_token_budget", "repetition_detection", "logprob_token_ids", "prompt_logprob_token_ids",
    "prompt_logprob_start", "stream_interval", "routed_experts_prompt_start", "trace_decode_token_ids",
    "use_beam_search", "length_penalty", "early_stopping",
)  # fmt: skip
"""Of `vllm.SamplingParams`, older ones too."""

NOTES = {
    "logits_processors": "callables in this process; slow, as each token waits for Python",
    "output_kind": "read by AsyncLLM and LLMEngine",
    "logprobs": "offline as many as are asked for, over HTTP up to `--max-logprobs`",
    "best_of": "still there",
    "use_beam_search": "still there; `LLM.beam_search` is the newer way",
}

_FLAGS = """
    model runner convert task tokenizer tokenizer-mode trust-remote-code dtype seed hf-config-path
    allowed-local-media-path allowed-media-domains revision code-revision rope-scaling rope-theta rope-parameters
    tokenizer-revision max-model-len quantization enforce-eager max-seq-len-to-capture max-logprobs logprobs-mode
    disable-sliding-window disable-cascade-attn skip-tokenizer-init enable-prompt-embeds served-model-name config-format
    hf-token hf-overrides pooler-config override-pooler-config logits-processor-pattern generation-config
    override-generation-config enable-sleep-mode model-impl override-attention-dtype logits-processors
    io-processor-plugin enable-return-routed-experts renderer-num-workers load-format download-dir
    safetensors-load-strategy model-loader-extra-config ignore-patterns use-tqdm-on-load pt-load-map-location
    reasoning-parser reasoning-parser-plugin guided-decoding-backend guided-decoding-disable-fallback
    guided-decoding-disable-any-whitespace guided-decoding-disable-additional-properties structured-outputs-config
    distributed-executor-backend pipeline-parallel-size tensor-parallel-size decode-context-parallel-size
    prefill-context-parallel-size dcp-kv-cache-interleave-size data-parallel-size data-parallel-rank
    data-parallel-start-rank data-parallel-size-local data-parallel-address data-parallel-rpc-port data-parallel-backend
    data-parallel-hybrid-lb data-parallel-external-lb enable-expert-parallel all2all-backend enable-dbo ubatch-size
    dbo-decode-token-threshold dbo-prefill-token-threshold disable-nccl-for-dp-synchronization enable-eplb eplb-config
    num-redundant-experts eplb-window-size eplb-step-interval eplb-log-balancedness expert-placement-strategy
    enable-elastic-ep distributed-timeout-seconds dcp-comm-backend cp-kv-cache-interleave-size
    allow-deprecated-quantization max-parallel-loading-workers ray-workers-use-nsight disable-custom-all-reduce
    worker-cls worker-extension-cls nnodes node-rank master-addr master-port block-size gpu-memory-utilization
    kv-cache-memory-bytes swap-space kv-cache-dtype num-gpu-blocks-override enable-prefix-caching
    prefix-caching-hash-algo cpu-offload-gb cpu-offload-params offload-backend offload-group-size offload-num-in-group
    offload-prefetch-step offload-params calculate-kv-scales kv-cache-dtype-skip-layers kv-sharing-fast-prefill
    mamba-cache-dtype mamba-ssm-cache-dtype mamba-block-size mamba-cache-mode kv-offloading-size kv-offloading-backend
    limit-mm-per-prompt enable-mm-embeds interleave-mm-strings media-io-kwargs mm-processor-kwargs mm-processor-cache-gb
    disable-mm-preprocessor-cache mm-processor-cache-type mm-shm-cache-max-object-size-mb mm-encoder-only
    mm-encoder-tp-mode mm-encoder-attn-backend skip-mm-profiling video-pruning-rate language-model-only
    disable-chunked-mm-input enable-multimodal-encoder-data-parallel enable-lora enable-lora-bias max-loras
    max-lora-rank lora-extra-vocab-size lora-dtype max-cpu-loras fully-sharded-loras default-mm-loras
    lora-target-modules enable-tower-connector-lora specialize-active-lora show-hidden-metrics-for-version
    otlp-traces-endpoint collect-detailed-traces kv-cache-metrics kv-cache-metrics-sample cudagraph-metrics
    enable-layerwise-nvtx-tracing enable-mfu-metrics enable-logging-iteration-details max-num-batched-tokens
    max-num-seqs max-num-partial-prefills max-long-partial-prefills long-prefill-token-threshold num-lookahead-slots
    scheduling-policy enable-chunked-prefill scheduler-cls disable-hybrid-kv-cache-manager async-scheduling
    stream-interval scheduler-reserve-full-isl compilation-config cudagraph-capture-sizes cuda-graph-sizes
    max-cudagraph-capture-size speculative-config kv-transfer-config kv-events-config ec-transfer-config
    additional-config attention-backend attention-config kernel-config enable-flashinfer-autotune moe-backend
    optimization-level performance-mode profiler-config weight-transfer-config disable-log-stats
    aggregate-engine-logging fail-on-environ-validation enable-log-requests disable-log-requests host port uds
    uvicorn-log-level disable-uvicorn-access-log disable-access-log-for-endpoints allow-credentials allowed-origins
    allowed-methods allowed-headers api-key lora-modules chat-template chat-template-content-format
    trust-request-chat-template default-chat-template-kwargs response-role ssl-keyfile ssl-certfile ssl-ca-certs
    enable-ssl-refresh ssl-cert-reqs ssl-ciphers root-path middleware return-tokens-as-token-ids
    disable-frontend-multiprocessing enable-request-id-headers enable-auto-tool-choice
    exclude-tools-when-tool-choice-none tool-call-parser tool-parser-plugin tool-server log-config-file max-log-len
    disable-fastapi-docs enable-prompt-tokens-details enable-server-load-tracking enable-force-include-usage
    enable-tokenizer-info-endpoint enable-log-outputs enable-log-deltas log-error-stack h11-max-incomplete-event-size
    h11-max-header-count tokens-only enable-offline-docs headless api-server-count data-parallel-multi-port-external-lb
    grpc config
    """
FLAGS: tuple[str, ...] = tuple(_FLAGS.split())
"""Of `vllm serve`, older ones too."""


def of_field(name: str) -> Verdict:
    """What becomes of a field of SamplingParams."""
    if name in SamplingParams.__struct_fields__:
        return done(NOTES.get(name, ""))
    if name in SAMPLING.older:
        return done(f"an older name of `{SAMPLING.older[name]}`")
    return harmless(SAMPLING.harmless[name]) if name in SAMPLING.harmless else refused(SAMPLING.refused[name])


def of_flag(flag: str) -> Verdict:
    """What becomes of a flag of `vllm serve`."""
    name = flag.replace("-", "_")
    if name in SPELLINGS:
        return done(f"the same as `--{SPELLINGS[name]}`")
    if name in SERVER_FLAGS or name in all_options(GROUPS) or name == "config":
        help = {**all_options(GROUPS), **all_options(SERVER_GROUPS)}
        text = help[name][1].metadata["help"] if name in help else ""
        return harmless(text) if text.startswith("Accepted for compatibility") else done()
    return of_other((ENGINE if name in ENGINE else SERVER)[name])


def of_other(other: Other) -> Verdict:
    """What an entry of the lists says."""
    if other.harmless:
        return harmless(other.why)
    neutral = ", ".join(str(value) for value in other.neutral if not isinstance(value, (list, dict)))
    return refused(other.why + (f" ({neutral if len(neutral) < 40 else '0 to 20'})" if neutral else ""))
