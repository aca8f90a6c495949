"""Where the nodes of a picture are: positions in the unit circle, by the shape of the topology."""

import numpy as np
import scipy.sparse.csgraph

from dcliques_jax._topologies.topology import arcs_of
from dcliques_jax.topologies import Topology

_MOST_BY_DISTANCE = 1500  # nodes to position by their distances, which takes cubic time


def node_positions(topology: Topology) -> tuple[np.ndarray, float]:
    """Positions nodes, `[nodes, 2]` in the unit circle, and computes the radius that they have room for."""
    n, degrees = topology.num_nodes, topology.degrees
    if topology.clique_ids is not None:
        return _in_cliques(topology, topology.clique_ids)
    if topology.drawn or (topology.matrices is not None and len(topology.matrices) > 1):
        circle, radius = _circle(n, 1.0)
        order = np.arange(n) if topology.drawn else _order_by_rounds(topology)
        return circle[np.argsort(order)], 0.65 * radius  # which leaves links between neighbours on the circle visible
    if (positions := _in_grid(topology)) is not None:
        return positions
    if n <= _MOST_BY_DISTANCE and (degrees != 2).any() and (degrees != n - 1).any():
        return _by_distance(topology)
    circle, radius = _circle(n, 1.0)
    order = scipy.sparse.csgraph.depth_first_order(topology.adjacency(), 0, return_predecessors=False)
    return circle[np.argsort(order)], radius


def _in_cliques(topology: Topology, ids: np.ndarray) -> tuple[np.ndarray, float]:
    from scipy.optimize import linear_sum_assignment

    count, sizes = int(ids.max()) + 1, np.bincount(ids)
    # A fractal groups as many cliques as a clique has nodes, then as many groups, and so on.
    base = max(2, int(sizes.max())) if "(fractal)" in topology.name else count
    centres, radius = _nested_circles(count, base)
    first, second = np.concatenate([topology.edges, topology.edges[:, ::-1]]).T
    pull = np.zeros((len(ids), 2))  # of each node towards the cliques it is linked to
    np.add.at(pull, first, centres[ids[second]] - centres[ids[first]])
    positions, node_radius = np.empty((len(ids), 2)), radius
    for clique in range(count):
        circle, fits = _circle(int(sizes[clique]), radius)
        members = np.flatnonzero(ids == clique)
        nodes, spots = linear_sum_assignment(pull[members] @ circle.T, maximize=True)
        positions[members[nodes]] = centres[clique] + circle[spots]
        node_radius = min(node_radius, fits)
    return positions, node_radius


def _nested_circles(count: int, base: int) -> tuple[np.ndarray, float]:
    """Positions things in circles of `base`, these in circles of `base` and so on, and the radius that fits."""
    if count <= base:
        return _circle(count, 1.0, most=30)
    outer, radius = _nested_circles(-(-count // base), base)
    inner, fits = _circle(base, radius)
    return (outer[:, None] + inner).reshape(-1, 2)[:count], fits


def _circle(count: int, radius: float, most: int = 150) -> tuple[np.ndarray, float]:
    """Positions things on a circle inside the given radius, and computes the radius that fits there.

    More than `most` things zigzag between concentric circles, which gives them more room.
    """
    if count == 1:
        return np.zeros((1, 2)), radius
    rows = -(-count // most)
    fits = 0.8 * np.sin(np.pi * rows / count)  # in the innermost row, if its radius is 1
    innermost = radius / (1 + fits * (2.2 * rows - 1.2))
    circles = innermost * (1 + 2.2 * fits * (np.arange(count) % rows))
    angles = np.pi / 2 - 2 * np.pi * np.arange(count) / count
    return circles[:, None] * np.stack([np.cos(angles), np.sin(angles)], axis=1), innermost * fits


def _order_by_rounds(topology: Topology) -> np.ndarray:
    """Orders nodes depth first, so that those that meet in the first rounds are next to each other."""
    first: dict[tuple[int, int], int] = {}  # the round in which a link first occurs
    for turn, matrix in enumerate(topology.matrices or ()):
        for sender, receiver in arcs_of([matrix]).tolist():
            first.setdefault((sender, receiver), turn)
            first.setdefault((receiver, sender), turn)
    near: list[list[int]] = [[] for _ in range(topology.num_nodes)]
    for (node, other), _ in sorted(first.items(), key=lambda item: item[1], reverse=True):
        near[node].append(other)
    order, seen, stack = list[int](), set[int](), [0]
    while stack:
        if (node := stack.pop()) not in seen:
            seen.add(node)
            order.append(node)
            stack.extend(near[node])
    return np.array(order)


def _in_grid(topology: Topology) -> tuple[np.ndarray, float] | None:
    """Positions nodes in upright rows and columns if the graph is a rectangular grid with corners, else None."""
    n, corners = topology.num_nodes, np.flatnonzero(topology.degrees == 2)
    if len(corners) != 4 or n == 4:
        return None
    first = corners[0]
    from_first = scipy.sparse.csgraph.shortest_path(topology.adjacency(), unweighted=True, indices=first)
    second = corners[np.argsort(from_first[corners])[2]]  # the corner at the other end of the longer side
    from_second = scipy.sparse.csgraph.shortest_path(topology.adjacency(), unweighted=True, indices=second)
    side = from_first[second]
    positions = np.stack([from_first - from_second + side, side - from_first - from_second], axis=1) / 2
    shape = np.ptp(positions, axis=0) + 1
    # The graph is a grid if distinct positions fill a rectangle, and edges are all links of neighbouring positions.
    grid_edges = 2 * n - shape.sum()
    if shape.prod() != n or len(np.unique(positions, axis=0)) != n or len(topology.edges) != grid_edges:
        return None
    if (np.abs(np.diff(positions[topology.edges], axis=1)).sum(axis=2) != 1).any():
        return None
    positions -= positions.mean(axis=0)
    radius = 0.33 / (np.linalg.norm(positions, axis=1).max() + 0.33)
    return positions * radius / 0.33, radius


def _by_distance(topology: Topology) -> tuple[np.ndarray, float]:
    """Positions nodes so that distances follow those in the graph: classical scaling, then stress majorisation."""
    from scipy.spatial.distance import cdist

    distances = scipy.sparse.csgraph.shortest_path(topology.adjacency(), unweighted=True)
    n, squares = len(distances), distances**2
    centred = squares.mean(axis=0) + squares.mean(axis=1)[:, None] - squares - squares.mean()
    positions = np.random.default_rng(0).normal(size=(n, 2))
    for _ in range(50):  # towards the first two eigenvectors; an approximation is enough
        positions = np.linalg.qr(centred @ positions)[0]
    positions *= np.sqrt(np.linalg.norm(centred @ positions, axis=0))
    weights = 1 / (squares + np.eye(n)) - np.eye(n)  # long distances count less, as in Kamada and Kawai's layout
    solve = np.linalg.inv(np.diag(weights.sum(axis=1)) - weights + 1 / n)
    wanted = weights * distances
    for _ in range(30):
        ratios = wanted / np.maximum(cdist(positions, positions), 1e-9)
        positions = solve @ (positions * ratios.sum(axis=1)[:, None] - ratios @ positions)
    positions -= positions.mean(axis=0)
    positions /= np.linalg.norm(positions, axis=1).max()
    apart = cdist(positions, positions) + 2 * np.eye(n)
    radius = 0.33 * float(np.median(apart.min(axis=1)))
    return positions * (1 - radius), radius
