"""The gossip matrices of a topology."""

import numpy as np
import numpy.typing as npt
import scipy.sparse

from dcliques_jax._mixing.entries import with_unit_rows
from dcliques_jax._topologies.topology import Topology


def gossip_matrices(topology: Topology) -> tuple[scipy.sparse.csr_array, ...]:
    """Returns the gossip matrices of a topology, one per round in turn; see `mixing.of_topology`."""
    if topology.matrices is not None:
        return topology.matrices
    if topology.arcs is not None:
        return (_uniform(topology),)
    return (metropolis_hastings(topology),)


def metropolis_hastings(topology: Topology) -> scipy.sparse.csr_array:
    """Returns the off-diagonal part of the matrix of eq. 2; see `mixing.metropolis_hastings`."""
    edges = topology.edges
    values = 1 / (topology.degrees[edges].max(axis=1) + 1)
    half = scipy.sparse.csr_array((values, tuple(edges.T)), shape=(topology.num_nodes, topology.num_nodes))
    return half + half.T


def from_arcs(num_nodes: int, arcs: np.ndarray, weights: npt.ArrayLike) -> scipy.sparse.csr_array:
    """Makes the matrix with these weights on arcs (sender, receiver) `[arcs, 2]`. Its diagonal makes rows sum to 1."""
    senders, receivers = arcs.T
    values = np.broadcast_to(np.asarray(weights, np.float64), len(arcs))
    return with_unit_rows(scipy.sparse.csr_array((values, (receivers, senders)), shape=(num_nodes, num_nodes)))


def from_pairs(num_nodes: int, pairs: np.ndarray, weights: npt.ArrayLike) -> scipy.sparse.csr_array:
    """Makes the symmetric matrix with these weights on undirected edges `[edges, 2]`. Rows and columns sum to 1."""
    both = np.broadcast_to(np.asarray(weights, np.float64), len(pairs))
    return from_arcs(num_nodes, np.concatenate([pairs, pairs[:, ::-1]]), np.concatenate([both, both]))


def _uniform(topology: Topology) -> scipy.sparse.csr_array:
    """Returns equal weights over a digraph in which every node sends to and hears from equally many others."""
    assert topology.arcs is not None
    n, (senders, receivers) = topology.num_nodes, topology.arcs.T
    sent, received = np.bincount(senders, minlength=n), np.bincount(receivers, minlength=n)
    if (uneven := np.flatnonzero((sent != sent[0]) | (received != sent[0]))).size:
        node = uneven[0]
        raise ValueError(
            f"{topology!r} has no gossip matrix of its own whose columns sum to 1: node 0 sends to {sent[0]} others, "
            f"and node {node} to {sent[node]} and hears from {received[node]}. Use algorithms.push_sum, a digraph in "
            "which all nodes send to and hear from equally many, or topologies.from_matrices with a matrix"
        )
    weights = np.full(len(senders), 1 / (sent[0] + 1))
    return scipy.sparse.csr_array((weights, (receivers, senders)), shape=(n, n))
