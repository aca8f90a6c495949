"""Functions as keys of compiled programs.

`jax.jit` recognises a function it has compiled by identity, but `optax.sgd(0.1)` returns new closures at every call and
so does everything built on it. `Static` compares functions by their code and by what they close over, so that a second
run built from the same pieces finds the first one's program.
"""

import functools
import types
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Static(Generic[T]):
    """A value for a static argument of `jax.jit`; equal to another if it was built in the same way."""

    def __init__(self, value: T) -> None:
        self.value = value
        self._key = _key(value, ())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


class _ById:
    """Stands for a value that cannot be compared; holds on to it, so that its id is not given to another."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


def _key(value: Any, within: tuple[int, ...]) -> Any:
    """A hashable stand-in for a value; `within` are the ids of the values around it, against endless recursion."""
    if id(value) in within:
        return "recursion"
    inner = functools.partial(_key, within=(*within, id(value)))
    if isinstance(value, types.FunctionType):
        cells = tuple(inner(cell.cell_contents) for cell in value.__closure__ or ())
        defaults = inner(value.__defaults__), inner(value.__kwdefaults__)
        return value.__code__, id(value.__globals__), cells, defaults
    if isinstance(value, functools.partial):
        return functools.partial, inner(value.func), inner(value.args), inner(value.keywords)
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(inner, value))
    if isinstance(value, dict):
        return type(value), tuple((inner(name), inner(entry)) for name, entry in value.items())
    try:
        hash(value)
    except TypeError:
        return _ById(value)
    return type(value), value
