"""Triton's interpreter, quicker. Owns: doing once what it does again and again for each operation of each program.

What a kernel computes, and what is refused, stays as it is: types and shapes are described once, checks of integers
that may overflow are one numpy operation in place of thirty of the language, and operands that fit are not fitted.
Must not know: kernels, engines.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from typing import Any

import numpy as np
import pytest

EXACT = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
"""Operations of the language on integers that may overflow."""


def quicken() -> None:
    """For this process. Whether integers overflow is asked where accesses are watched (bounds.py)."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    interpreter.interpreter_builder.options = dataclasses.replace(
        interpreter.interpreter_builder.options, sanitize_overflow=False
    )
    _patch_language_once(interpreter)
    _describe_types_once(interpreter)
    _describe_tensors_once(interpreter)
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
        semantic = interpreter.TritonSemantic(builder)

        @functools.wraps(member)
        def called(*args: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return member(*args, **named)

        scope.set_attr(obj, name, called)

    interpreter._patch_attr = patch_builtin
    interpreter._patch_lang = lambda fn: patched_once()


def _describe_types_once(interpreter: Any) -> None:
    """What follows from a name or a shape alone."""
    lang = interpreter.tl
    dtype, block = lang.dtype, lang.block_type
    describe, equal = block.__init__, dtype.__eq__
    described: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}

    def made(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, tuple(shape.values if isinstance(shape, lang.tuple) else shape)
        try:
            known = described[key]
        except (KeyError, TypeError):
            describe(self, element_ty, shape)
            if all(type(size) is int for size in key[1]):
                described[key] = {"shape": self.shape, "numel": self.numel, "name": self.name}
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


def _describe_tensors_once(interpreter: Any) -> None:
    """Sizes of a tensor of the language, and operands whose shapes are the same already."""
    lang, semantic = interpreter.tl, interpreter.TritonSemantic
    fit = semantic.broadcast_impl_value

    @functools.cache
    def sizes(shape: tuple[int, ...]) -> tuple[object, object]:
        return lang.constexpr(math.prod(shape)), lang.tuple([lang.constexpr(size) for size in shape])

    def made(self: Any, handle: object, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = sizes(tuple(type.shape.values) if type.is_block() else ())

    def fitted(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        one, other = lhs.type, rhs.type
        if one.is_block() and other.is_block() and one.shape.values == other.shape.values:
            return lhs, rhs
        return fit(self, lhs, rhs)

    lang.tensor.__init__ = made
    semantic.broadcast_impl_value = fitted


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
