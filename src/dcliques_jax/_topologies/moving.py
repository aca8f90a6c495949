"""Topologies that carry gossip matrices of their own: one, a sequence that repeats, or one drawn in every round."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse

from dcliques_jax import _arrays, _edges
from dcliques_jax import cliques as cliques_lib
from dcliques_jax._mixing.entries import TOLERANCE, check_rows, check_square, with_unit_rows
from dcliques_jax._topologies.matrices import gossip_matrices
from dcliques_jax._topologies.topology import Topology, arcs_of


def from_matrices(
    matrices: Any, *, clique_ids: npt.ArrayLike | None = None, drawn: bool = False, name: str = "own matrices"
) -> Topology:
    """Makes a topology from gossip matrices, which rounds use in turn.

    Row i of a matrix holds the weights that node i gives to what it receives: theta_i <- sum_j W_ij theta_j. Rows sum
    to 1; rounding errors of up to 1e-6 go to the diagonal. Algorithms say what else they require of W, and `simulate`
    checks it.

    Args:
      matrices: one matrix `[nodes, nodes]` or several, as arrays or SciPy sparse matrices. All of them together must
        connect the nodes.
      clique_ids: the clique of each node, `[nodes]`. Gradients are averaged inside cliques, over edges of any matrix.
      drawn: whether nodes swap their places in the matrices in every round, at random: W_t = P_t^T W P_t.
      name: name in reports and pictures.

    >>> swap = np.array([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])
    >>> from_matrices([swap, np.roll(swap, (1, 1), axis=(0, 1))])
    Topology('own matrices', num_nodes=3, edges=2, matrices=2)
    """
    given = tuple(map(_cleaned, _each(matrices)))
    if not given:
        raise ValueError("matrices holds no matrix: pass at least one")
    n = given[0].shape[0]
    for number, matrix in enumerate(given):
        if matrix.shape[0] != n:
            raise ValueError(f"matrix {number} is for {matrix.shape[0]} nodes, matrix 0 for {n}: use as many for all")
    arcs = arcs_of(given)
    edges = _arrays.frozen(_edges.in_order(n, arcs))
    ids = gradient_edges = None
    if clique_ids is not None:
        ids = cliques_lib.check_clique_ids(clique_ids, n)
        gradient_edges = edges[np.equal(*ids[edges].T)]
    both_ways = len(arcs) == 2 * len(edges)
    return Topology(n, edges, ids, gradient_edges, name, None if both_ways else arcs, given, drawn)


def sequence(topologies: Sequence[Topology], *, name: str | None = None) -> Topology:
    """Makes a topology that uses the graphs of several topologies in turn, one per round.

    Each keeps its gossip matrices: its own, or Metropolis-Hastings weights. Only all of them together must be
    connected. Cliques stay if all topologies have the same.

    Args:
      topologies: topologies of the same nodes.
      name: name in reports and pictures.

    >>> from dcliques_jax import topologies
    >>> sequence([topologies.ring(10, seed=1), topologies.ring(10, seed=2)])
    Topology('sequence of 2 graphs', num_nodes=10, edges=15, matrices=2)
    """
    graphs = list(topologies) if isinstance(topologies, Iterable) else []
    if not graphs or not all(isinstance(graph, Topology) for graph in graphs):
        raise ValueError(f"topologies={topologies!r} must be a list of at least one Topology")
    if any(graph.drawn for graph in graphs):
        raise ValueError("a sequence cannot hold graphs that are drawn in every round: use such a topology alone")
    ids = graphs[0].clique_ids
    same = ids is not None and all(g.clique_ids is not None and np.array_equal(g.clique_ids, ids) for g in graphs)
    matrices = [matrix for graph in graphs for matrix in gossip_matrices(graph)]
    given = f"sequence of {len(graphs)} graphs" if name is None else name
    return from_matrices([with_unit_rows(matrix) for matrix in matrices], clique_ids=ids if same else None, name=given)


def _each(matrices: Any) -> list[Any]:
    """Returns one matrix or several as a list."""
    if scipy.sparse.issparse(matrices) or getattr(matrices, "ndim", None) == 2:
        return [matrices]
    if not isinstance(matrices, Iterable):
        raise ValueError(f"matrices={matrices!r} must be a matrix [nodes, nodes] or a list of matrices")
    listed = list(matrices)
    one = bool(listed) and not scipy.sparse.issparse(listed[0]) and np.ndim(listed[0]) == 1  # a list of rows
    return [listed] if one else listed


def _cleaned(matrix: Any) -> scipy.sparse.csr_array:
    """Converts a matrix to float64 and puts rounding errors of its rows on the diagonal."""
    given = matrix if scipy.sparse.issparse(matrix) else np.asarray(matrix)
    check_square(given)
    sparse = scipy.sparse.csr_array(given).astype(np.float64)
    check_rows(sparse)
    unit = with_unit_rows(sparse)
    if unit.data.min(initial=0) < -TOLERANCE:
        raise ValueError(f"weights must not be negative, but the smallest is {unit.data.min():.6g}")
    unit.data = np.maximum(unit.data, 0)
    unit.eliminate_zeros()
    return unit
