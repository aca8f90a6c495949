"""Runs functions of one node for all nodes, in chunks.

`jax.vmap` over all nodes writes every intermediate result of every node to memory. In chunks of nodes the results stay
in the cache of a CPU, which is up to twice as fast, and take bounded memory on other devices.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax import lax

# Maximum size in bytes of the largest intermediate result of a chunk.
_CPU_BYTES = 2**22  # measured: within 10 % of the best for 100 nodes of 128 and 1000 of 13 MNIST images in a batch
_DEVICE_BYTES = 2**30
_PRIME = 1_000_003


def over_nodes(function: Callable[..., Any], runs: int = 1) -> Callable[..., Any]:
    """Lifts a function of one node's arrays to arrays with the nodes on their first axis.

    `runs` is the number of runs that `jax.vmap` adds outside: their chunks are computed together and share the cache.
    """
    # Trace once for all uses below.
    function = jax.jit(function, inline=True)

    def lifted(*stacked: Any) -> Any:
        largest = largest_result_of_a_node(function, *stacked)

        def in_chunks(most: int) -> Callable[..., Any]:
            return lambda *args: _map(function, args, max(1, most // (largest * runs)))

        return lax.platform_dependent(*stacked, cpu=in_chunks(_CPU_BYTES), default=in_chunks(_DEVICE_BYTES))

    return lifted


def largest_result(function: Callable[..., Any], *args: Any) -> int:
    """Returns the size in bytes of the largest intermediate array of a function; at least 1."""
    return max(1, *_sizes(jax.make_jaxpr(function)(*args).jaxpr))


def largest_result_of_a_node(function: Callable[..., Any], *stacked: Any) -> int:
    """Returns the size in bytes per node of the largest intermediate array of `jax.vmap(function)`; at least 1.

    Arrays that all nodes share, such as evaluated examples, do not count.
    """
    # Traced for this many nodes, a prime: the sizes that it divides are those of arrays with an entry per node.
    args = jax.eval_shape(lambda tree: jax.tree.map(lambda leaf: leaf[jnp.zeros(_PRIME, int)], tree), stacked)
    sizes = _sizes(jax.make_jaxpr(jax.vmap(function))(*args).jaxpr)
    return max(1, *(size // _PRIME for size in sizes if size % _PRIME == 0))


def _sizes(jaxpr: Any) -> list[int]:
    """Returns the sizes in bytes of all intermediate results, in order, including those of inner functions."""
    sizes = [0]
    for equation in jaxpr.eqns:
        sizes += [variable.aval.size * variable.aval.dtype.itemsize for variable in equation.outvars]
        for part in jax.tree.leaves(equation.params, is_leaf=_is_jaxpr):
            if _is_jaxpr(part):
                sizes += _sizes(getattr(part, "jaxpr", part))
    return sizes


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, (jax.extend.core.Jaxpr, jax.extend.core.ClosedJaxpr))


def _map(function: Callable[..., Any], stacked: tuple[Any, ...], most: int) -> Any:
    """Runs a function for all nodes in chunks of about equal size, of at most `most` nodes."""
    num_nodes = len(jax.tree.leaves(stacked)[0])
    chunk = int(np.ceil(num_nodes / np.ceil(num_nodes / most)))
    if chunk == 1:
        return lax.map(lambda args: function(*args), stacked)
    if chunk == num_nodes:
        return jax.vmap(function)(*stacked)
    return lax.map(lambda args: function(*args), stacked, batch_size=chunk)
