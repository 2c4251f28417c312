"""What values options may have. Owns: which numbers must be positive, ceilings, and what may be left out.

Must not know: what options do.
"""

from __future__ import annotations

ALL = {"max_logprobs": -1}
"""Option values that mean "no limit"."""
POSITIVE = frozenset(
    {
        "block_size",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "max_num_seqs",
        "max_waiting",
        "max_model_len",
        "max_num_batched_tokens",
        "pipeline_depth",
        "threads",
        "num_gpu_blocks_override",
        "kv_cache_memory_bytes",
        "max_loras",
        "max_lora_rank",
        "max_cpu_loras",
        "gpu_memory_utilization",
        "kernel_search_seconds",
        "max_num_queued_reqs",
        "max_body_bytes",
        "max_blob_bytes",
        "max_header_bytes",
        "max_connections",
        "max_n",
        "read_timeout",
        "write_timeout",
        "text_timeout",
        "watchdog_timeout",
        "models_memory",
        "models_queue",
    }
)

MOST: dict[str, int] = {
    "gpu_memory_utilization": 1,
    "check_structured": 1,
    "kernel_search_seconds": 86_400,
    "max_num_seqs": 1 << 16,
    "num_gpu_blocks_override": 1 << 27,
    "block_size": 1 << 20,
    "pipeline_depth": 64,
    "max_loras": 4096,
    "max_lora_rank": 1024,
    "threads": 1024,
    "port": 65535,
    "engines": 1024,
    "tensor_parallel_size": 64,
    "pipeline_parallel_size": 64,
    "data_parallel_size": 1024,
}
"""Ceilings of options that could otherwise fill the memory or the process table before anything fails."""

LEFT_OUT = (
    "fusion",
    "cascade",
    "dependent-launch",
    "quick-launch",
    "few-rows",
    "many-rows",
    "unfolded",
    "widened",
    "all-reduce",
    "exchange",
)
"""Parts of GPU kernels that `--disable` can switch off, to measure what they gain."""
