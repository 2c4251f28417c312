"""Methods by name. Owns: what each needs, which forms of files can hold its result, and its entries in config.json.

Must not know: layers, where tensors come from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tokenmill.compute.lines import RoundsLines
from tokenmill.core.errors import UserError
from tokenmill.kernels.fp8 import BLOCK
from tokenmill.quant import compressed as ct
from tokenmill.quant import left_out
from tokenmill.quant.convert import GROUPS
from tokenmill.quantize import calibration_text, sparse_methods, squeezellm, stored_forms
from tokenmill.quantize.codes import Codes, Spec, nearest
from tokenmill.quantize.gptq import gptq
from tokenmill.quantize.inputs import Inputs
from tokenmill.quantize.methods import autoround, clipped, hqq
from tokenmill.quantize.stored_forms import Held

Round = Callable[[Tensor, Spec, Inputs | None], Codes]


@dataclass(frozen=True, slots=True)
class Recipe:
    """What to do. bits: of integers. A number between two whole ones gives weights more or fewer bits, by their
    loss."""

    method: str
    form: str = ""
    bits: float = 4.0
    group: int = 128
    symmetric: bool = False
    sparsity: str = "2:4"
    samples: int = 128
    length: int = 512
    damping: float = 0.01
    double: bool = True
    """The scales of NF4 and FP4 are rounded, too."""
    kv_scales: bool = False
    """Scales of K/V in float8 are measured, too, for engines that read them."""
    catch_up: float | None = None
    """The part of what earlier layers lose that weights make up for; None: half, where that was seen to help."""


def _needing(method: Callable[[Tensor, Spec, Inputs], Codes]) -> Round:
    """A method that needs inputs. It rounds to the nearest code if calibration did not reach the weight."""

    def round_(weight: Tensor, spec: Spec, inputs: Inputs | None) -> Codes:
        return nearest(weight, spec) if inputs is None or not inputs.count else method(weight, spec, inputs)

    return round_


INTEGERS: dict[str, Round] = {
    "rtn": lambda weight, spec, inputs: nearest(weight, spec),
    "hqq": lambda weight, spec, inputs: hqq(weight, spec),
    "gptq": _needing(gptq),
    "awq": _needing(clipped),
    "autoround": _needing(autoround),
}
"""Methods whose result is integers in groups."""
WHOLE: dict[str, tuple[Callable[[Tensor], Held], str]] = {
    "smoothquant": (stored_forms.eight_rows, "compressed-tensors"),
    "int8": (stored_forms.eight_rows, "compressed-tensors"),
    "fp8": (stored_forms.float8, "compressed-tensors"),
    "fp8-tensor": (stored_forms.float8_tensor, "compressed-tensors"),
    "fp8-block": (stored_forms.float8_blocks, "compressed-tensors"),
    "mxfp4": (stored_forms.mxfp4, "compressed-tensors"),
    "nvfp4": (stored_forms.nvfp4, "compressed-tensors"),
    "nf4": (stored_forms.nf4, "bitsandbytes"),
    "fp4": (stored_forms.fp4, "bitsandbytes"),
    "llm.int8": (stored_forms.bitsandbytes_eight, "bitsandbytes"),
    "bitnet": (stored_forms.ternary, "bitnet"),
}
"""Methods that fix how a weight is stored, and the form of their files."""
TABLES: dict[str, Callable[[Tensor, int, Inputs | None], Held]] = {"squeezellm": squeezellm.squeezellm}
"""Methods whose result is tables; no other method writes such files."""
NORMAL = {"nf4": stored_forms.nf4, "fp4": stored_forms.fp4}
"""Methods whose scales may be rounded."""
SHARED = ("nvfp4",)
"""Methods with a scale that matrices share if they are multiplied as one."""
DAMPED = ("gptq", "sparsegpt")
CALIBRATED = frozenset({"gptq", "awq", "autoround", "smoothquant", "wanda", "sparsegpt", "squeezellm"})
CATCHING_UP = frozenset({"gptq", "awq"})
FOLDING = frozenset({"awq", "smoothquant"})
METHODS = (*INTEGERS, *WHOLE, *TABLES, *sparse_methods.METHODS)
_WRITERS = {"compressed-tensors": stored_forms.compressed, "gptq": stored_forms.gptq, "awq": stored_forms.awq}
_BITS = {"compressed-tensors": range(2, 9), "gptq": (2, 3, 4, 8), "awq": (4,)}
_COLUMNS = {"mxfp4": 32, "nvfp4": 16, "nf4": 64, "fp4": 64, "squeezellm": 32}
_OWN_BITS = {**dict.fromkeys(("mxfp4", "nvfp4", "nf4", "fp4"), 4),
             **dict.fromkeys(("smoothquant", "int8", "fp8", "fp8-tensor", "fp8-block", "llm.int8"), 8)}  # fmt: skip
"""The bits of methods that have a fixed number."""


def complete_recipe(recipe: Recipe) -> Recipe:
    """The recipe with its form of files, and no default open. A method and a form that do not fit are refused."""
    if recipe.method not in METHODS:
        raise UserError(f"--method {recipe.method}: use {', '.join(METHODS)}.")
    if recipe.method in sparse_methods.METHODS:
        sparse_methods.parse_sparsity(recipe.sparsity)
        forms: tuple[str, ...] = ("plain", "compressed-tensors")
    else:
        own = (WHOLE[recipe.method][1],) if recipe.method in WHOLE else (recipe.method,)
        forms = tuple(_WRITERS) if recipe.method in INTEGERS else own
        if recipe.method in TABLES and recipe.bits not in (3, 4):
            raise UserError(f"--bits {recipe.bits:g}: --method {recipe.method} takes 3 or 4.")
    form = recipe.form or forms[0]
    if form not in forms:
        raise UserError(f"--method {recipe.method} makes files of the form {', '.join(forms)}, not {form}.")
    if recipe.method in INTEGERS:
        if not math.isfinite(recipe.bits):
            raise UserError(f"--bits {recipe.bits:g}: use a number from 2 to 8.")
        if 1 < recipe.bits < 2:
            raise UserError(
                f"--bits {recipe.bits:g}: integers have 2 bits or more; --method bitnet stores -1, 0 and 1."
            )
        whole = recipe.bits == int(recipe.bits)
        if whole and int(recipe.bits) not in _BITS[form]:
            raise UserError(f"--bits {recipe.bits:g}: files of the form {form} hold {_words(_BITS[form])} bits.")
        if not whole and (form != "compressed-tensors" or not 2 < recipe.bits < 8):
            raise UserError(f"--bits {recipe.bits:g}: bits that differ from weight to weight lie between 2 and 8 and "
                            "need --format compressed-tensors.")  # fmt: skip
        if recipe.group not in GROUPS:
            raise UserError(f"--group {recipe.group}: use 32, 64, 128 or 256.")
    calibration_text.check_counts(recipe.samples, recipe.length)
    if not 0.0 < recipe.damping <= 1.0:
        raise UserError(f"--damping {recipe.damping:g}: use a part between 0 and 1.")
    if recipe.catch_up is None:
        helps = recipe.method == "awq" or (recipe.method == "gptq" and recipe.bits < 4)
        recipe = replace(recipe, catch_up=0.5 if helps else 0.0)
    elif not 0.0 <= recipe.catch_up <= 1.0:
        raise UserError(f"--catch-up {recipe.catch_up:g}: use a part from 0 to 1.")
    return replace(recipe, form=form)


def without_effect(recipe: Recipe, given: Mapping[str, Any]) -> str | None:
    """The first given setting that this recipe does not use, by its name on the command line."""
    method, sees = recipe.method, {"method", "form", "device"}
    if method in INTEGERS:
        sees |= {"bits", "group", "symmetric"}
    elif method in TABLES:
        sees |= {"bits"}
    elif method in sparse_methods.METHODS:
        sees |= {"sparsity"}
    sees |= {"double"} if method in NORMAL else {"damping"} if method in DAMPED else set()
    sees |= {"catch_up"} if method in CATCHING_UP else set()
    sees |= {"kv_scales"} if recipe.form == ct.METHOD and method not in sparse_methods.METHODS else set()
    if calibrates(recipe):
        sees |= {"calibration", "samples", "length"}
    own = {"bits": _OWN_BITS.get(method), "group": _COLUMNS.get(method)}
    return next((name for name, value in given.items() if name not in sees and own.get(name) != value), None)


def _words(numbers: Any) -> str:
    return ", ".join(str(n) for n in numbers)


def spec_of(recipe: Recipe, bits: int) -> Spec:
    """How fine the codes of this recipe's files are."""
    return Spec(bits, recipe.group, recipe.symmetric, 1 if recipe.form == "gptq" else 0)


def hold(
    recipe: Recipe,
    weight: Tensor,
    bits: int,
    inputs: Inputs | None,
    kind: torch.dtype = torch.bfloat16,
    largest: float | None = None,
    kernels: RoundsLines | None = None,
) -> Held:
    """The weight [out, in] float32 in the form of this recipe's files. kind: its original type. largest: the largest
    magnitude of all matrices that are multiplied with it as one. kernels: of its device; None: plain torch."""
    if recipe.method in SHARED:
        return stored_forms.nvfp4(weight, largest)
    if recipe.method in NORMAL:
        return NORMAL[recipe.method](weight, recipe.double)
    if recipe.method in WHOLE:
        return WHOLE[recipe.method][0](weight)
    if recipe.method in TABLES:
        return TABLES[recipe.method](weight, bits, inputs)
    if recipe.method in sparse_methods.METHODS:
        method = (
            partial(sparse_methods.sparsegpt, damping=recipe.damping, kernels=kernels)
            if recipe.method in DAMPED
            else sparse_methods.METHODS[recipe.method]
        )
        sparsity = sparse_methods.parse_sparsity(recipe.sparsity)
        masked = stored_forms.bitmask_of_pairs if sparsity == sparse_methods.PAIRS else stored_forms.bitmask
        write = stored_forms.plain if recipe.form == "plain" else masked
        return write(method(weight, sparsity, inputs), kind)
    spec = spec_of(recipe, bits)
    damped = _needing(partial(gptq, damping=recipe.damping, kernels=kernels))
    codes = (damped if recipe.method in DAMPED else INTEGERS[recipe.method])(weight, spec, inputs)
    return _WRITERS[recipe.form](codes)


def calibrates(recipe: Recipe) -> bool:
    """Does the method use the weights' inputs?"""
    mixed = recipe.method in INTEGERS and recipe.bits != int(recipe.bits)
    return recipe.method in CALIBRATED or mixed or recipe.kv_scales


def columns(recipe: Recipe) -> int:
    """A weight's columns must be a multiple of this."""
    if recipe.method in sparse_methods.METHODS:
        return sparse_methods.parse_sparsity(recipe.sparsity).of or 1
    return recipe.group if recipe.method in INTEGERS else _COLUMNS.get(recipe.method, 1)


def check_zeros(recipe: Recipe, widths: Set[int]) -> None:
    """Refuse a part that makes no number zero in matrices of so many columns, or leaves nothing else."""
    if recipe.method not in sparse_methods.METHODS or not widths:
        return
    sparsity = sparse_methods.parse_sparsity(recipe.sparsity)
    gone = [] if sparsity.of else [(round(sparsity.share * columns), columns) for columns in sorted(widths)]
    if gone and not any(count for count, _ in gone):
        raise UserError(f"--sparsity {recipe.sparsity} makes none of {gone[-1][1]} columns zero: name a larger part.")
    if any(count == columns for count, columns in gone):
        raise UserError(f"--sparsity {recipe.sparsity} makes all of {gone[0][1]} columns zero: name a smaller part.")


def dividing(recipe: Recipe, widths: Set[int], *, smaller: bool) -> Recipe:
    """The recipe with the largest group that divides all these column counts that any divides, if a smaller one is
    allowed. Where 128 does not divide one, activations of float8 in blocks get a scale per token: readers refuse groups
    that end early."""
    if recipe.method == "fp8-block":
        return replace(recipe, group=0 if any(n % BLOCK for n in widths) else BLOCK)
    if not smaller or recipe.method not in INTEGERS:
        return recipe
    widths = {n for n in widths if n % GROUPS[-1] == 0} or {GROUPS[-1]}  # no group divides the others
    group = next((g for g in GROUPS if g <= recipe.group and all(n % g == 0 for n in widths)), GROUPS[-1])
    return replace(recipe, group=group)


def warning(recipe: Recipe) -> str | None:
    """A warning if other programs misread such files without an error."""
    if recipe.form == "compressed-tensors" and recipe.method in sparse_methods.METHODS:
        return (
            "Transformers takes no notice of the bitmask and computes noise from this copy; --format plain is for all"
        )
    if recipe.form in ("squeezellm",):
        return "Transformers does not know this form and computes noise from this copy, without an error"
    return None


def rows(recipe: Recipe) -> int:
    """A weight's rows must be a multiple of this."""
    return 8 if recipe.form == "awq" else 4 if recipe.form == "bitnet" else 1


def config(recipe: Recipe, bits: Mapping[str, int], ignore: list[str]) -> dict[str, Any] | None:
    """The quantization_config for the weights' form, if it needs one. bits: of each rounded module; ignore: the modules
    left out. Both as left_out.py spells names."""
    if recipe.form == "plain":
        return None
    if recipe.form != ct.METHOD and recipe.form != "gptq":
        ignore = left_out.as_patterns(ignore)
    if recipe.form == "gptq":
        rules: dict[str, Any] = {"dynamic": left} if (left := left_out.as_rules(ignore)) else {}
        return {"quant_method": "gptq", "bits": int(recipe.bits), "group_size": recipe.group, "desc_act": False,
                "sym": recipe.symmetric, "lm_head": False, "damp_percent": recipe.damping, "true_sequential": False,
                "checkpoint_format": "gptq", **rules}  # fmt: skip
    if recipe.form == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": recipe.group, "zero_point": True, "version": "gemm",
                "modules_to_not_convert": ignore}  # fmt: skip
    if recipe.form == "bitsandbytes":
        four = recipe.method in NORMAL
        return {"quant_method": "bitsandbytes", "load_in_4bit": four, "load_in_8bit": not four,
                "bnb_4bit_quant_type": recipe.method if four else "nf4", "bnb_4bit_use_double_quant": recipe.double,
                "bnb_4bit_compute_dtype": "bfloat16",
                "bnb_4bit_quant_storage": "uint8", "llm_int8_skip_modules": ignore,
                **({} if four else {"llm_int8_threshold": 6.0})}  # fmt: skip
    if recipe.form == "squeezellm":
        return {"quant_method": "squeezellm", "wbits": int(recipe.bits), "modules_to_not_convert": ignore}
    if recipe.form == "bitnet":
        return {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline",
                "modules_to_not_convert": ignore}  # fmt: skip
    return _compressed(recipe, bits, ignore)


def _compressed(recipe: Recipe, bits: Mapping[str, int], ignore: list[str]) -> dict[str, Any]:
    if recipe.method in sparse_methods.METHODS:
        found = sparse_methods.parse_sparsity(recipe.sparsity)
        names = {True: ("sparse-24-bitmask", "2:4"), False: ("sparse-bitmask", "unstructured")}
        form, structure = names[found == sparse_methods.PAIRS]
        sparsity = {"format": form, "sparsity_structure": structure, "global_sparsity": found.share, "ignore": ignore,
                    "targets": ["Linear"]}  # fmt: skip
        return {"quant_method": ct.METHOD, "format": "dense", "config_groups": {}, "ignore": ignore,
                "sparsity_config": sparsity}  # fmt: skip
    if recipe.method == "fp8":
        return ct.fp8_config(ignore)
    token = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "group_size": None, "dynamic": True}
    by_block = {"strategy": "group", "group_size": BLOCK} if recipe.group else {}
    kinds: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
        "smoothquant": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, token),
        "int8": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, token),
        "fp8-tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"},
                       {**token, "type": "float"}),
        "fp8-block": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block",
                                          "block_structure": [BLOCK, BLOCK]},
                      {**token, "type": "float", **by_block}),
        "mxfp4": ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32,
                                           "scale_dtype": "torch.uint8"}, None),
        "nvfp4": ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group",
                                           "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}, None),
    }  # fmt: skip
    if recipe.method in kinds:
        form, weights, inputs = kinds[recipe.method]
        return ct.config(form, {"symmetric": True, "dynamic": False, **weights}, inputs, ignore)
    every = sorted(set(bits.values()))
    told = [
        ct.config("pack-quantized", {"num_bits": each, "type": "int", "symmetric": recipe.symmetric, "dynamic": False,
                                     "strategy": "group", "group_size": recipe.group}, None, ignore)
        for each in every
    ]  # fmt: skip
    groups = {f"group_{i}": one["config_groups"]["group_0"] for i, one in enumerate(told)}
    if len(every) > 1:
        for each, scheme in zip(every, groups.values(), strict=True):
            scheme["targets"] = [name for name, held in bits.items() if held == each]
    return {**told[0], "config_groups": groups}
