"""An engine's numbers under vLLM's names. Owns: which statistic each name stands for, and the kinds of metrics that
`LLM.get_metrics()` gives. The server's series are made from the same tables. Must not know: torch, HTTP, Prometheus.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenmill.engine.running.wire import EngineStats

GAUGES = {
    "vllm:num_requests_running": ("running", "Outputs in the batch: a request with n has n."),
    "vllm:num_requests_waiting": ("waiting", "Outputs that wait for the batch."),
    "vllm:kv_cache_usage_perc": ("kv_usage", "Share of K/V blocks in use."),
    "tokenmill:engine_up": ("up", "1: the engine serves; 0: it starts, or makes no progress."),
    "tokenmill:kv_blocks": ("kv_blocks", "K/V blocks."),
    "tokenmill:kept_states": ("states_kept", "States of recurrent layers that the prefix cache keeps."),
    "tokenmill:kept_state_slots": ("state_slots", "Slots for such states."),
    "tokenmill:expert_balancedness": (
        "balancedness",
        "Mean over maximum of the ranks' tokens for experts (0: unknown).",
    ),
    "tokenmill:grammar_cache_bytes": ("grammar_bytes", "Memory of compiled grammars that are kept."),
    "tokenmill:engine_resident_memory_bytes": ("rss_bytes", "Memory of the engine's process."),
    "tokenmill:engine_open_fds": ("open_files", "Open files of the engine's process."),
}
COUNTERS = {
    "vllm:prompt_tokens": ("looked_up", "Prompt tokens computed or found in the cache."),
    "vllm:generation_tokens": ("output_tokens", "Tokens generated, also those that no answer shows."),
    "vllm:num_preemptions": ("preemptions", "Preemptions."),
    "vllm:prefix_cache_hits": ("cached_tokens", "Prompt tokens found in the prefix cache."),
    "vllm:prompt_tokens_cached": ("cached_tokens", "Prompt tokens found in the prefix cache."),
    "vllm:prefix_cache_queries": ("looked_up", "Prompt tokens looked up in the prefix cache."),
    "vllm:spec_decode_num_drafts": ("drafts", "Drafts that were verified."),
    "vllm:spec_decode_num_draft_tokens": ("drafted", "Draft tokens."),
    "vllm:spec_decode_num_accepted_tokens": ("accepted", "Draft tokens that were right."),
    "tokenmill:draft_saved_seconds": ("saved_s", "Time of steps that right drafts made needless, estimated."),
    "tokenmill:draft_spent_seconds": ("spent_s", "Time that drafts added to steps, estimated."),
    "vllm:estimated_flops_per_gpu": ("flops", "Operations that the steps needed, estimated."),
    "vllm:estimated_read_bytes_per_gpu": ("read_bytes", "Bytes that the steps read, estimated."),
    "vllm:estimated_write_bytes_per_gpu": ("written_bytes", "Bytes of K/V that the steps wrote, estimated."),
    "vllm:external_prefix_cache_queries": ("", "Prompt tokens looked up in other engines' caches."),
    "vllm:external_prefix_cache_hits": ("", "Prompt tokens found in other engines' caches."),
    "vllm:mm_cache_queries": ("", "Media looked up in the cache."),
    "vllm:mm_cache_hits": ("", "Media found in the cache."),
    "vllm:corrupted_requests": ("", "Requests whose logits held NaN; they end with an error here."),
    "tokenmill:steps": ("steps", "Steps."),
    "tokenmill:logits_processor_tokens": ("processed", "Tokens that waited for a logits processor in Python: slow."),
    "tokenmill:failed_steps": ("failures", "Steps that failed as a whole."),
    "tokenmill:states_saved": ("states_saved", "States of recurrent layers that the prefix cache took in."),
    "tokenmill:states_used": ("states_used", "Times that a sequence went on from a kept state."),
    "tokenmill:states_evicted": ("states_evicted", "Kept states that gave way to others."),
    "tokenmill:expert_moves": ("expert_moves", "Experts that came to a rank or a slot of it."),
    "tokenmill:kernel_calls": ("kernel_calls", "Operations run."),
    "tokenmill:kernel_fallbacks": ("fallback_calls", "Operations that the backend left to plain torch."),
}
PER_PLACE = "vllm:spec_decode_num_accepted_tokens_per_pos"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A name with its labels."""

    name: str
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter(Metric):
    """A total since the start."""

    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge(Metric):
    """A current value."""

    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Vector(Metric):
    """Totals by position."""

    values: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram(Metric):
    """Totals by size. An engine inside a program has none: its requests carry their own times (`metrics`)."""

    count: int
    sum: float
    buckets: dict[str, int]


def statistic(stats: EngineStats, name: str) -> float:
    """The value of one field. Like vLLM, it counts all prompt tokens as looked up, cached ones included."""
    if name == "looked_up":
        return stats.prompt_tokens + stats.cached_tokens
    return getattr(stats, name) if name else 0.0


def read_metrics(stats: EngineStats, model: str, engine: int = 0) -> list[Metric]:
    """All of one engine's numbers."""
    labels = {"model_name": model, "engine": str(engine)}
    found: list[Metric] = [
        Gauge(name=name, labels=labels, value=statistic(stats, each)) for name, (each, _) in GAUGES.items()
    ]
    found += [Counter(name=name, labels=labels, value=statistic(stats, each)) for name, (each, _) in COUNTERS.items()]
    return [*found, Vector(name=PER_PLACE, labels=labels, values=list(stats.accepted_at))]
