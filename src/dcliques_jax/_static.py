"""Functions as keys of compiled programs.

`jax.jit` recognises a function it has compiled by identity, but `optax.sgd(0.1)` returns new closures at every call and
so does everything built on it. `Static` also recognises functions that were built alike: of the same code, and with
equal plain values in all that they close over, default to or look up. Whatever may change unnoticed, such as an
array, an object or a module of one's own, leaves a function equal to itself only: it is compiled again.
"""

import dataclasses
import functools
import types
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import flax.linen as nn
import numpy as np

T = TypeVar("T")

_PLAIN = (type(None), type(...), bool, int, float, complex, str, bytes, np.dtype, np.generic, types.BuiltinFunctionType)
# Packages whose functions, classes and modules nobody changes while a program runs.
_INSTALLED = {"builtins", "dcliques_jax", "flax", "functools", "jax", "jaxlib", "math", "numpy", "optax", "typing"}


class Static(Generic[T]):
    """A value for a static argument of `jax.jit`; equal to another if it was built alike."""

    def __init__(self, value: T) -> None:
        self.value = value
        parts = value if isinstance(value, tuple) else (value,)
        self._key = tuple(map(_key_or_same, parts))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


class _Same:
    """Equal to itself only; holds on to the value, so that its id is not given to another."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


class _ChangeableError(Exception):
    """A value may change unnoticed."""


def _key_or_same(value: Any) -> Any:
    try:
        return _key(value, ())
    except _ChangeableError:
        return _Same(value)


def _key(value: Any, within: tuple[int, ...]) -> Any:
    """A hashable stand-in for a value; `within` are the ids of what it was reached through, against endless loops."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if id(value) in within:
        return "around"
    inner = functools.partial(_key, within=(*within, id(value)))
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(inner, value))
    if isinstance(value, dict):
        return dict, tuple((inner(name), inner(entry)) for name, entry in value.items())
    if isinstance(value, types.MethodType):
        return types.MethodType, inner(value.__func__), inner(value.__self__)
    if isinstance(value, functools.partial):
        return functools.partial, inner(value.func), inner(value.args), inner(value.keywords)
    if isinstance(value, types.FunctionType):
        try:
            return _function_parts(value, inner)
        except (_ChangeableError, ValueError):  # ValueError: it closes over a name that has no value yet
            return _Same(value)
    if isinstance(value, (type, types.ModuleType)) and _installed(value):
        return _Same(value)
    if isinstance(value, type):
        public = {name: entry for name, entry in vars(value).items() if name == "__call__" or not name.startswith("_")}
        public.pop("parent", None)  # flax's own, and not for comparison
        return _Same(value), inner(value.__bases__), inner(public)
    if callable(value) and type(value).__module__.split(".")[0] in ("jax", "jaxlib"):  # such as jax.nn.relu
        return _Same(value), inner(getattr(value, "__wrapped__", None))
    if isinstance(value, nn.Module):
        fields = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value) if field.init]
        return inner(type(value)), inner([field for field in fields if field[0] not in ("parent", "name")])
    raise _ChangeableError


def _function_parts(function: types.FunctionType, inner: Any) -> Any:
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    names = () if _installed(function) else _names(function.__code__)
    looked_up = {name: function.__globals__[name] for name in names if name in function.__globals__}
    parts = tuple(map(inner, (cells, function.__defaults__, function.__kwdefaults__, looked_up)))
    return function.__code__, parts


def _names(code: types.CodeType) -> Iterator[str]:
    """All names that a function and the functions inside it may look up globally."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _installed(value: Any) -> bool:
    name = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    return str(name).split(".")[0] in _INSTALLED
