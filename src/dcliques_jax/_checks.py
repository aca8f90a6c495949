"""Checks of arguments, and warnings.

Each check raises a `ValueError` that names the argument, its value and what is valid.
"""

import math
import operator
import sys
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import Any


def integer(name: str, value: Any, least: int, most: int | None = None, why: str = "") -> int:
    """Returns the value as an int; it must be an integer from `least` to `most`.

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


def real(name: str, value: Any, least: float, most: float = math.inf) -> float:
    """Returns the value as a float; it must be a number from `least` to `most`.

    >>> real("p", 1.5, 0, 1)
    Traceback (most recent call last):
    ValueError: p=1.5 must be a number in 0..1
    """
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not least <= number <= most or math.isinf(number):
        bounds = f"of at least {least:g}" if math.isinf(most) else f"in {least:g}..{most:g}"
        raise ValueError(f"{name}={value!r} must be a number {bounds}")
    return number


def share(name: str, value: Any) -> float:
    """Returns the value as a float from 0 to 1."""
    return real(name, value, 0, 1)


def choice(name: str, value: Any, known: Sequence[str]) -> None:
    """Checks that the value is one of the known names."""
    if value not in known:
        raise ValueError(f"{name}={value!r} is unknown: choose one of {', '.join(known)}")


def text(name: str, value: Any) -> None:
    """Checks that the value is a string."""
    if not isinstance(value, str):
        raise ValueError(f"{name}={value!r} must be a string")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the line of the user's code that called the library."""
    frame: FrameType | None = sys._getframe()
    level = 0
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("dcliques_jax", "contextlib"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level + 1)
