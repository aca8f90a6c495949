"""Functions as keys of compiled programs.

`jax.jit` recognises a function it has compiled by identity, but `optax.sgd(0.1)` returns new closures at every call and
so does everything built on it. `Static` also recognises functions that were built alike: of the same code, and with
equal plain values in all that they close over, default to or look up globally. Anything else than plain values, such as
an array or an object that may change, leaves a function equal to itself only.
"""

import functools
import types
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import flax.linen as nn
import numpy as np

T = TypeVar("T")

# Values that cannot change, or are replaced rather than changed.
_PLAIN = (
    *(type(None), type(...), bool, int, float, complex, str, bytes, frozenset, np.dtype, np.generic),
    *(type, types.ModuleType, types.BuiltinFunctionType, nn.Module),
)


class Static(Generic[T]):
    """A value for a static argument of `jax.jit`; equal to another if it was built alike."""

    def __init__(self, value: T) -> None:
        self.value = value
        self._key = _key(value, ())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


class _IncomparableError(Exception):
    """A value is not plain."""


class _Same:
    """Equal to itself only; holds on to the value, so that its id is not given to another."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


def _key(value: Any, within: tuple[int, ...]) -> Any:
    """A hashable stand-in for a value; `within` are the ids of the functions around it, against endless recursion."""
    inner = functools.partial(_key, within=within)
    if isinstance(value, types.FunctionType):
        return _function_key(value, within)
    if isinstance(value, functools.partial):
        return functools.partial, inner(value.func), inner(value.args), inner(value.keywords)
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(inner, value))
    if isinstance(value, dict):
        return dict, tuple((inner(name), inner(entry)) for name, entry in value.items())
    try:
        if isinstance(value, _PLAIN) and hash(value) is not None:
            return type(value), value
    except TypeError:  # a flax module with an array in it
        pass
    raise _IncomparableError


def _function_key(function: types.FunctionType, within: tuple[int, ...]) -> Any:
    if id(function) in within:
        return "recursion"
    inner = functools.partial(_key, within=(*within, id(function)))
    names = sorted(set(_names(function.__code__)) & function.__globals__.keys())
    try:
        cells = tuple(inner(cell.cell_contents) for cell in function.__closure__ or ())
        defaults = inner(function.__defaults__), inner(function.__kwdefaults__)
        looked_up = tuple((name, inner(function.__globals__[name])) for name in names)
    except (_IncomparableError, ValueError):  # ValueError: a cell that is still empty
        return _Same(function)
    return function.__code__, cells, defaults, looked_up


def _names(code: types.CodeType) -> Iterator[str]:
    """All names that a function and the functions inside it may look up globally."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
