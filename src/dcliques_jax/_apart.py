"""Parts of a program that XLA compiles by themselves.

XLA fuses whatever it can. That is wrong where a result is read many times, as gossip reads every model once for each
neighbour: fused with what computes them, the models are computed as often. It is wrong, too, where a transposition is
folded into a product of small matrices, which then runs several times slower.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
from jax.experimental.xla_metadata import set_xla_metadata

P = ParamSpec("P")
R = TypeVar("R")


def apart(function: Callable[P, R]) -> Callable[P, R]:
    """The same function of arrays, computed from finished arguments into finished results.

    On CPUs it stays a call, since `jax.lax.optimization_barrier` is removed there before fusion (jax 0.10).
    """
    compiled = jax.jit(function)

    def call(*args: Any) -> Any:
        with set_xla_metadata(inlineable="false"):
            return compiled(*args)

    def barrier(*args: Any) -> Any:
        return jax.lax.optimization_barrier(function(*jax.lax.optimization_barrier(args)))

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        return jax.lax.platform_dependent(*args, cpu=call, default=barrier)

    return wrapped
