"""Exponential graphs: every node hears from the nodes 1, 2, 4, 8 .. places further on a ring."""

import numpy as np

from dcliques_jax import _checks, _random
from dcliques_jax._topologies.matrices import from_arcs
from dcliques_jax._topologies.moving import from_matrices
from dcliques_jax._topologies.topology import Topology


def exponential(num_nodes: int, *, seed: int = 0) -> Topology:
    """Makes the static exponential graph (Ying et al. 2021, arXiv:2110.13363). It is directed and doubly stochastic.

        W_ij = 1 / (tau + 1)  for j = i  and  j = i + 2^m mod n,  m = 0 .. tau - 1,   tau = ceil(log2 n)

    Nodes stand in random order. For even n, one round shrinks differences by ||W - 11^T/n|| = 1 - 2 / (tau + 1).

    Args:
      num_nodes: number of nodes n.
      seed: seed of the order.

    >>> exponential(100)
    Topology('exponential', num_nodes=100, arcs=700)
    """
    arcs = _arcs_by_distance(num_nodes, seed)  # as 2^(tau - 1) < n, distances differ from each other and from 0
    matrix = from_arcs(len(arcs[0]), np.concatenate(arcs), 1 / len(arcs))
    return from_matrices(matrix, name="exponential")


def one_peer_exponential(num_nodes: int, *, seed: int = 0) -> Topology:
    """Makes the one-peer exponential sequence (Ying et al. 2021, arXiv:2110.13363): one message per node and round.

        W_t = (I + P_t) / 2,   where P_t lets node i read node i + 2^(t mod tau) mod n,   tau = ceil(log2 n)

    Nodes stand in random order. The matrices are directed and doubly stochastic. If n is a power of two, the product of
    any tau matrices in a row is exactly 11^T/n: all nodes then hold the mean.

    Args:
      num_nodes: number of nodes n.
      seed: seed of the order.

    >>> one_peer_exponential(16)
    Topology('one-peer exponential', num_nodes=16, arcs=64, matrices=4)
    """
    arcs = _arcs_by_distance(num_nodes, seed)
    matrices = [from_arcs(len(one), one, 0.5) for one in arcs[1:] or arcs]
    return from_matrices(matrices, name="one-peer exponential")


def _arcs_by_distance(num_nodes: int, seed: int) -> list[np.ndarray]:
    """Lists the arcs (sender, receiver) `[nodes, 2]` over distances 0, 1, 2, 4 .. below the number of nodes."""
    num_nodes = _checks.integer("num_nodes", num_nodes, 1)
    order = _random.generator(seed).permutation(num_nodes)
    distances = [0, *(1 << m for m in range((num_nodes - 1).bit_length()))]  # bit_length(n - 1) = ceil(log2 n)
    return [np.stack([np.roll(order, -distance), order], axis=1) for distance in distances]
