"""Graphs that are drawn at random in every round: matchings and Epidemic Learning.

Programs cannot draw such graphs efficiently. They draw a permutation of nodes instead, and apply it to a graph of a
pool that is drawn here.
"""

import numpy as np
import scipy.sparse

from dcliques_jax import _checks, _random
from dcliques_jax._topologies.matrices import from_arcs, from_pairs
from dcliques_jax._topologies.moving import from_matrices
from dcliques_jax._topologies.random_graphs import check_even, random_regular_edges
from dcliques_jax._topologies.topology import Topology

_POOL = 16  # graphs that rounds use in turn, each time with other places for the nodes


def random_matchings(num_nodes: int, *, seed: int = 0) -> Topology:
    """Pairs nodes at random in every round: randomised gossip (Boyd et al. 2006), all pairs at once.

        W_t = (I + P_t) / 2,   where P_t swaps the two nodes of every pair

    All matrices are symmetric and doubly stochastic. If n is odd, one random node is idle. For even n, one round
    shrinks the squared distance from the mean by (n - 2) / (2 (n - 1)) in expectation, about a half.

    Args:
      num_nodes: number of nodes n.
      seed: seed of the matching whose nodes swap their places. The pairs also depend on the seed of the run.

    >>> random_matchings(100)
    Topology('random matchings', num_nodes=100, edges=50)
    """
    num_nodes = _checks.integer("num_nodes", num_nodes, 1)
    order = _random.generator(seed).permutation(num_nodes)
    pairs = order[: num_nodes // 2 * 2].reshape(-1, 2)
    return from_matrices(from_pairs(num_nodes, pairs, 0.5), drawn=True, name="random matchings")


def epidemic(num_nodes: int, degree: int, *, local: bool = False, seed: int = 0) -> Topology:
    """Makes the random graphs of Epidemic Learning (de Vos et al. 2023, arXiv:2310.01972), with s = `degree`.

    EL-Oracle, the default, uses a random s-regular graph in every round. Its matrices are symmetric and doubly
    stochastic. One round shrinks the squared distance from the mean by (1 - s / (n - 1)) / (s + 1) in expectation.

    EL-Local needs no coordination: every node sends to s random others. A receiver averages what came and its own model
    with equal weights. Rows sum to 1, columns do not: the mean of all models drifts a little in every round.

        W_ij = 1 / (s + 1)       on edges                EL-Oracle
        W_ij = 1 / (1 + |R_i|)   for j = i, j in R_i     EL-Local, where R_i are those who sent to i

    Rounds use a pool of 16 graphs in turn. In every round nodes take other, random places in the graph.

    Args:
      num_nodes: number of nodes n.
      degree: number s of messages that a node sends per round. Without `local`, `num_nodes * degree` must be even.
      local: whether nodes choose receivers on their own (EL-Local).
      seed: seed of the pool. The graphs also depend on the seed of the run.

    >>> epidemic(100, 5)
    Topology('epidemic, 5 messages', num_nodes=100, edges=2794, matrices=16)
    >>> epidemic(100, 5, local=True)
    Topology('local epidemic, 5 messages', num_nodes=100, arcs=5585, matrices=16)
    """
    num_nodes = _checks.integer("num_nodes", num_nodes, 2)
    degree = _checks.integer("degree", degree, 1, num_nodes - 1, "the number of other nodes")
    rng = _random.generator(seed)
    if local:
        matrices = [_local_matrix(num_nodes, degree, rng) for _ in range(_POOL)]
        return from_matrices(matrices, drawn=True, name=f"local epidemic, {degree} messages")
    check_even(num_nodes, degree)
    graphs = [random_regular_edges(num_nodes, degree, rng) for _ in range(_POOL)]
    matrices = [from_pairs(num_nodes, edges, 1 / (degree + 1)) for edges in graphs]
    return from_matrices(matrices, drawn=True, name=f"epidemic, {degree} messages")


def _local_matrix(num_nodes: int, degree: int, rng: np.random.Generator) -> scipy.sparse.csr_array:
    receivers = _random_others(num_nodes, degree, rng).ravel()
    came = np.bincount(receivers, minlength=num_nodes)
    arcs = np.stack([np.repeat(np.arange(num_nodes), degree), receivers], axis=1)
    return from_arcs(num_nodes, arcs, 1 / (1 + came[receivers]))


def _random_others(num_nodes: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draws `count` different others for every node, `[nodes, count]`, by Floyd's algorithm for all nodes at once."""
    chosen = np.empty((num_nodes, count), np.int64)
    for column, last in enumerate(range(num_nodes - 1 - count, num_nodes - 1)):
        drawn = rng.integers(0, last, num_nodes, endpoint=True)
        taken = (chosen[:, :column] == drawn[:, None]).any(axis=1)
        chosen[:, column] = np.where(taken, last, drawn)
    return chosen + (chosen >= np.arange(num_nodes)[:, None])  # leaves oneself out
