"""The gossip matrices of a topology."""

import numpy as np
import scipy.sparse

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


def _uniform(topology: Topology) -> scipy.sparse.csr_array:
    """Returns equal weights over a digraph in which every node sends to and hears from equally many others."""
    assert topology.arcs is not None
    n, (senders, receivers) = topology.num_nodes, topology.arcs.T
    sent, received = np.bincount(senders, minlength=n), np.bincount(receivers, minlength=n)
    if (uneven := np.flatnonzero((sent != sent[0]) | (received != sent[0]))).size:
        node = uneven[0]
        raise ValueError(
            f"{topology!r} has no gossip matrix of its own whose columns sum to 1: node 0 sends to {sent[0]} others, "
            f"node {node} sends to {sent[node]} and hears from {received[node]}. Use a digraph in which all nodes send "
            "to and hear from equally many, or give the matrix with topologies.from_matrices"
        )
    weights = np.full(len(senders), 1 / (sent[0] + 1))
    return scipy.sparse.csr_array((weights, (receivers, senders)), shape=(n, n))
