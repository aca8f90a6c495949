"""Checks of arguments: each raises a `ValueError` that names the argument, its value and what would do. Checksums."""

import hashlib
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np


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
