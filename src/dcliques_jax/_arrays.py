"""Read-only arrays and their checksums."""

import dataclasses
import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt


def read_only(values: npt.ArrayLike, dtype: npt.DTypeLike | None = None) -> np.ndarray:
    """Returns the values as a read-only array in native byte order; copies them unless their memory is read-only.

    A memory map is not copied. The result is a read-only view of it, and its owner can still write to the file.

    >>> base = np.zeros(3)
    >>> array = read_only(base)
    >>> base[0] = 1
    >>> array, read_only(array) is array
    (array([0., 0., 0.]), True)
    """
    if isinstance(values, np.ma.MaskedArray):
        raise ValueError("a masked array would lose its mask: pass values.filled(...), or remove masked examples")
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
    """Makes an array and all arrays it is a view of read-only, and returns it. Memory maps stay as they are."""
    parts = list(_memory_of(array))
    if not any(isinstance(part, np.memmap) for part in parts):
        for part in parts:
            part.flags.writeable = False
    return array


def _memory_of(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yields the array and all arrays that it is a view of."""
    shown: Any = array
    while shown is not None:
        if isinstance(shown, np.ndarray):
            yield shown
        shown = getattr(shown, "base", None)  # sliding windows have bases that are not arrays


def rebuilt(value: Any) -> tuple[type, tuple[Any, ...]]:
    """Implements `__reduce__` for dataclasses: copies go through the constructor, which checks them."""
    return type(value), tuple(getattr(value, field.name) for field in dataclasses.fields(value))


def checksum(*contents: Any) -> str:
    """Computes a checksum of bytes, arrays (types, shapes and values) and Nones.

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
