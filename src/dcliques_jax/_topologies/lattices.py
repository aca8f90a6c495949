"""Regular graphs on which nodes are placed at random: rings, grids, tori and hypercubes."""

import numpy as np

from dcliques_jax import _checks, _random
from dcliques_jax._topologies.topology import Topology, make_topology


def ring(num_nodes: int, *, seed: int = 0) -> Topology:
    """Makes a ring of nodes in random order.

    Args:
      num_nodes: number of nodes.
      seed: seed of the order.

    >>> ring(100).degrees.max()
    np.int64(2)
    """
    num_nodes = _checks.integer("num_nodes", num_nodes, 1)
    order = _random.generator(seed).permutation(num_nodes)
    return make_topology(num_nodes, np.stack([order, np.roll(order, -1)], axis=1), "ring")


def grid(rows: int, columns: int, *, seed: int = 0) -> Topology:
    """Makes a rectangular grid of nodes in random order, with borders.

    Args:
      rows: number of rows.
      columns: number of columns.
      seed: seed of the order.

    >>> grid(10, 10)
    Topology('grid', num_nodes=100, edges=180)
    """
    rows, columns = _checks.integer("rows", rows, 1), _checks.integer("columns", columns, 1)
    nodes = _random.generator(seed).permutation(rows * columns).reshape(rows, columns)
    across = np.stack([nodes[:, :-1], nodes[:, 1:]], axis=-1).reshape(-1, 2)
    down = np.stack([nodes[:-1], nodes[1:]], axis=-1).reshape(-1, 2)
    return make_topology(rows * columns, np.concatenate([across, down]), "grid")


def torus(rows: int, columns: int, *, seed: int = 0) -> Topology:
    """Makes a torus of nodes in random order: a grid whose borders are joined, so that every node has 4 neighbours.

    Metropolis-Hastings weights are 1/5. Their eigenvalues are (1 + 2 cos(2 pi a / rows) + 2 cos(2 pi b / columns)) / 5.

    Args:
      rows: number of rows, at least 3.
      columns: number of columns, at least 3.
      seed: seed of the order.

    >>> torus(10, 10)
    Topology('torus', num_nodes=100, edges=200)
    """
    why = "so that neighbours on both sides differ; use topologies.grid for fewer"
    rows, columns = (_checks.integer(name, given, 3, why=why) for name, given in (("rows", rows), ("columns", columns)))
    nodes = _random.generator(seed).permutation(rows * columns).reshape(rows, columns)
    pairs = [np.stack([nodes, np.roll(nodes, -1, axis)], axis=-1).reshape(-1, 2) for axis in (0, 1)]
    return make_topology(rows * columns, np.concatenate(pairs), "torus")


def hypercube(num_nodes: int, *, seed: int = 0) -> Topology:
    """Makes a hypercube of 2^m nodes in random order. Corners that differ in one of m bits are neighbours.

    Metropolis-Hastings weights are 1 / (m + 1). Their second eigenvalue is 1 - 2 / (m + 1).

    Args:
      num_nodes: number of nodes, a power of two.
      seed: seed of the order.

    >>> hypercube(64).degrees.max()
    np.int64(6)
    """
    num_nodes = _checks.integer("num_nodes", num_nodes, 1)
    if num_nodes & (num_nodes - 1):
        below = 2 ** (num_nodes.bit_length() - 1)
        raise ValueError(
            f"num_nodes={num_nodes} must be a power of two, such as {below} or {2 * below}: topologies.exponential and "
            "base_graph take any number"
        )
    corners = np.arange(num_nodes)
    order = _random.generator(seed).permutation(num_nodes)
    pairs = [np.stack([corners, corners ^ (1 << bit)], axis=1) for bit in range(num_nodes.bit_length() - 1)]
    return make_topology(num_nodes, order[np.concatenate([np.empty((0, 2), np.int64), *pairs])], "hypercube")
