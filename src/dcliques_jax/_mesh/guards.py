"""Checks that a mesh and an algorithm can be used together, before anything runs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dcliques_jax import mixing
from dcliques_jax._mesh.transfer import AXIS, is_key
from dcliques_jax.algorithms import Network, Round


def check_mesh(mesh: Any) -> Mesh:
    """Checks that the mesh has one axis named "nodes"; returns it with automatic axis types."""
    if not isinstance(mesh, Mesh) or tuple(mesh.axis_names) != (AXIS,):
        raise ValueError(f"mesh={mesh!r} must have one axis named {AXIS!r}: pass jax.make_mesh((k,), ({AXIS!r},))")
    return Mesh(mesh.devices, mesh.axis_names)


def check_separate(step: Any, params: Any, state: Any) -> None:
    """Raises a `ValueError` if a step lets nodes see each other without weights: on a mesh it would miss most nodes.

    The test sets the second of three nodes without weights between them to NaN. The others must not change.
    """
    num_nodes = len(jax.tree.leaves(params)[0])
    three = np.arange(3) % num_nodes
    of_nodes = jax.tree.map(lambda leaf: leaf.shape[:1] == (num_nodes,), (params, state))
    values = jax.tree.map(lambda leaf, own: leaf[three] if own else leaf, (params, state), of_nodes)
    network = Network(mixing.Identity(3), mixing.Identity(3))
    round = Round(jnp.zeros((), jnp.int32), jax.random.key(0), jnp.arange(3, dtype=jnp.int32), lambda params: params)

    @jax.jit
    def after(values: Any) -> Any:
        params, state = values
        return step(params, params, state, network, round)  # any gradients will do

    def spoilt(leaf: Any, own: bool) -> Any:
        return leaf.at[1].set(jnp.nan) if own and jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf

    def unchanged(one: Any, other: Any, own: bool) -> Any:
        if own:
            one, other = one[::2], other[::2]
        return is_key(one) or np.array_equal(one, other, equal_nan=True)

    outcomes = after(values), after(jax.tree.map(spoilt, values, of_nodes))
    if not all(jax.tree.leaves(jax.tree.map(unchanged, *outcomes, of_nodes))):
        raise ValueError(
            "the algorithm lets nodes see each other without Weights, but each device of a mesh holds only some nodes: "
            "use mixing.mix, or omit mesh"
        )
