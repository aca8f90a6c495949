"""STL-FW: a sparse gossip matrix learnt from label distributions by Frank-Wolfe (Le Bars et al. 2023)."""

import numpy as np
import numpy.typing as npt
import scipy.optimize

from dcliques_jax import _checks, _edges, _random
from dcliques_jax import cliques as cliques_lib
from dcliques_jax._topologies.moving import from_matrices
from dcliques_jax._topologies.topology import Topology

_NOISE = 1e-9  # on the costs of the assignment, so that ties are broken at random


def stl_fw(label_distribution: npt.ArrayLike, degree: int, *, variance: float = 0.1, seed: int = 0) -> Topology:
    """Learns a topology from label distributions: STL-FW (Le Bars et al. 2023, arXiv:2204.04452).

    Frank-Wolfe minimises g over doubly stochastic matrices W. The first term is the squared label bias of
    neighbourhoods, the second keeps W close to 11^T/n. Pi `[nodes, classes]` is the label distribution, pi its mean.

        g(W) = 1/n ||W Pi - 1 pi^T||^2 + variance/n ||W - 11^T/n||^2

    It starts at W = I and takes `degree` steps. Each moves W towards the permutation matrix that lowers g most steeply,
    as far as lowers g most. It gives every node at most one more to send to, and to hear from. W is directed. A step
    takes about a second for 1000 nodes, and grows with the cube of their number.

    Args:
      label_distribution: p_i(y) of every node, `[nodes, classes]`.
      degree: largest number of nodes that a node sends to, and hears from. As many as classes serve well.
      variance: weight lambda > 0 of the second term.
      seed: seed of tiny noise on the costs. Nodes with equal labels make ties, and fixed choices among these would
        leave W nearly disconnected.

    >>> from dcliques_jax import datasets, partitions
    >>> data = partitions.shards(datasets.synthetic(), 100)
    >>> stl_fw(data.label_distribution, 5).name
    'STL-FW, degree 5'
    """
    p = cliques_lib.check_label_distribution(label_distribution)
    degree = _checks.integer("degree", degree, 1)
    variance = _checks.real("variance", variance, 0)
    if variance == 0:
        raise ValueError("variance=0: the matrix would not mix; pass a positive number, such as 0.1")
    w = frank_wolfe(p, degree, variance, _random.generator(seed))
    arcs = np.argwhere(w)
    if _edges.connected_parts(len(p), arcs)[0] > 1:
        raise ValueError(
            f"degree={degree} leaves the topology that STL-FW learns for {len(p)} nodes disconnected: choose a higher "
            "degree, or another seed"
        )
    return from_matrices(w, name=f"STL-FW, degree {degree}")


def frank_wolfe(p: np.ndarray, steps: int, variance: float, rng: np.random.Generator) -> np.ndarray:
    """Takes steps of Frank-Wolfe from W = I towards the doubly stochastic matrix with the least g."""
    n = len(p)
    w = np.eye(n)
    for _ in range(steps):
        bias, excess = w @ p - p.mean(axis=0), w - 1 / n
        cost = bias @ p.T + variance * excess  # the gradient of g, times n / 2
        rows, columns = scipy.optimize.linear_sum_assignment(cost + _NOISE * rng.random((n, n)))
        towards = -w
        towards[rows, columns] += 1
        slope = np.vdot(cost, towards)
        if slope >= 0:  # no direction lowers g
            break
        curvature = np.sum((towards @ p) ** 2) + variance * np.sum(towards**2)
        w += min(1.0, -slope / curvature) * towards
    return w
