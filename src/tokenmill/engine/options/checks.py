"""Checks of an engine's options alone. Owns: refusing values that are wrong whatever the model and device, before a
load or a download that may take minutes.

Command lines check before anything heavy is imported, engines before they look for the model. Must not know: torch,
models' files.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from tokenmill.checkpoint.hub import check_place
from tokenmill.core.bounds import LEFT_OUT
from tokenmill.core.config import AdapterOptions, CacheOptions, EngineConfig, FileOptions, ParallelOptions
from tokenmill.core.errors import ModelError, ParameterError, shown
from tokenmill.core.files import in_home, open_regular
from tokenmill.demo.files import check_part, demo_model
from tokenmill.engine.options.adapter_names import check_name, located, read_modules
from tokenmill.engine.options.balance_settings import check_balance
from tokenmill.engine.options.drafting import Speculation, read_speculation
from tokenmill.engine.options.generation import check_generation
from tokenmill.lora.config import read_adapter_config
from tokenmill.quant.schemes import check_scheme

_SHORTEST = 2
_SCALED = ("fp8", "int8", "int4", "int4-fp8k")


def check_options(config: EngineConfig, *, later: bool = False) -> None:
    """Refuse options that are wrong for every model and device. later: adapters' files may still be put in their
    place. Options without effect are no mistake here, for several models may share them: see check_companions."""
    if config.model.max_model_len is not None and config.model.max_model_len < _SHORTEST:
        raise ParameterError(
            f"max_model_len must be at least {_SHORTEST}, a token of the prompt and one of the answer; got "
            f"{config.model.max_model_len}.",
            param="max_model_len",
        )
    if config.model.served_model_name is not None:
        _check_names(config.model.served_model_name)
    if config.model.quantization is not None:
        check_scheme(config.model.quantization)
    if config.model.tokenizer is not None:
        check_place(config.model.tokenizer)
    drafts = read_speculation(config.speculate)
    _check_revisions(config, drafts)
    _check_files(config.files)
    _check_cache(config.cache)
    _check_adapters(config.adapters, later=later)
    _check_parallel(config.parallel)
    check_balance(config)
    if unknown := set(left_out(config)) - set(LEFT_OUT):
        raise ParameterError(
            f"--disable {', '.join(sorted(unknown))}: what can be left out is {', '.join(LEFT_OUT)}.", param="disable"
        )
    if drafts is not None and drafts.model is not None:
        check_part(drafts.model)
        check_place(drafts.model)
    if drafts is not None and drafts.quantization is not None:
        check_scheme(drafts.quantization)


def _check_revisions(config: EngineConfig, drafts: Speculation | None) -> None:
    """Refuse a revision of what lies on this machine: another one than was asked for would be served."""
    model, revision = config.model, config.files.tokenizer_revision
    given = [("revision", model.revision, model.model)]
    given.append(("tokenizer_revision", revision, model.tokenizer or model.model))
    if drafts is not None and drafts.model is not None:
        given.append(("speculative_config: revision", drafts.revision, drafts.model))
    for name, asked, place in given:
        if asked is not None and (demo_model(place) is not None or in_home(place).exists()):
            raise ParameterError(
                f"{name} chooses among a hub model's revisions, and {shown(place)} lies on this machine: leave it out.",
                param=name.partition(":")[0],
            )


def left_out(config: EngineConfig) -> list[str]:
    """The parts that `--disable` names."""
    return [part.strip() for part in (config.execute.disable or "").split(",") if part.strip()]


def _check_names(given: str) -> None:
    names = [name.strip() for name in given.split(",")]
    if not all(names):
        raise ParameterError(
            f"--served-model-name {shown(given)}: a name is empty; leave the flag out for the model's own name.",
            param="served_model_name",
        )
    if len(set(names)) < len(names):
        raise ParameterError(f"--served-model-name {shown(given)}: a name stands twice.", param="served_model_name")


def check_companions(config: EngineConfig, said: Collection[str] | None = None) -> None:
    """Refuse options that have no effect without others, or beside others. said: those meant for this model alone
    (None: all)."""
    model, execute, adapters, schedule = config.model, config.execute, config.adapters, config.schedule
    lora, search = adapters.enable_lora, config.tuning.kernel_search != "off"
    needs = (
        (adapters, "max_loras", lora, "without --enable-lora"),
        (adapters, "max_lora_rank", lora, "without --enable-lora"),
        (adapters, "max_cpu_loras", lora, "without --enable-lora"),
        (schedule, "long_prefill_token_threshold", schedule.enable_chunked_prefill,
         "with --no-enable-chunked-prefill, as prompts are computed whole"),
        (config.tuning, "kernel_search_seconds", search, "without --kernel-search load"),
        (config.files, "sleep_folder", execute.enable_sleep_mode, "without --enable-sleep-mode"),
        (model, "tokenizer", not model.skip_tokenizer_init, "with --skip-tokenizer-init"),
        (execute, "check_structured", not model.skip_tokenizer_init, "with --skip-tokenizer-init"),
    )  # fmt: skip
    for group, name, effective, why_not in needs:
        if not effective and (said is None or name in said) and getattr(group, name) != getattr(type(group)(), name):
            flag = "--" + name.replace("_", "-")
            raise ParameterError(f"{flag} has no effect {why_not}: leave it out.", param=name)


def _check_files(files: FileOptions) -> None:
    where = files.generation_config
    if where not in ("auto", "vllm") and not (Path(where) / "generation_config.json").is_file():
        raise ParameterError(
            f"--generation-config {where}: there is no generation_config.json in it; `auto` takes the model's, `vllm` "
            "none.",
            param="generation_config",
        )
    ignored = check_generation(files.override_generation_config or {}, "--override-generation-config")
    if ignored:  # of a model's file this is a note; who writes a flag can leave it out
        raise ParameterError(f"{' '.join(ignored)} Leave it out.", param="override_generation_config")


def _check_cache(cache: CacheOptions) -> None:
    if cache.kv_cache_group and cache.kv_cache_dtype not in _SCALED:
        raise ParameterError("--kv-cache-group needs --kv-cache-dtype fp8, int8 or int4.", param="kv_cache_group")


def _check_adapters(adapters: AdapterOptions, *, later: bool) -> None:
    modules = read_modules(adapters.lora_modules or [])
    if modules and not adapters.enable_lora:
        raise ParameterError("lora_modules needs enable_lora (--enable-lora).", param="lora_modules")
    names = [name for name, _ in modules]
    for name, path in modules:
        check_name(name)
        if names.count(name) > 1:
            raise ParameterError(f"lora_modules names {name!r} twice.", param="lora_modules")
        if not Path(located(path)).exists() and not later:
            raise ParameterError(f"lora_modules: {path}: there is no such adapter.", param="lora_modules")
        if not later:
            _check_adapter(Path(located(path)))


def _check_adapter(path: Path) -> None:
    """Read of an adapter what costs nothing. Its matrices are read when a request asks for it."""
    try:
        if path.suffix == ".gguf":
            open_regular(path).close()
        else:
            read_adapter_config(path)
    except ModelError as error:
        raise ParameterError(f"lora_modules: {str(error).removesuffix('.')}.", param="lora_modules") from error


def _check_parallel(parallel: ParallelOptions) -> None:
    if parallel.enable_expert_parallel and parallel.tensor_parallel_size == 1:
        raise ParameterError(
            "--enable-expert-parallel shares experts out over the ranks of --tensor-parallel-size, which is 1.",
            param="enable_expert_parallel",
        )
