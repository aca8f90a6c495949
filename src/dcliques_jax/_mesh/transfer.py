"""Moves arrays of nodes to several devices and back.

Each device holds the same number of consecutive slots, and each clique is on one device, see `placement`. Only rows
that gossip needs move between devices, see `halos`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "nodes"  # axis of the mesh


def specs(tree: Any) -> Any:
    """Returns the sharding of a carry: arrays are split along slots, their second axis; scalars are replicated."""
    return jax.tree.map(lambda leaf: PartitionSpec(None, AXIS) if np.ndim(leaf) > 1 else PartitionSpec(), tree)


def put(tree: Any, specs: Any, mesh: Mesh) -> Any:
    """Puts a pytree of arrays on the host onto the mesh; every process fills its own devices."""

    def one(leaf: Any, spec: PartitionSpec) -> jax.Array:
        sharding = NamedSharding(mesh, spec)
        if is_key(leaf):
            return jax.device_put(leaf, sharding)
        values = np.asarray(leaf)
        values = values.astype(jax.dtypes.canonicalize_dtype(values.dtype))
        return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

    return jax.tree.map(one, tree, specs)


def put_replicated(values: np.ndarray, mesh: Mesh | None) -> jax.Array:
    """Puts an array on every device of a mesh, or on the default device."""
    return jnp.asarray(values) if mesh is None else put(values, PartitionSpec(), mesh)


def put_rows(values: np.ndarray, rows: np.ndarray, mesh: Mesh) -> jax.Array:
    """Puts some rows of an array in equal parts onto the mesh; each process copies only its own rows."""
    sharding = NamedSharding(mesh, PartitionSpec(AXIS))

    def of_device(index: Any) -> np.ndarray:
        return values[rows[index[0]]]

    return jax.make_array_from_callback((len(rows), *values.shape[1:]), sharding, of_device)


def is_key(leaf: Any) -> bool:
    """Returns whether an array holds random keys, which NumPy does not support."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def of_first_process(value: int) -> int:
    """Returns the number or boolean of the first process on all processes."""
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(np.asarray(value)))


def fetched(leaf: jax.Array) -> Any:
    """Returns an array on the host of every process, without a copy if the host is its device. Keys are unchanged."""
    if is_key(leaf):
        return leaf
    if leaf.is_fully_addressable or leaf.is_fully_replicated:
        return np.asarray(leaf)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
