"""`tokenmill quantize`: write a smaller copy of a model. Owns: its flags, the progress bar and the table at the end."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from tokenmill.checkpoint.new_folder import check_free, check_new
from tokenmill.cli.flags import flag, spelling, with_flags
from tokenmill.cli.loading import progress, show_waiting, size, weight_bytes
from tokenmill.cli.unloaded_model import look_for
from tokenmill.core.errors import ParameterError
from tokenmill.core.text_file import check_file, read_texts
from tokenmill.device.named import check_device

if TYPE_CHECKING:
    from tokenmill.engine.load.model_source import FolderSource
    from tokenmill.quant.convert import LayerError

Format = Literal[
    "int8", "int4", "fp8", "gguf-q8_0", "gguf-q4_0", "gguf-q4_1", "gguf-q5_0", "gguf-q5_1", "gguf-iq4_nl", "gguf-q2_k",
    "gguf-q3_k", "gguf-q4_k", "gguf-q5_k", "gguf-q6_k", "gguf-iq1_s", "gguf-iq1_m", "gguf-iq2_xxs", "gguf-iq2_xs",
    "gguf-iq2_s", "gguf-iq3_xxs", "gguf-iq3_s", "gguf-iq4_xs", "gguf-tq1_0", "gguf-tq2_0", "gguf-bf16", "gguf-f16",
    "plain", "compressed-tensors", "gptq", "awq", "bitsandbytes", "bitnet", "squeezellm",
]  # fmt: skip
Method = Literal[
    "rtn", "gptq", "awq", "autoround", "hqq", "smoothquant", "int8", "fp8", "fp8-tensor", "fp8-block", "mxfp4", "nvfp4",
    "nf4", "fp4", "llm.int8", "squeezellm", "bitnet", "magnitude", "wanda", "sparsegpt",
]  # fmt: skip
FORMS = {"compressed-tensors": "rtn", "gptq": "gptq", "awq": "awq", "bitsandbytes": "nf4", "bitnet": "bitnet",
         "squeezellm": "squeezellm", "plain": "sparsegpt"}  # fmt: skip
"""Forms of files that methods write, and the usual method of each."""
BITS = {"int8": 8, "int4": 4, "fp8": 8}
EXACT = ("gguf-q8_0", "gguf-bf16", "gguf-f16")
GROUPED = frozenset({"int8", "int4"})
BLIND = ("iq1", "iq2")
"""GGUF types with so few bits that columns must be weighted by their inputs. Without a file, the inputs are
measured."""
MEASURING = frozenset({"calibration", "samples", "length", "device", "save_imatrix"})
SAMPLES, LENGTH = 128, 512
SHOWN = 5
MOST_CHARS = 16 << 20


METHOD_FLAGS = {
    "method": flag("method", Method, "How to round or prune. Some methods calibrate on a text."),
    "bits": flag("bits", float, "With --method: bits of integers (default: 4); 4.5: more bits where they matter."),
    "symmetric": flag("symmetric", bool, "With --method: use no zero points.", spelled="--symmetric"),
    "damping": flag("damping", float, "With gptq and sparsegpt: added to the inputs' squares (default: 0.01)."),
    "catch_up": flag(
        "catch_up",
        float,
        "With gptq and awq: the part of earlier layers' losses that weights make up for (default: 0.5; gptq of 4 bits "
        "and more: 0).",
    ),
    "double": flag(
        "double", bool, "With nf4 and fp4: scales are rounded, too (the default).", spelled="--double/--single"
    ),
    "sparsity": flag("sparsity", str, "With pruning methods: 2:4 (default), or the part of weights that become 0."),
    "calibration": flag(
        "calibration",
        Path,
        "Text (or JSON lines) to calibrate on, or to weigh a GGUF file's columns by (default: ours).",
    ),
    "samples": flag("samples", int, "Sequences to calibrate on (default: 128)."),
    "length": flag("length", int, "Tokens of each sequence (default: 512)."),
    "device": flag("device", str, "Where to calibrate and round (default: cpu)."),
    "kv_scales": flag(
        "kv_scales",
        bool,
        "With --method: also scales of K/V in float8, for engines that use them.",
        spelled="--kv-scales",
    ),
    "save_imatrix": flag("save_imatrix", Path, "With GGUF files: write the measured importance here (.gguf or .dat)."),
}
"""Flags that only methods use, and flags for measuring columns for GGUF files."""


@with_flags("chosen", METHOD_FLAGS)
def quantize(
    source: str = typer.Argument(..., metavar="SRC", help="Folder or hub name of an unquantised model, or `demo`."),
    target: Path = typer.Argument(..., metavar="DST", help="The folder (new, or empty) or .gguf file (new) to write."),
    format: Format = typer.Option(
        None,
        "--format",
        help="int4 (default) or int8 with a scale per group, fp8 with a scale per row, a GGUF file, or, with --method, "
        "the form of the files.",
    ),
    group: int = typer.Option(
        None,
        "--group",
        "--group-size",
        help="Columns that share a scale: 32, 64, 128 or 256 (default: 32; with --method 128).",
    ),
    skip: str = typer.Option(None, "--skip", metavar="REGEX", help="Do not round weights whose name matches this."),
    perplexity: Path = typer.Option(
        None, "--perplexity", metavar="FILE", help="Compare perplexity before and after on this text."
    ),
    imatrix: Path = typer.Option(
        None,
        "--imatrix",
        metavar="FILE",
        help="With GGUF files of 6 bits and less: llama.cpp's importance file, by which columns count.",
    ),
    chosen: dict[str, Any] | None = None,
) -> None:
    """Round a model's weights and write them as compressed-tensors files, or as one GGUF file: other engines read both.

    In the former the embeddings, the output head, norms and routers keep their precision; in GGUF files embeddings and
    head get 6 bits or 8, as usual there."""
    pattern = _pattern(skip)
    text = _read_text(perplexity) if perplexity is not None else None
    (check_new if str(format).startswith("gguf-") else check_free)(target)
    look_for(source)
    check_file((chosen or {}).get("calibration"), "--calibration")
    check_file(imatrix, "--imatrix")
    check_device((chosen or {}).get("device", "cpu"))
    with show_waiting("Getting ready"):
        from tokenmill.measure.whole_source import whole_source
        from tokenmill.quant.convert import Recipe, convert
    if text is not None:
        _check_predictable(source, text)
    chosen = chosen or {}
    if _asks_for_a_method(format, target, chosen, imatrix):
        _check_suffix(target, format)
        groups = {} if group is None else {"group": group}
        _by_method(source, target, {"form": format or "", **groups, **chosen}, pattern)
        if text is not None:
            _compare(source, str(target), text)
        return
    format = format or "int4"
    if group is not None and format not in GROUPED:
        raise ParameterError(f"--group has no effect with --format {format}: leave it out.")
    asked, group = group or 0, 32 if group is None else group
    _check_suffix(target, format)
    found = whole_source(source)
    if format.startswith("gguf-"):
        kind = format.removeprefix("gguf-")
        counts = _importance(found, kind, imatrix, chosen, pattern)
        _write_gguf(found.path, target, kind, pattern, counts)
        if text is not None:
            _compare(str(found.path), str(target), text)
        return
    with progress("Rounding") as tell:
        recipe = Recipe(BITS[format], group, pattern, format == "fp8", _apart(found.path))
        errors = convert(found.path, target, recipe, tell)
    _show(found.path, target, errors, asked)
    if text is not None:
        _compare(str(found.path), str(target), text)


def _asks_for_a_method(form: str | None, target: Path, chosen: dict[str, Any], imatrix: Path | None) -> bool:
    """Is a method to round, by its flags or the form of its files? Refuses flags that do not go together."""
    counted = str(form).startswith("gguf-") and form not in EXACT
    for name, given in (("--imatrix", imatrix is not None), ("--save-imatrix", "save_imatrix" in chosen)):
        if given and not counted:
            raise ParameterError(f"{name} goes with --format gguf-q2_k and other GGUF files of 6 bits and less.")
    if "save_imatrix" in chosen and chosen["save_imatrix"].resolve() == target.resolve():
        raise ParameterError(f"--save-imatrix {target} is the model's own file; name another one.")
    methods = [name for name in chosen if not (counted and name in MEASURING)]
    if methods and form is not None and form not in FORMS:
        raise ParameterError(f"{spelling(methods[0])} goes with --format {', '.join(FORMS)}, not {form}.")
    if methods and form is None and "method" not in chosen:
        raise ParameterError(f"{spelling(methods[0])} needs --method, such as rtn: without one, int4 is made.")
    return bool(methods) or form in FORMS


def _check_suffix(target: Path, form: str | None) -> None:
    """Refuse a folder with a file's name, and a file with a folder's."""
    one = str(form).startswith("gguf-")
    if one and target.suffix != ".gguf":
        raise ParameterError(f"{target} must end in .gguf: it is one file.")
    if not one and target.suffix == ".gguf":
        raise ParameterError(f"{target} ends in .gguf: choose the file's form, --format gguf-q4_k or another one.")


def _apart(folder: Path) -> frozenset[str]:
    """The tensors of a model outside of the part that writes text."""
    from tokenmill.checkpoint.folder import open_checkpoint, read_config
    from tokenmill.quantize.text_alone import other_parts

    ckpt = open_checkpoint(folder)
    try:
        return other_parts(read_config(folder), ckpt.names())
    finally:
        ckpt.close()


def _stacked(folder: Path) -> int:
    """How many tensors hold several experts."""
    from tokenmill.checkpoint.folder import open_checkpoint
    from tokenmill.quant.convert import stacked_experts

    ckpt = open_checkpoint(folder)
    try:
        return len(stacked_experts(ckpt))
    finally:
        ckpt.close()


def _importance(
    found: FolderSource, kind: str, imatrix: Path | None, chosen: dict[str, Any], skip: re.Pattern[str] | None
) -> dict[str, Any]:
    """The weights of columns: read from a file, or measured if that was asked for or is necessary."""
    from tokenmill.device.memory import pick_device
    from tokenmill.models.registry import context_of
    from tokenmill.quant import importance
    from tokenmill.quantize import calibration_text
    from tokenmill.quantize.gguf_export import check_export
    from tokenmill.quantize.gguf_importance import measure

    if imatrix is not None:
        if chosen:
            which = spelling(next(iter(chosen)))
            raise ParameterError(f"{which} is for measuring, and --imatrix names what was measured: use one of them.")
        return importance.read(imatrix)
    if not chosen and not kind.startswith(BLIND):
        return {}
    save = chosen.get("save_imatrix")
    if save is not None:
        _check_saved(save)
    check_export(found.path, kind, skip)
    file = chosen.get("calibration")
    samples = int(chosen.get("samples", SAMPLES))
    length = calibration_text.fitting(chosen.get("length"), LENGTH, context_of(found.config()))
    device = pick_device(chosen.get("device", "cpu"))
    with show_waiting("Reading the text"):
        tokens = calibration_text.sequences(calibration_text.read(file), found.tokenizer().encode, samples, length)
    with progress("Measuring") as tell:
        sums = measure(found.path, tokens, device, tell)
    typer.echo(f"Columns count by their inputs on {tokens.numel():,} tokens of {file or 'the text in the package'}.")
    if save is not None:
        importance.write(save, sums, str(file or "tokenmill"), (tokens.shape[0], tokens.shape[1]))
    return {name: each.means() for name, each in sums.items()}


def _check_saved(save: Path) -> None:
    """Refuse a file for importance that exists, cannot be made, or has a name that tells no form."""
    if save.suffix not in (".gguf", ".dat"):
        raise ParameterError(f"--save-imatrix {save} must end in .gguf or .dat: the name tells the form.")
    if save.exists():
        raise ParameterError(f"--save-imatrix {save} exists already; name a file that does not.")
    check_new(save)


def _write_gguf(source: Path, target: Path, kind: str, skip: re.Pattern[str] | None, counts: dict[str, Any]) -> None:
    from tokenmill.quantize.gguf_export import export

    with progress("Rounding") as tell:
        errors, note = export(source, target, kind, skip, tell, counts)
    if note is not None:
        typer.echo(f"Note: {note}.")
    before, after = weight_bytes(source), target.stat().st_size
    typer.echo(f"{target}: {size(after)} instead of {size(before)}; {len(errors)} matrices rounded")
    _table(errors)


def _by_method(source: str, target: Path, chosen: dict[str, Any], pattern: re.Pattern[str] | None) -> None:
    """Round (or prune) by a method. Without one, by the usual method of the form."""
    from tokenmill.device.memory import pick_device
    from tokenmill.measure.whole_source import whole_source
    from tokenmill.models.registry import context_of
    from tokenmill.quantize import calibration_text, recipes
    from tokenmill.quantize.quantize_model import QuantizeJob, quantize_model

    given = dict(chosen)
    calibration, device = chosen.pop("calibration", None), pick_device(chosen.pop("device", "cpu"))
    recipe = recipes.complete_recipe(recipes.Recipe(**{"method": FORMS.get(chosen["form"], "rtn"), **chosen}))
    if (name := recipes.without_effect(recipe, given)) is not None:
        how = f"--method {recipe.method} --format {recipe.form}"
        raise ParameterError(f"{spelling(name)} has no effect with {how}: leave it out.")
    found = whole_source(source)
    tokens = None
    if recipes.calibrates(recipe):
        length = calibration_text.fitting(given.get("length"), recipe.length, context_of(found.config()))
        recipe = replace(recipe, length=length)
        with show_waiting("Reading the text"):
            tokens = calibration_text.sequences(
                calibration_text.read(calibration), found.tokenizer().encode, recipe.samples, recipe.length
            )
    with progress("Rounding") as tell:
        made = quantize_model(
            QuantizeJob(found.path, target, recipe, pattern, tokens, device, "group" not in given), tell
        )
    if recipe.method in recipes.INTEGERS and made.group != recipe.group:
        typer.echo(f"Groups of {made.group} columns: {recipe.group} do not divide every matrix")
    if (warning := recipes.warning(recipe)) is not None:
        typer.echo(f"Warning: {warning}.")
    if made.moved:
        typer.echo(f"{made.moved} scales moved between layers")
    if made.unreached:
        what = "rounded to the nearest" if recipe.method in recipes.CALIBRATED else "got the fewest bits"
        typer.echo(f"{len(made.unreached)} matrices were not reached by calibration and {what}")
    _show(found.path, target, made.errors, int(given.get("group", 0)) if recipe.method in recipes.INTEGERS else 0)


def _pattern(skip: str | None) -> re.Pattern[str] | None:
    try:
        return None if skip is None else re.compile(skip)
    except re.error as error:
        raise ParameterError(f"--skip {skip!r} is not a regular expression ({error}).") from error


def _read_text(path: Path) -> str:
    return "\n\n".join(read_texts(path, "--perplexity", MOST_CHARS))


def _check_predictable(source: str, text: str) -> None:
    """Refuse a text that cannot be predicted, before the work after which it would be read."""
    from tokenmill.engine.load.model_source import find_source
    from tokenmill.models.registry import read
    from tokenmill.quantize.calibration_text import check_ids, lead_and_rest

    found = find_source(source)
    lead, ids = lead_and_rest(text, found.tokenizer().encode)
    if len(lead) + len(ids) < 2 or not ids:
        raise ParameterError("--perplexity: the text is too short, it needs at least two tokens.")
    if isinstance(vocab := read(found.config()).get("vocab_size"), int):
        check_ids(max(*lead, *ids), vocab, str(found.path))


def _show(source: Path, target: Path, errors: list[LayerError], group: int) -> None:
    """Show sizes, the weights that lost most, and those that were kept. group: as it was asked for (0: it was not)."""
    from tokenmill.quant.convert import GROUPS, REPORT

    before, after = weight_bytes(source), weight_bytes(target)
    typer.echo(f"{target}: {size(after)} of weights instead of {size(before)}; {len(errors)} matrices rounded")
    _table(errors)
    typer.echo(f"All of them: {REPORT}")
    kept = json.loads((target / REPORT).read_text(encoding="utf-8"))["kept"]
    if kept:
        named = ", ".join(kept[:SHOWN]) + ", ..." * (len(kept) > SHOWN)
        finer = "; a smaller --group may divide them" if group > GROUPS[-1] else ""
        typer.echo(f"{len(kept)} matrices are not in whole groups and keep their precision: {named}{finer}")
    if count := _stacked(source):
        typer.echo(f"Note: {count} tensors hold several experts each and are not rounded")


def _table(errors: list[LayerError]) -> None:
    """A table of the weights that lost most."""
    from rich.console import Console
    from rich.table import Table

    if not errors:
        return
    mean = sum(item.error * item.weights for item in errors) / sum(item.weights for item in errors)
    table = Table(title=f"relative error: mean {mean:.4f}; the largest")
    table.add_column("weight")
    table.add_column("error", justify="right")
    for item in sorted(errors, key=lambda item: -item.error)[:SHOWN]:
        table.add_row(item.name, f"{item.error:.4f}")
    Console().print(table)


def _compare(before: str, after: str, text: str) -> None:
    from tokenmill.measure.perplexity import perplexity

    results = []
    for name in (before, after):
        with show_waiting(f"Reading the text with {name}"):
            results.append(perplexity({"model": name, "max_num_seqs": 8}, text))
    first, second = results
    change = 100 * (second.value / first.value - 1)
    typer.echo(
        f"perplexity over {first.tokens} tokens: {first.value:.4f} before, {second.value:.4f} after ({change:+.2f} %)"
    )
