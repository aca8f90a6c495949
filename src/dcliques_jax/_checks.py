"""Checks of arguments: each raises a `ValueError` that names the argument, its value and what would do.

Also arrays that nobody changes, and checksums.
"""

import dataclasses
import hashlib
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


def integer(name: str, value: Any, least: int, most: int | None = None, why: str = "") -> int:
    """The value as an int, if it is a whole number from `least` to `most`.

    >>> integer("num_nodes", 0, 1)
    Traceback (most recent call last):
    ValueError: num_nodes=0 must be an integer of at least 1
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least or (most is not None and number > most):
        bounds = f"of at least {least}" if most is None else f"in {least}..{most}"
        raise ValueError(f"{name}={value!r} must be an integer {bounds}{why and ', '}{why}")
    return number


def choice(name: str, value: Any, known: Sequence[str]) -> None:
    """Checks that the value is one of the known names."""
    if value not in known:
        raise ValueError(f"{name}={value!r} is unknown: choose one of {', '.join(known)}")


def text(name: str, value: Any) -> None:
    """Checks that the value is a string."""
    if not isinstance(value, str):
        raise ValueError(f"{name}={value!r} must be a string")


def read_only(values: npt.ArrayLike, dtype: npt.DTypeLike | None = None) -> np.ndarray:
    """The values as an array in the machine's byte order that nobody can change: a copy, unless it is one already.

    A memory map stays a map, and only this view of it is read-only: whoever opened it for writing can change it.

    >>> base = np.zeros(3)
    >>> array = read_only(base)
    >>> base[0] = 1
    >>> array, read_only(array) is array
    (array([0., 0., 0.]), True)
    """
    if isinstance(values, np.ma.MaskedArray):
        raise ValueError("a masked array would lose its mask: pass values.filled(...), or leave masked examples out")
    given = values if isinstance(values, np.memmap) else np.asarray(values)
    array = given.astype(np.dtype(given.dtype if dtype is None else dtype).newbyteorder("="), copy=False)
    if array is given and any(isinstance(part, np.memmap) for part in _memory_of(given)):
        array = given.view()
    elif array is given and any(part.flags.writeable for part in _memory_of(given)):
        array = np.array(given, copy=True)
    if array.flags.writeable:
        array.flags.writeable = False
    return array


def frozen(array: np.ndarray) -> np.ndarray:
    """The array itself, made read-only together with the arrays it is a view of; memory maps are left as they are."""
    parts = list(_memory_of(array))
    if not any(isinstance(part, np.memmap) for part in parts):
        for part in parts:
            part.flags.writeable = False
    return array


def _memory_of(array: np.ndarray) -> Iterator[np.ndarray]:
    """The array and all arrays that it is a view of."""
    shown: Any = array
    while shown is not None:
        if isinstance(shown, np.ndarray):
            yield shown
        shown = getattr(shown, "base", None)  # also those of NumPy's stand-ins behind sliding windows


def rebuilt(value: Any) -> tuple[type, tuple[Any, ...]]:
    """What `__reduce__` of a dataclass returns for its copies to be made, and so checked, by the constructor."""
    return type(value), tuple(getattr(value, field.name) for field in dataclasses.fields(value))


def generator(seed: Any, *stream: int) -> np.random.Generator:
    """A random generator for a seed; those of different streams are independent."""
    return np.random.default_rng([integer("seed", seed, 0, 2**32 - 1), *stream])


def checksum(*contents: Any) -> str:
    """A checksum of bytes and arrays: their types, shapes and values; None counts, too.

    >>> checksum(np.zeros(2), None) == checksum(np.zeros(2), None) != checksum(np.zeros(2))
    True
    """
    found = hashlib.blake2b(digest_size=16)
    for content in contents:
        if not isinstance(content, (bytes, type(None))):
            content = np.ascontiguousarray(content)
            found.update(f"{content.dtype.str}{content.shape}".encode())
        found.update(b"-" if content is None else content)
    return found.hexdigest()
