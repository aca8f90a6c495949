"""Parts of a program that XLA compiles by themselves.

XLA fuses whatever it can. That is wrong where a result is read many times, as gossip reads every model once for each
neighbour: fused with what computes them, the models are computed as often. It is wrong, too, where a transposition is
folded into a product of small matrices, which then runs several times slower.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata


def unfused(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function of arrays, computed from finished arguments into finished results.

    On CPUs it stays a call, since `jax.lax.optimization_barrier` is removed there before fusion (jax 0.10).
    """
    compiled = jax.jit(function)

    def call(*args: Any) -> Any:
        with set_xla_metadata(inlineable="false"):
            return compiled(*args)

    def barrier(*args: Any) -> Any:
        finished: Any = jax.lax.optimization_barrier  # untyped
        return finished(function(*finished(args)))

    @functools.wraps(function)
    def wrapped(*args: Any) -> Any:
        return jax.lax.platform_dependent(*args, cpu=call, default=barrier)

    return wrapped
