"""Cache of compiled programs, keyed by what they compute.

A run is a pure function of its arguments, but a Python function may read globals, closures and attributes: the same
object may compute something else the next time. So every run traces its programs again, and looks up the compiled
program by the text of the lowered one.

Tracing and lowering take 0.3 s for logistic regression and 2 s for GN-LeNet. `StructuralKey` avoids this for functions
of installed packages that close over plain values and over each other, such as those of `dsgd(optax.sgd(0.1))`: it
compares them by value.
"""

import collections
import contextlib
import dataclasses
import functools
import re
import types
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import Mesh

from dcliques_jax import _arrays

_PLAIN = (type(None), type(...), bool, int, float, complex, str, bytes, np.dtype, np.generic, types.BuiltinFunctionType)
# Packages whose functions, classes and modules do not change while a process runs.
_INSTALLED = {"builtins", "dcliques_jax", "flax", "functools", "jax", "jaxlib", "math", "numpy", "optax", "typing"}
_MOST_KEPT = 256  # programs of each kind; bounds the memory of a process that keeps creating new ones

# JAX caches traces by the identity of functions, including those that a user has jitted or loops over. A new value of
# this context hides these traces.
_traces = jax.make_user_context(None)


def fresh_traces() -> Any:
    """Returns a context in which JAX traces every function again. Only trace in it: running compiles again, too."""
    return _traces(object())


class Lowered(NamedTuple):
    """A program before it is compiled."""

    stage: jax.stages.Lowered
    checksum: str  # of the text of the program
    key: Hashable  # identifies the program; None if it calls functions of the host, which its text omits

    def compile(self, mesh: Mesh | None = None) -> jax.stages.Compiled:
        """Returns the compiled program. Programs with the same text on the same devices are compiled once."""
        if self.key is None:
            return self.stage.compile()
        default: Any = jax.config.jax_default_device  # type: ignore[attr-defined]
        devices = repr(default) if mesh is None else tuple(device.id for device in mesh.devices.flat)
        key = (self.key, devices)
        if key not in _compiled:
            _compiled[key] = self.stage.compile()
        _compiled.move_to_end(key)
        if len(_compiled) > _MOST_KEPT:
            _compiled.popitem(last=False)
        return _compiled[key]


_compiled: collections.OrderedDict[Hashable, jax.stages.Compiled] = collections.OrderedDict()


def lower(
    function: Callable[..., Any], parts: Any, *args: Any, donate: tuple[int, ...] = (), **options: Any
) -> Lowered:
    """Lowers `function(parts, *args, **options)`; see `StructuralKey`. `donate` holds indices into `args`."""
    compared = StructuralKey(parts)
    if compared.key is None:
        with fresh_traces():
            return _lowered(_jitted.__wrapped__(function, compared, donate, **options), *args)
    return _lowered(_jitted(function, compared, donate, **options), *args)


def _lowered(jitted: Any, *args: Any) -> Lowered:
    stage = jitted.lower(*args)
    text = stage.as_text()
    checksum = _arrays.checksum(text.encode())
    # The text omits the names and constants in pytrees, and unused arguments.
    key: Hashable = (checksum, stage.in_tree, stage.out_tree, str(stage.in_avals))
    try:
        hash(key)
    except TypeError:  # a constant in a pytree is not hashable
        key = None
    return Lowered(stage, checksum, None if re.search(r"custom_call @\w*callback", text) else key)


@functools.lru_cache(maxsize=_MOST_KEPT)
def _jitted(function: Callable[..., Any], parts: "StructuralKey", donate: tuple[int, ...], **options: Any) -> Any:
    return jax.jit(functools.partial(function, parts.value, **options), donate_argnums=donate)


class StructuralKey:
    """The functions and numbers that a program is built from, compared by value.

    `key` is None if they cannot be compared by value; then only the same object is equal.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self.key: Hashable = None
        with contextlib.suppress(_ChangeableError):
            self.key = _key(value, ())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StructuralKey) and (self is other if self.key is None else self.key == other.key)

    def __hash__(self) -> int:
        return hash(self.key)


class _ChangeableError(Exception):
    """A value may change without notice."""


def _key(value: Any, within: tuple[int, ...]) -> Hashable:
    """Returns a hashable key of a value. `within` holds the ids of the enclosing values, to stop at cycles."""
    if not installed(value):
        raise _ChangeableError
    if isinstance(value, _PLAIN):
        return type(value), value
    if id(value) in within:
        return "around"
    inner = functools.partial(_key, within=(*within, id(value)))
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(inner, value))
    if isinstance(value, frozenset):
        return frozenset, frozenset(map(inner, value))
    if isinstance(value, dict):
        return dict, tuple((inner(name), inner(entry)) for name, entry in value.items())
    if isinstance(value, functools.partial):
        return functools.partial, inner(value.func), inner(value.args), inner(value.keywords)
    if isinstance(value, types.FunctionType):
        return value.__code__, inner((_cells(value), value.__defaults__, value.__kwdefaults__))
    if isinstance(value, types.MethodType):
        return types.MethodType, inner(value.__func__), inner(value.__self__)
    if isinstance(value, nn.Module):
        fields = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value) if field.init]
        return type(value), inner([field for field in fields if field[0] not in ("parent", "name")])
    if isinstance(value, (type, types.ModuleType)) or callable(getattr(value, "__wrapped__", None)):  # jax.nn.relu
        return value
    raise _ChangeableError


def _cells(function: types.FunctionType) -> list[Any]:
    try:
        return [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # an unassigned name
        raise _ChangeableError from None


def installed(value: Any) -> bool:
    """Returns whether a function, class or module, or the class of an object, is from an installed package."""
    if isinstance(value, types.MethodType):
        return installed(value.__func__) and installed(value.__self__)
    if isinstance(value, types.FunctionType):  # `functools.wraps` changes `__module__`
        name = value.__globals__.get("__name__", "")
    elif isinstance(value, types.ModuleType):
        name = value.__name__
    elif isinstance(value, type):
        name = value.__module__
    elif callable(inner := getattr(value, "__wrapped__", None)):  # from `jax.jit`
        return installed(inner)
    else:
        name = type(value).__module__
    return str(name).split(".")[0] in _INSTALLED
