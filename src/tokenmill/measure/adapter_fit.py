"""Does an adapter fit a model? Owns: the answer without the model's data, in a process of its own, because who asks may
not import torch.

The model's layers are built on shapes, and the adapter is fitted to them as an engine does it. Must not know: stores,
servers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import traceback
from pathlib import Path

import msgspec

from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import ModelError, UserError
from tokenmill.process.start import own_end, start_process

log = logging.getLogger("tokenmill.measure")
PATIENCE_S = 600.0
encode = msgspec.json.encode


class Found(msgspec.Struct):
    """refused: what an engine would say. unknown: why nothing can be said."""

    refused: str = ""
    unknown: str = ""


def check_fit(config: EngineConfig, adapter: Path) -> None:
    """Raise the ModelError that an engine of these options would raise when it reads the adapter. Nothing is raised if
    the model itself cannot be built: its load tells why."""
    process, pipe = start_process(__name__, "adapter fit")
    try:
        pipe.send(encode((config, str(adapter))))
        answer = pipe.receive(PATIENCE_S)
        found = Found(unknown="no answer in time") if answer is None else msgspec.json.decode(answer, type=Found)
    except (EOFError, OSError):
        found = Found(unknown="the process ended")
    finally:
        process.kill()
        process.wait()
        pipe.close()
    if found.unknown:
        log.info("adapter not compared with its base", extra={"data": {"reason": found.unknown}})
    if found.refused:
        raise ModelError(found.refused)


def run_worker() -> None:
    """The main function of the process."""
    pipe = own_end()
    message = pipe.receive()
    assert message is not None
    config, adapter = msgspec.json.decode(message, type=tuple[EngineConfig, str])
    with contextlib.suppress(OSError):
        pipe.send(encode(find_fit(config, Path(adapter))))
    os._exit(0)


def find_fit(config: EngineConfig, adapter: Path) -> Found:
    """What an engine of these options would say to the adapter."""
    import torch

    from tokenmill.device.memory import pick_device
    from tokenmill.engine.load import loading
    from tokenmill.lora.sites import Sites
    from tokenmill.lora.store import fitted
    from tokenmill.measure.counting import CountingKernels, build_on_shapes
    from tokenmill.models.registry import is_elsewhere

    try:
        device = pick_device(config.execute.device)
        source = loading.find_model(config)
        raw = loading.read_config(config, source)
        if is_elsewhere(raw, config.files.model_impl):
            return Found(refused=loading.NO_ADAPTERS)
        dtype = loading.compute_dtype(config.model.dtype, raw, device, [])
        sites = Sites(1, config.adapters.max_lora_rank, dtype, torch.device("cpu"), raw)
        kernels = CountingKernels("cpu" if device == "cpu" else "gpu")
        checkpoint = source.checkpoint(config.model.load_format, seed=0, device="cpu")
        with contextlib.closing(checkpoint), torch.no_grad():
            how = config.model.quantization
            build_on_shapes(raw, kernels, checkpoint, dtype=dtype, quantization=how, adapters=sites)
    except Exception as error:  # the load says it better
        return Found(unknown=f"{type(error).__name__}: {error}")
    try:
        with torch.inference_mode():
            fitted(adapter, sites)
    except UserError as error:
        return Found(refused=str(error))
    except Exception:
        return Found(unknown=traceback.format_exc(limit=-3))
    return Found()
