"""New numbers for a loaded model's weights, in place. Owns: which tensors may come, and in which parts.

A layer is built as at the load (joined, split, quantised, packed). Then its tensors are copied into the old ones
(load/inplace.py), so addresses stay and recorded steps stay valid. One layer at a time is held twice. Must not know:
families, formats, requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tokenmill.checkpoint.safetensors import SafetensorsCheckpoint, open_safetensors
from tokenmill.checkpoint.whole_tensors import Overlaid
from tokenmill.compute.model import Checkpoint
from tokenmill.core.errors import ModelError, UserError
from tokenmill.core.files import in_home
from tokenmill.core.sleeping import WEIGHTS
from tokenmill.engine.load.inplace import LayerMaker, Piece, fill, pieces
from tokenmill.engine.load.loading import DTYPES, adapter_sites, read_config
from tokenmill.engine.running.build import Built
from tokenmill.engine.steps.executor import InProcessExecutor
from tokenmill.layers.build import unread
from tokenmill.models.decoder import Decoder
from tokenmill.models.registry import text_alone
from tokenmill.models.text_names import text_names
from tokenmill.models.text_part import TEXT_OF
from tokenmill.runner.runner import Runner

Weights = Iterable[tuple[str, Tensor]] | Mapping[str, Tensor] | str | Path
WIDE = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
HEAD = "lm_head.weight"


def runner_of(built: Built) -> Runner:
    """The runner of the model, if it is in this process."""
    executor = built.engine.executor
    if not isinstance(executor, InProcessExecutor):
        said = built.config.parallel
        several = said.ranks > 1 or said.data_parallel_size > 1 or built.config.engines > 1
        wish = "with one rank and one engine" if several else "with executor='inprocess'"
        raise UserError(f"the model runs in other processes: load it {wish} for this.")
    return executor.runner


class WeightUpdates:
    """Takes new weights for one engine's model."""

    def __init__(self, built: Built) -> None:
        self.built = built
        self.names: dict[Piece, set[str]] = {}
        """By piece, the tensors that it is made of, as far as known."""
        self.changed: set[str] = set()
        """Tensors that differ from the checkpoint's by now."""
        self.coming: dict[str, Tensor] | None = None
        built.sleep.reread = self._read_again

    def start(self) -> None:
        """From now on collect what comes, until `finish`."""
        if self.coming is not None:
            raise UserError("an update has been started already: finish_weight_update() ends it.")
        self.coming = {}

    def finish(self) -> int:
        """Apply what was collected."""
        if self.coming is None:
            raise UserError("no update has been started: start_weight_update() does, or update_weights() alone.")
        given, self.coming = self.coming, None
        return self._apply(given)

    def update(self, weights: Weights) -> int:
        """Apply these weights; or collect them, if an update was started (as copies, because senders reuse their
        buffers)."""
        given = _read(weights)
        if self.coming is None:
            return self._apply(given)
        self.coming |= {name: tensor.detach().clone() for name, tensor in given.items()}
        return len(given)

    def _apply(self, given: dict[str, Tensor]) -> int:
        engine = self.built.engine
        runner = runner_of(self.built)
        if engine.has_work or engine.flying:
            raise UserError("requests are open: weights are changed between requests.")
        if WEIGHTS in self.built.sleep.asleep:
            raise UserError("the weights sleep: wake_up(tags=['weights']) first.")
        source = self.built.source.checkpoint(
            self.built.config.model.load_format, seed=self.built.config.model.seed, device=self.built.facts.device
        )
        config = read_config(self.built.config, self.built.source)
        source = text_alone(config, source)
        if TEXT_OF in config:
            given = {ours: given[name] for ours, name in text_names(given)[0].items()}
        try:
            given = _without_copy_of_head(given, source)
            _check(given, source)
            given = _in_half_where_stored_so(given, source)
            taken = self._copy(runner, Overlaid(source, given), set(given))
        finally:
            source.close()
        return taken

    @torch.inference_mode()
    def _copy(self, runner: Runner, checkpoint: Checkpoint, given: set[str]) -> int:
        model, facts, config = runner.model, self.built.facts, self.built.config
        assert isinstance(model, Decoder)
        raw, dtype = read_config(config, self.built.source), DTYPES[facts.dtype]
        touched = [piece for piece in pieces(model) if piece not in self.names or self.names[piece] & given]
        for piece in touched:
            self._check_whole(self.names.get(piece, set()), given)
        maker = LayerMaker(
            raw, config, dtype, facts.device, runner.kernels, partial(adapter_sites, config, {}, dtype, facts.device)
        )
        used: set[str] = set()
        filled = False
        try:
            for piece in touched:
                new, names = maker.build(model, checkpoint, piece)
                self.names[piece] = names
                used |= names
                if names & given:
                    fill(model, new, piece)
                    self.changed |= names & given
                    filled = True
        except UserError as error:
            more = " Layers before it have their new weights already: give the whole update again." if filled else ""
            raise UserError(f"{error}{more}") from error
        finally:
            if filled:
                self._forget(runner)
        if left := unread(checkpoint, given - used):
            raise UserError(f"no layer is made of {', '.join(left[:4])}; the other tensors were taken.")
        return len(given)

    def _forget(self, runner: Runner) -> None:
        """Drop what was computed from the weights of before, even if not all of them have changed."""
        self.built.engine.forget_prefixes()
        runner.forget_weights()
        self.built.adapters.forget_fits()

    def _read_again(self) -> None:
        """The files' numbers come back. Adapters may have been fitted to others (DoRA reads the base)."""
        if self.changed:
            self.changed.clear()
            self.built.adapters.forget_fits()

    def _check_whole(self, names: set[str], given: set[str]) -> None:
        """Check that all tensors of a layer are given, unless the rest of it is still the checkpoint's."""
        missing = sorted((names - given) & self.changed)
        if missing:
            raise UserError(
                f"the update holds {min(names & given)} but not {missing[0]}, which an earlier one changed: give all "
                "tensors of a layer at once (or call start_weight_update() before the first part)."
            )


def _read(weights: Weights) -> dict[str, Tensor]:
    """Name -> tensor, from any form."""
    if isinstance(weights, (str, Path)):
        path = in_home(weights)
        if not path.exists():
            raise UserError(f"{path}: there is no such file or folder.")
        found = open_safetensors(path) if path.is_dir() else SafetensorsCheckpoint(path, [path])
        if found is None:
            raise UserError(f"{path}: it holds no safetensors files.")
        return {name: found.tensor(name) for name in found.names()}
    given: dict[str, Tensor] = {}
    pairs = weights.items() if isinstance(weights, Mapping) else weights
    for pair in pairs if isinstance(pairs, Iterable) else (None,):
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise UserError("weights must be pairs of a name and a tensor, a dict of them, or a safetensors file.")
        name, tensor = pair
        if not isinstance(tensor, Tensor):
            raise UserError(f"{name} must be a tensor, not {type(tensor).__name__}.")
        if tensor.layout is not torch.strided:
            raise UserError(f"{name} must hold all its numbers: a sparse tensor cannot be read.")
        if name in given:
            raise UserError(f"{name} is given twice.")
        given[name] = tensor.detach()
    return given


def _in_half_where_stored_so(given: dict[str, Tensor], source: Checkpoint) -> dict[str, Tensor]:
    """Convert tensors to float16 or from it, as the checkpoint stores them: the model may hold only those in 16
    bits."""
    known = set(source.names())
    ask = getattr(source, "blocks", None)

    def fitted(name: str, tensor: Tensor) -> Tensor:
        if tensor.dtype not in WIDE or (ask is not None and ask(name, None) is not None):
            return tensor
        half = torch.float16
        stored = half if name in known and source.tensor(name).dtype == half else torch.float32
        return tensor.to(stored) if half in (stored, tensor.dtype) else tensor

    return {name: fitted(name, tensor) for name, tensor in given.items()}


def _without_copy_of_head(given: dict[str, Tensor], source: Checkpoint) -> dict[str, Tensor]:
    """Drop the second copy of a tied matrix: trainers send it under both names, checkpoints hold it once."""
    if HEAD not in given or source.has(HEAD):
        return given
    head = given[HEAD]
    tied = any(name != HEAD and t.shape == head.shape and torch.equal(t, head) for name, t in given.items())
    return {name: tensor for name, tensor in given.items() if name != HEAD} if tied else given


def _check(given: Mapping[str, Tensor], source: Checkpoint) -> None:
    """Before anything is written, refuse tensors that do not fit the checkpoint that the model was loaded from."""
    if not given:
        raise UserError("the update holds no tensors.")
    known = set(source.names())
    for name, tensor in given.items():
        if known and name not in known:
            stem = name.removesuffix("weight")
            packed = sorted(other for other in known if other.startswith(stem)) if stem != name else []
            more = f"; it is held there as {packed[0]}, which other formats cannot fill" if packed else ""
            raise UserError(f"the model's checkpoint has no tensor {name}{more}.")
        shape = source.shape(name) if known else None
        if shape is not None and tuple(shape) != tuple(tensor.shape):
            raise UserError(f"{name} has shape {list(tensor.shape)}, but the model needs {list(shape)}.")
        if known and not _fits(name, tensor, source):
            raise UserError(f"{name} is packed in the model's checkpoint, and other formats cannot fill it.")
        if tensor.is_meta or (tensor.dtype in WIDE and not bool(tensor.isfinite().all())):
            raise UserError(f"{name} holds NaN or infinity, or no numbers at all.")


def _fits(name: str, tensor: Tensor, source: Checkpoint) -> bool:
    """Is the tensor stored as plain numbers, or in exactly the type that is given?"""
    ask = getattr(source, "blocks", None)
    try:
        if ask is not None and ask(name, None) is not None:
            return False
    except ModelError:
        return False
    if ask is not None:
        return tensor.dtype in WIDE
    stored = source.tensor(name).dtype
    return stored == tensor.dtype or (stored in WIDE and tensor.dtype in WIDE)
