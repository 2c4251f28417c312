"""What --eplb-config says. Owns: its settings, and refusing those that are wrong or do not go with other options. Must
not know: how experts move (steps/balance.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.core.config import EngineConfig, ParallelOptions
from tokenmill.core.errors import ParameterError


@dataclass(frozen=True, slots=True)
class BalanceConfig:
    """--eplb-config, with vLLM's names. window_size: how many steps' tokens are counted. step_interval: how many steps
    lie between two decisions."""

    window_size: int = 1000
    step_interval: int = 3000
    num_redundant_experts: int = 0
    log_balancedness: bool = False


def read_balance(said: ParallelOptions) -> BalanceConfig | None:
    """Read what the options ask for; None: experts stay where they are."""
    given = dict(said.eplb_config or {})
    if not said.enable_eplb:
        if said.eplb_config is not None:
            raise ParameterError("--eplb-config has no effect without --enable-eplb.", param="eplb_config")
        return None
    if given.pop("policy", "default") != "default":
        raise ParameterError("--eplb-config: policy is 'default', there is no other.", param="eplb_config")
    if given.pop("use_async", False) is not False:
        raise ParameterError("--eplb-config: use_async is not built; experts move between steps.", param="eplb_config")
    known = BalanceConfig.__dataclass_fields__
    if unknown := sorted(set(given) - set(known)):
        raise ParameterError(
            f"--eplb-config: {unknown[0]!r} is unknown; there are {', '.join(known)}.", param="eplb_config"
        )
    for name, value in given.items():
        if name == "log_balancedness":
            if not isinstance(value, bool):
                raise ParameterError(f"--eplb-config: {name} is true or false.", param="eplb_config")
            continue
        least = 0 if name == "num_redundant_experts" else 1
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ParameterError(f"--eplb-config: {name} is a whole number of at least {least}.", param="eplb_config")
    return BalanceConfig(**given)


def check_balance(config: EngineConfig) -> None:
    """Refuse options that do not work with experts that move."""
    if read_balance(config.parallel) is None:
        return
    for wrong, why in (
        (not config.parallel.enable_expert_parallel, "needs --enable-expert-parallel"),
        (config.parallel.pipeline_parallel_size > 1, "does not go with --pipeline-parallel-size"),
        (config.adapters.enable_lora, "does not go with --enable-lora: adapters of experts would have to move, too"),
        (config.execute.enable_sleep_mode, "does not go with --enable-sleep-mode: weights are read again by place"),
    ):
        if wrong:
            raise ParameterError(f"--enable-eplb {why}.", param="enable_eplb")
