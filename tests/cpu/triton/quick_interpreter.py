"""Triton's interpreter, quicker. Owns: doing once what it does again and again for each operation of each program.

What a kernel computes, and what is refused, stays as it is: types and shapes are described once, operands are not
copied to the size of their result, and whether integers overflow is one question of numpy in place of thirty of the
language.
Must not know: kernels, engines.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any

import numpy as np
import pytest

EXACT = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
"""Operations of the language on integers that may overflow."""
NUMBERS = {bool, int, float}
ARITHMETIC = {
    f"__{side}{name}__": name.replace("and", "and_") for name in ("add", "sub", "mul", "and") for side in ("", "r")
}
"""Operators that the language hands on through several functions."""


def quicken() -> None:
    """For this process. Whether integers overflow is asked where accesses are watched (bounds.py)."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    interpreter.interpreter_builder.options = dataclasses.replace(
        interpreter.interpreter_builder.options, sanitize_overflow=False
    )
    _patch_language_once(interpreter)
    _describe_types_once(interpreter)
    _pass_tensors_on(interpreter)
    _leave_fitting_to_numpy(interpreter)
    _check_at_once(interpreter)


def _patch_language_once(interpreter: Any) -> None:
    """The language is patched once and stays so; Triton does it, by looking at every name, at each call of a helper."""
    lang, patch = interpreter.tl, interpreter._patch_lang
    kept = types.SimpleNamespace(restore=lambda: None)

    @functools.cache
    def patched_once() -> types.SimpleNamespace:
        patch(types.SimpleNamespace(__globals__={"tl": lang, "core": lang.core}))
        return kept

    def patch_builtin(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        semantic, plain = interpreter.TritonSemantic(builder), getattr(member, "__wrapped__", member)
        if obj is lang.tensor and name in ARITHMETIC:
            scope.set_attr(obj, name, _operator(lang, getattr(semantic, ARITHMETIC[name]), name))
            return

        def called(*args: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return plain(*args, **named)

        scope.set_attr(obj, name, called)

    interpreter._patch_attr = patch_builtin
    interpreter._patch_lang = lambda fn: patched_once()


def _operator(lang: Any, meaning: Any, name: str) -> Any:
    """The operator of a tensor, without the functions between it and what it means."""
    constexpr, more, swapped = lang.constexpr, (True,) * (meaning.__name__ != "and_"), name.startswith("__r")

    def called(self: Any, other: Any, _semantic: Any = None) -> Any:
        if type(other) is constexpr:
            other = other.value
        return meaning(other, self, *more) if swapped else meaning(self, other, *more)

    return called


def _describe_types_once(interpreter: Any) -> None:
    """What follows from a name or a shape alone. `sizes` of a block is what its tensors tell of it."""
    lang = interpreter.tl
    dtype, block = lang.dtype, lang.block_type
    describe, equal = block.__init__, dtype.__eq__
    described: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}

    def made(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, tuple(shape.values if isinstance(shape, lang.tuple) else shape)
        try:
            known = described[key]
        except (KeyError, TypeError):
            describe(self, element_ty, list(key[1]))
            self.sizes = lang.constexpr(self.numel), lang.tuple([lang.constexpr(size) for size in self.shape])
            if all(type(size) is int for size in key[1]):
                described[key] = {part: getattr(self, part) for part in ("shape", "numel", "name", "sizes")}
        else:
            self.element_ty = element_ty
            self.__dict__.update(known)

    block.__init__ = made
    dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    for question in ("is_int", "is_int_signed", "is_int_unsigned", "is_floating", "is_fp8", "kind"):
        setattr(dtype, question, _by_name(getattr(dtype, question)))
    numpy_type, address = functools.cache(interpreter._get_np_dtype), np.dtype(np.uint64)
    interpreter._get_np_dtype = lambda of: address if of.scalar.is_ptr() else numpy_type(of.scalar)


def _by_name(question: Any) -> Any:
    """The answer of a type for all types of its name."""
    known: dict[str, Any] = {}

    def asked(self: Any) -> Any:
        if self.name not in known:
            known[self.name] = question(self)
        return known[self.name]

    return asked


def _pass_tensors_on(interpreter: Any) -> None:
    """Tensors, of which most things are made, do not go through what other things need."""
    lang, handle = interpreter.tl, interpreter.TensorHandle
    none = lang.constexpr(1), lang.tuple([])
    unwrap, to_tensor, check = (
        lang.core._unwrap_if_constexpr,
        interpreter.TritonSemantic.to_tensor,
        handle.__post_init__,
    )
    plain = {lang.tensor, int, float, bool}

    def made(self: Any, handle: object, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.sizes if type.is_block() else none

    def unwrapped(given: Any) -> Any:
        return given if type(given) in plain else unwrap(given)

    def as_tensor(self: Any, x: Any, check_type: bool = True) -> Any:
        return x if type(x) is lang.tensor else to_tensor(self, x, check_type)

    def checked(self: Any) -> None:
        if isinstance(self.dtype, lang.pointer_type) or self.data.itemsize * 8 > self.dtype.primitive_bitwidth:
            check(self)

    lang.tensor.__init__ = made
    lang.core._unwrap_if_constexpr = unwrapped
    interpreter.TritonSemantic.to_tensor = as_tensor
    handle.__post_init__ = checked


def _leave_fitting_to_numpy(interpreter: Any) -> None:
    """Operands of an operation on pairs get the type of what comes out; numpy repeats their numbers by itself. Two of
    one type keep it unless they are divided, and a number is made a tensor once for each type that it meets."""
    lang, semantic, tensor = interpreter.tl, interpreter.TritonSemantic, interpreter.tl.tensor
    fit, operands = semantic.broadcast_impl_value, semantic.binary_op_type_checking_impl

    @functools.cache
    def common(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...] | None:
        """None: they do not fit, or Triton adds axes."""
        pairs = list(zip(one, other, strict=False))
        if len(one) != len(other) or any(a != b and 1 not in (a, b) for a, b in pairs):
            return None
        return tuple(b if a == 1 else a for a, b in pairs)

    def typed(given: Any, shape: tuple[int, ...]) -> Any:
        return lang.tensor(given.handle, lang.block_type(given.type.scalar, shape))

    class Operands(semantic):
        def broadcast_impl_value(self, lhs: Any, rhs: Any) -> tuple[Any, Any]:
            one, other = lhs.type, rhs.type
            if not one.is_block():
                return (typed(lhs, other.shape), rhs) if other.is_block() else (lhs, rhs)
            if not other.is_block():
                return lhs, typed(rhs, one.shape)
            one, other = tuple(one.shape.values), tuple(other.shape.values)
            if one == other:
                return lhs, rhs
            shape = common(one, other)
            if shape is None:
                return fit(self, lhs, rhs)
            return lhs if shape == one else typed(lhs, shape), rhs if shape == other else typed(rhs, shape)

    def fitted(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        one, other = lhs.type, rhs.type
        alike = one.is_block() and other.is_block() and one.shape.values == other.shape.values
        return (lhs, rhs) if alike else fit(self, lhs, rhs)

    constants: dict[tuple[str, type, Any], Any] = {}

    def checked(self: Any, lhs: Any, rhs: Any, *rules: Any, **named: Any) -> Any:
        if "operands" not in self.__dict__:
            self.operands = Operands(self.builder)
        if len(rules) > 2 or named or type(lhs) is not tensor:
            return operands(self.operands, lhs, rhs, *rules, **named)
        if type(lhs.dtype) is not lang.dtype:
            if rules[:1] == (True,) and type(rhs) is tensor and type(rhs.dtype) is lang.dtype and rhs.dtype.is_int():
                return self.operands.broadcast_impl_value(lhs, rhs)
            return operands(self.operands, lhs, rhs, *rules)
        if type(rhs) is tensor:
            if lhs.dtype is rhs.dtype:
                return self.operands.broadcast_impl_value(lhs, rhs)
        elif type(rhs) in NUMBERS:
            key = lhs.dtype.name, type(rhs), rhs
            if key in constants:
                return lhs, tensor(constants[key], lhs.type)
            found = operands(self.operands, lhs, rhs, *rules)
            if found[0] is lhs:
                constants[key] = found[1].handle
            return found
        return operands(self.operands, lhs, rhs, *rules)

    constant, constant_tensors = semantic.scalar_constant, {}

    def constant_once(self: Any, value: Any, dtype: Any) -> Any:
        key = type(value), value, dtype and dtype.name
        if key not in constant_tensors:
            constant_tensors[key] = constant(self, value, dtype)
        return constant_tensors[key]

    semantic.scalar_constant = constant_once
    semantic.broadcast_impl_value = fitted
    semantic.binary_op_type_checking_impl = checked


def _check_at_once(interpreter: Any) -> None:
    """Overflow, with Triton's words."""

    def checked(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
        kind = lhs.type.scalar
        if kind.int_bitwidth >= 64 or not self.builder.options.sanitize_overflow:
            return
        name = binary_op.__name__
        exact = EXACT[name](lhs.handle.data, rhs.handle.data, dtype=np.int64)
        within = exact.min() >= kind.get_int_min_value() and exact.max() <= kind.get_int_max_value()
        assert within, f"int{kind.int_bitwidth} overflow detected for operation {name}"

    interpreter.TritonSemantic.binary_op_sanitize_overflow_impl = checked
