"""Keeps XLA from fusing parts of a program.

Fusion is slow if a result is read many times: gossip reads every model once per neighbour, and fused with gossip the
model is computed as many times. Fusion is slow, too, if XLA folds a transposition into a product of small matrices,
which then runs several times slower.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata


def unfused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function of arrays so that XLA fuses it neither with its arguments nor with its results.

    On CPUs the function stays a call, since XLA removes `jax.lax.optimization_barrier` there before fusion (jax 0.10).
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
