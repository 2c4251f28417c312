"""Configuration. Owns: frozen option groups, the one mapping from flat names to them, and the environment mirror.

CLI flags, LLM keyword arguments, environment variables and docs are generated from these fields: the flag of
`max_model_len` is --max-model-len, its variable TOKENMILL_MAX_MODEL_LEN. Nothing else in the package reads the
environment. Options are never patched: resolving makes new objects and keeps reasons.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from tokenmill.core.errors import ParameterError, shown
from tokenmill.core.files import home, in_home
from tokenmill.core.option_values import but_got, check_option
from tokenmill.core.text_values import is_auto, read_written
from tokenmill.core.vllm_arguments import ENGINE, SERVER, Other, options_alone

_types = cache(get_type_hints)  # annotations are text: each is compiled and run


def option(default: Any, help: str, *aliases: str, choices: tuple[str, ...] = (), secret: bool = False) -> Any:
    """A field with its help text, other spellings and allowed values; a secret is not shown."""
    return field(default=default, repr=not secret, metadata={"help": help, "aliases": aliases, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model, and how its weights are read."""

    model: str = option("demo", "Folder, .gguf file, hub name, or `demo`.")
    tokenizer: str | None = option(None, "Folder or hub name of another tokenizer than the model's.")
    dtype: str = option(
        "auto", "Type to compute in.", choices=("auto", "float32", "bfloat16", "float16", "float", "half")
    )
    load_format: str = option(
        "auto", "Where weights come from; `dummy` invents them.", choices=("auto", "safetensors", "pt", "dummy")
    )
    quantization: str | None = option(
        None,
        "Quantise the weights at load: fp8, int8, int4 (int4-g64, int4-g128, w4a8); `fp8,head=none` spares the head.",
    )
    max_model_len: int | None = option(None, "Longest prompt + output in tokens (default: the model's, or what fits).")
    skip_tokenizer_init: bool = option(False, "Load no tokenizer: token ids in, token ids out.")
    revision: str | None = option(None, "Branch, tag or commit of a hub model.")
    hf_overrides: dict[str, Any] | None = option(None, "Entries that replace those of config.json (JSON).")
    seed: int = option(0, "Seed for dummy weights; if given, also for requests without a seed.")
    trust_remote_code: bool = option(False, "Accepted for compatibility; code from model folders is never run.")
    served_model_name: str | None = option(None, "The name that clients use for the model.")


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """Where a model's files come from, besides its name, and whose code runs them."""

    tokenizer_revision: str | None = option(None, "Branch, tag or commit of a hub tokenizer.")
    download_dir: str | None = option(None, "Folder for downloads (default: the hub's cache).")
    hf_token: str | None = option(None, "Token for the hub (default: HF_TOKEN, or the stored one).", secret=True)
    generation_config: str = option(
        "auto", "Folder whose generation_config.json gives the defaults; auto: the model's; vllm: none."
    )
    override_generation_config: dict[str, Any] | None = option(None, "Entries that replace its own (JSON).")
    model_impl: str = option("auto", "Whose layers to use.", choices=("auto", "tokenmill", "vllm", "transformers"))
    sleep_folder: str | None = option(None, "Folder for the weights of sleeping models on a CPU (default: /var/tmp).")
    stored_as: str | None = option(None, "Refuse weights that are not stored so: awq, gptq, compressed-tensors, ...")


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """The K/V cache."""

    block_size: int = option(16, "Tokens per K/V block.")
    kv_cache_dtype: str = option(
        "auto",
        "Type of stored K/V. fp8 and int8 have a scale per token and head, int4 two; int4-fp8k: only values in int4.",
        "kv_dtype",
        choices=("auto", "float32", "bfloat16", "fp8", "int8", "int4", "int4-fp8k"),
    )
    kv_cache_group: int = option(0, "Numbers that share a scale in quantised K/V (0: a head, in int4 half a head).")
    kv_cache_memory_bytes: int | None = option(
        None, "Bytes for the K/V cache, whatever --gpu-memory-utilization says (default: measured)."
    )
    gpu_memory_utilization: float = option(0.9, "Part of a GPU's memory to use in all.")
    num_gpu_blocks_override: int | None = option(
        None, "Exactly this many K/V blocks per pool, whatever the two flags of memory say.", "num_blocks"
    )
    mamba_ssm_cache_dtype: str = option(
        "auto", "Type of recurrent states (auto: float32).", choices=("auto", "float32", "bfloat16", "float16")
    )
    enable_prefix_caching: bool = option(True, "Reuse K/V of equal prefixes.")


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """How requests share a step."""

    max_num_seqs: int = option(256, "Most sequences that run at once.")
    max_num_batched_tokens: int | None = option(None, "Tokens per step (default: 2048 on CPU, 8192 on GPU).")
    enable_chunked_prefill: bool = option(True, "Compute long prompts in pieces, between others' tokens.")
    batching: str = option("continuous", "Whether requests may join a running batch.", choices=("continuous", "static"))
    long_prefill_token_threshold: int = option(0, "Most prompt tokens of one request per step (0: no limit).")
    scheduling_policy: str = option("fcfs", "Which requests go first.", choices=("fcfs", "priority"))
    max_waiting: int = option(100_000, "Requests that may wait; more are refused.")


@dataclass(frozen=True, kw_only=True)
class ExecuteOptions:
    """Where and how steps run."""

    device: str = option("auto", "`cpu`, `cuda`, `cuda:1`, another that torch knows (`mps`, `xpu`), or `auto`.")
    executor: str = option(
        "inprocess", "Run the model here or in a process of its own.", choices=("inprocess", "process")
    )
    pipeline_depth: int | None = option(None, "Plans in flight (default: 1 in process on a CPU, else 2).", "depth")
    threads: int | None = option(None, "CPU threads for kernels (default: the cores this process may use).")
    kernels: str = option("auto", "Kernel backend.", choices=("auto", "reference"))
    enforce_eager: bool = option(False, "Record no steps (CUDA graphs).")
    deterministic: bool = option(
        False, "A request's tokens do not depend on the requests beside it (always so on a CPU; slower on a GPU)."
    )
    disable: str | None = option(
        None,
        "Switch these off on a GPU, to measure their worth: `fusion`, `cascade`, `dependent-launch`, `quick-launch`, "
        "`few-rows`, `many-rows`, `widened`, `unfolded`, `all-reduce`, `exchange` (comma separated).",
    )
    check_weights: bool = option(False, "Refuse, at load, a file whose weights hold NaN or infinity.")
    disable_log_stats: bool = option(False, "Accepted for compatibility.")
    enable_sleep_mode: bool = option(False, "The model's memory may be given back and taken again (sleep, wake_up).")
    check_structured: float = option(
        0.0, "Part of complete JSON answers (0 to 1) that are checked against their schema again; misfits are logged."
    )


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """How many devices share the work."""

    tensor_parallel_size: int = option(1, "Devices (on a CPU: processes) that share each layer.", "tp")
    pipeline_parallel_size: int = option(1, "Stages of devices (on a CPU: processes) that share the layers.", "pp")
    enable_expert_parallel: bool = option(False, "Distribute whole experts of mixtures over these ranks.", "ep")
    enable_eplb: bool = option(False, "Move whole experts between ranks, so that each gets about as many tokens.")
    eplb_config: dict[str, Any] | None = option(
        None, "JSON for --enable-eplb: window_size, step_interval, num_redundant_experts, log_balancedness."
    )
    data_parallel_size: int = option(1, "Engines that share the requests, each with the whole model.", "dp")

    @property
    def ranks(self) -> int:
        """Devices of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


@dataclass(frozen=True, kw_only=True)
class SpeculateOptions:
    """Guessing ahead."""

    speculative_config: dict[str, Any] | None = option(
        None,
        'JSON: {"method": "ngram" or "suffix"}, {"model": FOLDER} (a smaller model), or {"method": "medusa", "eagle" '
        'or "eagle3", "model": FOLDER}, or {"method": "mtp" or "lookahead"}; "num_speculative_tokens": most guesses '
        "at a time (4).",
    )


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """Adapters (LoRA) on top of the model."""

    enable_lora: bool = option(False, "Accept adapters (LoRA).")
    lora_modules: list[str] | None = option(None, "NAME=PATH: a PEFT folder or a GGUF file (may be repeated).")
    max_loras: int = option(8, "Most adapters on the device at once; others wait for a slot.")
    max_lora_rank: int = option(16, "Largest rank of an adapter.")
    max_cpu_loras: int | None = option(None, "Most adapters that stay in host memory (default: all that were used).")


@dataclass(frozen=True, kw_only=True)
class TuningOptions:
    """How kernels are made and chosen."""

    pruned_weights: str = option(
        "auto", "Hold zeros of pruned weights (auto: on a GPU; packed: none).", choices=("auto", "packed", "dense")
    )
    compile_ahead: bool = option(True, "Compile kernels for a GPU in processes of their own while the model loads.")
    kernel_search: str = option(
        "off", "Look for faster products on a GPU at load; what is found is kept.", choices=("off", "load")
    )
    kernel_search_seconds: float = option(10.0, "Seconds to look for faster products.")


@dataclass(frozen=True, kw_only=True)
class ListenOptions:
    """Where the server listens, and who may use it."""

    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8000, "Port to listen on (0: any free one).")
    uds: str | None = option(None, "Unix socket to listen on instead of host and port.")
    api_key: list[str] | None = option(None, "Key that clients must send (may be repeated).", secret=True)
    root_path: str = option("", "Prefix of every path, whether or not a proxy strips it.")
    allowed_hosts: list[str] | None = option(None, "Further Host names to answer to (`*`: any).")
    allowed_origins: list[str] | None = option(None, "Origins of web pages that may call the API (`*`: any).")
    ssl_keyfile: str | None = option(None, "TLS key file.")
    ssl_certfile: str | None = option(None, "TLS certificate file.")
    ssl_ca_certs: str | None = option(None, "CA file; clients must then show a certificate.")
    share_prefix_cache: bool = option(False, "Let keys share cached prompts; timing may show what others asked.")


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    """Ceilings of the server; a request over one is refused before the first byte of an answer."""

    max_num_queued_reqs: int = option(1024, "Most outputs open or waiting; more get 503.", "max_queued_requests")
    max_body_bytes: int = option(16 << 20, "Largest request body; larger ones get 413.")
    max_header_bytes: int = option(64 << 10, "Largest request head; larger ones get 431.")
    max_connections: int = option(4096, "Most open connections; more get 503.")
    max_n: int = option(128, "Most outputs per prompt.")
    max_logprobs: int = option(20, "Most log-probabilities per token; -1: all of the vocabulary.")
    max_stop: int = option(16, "Most stop strings.")
    requests_per_minute: int = option(0, "Requests per minute and key (0: no limit).")
    strict_fields: bool = option(
        False, "Refuse requests with unknown names (default: the header X-Tokenmill-Ignored lists them)."
    )
    tokens_per_minute: int = option(0, "Prompt and output tokens per minute and key (0: no limit).")
    lora_folder: str | None = option(None, "The one folder whose adapters clients may load (default: none).")
    prices: str | None = option(
        None, "Dollars per million tokens, `prompt=0.10,output=0.40,cached=0.02`: usage then has a cost."
    )


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """What clients may do to the models that are stored on this machine."""

    allow_model_changes: bool = option(
        False, "Clients may pull, create, copy and delete stored models, and send files for them (Ollama's API)."
    )
    model_folder: str | None = option(
        None,
        "The one folder whose models clients may pull and name in FROM and ADAPTER (default: none; only hub names).",
    )
    max_blob_bytes: int = option(64 << 30, "Most bytes of a file from a client, and of all that no model uses.")


@dataclass(frozen=True, kw_only=True)
class PatienceOptions:
    """How long the server waits, and for what."""

    request_timeout: float = option(3600.0, "Seconds after which a request is ended (0: never).")
    read_timeout: float = option(30.0, "Seconds within which a client must send its request.")
    write_timeout: float = option(60.0, "Seconds after which a client that takes no output is dropped.")
    text_timeout: float = option(10.0, "Seconds for templating and tokenising one request.")
    watchdog_timeout: float = option(
        15.0, "Seconds without progress, also within a step, until an engine is restarted."
    )
    max_restarts: int = option(5, "Engine deaths per minute after which the server gives up.")
    shutdown_timeout: float = option(30.0, "Seconds that running requests get to finish after SIGTERM.")


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """How the server behaves."""

    engines: int = option(1, "The same as --data-parallel-size; 0: the engine runs in the server's process.")
    response_role: str = option("assistant", "Role of chat answers.")
    chat_template: str | None = option(None, "File with a chat template that replaces the model's.")
    default_chat_template_kwargs: dict[str, Any] | None = option(None, "Arguments for the chat template (JSON).")
    trust_request_chat_template: bool = option(False, "Accept chat templates from requests.")
    enable_force_include_usage: bool = option(False, "Send usage in every chunk of every stream.")
    enable_per_request_metrics: bool = option(False, "Put timings into answers.")
    record: str | None = option(None, "Append each request's time and lengths to this file, for bench serve.")
    record_content: bool = option(False, "With --record: keep prompts (token ids), too.")
    otlp_traces_endpoint: str | None = option(None, "Send a trace of each request to this OTLP/HTTP collector.")
    log_level: str = option("info", "How much to log.", choices=("debug", "info", "warning", "error"))
    log_json: bool | None = option(
        None, "Log as JSON (default: unless on a terminal). Logs never hold prompts, outputs or keys."
    )


@dataclass(frozen=True, kw_only=True)
class MessageOptions:
    """How conversations begin, and how answers are read: tool calls and reasoning."""

    opening: dict[str, Any] | None = option(
        None,
        'Messages that begin every conversation (JSON): {"system": TEXT (a default), "messages": [...]}.',
    )

    tool_call_parser: str = option("auto", "Format of the model's tool calls (auto: from its chat template; none).")
    reasoning_parser: str = option("auto", "Format of the model's reasoning (auto: from its chat template; none).")
    enable_auto_tool_choice: bool = option(True, "Accepted for compatibility; models may always call tools.")


@dataclass(frozen=True, kw_only=True)
class ModelsOptions:
    """Many models behind one address."""

    models: str | None = option(None, "File (YAML or JSON) of models, each with its options; they load when asked for.")
    models_memory: int | None = option(None, "Bytes for all loaded models (default: the free memory at the start).")
    models_queue: int = option(256, "Most requests that wait for one model to load; more get 503.")
    models_patience: float = option(30.0, "Seconds that a load waits until models with open requests have ended them.")
    models_control: bool = option(
        False, "Clients may load and unload models (/models/load, /models/unload) and put them to sleep."
    )
    models_sleep_memory: int | None = option(
        None, "Bytes of host memory for all sleeping models (default: half of it); further ones are unloaded."
    )


SERVER_GROUPS: dict[str, type] = {
    "listen": ListenOptions,
    "limits": LimitOptions,
    "store": StoreOptions,
    "patience": PatienceOptions,
    "serve": ServeOptions,
    "messages": MessageOptions,
    "models": ModelsOptions,
}
"""Options of the server alone; engines do not know them."""

GROUPS: dict[str, type] = {
    "model": ModelOptions,
    "files": FileOptions,
    "cache": CacheOptions,
    "schedule": ScheduleOptions,
    "execute": ExecuteOptions,
    "parallel": ParallelOptions,
    "speculate": SpeculateOptions,
    "adapters": AdapterOptions,
    "tuning": TuningOptions,
}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All options of one engine."""

    model: ModelOptions = field(default_factory=ModelOptions)
    files: FileOptions = field(default_factory=FileOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    schedule: ScheduleOptions = field(default_factory=ScheduleOptions)
    execute: ExecuteOptions = field(default_factory=ExecuteOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    speculate: SpeculateOptions = field(default_factory=SpeculateOptions)
    adapters: AdapterOptions = field(default_factory=AdapterOptions)
    tuning: TuningOptions = field(default_factory=TuningOptions)
    number: int = 0
    engines: int = 1
    """`number` says which of several engines this is, `engines` how many share the machine."""


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """All options of a server, except its engine's."""

    listen: ListenOptions = field(default_factory=ListenOptions)
    limits: LimitOptions = field(default_factory=LimitOptions)
    store: StoreOptions = field(default_factory=StoreOptions)
    patience: PatienceOptions = field(default_factory=PatienceOptions)
    serve: ServeOptions = field(default_factory=ServeOptions)
    messages: MessageOptions = field(default_factory=MessageOptions)
    models: ModelsOptions = field(default_factory=ModelsOptions)


def all_options(groups: Mapping[str, type] = GROUPS) -> dict[str, tuple[str, Field, Any]]:
    """Flat option name -> (group name, field, type)."""
    found = {}
    for group, cls in groups.items():
        for item in fields(cls):
            found[item.name] = (group, item, _types(cls)[item.name])
    return found


def without_secrets(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options without secrets, so that they may be written into a file of results."""
    secret = {name for name, (_, item, _) in all_options().items() if not item.repr}
    return {name: value for name, value in options.items() if name not in secret}


def make_config(environment: Mapping[str, str] | None = None, **flat: Any) -> EngineConfig:
    """EngineConfig from flat names; unset ones come from TOKENMILL_* variables, then from the defaults."""
    return EngineConfig(**_read_groups(GROUPS, environment, flat, ENGINE))


def make_server_config(environment: Mapping[str, str] | None = None, **flat: Any) -> ServerConfig:
    """ServerConfig from flat names, in the same way as make_config."""
    return ServerConfig(**_read_groups(SERVER_GROUPS, environment, flat, SERVER))


def cache_dir() -> Path:
    """The folder for files that can be made again."""
    base = os.environ.get("TOKENMILL_CACHE") or os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else home() / ".cache") / "tokenmill"


def data_dir() -> Path:
    """The folder for files that were asked for: stored models."""
    if own := os.environ.get("TOKENMILL_HOME"):
        return in_home(own)
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else home() / ".local" / "share") / "tokenmill"


def _read_groups(
    groups: Mapping[str, type],
    environment: Mapping[str, str] | None,
    flat: Mapping[str, Any],
    others: Mapping[str, Other],
) -> dict[str, Any]:
    known = all_options(groups)
    names = {alias: name for name, (_, item, _) in known.items() for alias in item.metadata["aliases"]}
    chosen: dict[str, dict[str, Any]] = {group: {} for group in groups}
    environment = os.environ if environment is None else environment
    written = {name: text for name in known if (text := environment.get(f"TOKENMILL_{name.upper()}")) is not None}
    read = {name: _from_environment(name, text, *known[name][1:]) for name, text in written.items()}
    variables = {name: f"TOKENMILL_{name.upper()}" for name in read.keys() - {names.get(each, each) for each in flat}}
    for given, value in (*options_alone(read, others).items(), *options_alone(flat, others).items()):
        name = names.get(given, given)
        if name not in known:
            close = difflib.get_close_matches(given, [*known, *names], n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            if groups is GROUPS and given in all_options(SERVER_GROUPS):
                hint = f" It is the server's (--{given.replace('_', '-')})."
                hint += " Offline, give it to chat()." if given == "chat_template" else ""
            raise ParameterError(f"Unknown option {shown(given)}.{hint}", param=given)
        chosen[known[name][0]][name] = None if is_auto(value, known[name][2]) else value
    for values in chosen.values():
        for name, value in values.items():
            check_option(name, value, *known[name][1:], said=variables.get(name))
    return {group: groups[group](**values) for group, values in chosen.items()}


def override(config: EngineConfig, group: str, **values: Any) -> EngineConfig:
    """A copy with some options of one group replaced."""
    return replace(config, **{group: replace(getattr(config, group), **values)})


def _from_environment(name: str, text: str, item: Field, kind: Any) -> Any:
    found, wanted = read_written(text, kind)
    if found is None:
        raise ParameterError(f"TOKENMILL_{name.upper()} must be {wanted}{but_got(text, item)}.", param=name)
    return found


def wanted_faults() -> str:
    """The faults that TOKENMILL_FAULTS asks for; used only by tests of reliability (engine/steps/faults.py)."""
    return os.environ.get("TOKENMILL_FAULTS", "")


def wants_no_colour() -> bool:
    """Is NO_COLOR set to anything (https://no-color.org), or can the terminal do nothing but print?"""
    return bool(os.environ.get("NO_COLOR")) or only_prints()


def only_prints() -> bool:
    """Is the terminal one that takes no control sequences, and shows them?"""
    return os.environ.get("TERM") in ("dumb", "unknown")


LINKS = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}
"""Environment of ranks on GPUs: never set up multicast over NVLink. Some machines forbid it, and it gains little."""


def environment_with(more: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with `more` added, for a child."""
    return {**os.environ, **more}


def calm_threads() -> None:
    """Let idle OpenMP threads sleep; call it before torch is imported. By default they spin. If another process is busy
    on the same cores, every parallel region then costs a scheduler slice (milliseconds instead of microseconds)."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def keep_to_own_modules() -> None:
    """Let no Python that this process starts import from the folder in which it runs: multiprocessing's would."""
    os.environ.setdefault("PYTHONSAFEPATH", "1")
