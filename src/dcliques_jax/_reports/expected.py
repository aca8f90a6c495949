"""What a topology promises if messages get lost and nodes come and go."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy.sparse

from dcliques_jax import mixing
from dcliques_jax._mixing import spectrum
from dcliques_jax._mixing.entries import without_diagonal
from dcliques_jax.faults import Fault, as_faults


class Expected(NamedTuple):
    """Expected values of a round under faults.

    A message arrives with probability a, so E[W_t] = a W + (1 - a) I. If links or messages fail and nodes do not, the
    contraction is that of E[W_t^T W_t] = M^T M + a (1 - a) sum_ij w_ij^2 (e_i - e_j) (e_i - e_j)^T, M = E[W_t].
    """

    faults: tuple[str, ...]  # names
    arrival: float  # probability a that a message arrives, the mean over pairs of nodes
    online: float  # number of nodes that take part
    second_eigenvalue: float | None  # |lambda2| of E[W_t]; None unless W is one symmetric matrix, and for recordings
    contraction: float | None  # None if nodes fail, or for a sequence
    doubly_stochastic: bool  # whether columns of W_t sum to 1, so that the mean of all models does not drift


def under(
    faults: Fault | Sequence[Fault] | None,
    weights: mixing.Weights,
    matrix: str,
    extremes: spectrum.Extremes | None,
) -> Expected | None:
    """Computes what is expected under faults, or None if nothing can fail."""
    n = weights.num_nodes
    happening = as_faults(faults, n)
    if not happening:
        return None
    nodes = [fault for fault in happening if fault.fails == "nodes"]
    arrival = math.prod(_arrival(fault, n) for fault in happening)
    alike = all(fault.num_nodes is None for fault in happening)  # a recording has its own rate for every pair of nodes
    second = None if extremes is None or not alike else max(abs(1 - arrival * (1 - value)) for value in extremes)
    return Expected(
        faults=tuple(fault.name for fault in happening),
        arrival=arrival,
        online=n * math.prod(_works(fault, n, 1) for fault in nodes),
        second_eigenvalue=second,
        contraction=None if nodes else _contraction(weights, arrival),
        doubly_stochastic=matrix == "symmetric" and all(fault.fails != "messages" for fault in happening),
    )


def _arrival(fault: Fault, num_nodes: int) -> float:
    return _works(fault, num_nodes, 2) if fault.fails == "nodes" else 1 - fault.rate


def _works(fault: Fault, num_nodes: int, k: int) -> float:
    """Returns the probability that k nodes all work."""
    return (1 - fault.rate) ** k if fault.works is None else fault.works(num_nodes, k)


def _contraction(weights: mixing.Weights, arrival: float) -> float | None:
    """Computes the largest E|W_t X - 1 xbar|^2 / |X - 1 xbar|^2 if each message arrives with a probability."""
    n, lost = weights.num_nodes, 1 - arrival
    if n == 1:
        return 0.0
    if isinstance(weights, mixing.GroupMean):  # of all nodes: w_ij = 1 / n
        return lost**2 + 2 * arrival * lost / n
    if isinstance(weights, mixing.Sequence):
        return None
    matrices = weights.matrices()
    if isinstance(weights, mixing.Drawn):
        left = [spectrum.squares(_mean(m, arrival)) + 2 * arrival * lost * _outside(m).sum() - 1 for m in matrices]
        return float(np.mean(left)) / (n - 1)
    mean, outside = _mean(matrices[0], arrival), _outside(matrices[0])
    both = outside + outside.T
    laplacian = scipy.sparse.diags_array(both.sum(axis=1)) - both
    return spectrum.largest_centred((mean.T @ mean + arrival * lost * laplacian).tocsr())


def _mean(matrix: scipy.sparse.csr_array, arrival: float) -> scipy.sparse.csr_array:
    return (arrival * matrix + (1 - arrival) * scipy.sparse.eye_array(matrix.shape[0])).tocsr()


def _outside(matrix: scipy.sparse.csr_array) -> scipy.sparse.csr_array:
    """Returns the squares of the weights between different nodes."""
    return without_diagonal(matrix).power(2)
