"""States of nodes on several devices, and back.

Every device holds the same number of places, side by side in the order of all; whole cliques share a device, see
`_placements`. What nodes have for themselves never leaves it; what gossip moves is the business of `_halos`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dcliques_jax import mixing
from dcliques_jax._placements import Placement

AXIS = "nodes"  # of the mesh


def check_mesh(mesh: Any) -> Mesh:
    """The mesh, if it has one axis named "nodes". What is on it is not known by its type: all may be mixed freely."""
    if not isinstance(mesh, Mesh) or tuple(mesh.axis_names) != (AXIS,):
        raise ValueError(f"mesh={mesh!r} must have one axis named {AXIS!r}: pass jax.make_mesh((k,), ({AXIS!r},))")
    return Mesh(mesh.devices, mesh.axis_names)


def is_weights(leaf: Any) -> bool:
    """Whether a part of a pytree are weights, which are taken as a whole."""
    return isinstance(leaf, mixing.Weights)


def as_arrays(tree: Any) -> Any:
    """The pytree with arrays in the place of Python's numbers; weights stay as they are."""
    return jax.tree.map(lambda leaf: leaf if is_weights(leaf) else jnp.asarray(leaf), tree, is_leaf=is_weights)


def weights_in(tree: Any) -> list[mixing.Weights]:
    """All weights in a pytree."""
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=is_weights) if is_weights(leaf)]


def specs(tree: Any, num_places: int) -> Any:
    """How a pytree lies on the mesh: weights, and arrays with the places on their second axis after runs, in parts."""
    in_parts: Any = PartitionSpec(None, AXIS)

    def spec(leaf: Any) -> Any:
        if is_weights(leaf):
            return jax.tree.map(lambda _: in_parts, leaf)
        return in_parts if np.shape(leaf)[1:2] == (num_places,) else PartitionSpec()

    return jax.tree.map(spec, tree, is_leaf=is_weights)


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


def put_everywhere(values: np.ndarray, mesh: Mesh | None) -> jax.Array:
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


def consensus_distance(params: Any, used: jax.Array) -> jax.Array:
    """That of `metrics`, over the places of all devices that are used, `[places]`."""
    count = jax.lax.psum(used.sum(), AXIS)

    def mean_square(leaf: jax.Array) -> jax.Array:
        mask = used.reshape(-1, *[1] * (leaf.ndim - 1))
        first = jax.lax.psum(jnp.where(jax.lax.axis_index(AXIS) == 0, leaf[:1], 0), AXIS)
        from_first = jnp.where(mask, leaf - first, 0)
        mean = jax.lax.psum(from_first.sum(axis=0, keepdims=True), AXIS) / count
        return jax.lax.psum(jnp.sum(jnp.where(mask, jnp.square(from_first - mean), 0)), AXIS) / count

    return jnp.sqrt(sum(map(mean_square, jax.tree.leaves(params)), start=jnp.zeros(())))


def mean_model(params: Any, used: jax.Array) -> Any:
    """The mean over the places of all devices that are used, `[places]`."""
    count = jax.lax.psum(used.sum(), AXIS)

    def mean(leaf: jax.Array) -> jax.Array:
        mask = used.reshape(-1, *[1] * (leaf.ndim - 1))
        return jax.lax.psum(jnp.where(mask, leaf, 0).sum(axis=0), AXIS) / count.astype(leaf.dtype)

    return jax.tree.map(mean, params)


def of_first_process(value: int) -> int:
    """The number, or truth value, of the first of all processes."""
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(np.asarray(value)))


def check_separate(step: Any, params: Any, state: Any) -> None:
    """Raises a `ValueError` if a step lets nodes see each other without weights: on a mesh it would miss most of them.

    Of three nodes with no weights between them the second is spoilt, which must change nothing but its own values.
    """
    num_nodes = len(jax.tree.leaves(params)[0])
    values = jax.tree.map(
        lambda leaf: mixing.Identity(3) if is_weights(leaf) else leaf,
        (params, params, state),  # gradients may be anything
        is_leaf=is_weights,
    )
    of_nodes = jax.tree.map(lambda leaf: leaf.shape[:1] == (num_nodes,), values)
    three = np.arange(3) % num_nodes
    values = jax.tree.map(lambda leaf, own: leaf[three] if own else leaf, values, of_nodes)

    def spoilt(leaf: Any, own: bool) -> Any:
        return leaf.at[1].set(jnp.nan) if own and jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf

    def unchanged(one: Any, other: Any, own: bool) -> Any:
        if own:
            one, other = one[::2], other[::2]
        return is_key(one) or np.array_equal(one, other, equal_nan=True)

    step = jax.jit(step)
    outcomes = step(*values), step(*jax.tree.map(spoilt, values, of_nodes))
    if not all(jax.tree.leaves(jax.tree.map(unchanged, *outcomes, of_nodes[1:]))):
        raise ValueError(
            "the algorithm lets nodes see each other by other ways than Weights, but a device of a mesh has some nodes "
            "only: use Weights, or leave mesh out"
        )


def check_constant_weights(before: Any, after: Any) -> None:
    """Raises a `ValueError` if a round changes the weights in its state: there is no way back from them on a mesh."""
    changed = [
        a is not b for a, b in zip(*(jax.tree.leaves(weights_in(state)) for state in (before, after)), strict=True)
    ]
    if any(changed):
        raise ValueError("the algorithm changes the weights in its state, which it must not on a mesh: leave mesh out")


def in_topology_order(tree: Any, placements: Sequence[Placement], weights: Sequence[Any]) -> list[Any]:
    """What lies on the mesh, on the host of every process: a pytree for every run, in the order of its topology.

    The weights of each run in the topology's order are given; there is no way back to them from those on the mesh.
    """
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_weights)
    on_host = [leaf if is_weights(leaf) else fetched(leaf) for leaf in leaves]
    num_places = len(placements[0].order)

    def of_run(run: int, places: np.ndarray, own: Any) -> Any:
        remaining = iter(own)
        ordered = [
            next(remaining)
            if is_weights(leaf)
            else (leaf[run][places] if np.shape(leaf)[1:2] == (num_places,) else leaf[run])
            for leaf in on_host
        ]
        return jax.tree.unflatten(structure, ordered)

    return [of_run(run, p.places, own) for run, (p, own) in enumerate(zip(placements, weights, strict=True))]


def fetched(leaf: jax.Array) -> Any:
    """An array on the host of every process, without a copy where that is its device; keys stay what they are."""
    if is_key(leaf):
        return leaf
    if leaf.is_fully_addressable or leaf.is_fully_replicated:
        return np.asarray(leaf)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
