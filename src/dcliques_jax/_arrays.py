"""Arrays that nobody can change, and checksums of them."""

import dataclasses
import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt


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
