"""Arrays of nodes on several devices, and back.

Every device holds the same number of slots, side by side in the order of all; whole cliques share a device, see
`placement`. What nodes keep for themselves never leaves it; `halos` moves what gossip needs.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "nodes"  # of the mesh


def specs(tree: Any) -> Any:
    """How a carry lies on the mesh: what has slots on its second axis, after runs, in parts; scalars replicated."""
    return jax.tree.map(lambda leaf: PartitionSpec(None, AXIS) if np.ndim(leaf) > 1 else PartitionSpec(), tree)


def put(tree: Any, specs: Any, mesh: Mesh) -> Any:
    """A pytree of arrays on the host onto the mesh; every process fills its own devices."""

    def one(leaf: Any, spec: PartitionSpec) -> jax.Array:
        sharding = NamedSharding(mesh, spec)
        if is_key(leaf):
            return jax.device_put(leaf, sharding)
        values = np.asarray(leaf)
        values = values.astype(jax.dtypes.canonicalize_dtype(values.dtype))
        return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

    return jax.tree.map(one, tree, specs)


def put_replicated(values: np.ndarray, mesh: Mesh | None) -> jax.Array:
    """An array on every device of a mesh, or on the default device."""
    return jnp.asarray(values) if mesh is None else put(values, PartitionSpec(), mesh)


def put_rows(values: np.ndarray, rows: np.ndarray, mesh: Mesh) -> jax.Array:
    """Some rows of an array, in equal parts on the mesh; only those of a process are copied by it."""
    sharding = NamedSharding(mesh, PartitionSpec(AXIS))

    def of_device(index: Any) -> np.ndarray:
        return values[rows[index[0]]]

    return jax.make_array_from_callback((len(rows), *values.shape[1:]), sharding, of_device)


def is_key(leaf: Any) -> bool:
    """Whether an array holds keys of random generators, which NumPy does not know."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def of_first_process(value: int) -> int:
    """The number, or truth value, of the first of all processes."""
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(np.asarray(value)))


def fetched(leaf: jax.Array) -> Any:
    """An array on the host of every process, without a copy where that is its device; keys stay what they are."""
    if is_key(leaf):
        return leaf
    if leaf.is_fully_addressable or leaf.is_fully_replicated:
        return np.asarray(leaf)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
