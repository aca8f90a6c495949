"""Undirected edges `[edges, 2]`: every edge once, the smaller node first, in order."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import scipy.sparse

from dcliques_jax import _arrays

_AT_ONCE = 2**14  # edges that are checked at a time

Edges = npt.ArrayLike | Iterable[tuple[int, int]]


def checked(num_nodes: int, edges: Edges) -> np.ndarray:
    """Sorts edges of any form into an array `[edges, 2]`; raises a `ValueError` that names a wrong edge."""
    return in_order(num_nodes, as_pairs(num_nodes, "edges", edges))


def as_pairs(num_nodes: int, name: str, edges: Edges) -> np.ndarray:
    """Converts edges to integers `[edges, 2]` and checks that each links two different nodes."""
    listed = edges if hasattr(edges, "__array__") or not isinstance(edges, Iterable) else list(edges)
    try:
        pairs = np.asarray(listed)
    except ValueError as error:  # rows of different lengths
        raise ValueError(f"{name} must be pairs of integers [edges, 2]: {error}") from error
    if pairs.size == 0:
        return np.empty((0, 2), np.int64)
    if pairs.ndim != 2 or pairs.shape[1] != 2 or pairs.dtype.kind not in "iu":
        raise ValueError(f"{name} must be pairs of integers [edges, 2], not {pairs.dtype} of shape {pairs.shape}")
    if pairs.min() < 0 or pairs.max() >= num_nodes:
        outside = pairs[((pairs < 0) | (pairs >= num_nodes)).any(axis=1)]
        raise ValueError(f"edge {outside[0].tolist()} leaves the nodes 0..{num_nodes - 1}")
    loops = np.flatnonzero(pairs[:, 0] == pairs[:, 1])
    if len(loops):
        raise ValueError(f"edge {pairs[loops[0]].tolist()} links a node with itself: remove self-loops")
    return pairs


def ordered(num_nodes: int, name: str, edges: npt.ArrayLike) -> np.ndarray:
    """Returns edges as read-only int64 `[edges, 2]`; raises a `ValueError` unless they are unique and in order."""
    given = np.asarray(edges)
    if given.dtype.kind not in "iu" or given.shape[1:] != (2,) or not _is_ordered(num_nodes, given):
        pairs = as_pairs(num_nodes, name, given)
        i, j = pairs.T
        wrong = np.flatnonzero((i > j) | (np.diff(_codes(num_nodes, pairs), append=num_nodes**2) <= 0))
        if len(wrong):
            raise ValueError(
                f"{name} must be listed once each, the smaller node first, and in order, but hold "
                f"{pairs[wrong[0] : wrong[0] + 2].tolist()} at {wrong[0]}: topologies.from_edges accepts any order"
            )
        given = pairs
    return _arrays.read_only(given, np.int64)


def _is_ordered(num_nodes: int, pairs: np.ndarray) -> bool:
    """Whether all rows are edges, unique and in order."""

    def part_is_ordered(part: np.ndarray) -> bool:
        i, j = part.astype(np.int64, copy=False).T
        codes = i * num_nodes + j
        return bool(i[0] >= 0 and j.max() < num_nodes and (i < j).all() and (codes[1:] > codes[:-1]).all())

    # Complete graphs have millions of edges: check parts that fit into the cache and overlap by one edge.
    starts = range(0, len(pairs), _AT_ONCE)
    return all(part_is_ordered(pairs[start : start + _AT_ONCE + 1]) for start in starts)


def _codes(num_nodes: int, pairs: np.ndarray) -> np.ndarray:
    """Numbers edges so that their order is that of the numbers."""
    return pairs[:, 0].astype(np.int64) * num_nodes + pairs[:, 1]


def in_order(num_nodes: int, edges: np.ndarray) -> np.ndarray:
    """Sorts edges and removes duplicates and self-loops."""
    i, j = np.sort(edges.astype(np.int64), axis=1).T
    return _pairs_of(num_nodes, i[i != j] * num_nodes + j[i != j])


def arcs_in_order(num_nodes: int, arcs: np.ndarray) -> np.ndarray:
    """Sorts arcs (sender, receiver) and removes duplicates and self-loops. Directions stay."""
    return _pairs_of(num_nodes, _codes(num_nodes, arcs[arcs[:, 0] != arcs[:, 1]]))


def _pairs_of(num_nodes: int, codes: np.ndarray) -> np.ndarray:
    """Returns the pairs with these numbers, each once and in order. `np.unique` hashes and takes 20 times as long."""
    ordered = np.sort(codes)
    once = ordered[np.diff(ordered, prepend=-1) != 0]
    return np.stack([once // num_nodes, once % num_nodes], axis=1)


def check_same(num_nodes: int, name: str, arcs: np.ndarray, edges: np.ndarray) -> None:
    """Raises a `ValueError` unless arcs run along all of the edges and no others."""
    if not np.array_equal(in_order(num_nodes, arcs), edges):
        raise ValueError(f"{name} do not run along the edges: topologies.from_matrices and from_networkx make both")


def connected_parts(num_nodes: int, edges: np.ndarray) -> tuple[int, np.ndarray]:
    """Counts the connected parts of a graph and numbers the part of each node."""
    graph = scipy.sparse.coo_array((np.ones(len(edges)), tuple(edges.T)), shape=(num_nodes, num_nodes))
    parts: tuple[int, np.ndarray] = scipy.sparse.csgraph.connected_components(graph, directed=False)
    return parts


def check_connected(num_nodes: int, edges: np.ndarray, name: str) -> None:
    if len(edges) == num_nodes * (num_nodes - 1) // 2:
        return  # a complete graph
    parts, part = connected_parts(num_nodes, edges)
    if parts > 1:
        raise ValueError(
            f"the {name} of {num_nodes} nodes is disconnected: it falls into {parts} parts, and node 0 cannot reach "
            f"node {np.argmax(part != part[0])}; add edges between the parts"
        )


def check_strongly_connected(num_nodes: int, arcs: np.ndarray, name: str) -> None:
    """Raises a `ValueError` unless messages can get from every node to every other."""
    graph = scipy.sparse.coo_array((np.ones(len(arcs)), tuple(arcs.T)), shape=(num_nodes, num_nodes))
    parts, part = scipy.sparse.csgraph.connected_components(graph, directed=True, connection="strong")
    if parts > 1:
        raise ValueError(
            f"the {name} of {num_nodes} nodes is not strongly connected: no way leads from node 0 to node "
            f"{np.argmax(part != part[0])} and back; add arcs"
        )


def check_gradient_edges(num_nodes: int, edges: np.ndarray, chosen: np.ndarray, ids: np.ndarray | None) -> None:
    """Checks that the chosen edges are among all edges and, if there are cliques, inside them."""
    foreign = chosen[~np.isin(_codes(num_nodes, chosen), _codes(num_nodes, edges), assume_unique=True)]
    if len(foreign):
        raise ValueError(f"gradient edge {foreign[0].tolist()} is not one of the edges")
    between = chosen[:0] if ids is None else chosen[np.not_equal(*ids[chosen].T)]
    if len(between):
        raise ValueError(f"gradient edge {between[0].tolist()} links two cliques: leave such edges out")
