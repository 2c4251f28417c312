"""A model folder in, a quantised one out, layer by layer. Owns: the order of work, the files on disk meanwhile, and
resuming after a stop.

While it runs, finished layers lie in `.NAME.partial` beside the target, one file each. They stay after a stop: the same
command continues behind the last one, and a different command starts again. At the end they are gathered in shards, and
a layer's file goes when its shard is there: the disk holds the output and one shard at most. Must not know: command
lines, engines, how methods work.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tokenmill.checkpoint.folder import open_checkpoint, read_config
from tokenmill.checkpoint.new_folder import check_free, claimed, empty, ended_in_order, settle
from tokenmill.compute.lines import RoundsLines
from tokenmill.compute.model import Checkpoint
from tokenmill.core.errors import ModelError, UserError
from tokenmill.quant import left_out
from tokenmill.quant.convert import (
    REPORT,
    LayerError,
    Shards,
    Tell,
    check_kept,
    check_lost,
    check_upright,
    copy_rest,
    kept_whole,
    linear_names,
    relative,
    roundable,
    shard_name,
    write_json,
)
from tokenmill.quant.fused import joined
from tokenmill.quantize import folds, kv_scales, recipes
from tokenmill.quantize.catching_up import caught_up
from tokenmill.quantize.codes import nearest
from tokenmill.quantize.inputs import Inputs
from tokenmill.quantize.layer_stream import Layer, Stream, fold, widened
from tokenmill.quantize.methods import clipped
from tokenmill.quantize.mixed_bits import share_bits
from tokenmill.quantize.recipes import Recipe
from tokenmill.quantize.stored_forms import Held
from tokenmill.quantize.text_alone import TextTensors, other_parts, part_of

_STATE = "state.json"
_MARKS = ("weight_packed", "qweight", "weight_scale", "SCB", "weight.absmax", "bitmask")
"""Names of tensors that lie beside a rounded weight, or replace it."""


@dataclass(frozen=True, slots=True)
class QuantizeJob:
    """Which folder to quantise, where to, and how. tokens [N, L] are for calibration, or None. smaller: groups may be
    smaller than the recipe's if these do not divide every weight."""

    source: Path
    target: Path
    recipe: Recipe
    skip: re.Pattern[str] | None = None
    tokens: Tensor | None = None
    device: str = "cpu"
    smaller: bool = False


@dataclass(slots=True)
class RoundedModel:
    """What became of the weights: relative errors, weights that calibration never reached, the number of moved scales,
    bits by weight. group: columns that share a scale; files: the layers' files while the job runs, and shards: what is
    in the shards that are gathered; kept: weights that no group divides."""

    errors: list[LayerError] = field(default_factory=list)
    unreached: list[str] = field(default_factory=list)
    moved: int = 0
    bits: dict[str, int] = field(default_factory=dict)
    group: int = 0
    files: list[str] = field(default_factory=list)
    shards: list[list[str]] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)


def quantize_model(job: QuantizeJob, tell: Tell = lambda name, done, total: None) -> RoundedModel:
    """Write the quantised model to the new folder `job.target`."""
    config = _check(job)
    ckpt = open_checkpoint(job.source)
    try:
        part = part_of(config, ckpt)
        job, chosen, whole = _chosen(part, job, roundable(ckpt, job.skip, other_parts(config, ckpt.names())))
        check_kept(ckpt, {part.stored(name) for name in chosen})
        scales = _kv_scales(job, part)
        with ended_in_order(), claimed(job.target, "partial") as partial, _kept_if_begun(partial, job.target):
            check_free(job.target)  # another process may have ended just now
            made = _resume(partial, job, chosen)
            made.group, made.kept = job.recipe.group, whole
            run = _Run(job, part.config, part.ckpt, chosen, partial, made, tell)
            if len(made.errors) < len(chosen):
                run.all()
            _finish(run, config, ckpt, part, scales)
    finally:
        ckpt.close()
    return made


@contextmanager
def _kept_if_begun(partial: Path, target: Path) -> Iterator[None]:
    """Let finished layers stay after a stop or on a full disk, and nothing else."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        left = "nothing is left of it."
        if _left(partial):
            left = f"what is finished stays in {partial}, and the same command goes on behind it."
        raise UserError(f"{target} cannot be written ({reason}); {left}") from error
    except BaseException:
        _left(partial)
        raise


def _left(partial: Path) -> bool:
    """Remove what is unfinished. Is anything left?"""
    if not (partial / _STATE).exists():
        shutil.rmtree(partial, ignore_errors=True)
        return False
    for path in partial.glob("*.writing"):
        path.unlink(missing_ok=True)
    return True


def _check(job: QuantizeJob) -> dict[str, Any]:
    config = read_config(job.source)
    if config.get("quantization_config"):
        raise ModelError(f"{job.source} is already quantised; start from the unquantised model.")
    check_upright(config, job.source)
    check_free(job.target)
    assert job.tokens is not None or not recipes.calibrates(job.recipe), "this method calibrates"
    return config


def _chosen(part: TextTensors, job: QuantizeJob, stored: set[str]) -> tuple[QuantizeJob, set[str], list[str]]:
    """The job with a group that divides the weights, those to round, and those that no group divides: they keep their
    precision. stored: their stored names."""
    names = {name for name in part.ckpt.names() if part.stored(name) in stored}
    widths = {shape[1] for name in names if (shape := part.ckpt.shape(name)) is not None}
    recipes.check_zeros(job.recipe, widths)
    job = replace(job, recipe=recipes.dividing(job.recipe, widths, smaller=job.smaller))
    grouped = job.recipe.method in recipes.INTEGERS
    whole = kept_whole(part.ckpt, names, recipes.columns(job.recipe), recipes.rows(job.recipe), chosen=grouped)
    return job, names.difference(whole), whole


def _fingerprint(job: QuantizeJob, chosen: set[str]) -> dict[str, Any]:
    """Identifies the same work on the same model. Another --skip, another text or another checkpoint of the same name
    makes another job."""
    tokens = "" if job.tokens is None else f"{list(job.tokens.shape)}{job.tokens.flatten().tolist()}"
    files = sorted(p for p in job.source.iterdir() if p.suffix in (".safetensors", ".bin") or p.name == "config.json")
    seen = [f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files]
    digest = hashlib.sha256("\n".join([tokens, *sorted(chosen), "", *seen]).encode()).hexdigest()
    return {"source": str(job.source.resolve()), "recipe": asdict(job.recipe), "digest": digest}


def _seal(state: dict[str, Any]) -> str:
    """What a state that nobody has changed holds as its seal."""
    said = {name: value for name, value in state.items() if name != "seal"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _resume(partial: Path, job: QuantizeJob, chosen: set[str]) -> RoundedModel:
    """What an earlier run of the same job has done; the folder is ready afterwards. A file that the state does not list
    was written just before the stop, so its weights are made again. A state that is damaged or was edited counts as
    none."""
    state = partial / _STATE
    if state.exists():
        try:
            found = json.loads(state.read_text(encoding="utf-8"))
            if found["seal"] == _seal(found) and found["job"] == _fingerprint(job, chosen):
                errors = [LayerError(**entry) for entry in found["errors"]]
                same = ("unreached", "moved", "bits", "group", "files", "shards")
                made = RoundedModel(errors, **{name: found[name] for name in same})
                shards = (shard_name(number) for number in range(len(made.shards)))
                whole = {*made.files, *shards, _STATE}
                for name in whole - {_STATE}:
                    with safe_open(partial / name, "pt"):  # a file that is cut short is no finished layer
                        pass
                for path in partial.iterdir():
                    if path.name not in whole:
                        path.unlink()
                return made
        except (ValueError, KeyError, TypeError, OSError, SafetensorError):
            pass
    empty(partial)
    return RoundedModel()


@dataclass(slots=True)
class _Run:
    """One run over the layers."""

    job: QuantizeJob
    config: dict[str, Any]
    ckpt: Checkpoint
    chosen: set[str]
    partial: Path
    made: RoundedModel
    tell: Tell

    def all(self) -> None:
        """Round every chosen weight: with calibration layer by layer, otherwise one by one."""
        recipe = self.job.recipe
        if recipe.method in recipes.INTEGERS and recipe.bits != int(recipe.bits) and not self.made.bits:
            self.made.bits = self._shared_bits()
        if self.job.recipe.method in recipes.CALIBRATED:
            self._streamed()
        done = {entry.name for entry in self.made.errors}
        rest = [name for name in self.ckpt.names() if name in self.chosen and name not in done]
        if self.job.recipe.method in recipes.CALIBRATED:
            self.made.unreached += [name for name in rest if name not in self.made.unreached]
        for start in range(0, len(rest), 32):
            self._hold(
                f"rest{len(done) + start:06}", {name: self._read(name) for name in rest[start : start + 32]}, {}, {}
            )

    def _stream(self, *, paired: bool = False) -> Stream:
        assert self.job.tokens is not None
        return Stream(self.config, self.ckpt, self.job.device, self.job.tokens, paired=paired)

    def _streamed(self) -> None:
        recipe = self.job.recipe
        part = (recipe.catch_up or 0.0) if recipe.method in recipes.CATCHING_UP else 0.0
        stream = self._stream(paired=part > 0.0)
        for index in range(stream.count):
            name = f"layer{index:05}"
            path = self.partial / f"{name}.safetensors"
            if path.exists():
                stream.pass_by(index)
            else:
                layer = stream.calibrate(index, self.chosen)
                if recipe.method in recipes.FOLDING:
                    self.made.moved += fold(stream, layer, self._fit)
                for each, inputs in layer.inputs.items() if part else ():
                    layer.weights[each] = caught_up(layer.weights[each], inputs, part, recipe.damping)
                self.made.unreached += layer.missed
                self._hold(name, layer.weights, layer.inputs, layer.changed, stream.kernels)
            tensors = load_file(path)
            hidden = {name for name in self.chosen if _replaced(name, tensors)}
            stream.advance(index, tensors, hidden, recipes.config(recipe, self.made.bits or self._even(), []))

    def _fit(self, one: folds.Fold, layer: Layer, fitting: Callable[[Tensor], Tensor | None]) -> Tensor | None:
        if self.job.recipe.method == "smoothquant":
            return fitting(folds.smooth(one, layer.weights, layer.inputs))
        spec = recipes.spec_of(self.job.recipe, self._bits(one.consumers[0]))
        rounding = folds.Rounding(
            lambda weight: nearest(weight, spec).dense(),
            lambda weight, inputs: clipped(weight, spec, inputs).dense(),
            spec.group,
        )
        return folds.awq(one, layer.weights, layer.inputs, rounding, fitting)

    def _shared_bits(self) -> dict[str, int]:
        """The bits of each weight, chosen by its loss at every width, averaged over all tokens: an expert that few of
        them reach counts less, and one that none reaches not at all. Weights that are multiplied as one have the same
        bits."""
        stream, together = self._stream(), joined(self.chosen)
        tokens, reached = stream.x.numel(), set[str]()
        lost: dict[tuple[str, int], float] = defaultdict(float)
        sizes: dict[str, int] = defaultdict(int)
        for index in range(stream.count):
            layer = stream.calibrate(index, self.chosen)
            for name, weight in layer.weights.items():
                seen, first = layer.inputs.get(name), together[name][0]
                sizes[first] += weight.numel()
                if seen is None:
                    continue
                reached.add(name)
                for bits in range(2, 9):
                    error = nearest(weight, recipes.spec_of(self.job.recipe, bits)).dense() - weight
                    lost[first, bits] += seen.loss(error) * seen.count / tokens
            stream.advance(index, {}, set(), {})
        if self.job.recipe.method not in recipes.CALIBRATED:
            self.made.unreached = [name for name in self.ckpt.names() if name in self.chosen - reached]
        found = share_bits(lost, sizes, self.job.recipe.bits)
        return {name: found[names[0]] for name, names in together.items() if names[0] in found}

    def _bits(self, name: str) -> int:
        return self.made.bits.get(name, int(self.job.recipe.bits))

    def _even(self) -> dict[str, int]:
        return {name: int(self.job.recipe.bits) for name in self.chosen}

    def _read(self, name: str) -> Tensor:
        return widened(self.ckpt.tensor(name), name, torch.device(self.job.device))

    def _largest(self, name: str, weight: Tensor) -> float | None:
        """The largest magnitude of all weights that are multiplied with this one as one, if the method asks for it."""
        if self.job.recipe.method not in recipes.SHARED:
            return None
        others = (other for other in joined(self.chosen)[name] if other != name)
        return max([float(weight.abs().max()), *(float(self._read(other).abs().max()) for other in others)])

    def _rounded(
        self, name: str, weight: Tensor, inputs: Inputs | None, largest: float | None, kernels: RoundsLines | None
    ) -> Held:
        kind = self.ckpt.tensor(name).dtype
        return recipes.hold(self.job.recipe, weight, self._bits(name), inputs, kind, largest, kernels)

    def _hold(
        self,
        file: str,
        weights: dict[str, Tensor],
        inputs: dict[str, Inputs],
        changed: dict[str, Tensor],
        kernels: RoundsLines | None = None,
    ) -> None:
        """Round these weights, write them to a file, and record that this is done."""
        tensors = {name: tensor.cpu() for name, tensor in changed.items()}
        for name, weight in weights.items():
            largest = self._largest(name, weight)
            held = self._rounded(name, weight, inputs.get(name), largest, kernels)
            base = name.removesuffix(".weight")
            tensors |= {f"{base}.{part}": tensor.cpu().contiguous() for part, tensor in held.tensors.items()}
            error = relative(held.dense, weight)

            def again(by: float, name: str = name, weight: Tensor = weight, largest: float | None = largest) -> float:
                most = None if largest is None else largest * by
                return relative(self._rounded(name, weight * by, inputs.get(name), most, kernels).dense, weight * by)

            check_lost(error, weight, name, again)
            self.made.errors.append(LayerError(name, error, weight.numel()))
            self.tell(name, len(self.made.errors), len(self.chosen))
        written = self.partial / f"{file}.writing"
        save_file(tensors, written)
        written.rename(self.partial / f"{file}.safetensors")
        self.made.files.append(f"{file}.safetensors")
        self._record()

    def gather(self, part: TextTensors, others: Iterable[tuple[str, Tensor]]) -> Shards:
        """All tensors in shards, under their stored names; `others` lie in no layer's file."""
        gathered: list[str] = []

        def wrote() -> None:
            self.made.files = [name for name in self.made.files if name not in gathered]
            self._record()
            for name in gathered:
                (self.partial / name).unlink()
            gathered.clear()

        shards = Shards(self.partial, self.made.shards, wrote)
        for name in sorted(self.made.files):
            shards.add({part.stored(each): tensor for each, tensor in load_file(self.partial / name).items()})
            gathered.append(name)
        done = {name for names in (*shards.files, shards.waiting) for name in names}
        for name, tensor in others:
            if name not in done:
                shards.add({name: tensor})
        return shards

    def _record(self) -> None:
        """Write down what is done."""
        state = {**asdict(self.made), "job": _fingerprint(self.job, self.chosen)}
        state["seal"] = _seal(state)
        half = self.partial / f"{_STATE}.writing"
        half.write_text(json.dumps(state), encoding="utf-8")
        half.rename(self.partial / _STATE)


def _replaced(name: str, tensors: dict[str, Tensor]) -> bool:
    base = name.removesuffix("weight")
    return name not in tensors and any(base + part in tensors for part in _MARKS)


def _modules(names: Iterable[str]) -> set[str]:
    """The modules that these weights are of."""
    return {name.removesuffix(".weight") for name in names if name.endswith(".weight")}


def _kv_scales(job: QuantizeJob, part: TextTensors) -> dict[str, Tensor]:
    """Scales of K/V under the names of the source, if they were asked for."""
    if not job.recipe.kv_scales or job.tokens is None:
        return {}
    found = kv_scales.measure(part.config, part.ckpt, job.device, job.tokens)
    return {full: t for name, each in found.items() for full, t in kv_scales.tensors(part.stored(name), each).items()}


def _finish(run: _Run, config: dict[str, Any], ckpt: Checkpoint, part: TextTensors, scales: dict[str, Tensor]) -> None:
    """Gather the layers and all other tensors in shards, beside config, report and tokenizer: the folder is
    complete."""
    job, made, partial = run.job, run.made, run.partial
    rounded = {part.stored(name): made.bits.get(name, int(job.recipe.bits)) for name in sorted(run.chosen)}
    plain = ((name, ckpt.tensor(name)) for name in ckpt.names() if name not in rounded)
    shards = run.gather(part, chain(plain, scales.items()))
    apart = _modules(other_parts(config, ckpt.names()))
    bits = {name: rounded[f"{name}.weight"] for name in sorted(_modules(rounded))}
    if apart:  # other readers have other names for these modules
        bits = {left_out.MARK + left_out.pattern_of(name, apart): each for name, each in bits.items()}
    ignore = left_out.told(_modules(linear_names(ckpt) - set(rounded) | {"lm_head.weight"}), apart)
    quant_config = recipes.config(job.recipe, bits, ignore)
    if quant_config is not None and scales:
        quant_config["kv_cache_scheme"] = kv_scales.SCHEME
    write_json(
        partial / "config.json", config if quant_config is None else {**config, "quantization_config": quant_config}
    )
    report = {"recipe": asdict(job.recipe), "moved": made.moved,
              "weights": [{**asdict(e), "name": part.stored(e.name)} for e in made.errors],
              "unreached": [part.stored(name) for name in made.unreached],
              "kept": [part.stored(name) for name in made.kept],
              "bits": {part.stored(name): each for name, each in made.bits.items()}}  # fmt: skip
    write_json(partial / REPORT, report)
    copy_rest(job.source, partial)
    shards.close()
    settle(partial, job.target)
    (job.target / _STATE).unlink()
