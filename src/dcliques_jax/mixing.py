"""How much each neighbour counts.

Gossip and Clique Averaging are one operation: `mix` multiplies a stacked pytree by a matrix along the node axis.
Builders return the form that multiplies fastest: `GroupMean` for a mean over groups, `Neighbours` for up to 64
neighbours per node, else `Dense`. These choices were measured on CPUs (`benchmarks/mixing.py`) and apply to all
devices. To force another form, pass it to the algorithm:

    matrix = mixing.metropolis_hastings(topology).to_sparse()
    algorithms.dsgd(weights=mixing.Dense.from_sparse(matrix))
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse

from dcliques_jax import _arrays, _checks, _edges
from dcliques_jax._mixing.entries import TOLERANCE, check_rows, check_square, largest_entry, without_diagonal
from dcliques_jax._mixing.forms import MOST_UNROLLED, Dense, Identity, Neighbours, Weights
from dcliques_jax._mixing.groups import GroupMean
from dcliques_jax._mixing.paced import Paced, base_of
from dcliques_jax._mixing.push import Shares
from dcliques_jax._mixing.sequences import Drawn, Moving, Sequence
from dcliques_jax._mixing.spectrum import (
    contraction,
    is_symmetric,
    second_eigenvalue,
    smallest_eigenvalue,
    spectral_gap,
)
from dcliques_jax._topologies import matrices
from dcliques_jax.topologies import Edges, Topology

__all__ = [
    "Dense",
    "Drawn",
    "GroupMean",
    "Identity",
    "Messages",
    "Moving",
    "Neighbours",
    "Paced",
    "Sequence",
    "Shares",
    "Weights",
    "check_gossip",
    "check_rows",
    "clique_average",
    "contraction",
    "from_matrix",
    "lazy",
    "meets",
    "messages",
    "metropolis_hastings",
    "mix",
    "neighbourhood_average",
    "of_topology",
    "push",
    "second_eigenvalue",
    "smallest_eigenvalue",
    "spectral_gap",
]

_MOST_DENSE = 20_000  # nodes of the largest dense matrix, which takes 3.2 GB


def mix(weights: Weights, tree: Any) -> Any:
    """Multiplies every leaf of a stacked pytree by the matrix: x_i <- sum_j w_ij x_j.

    Args:
      weights: the matrix.
      tree: a pytree of floating-point arrays `[nodes, ...]`.

    >>> from dcliques_jax import topologies
    >>> mix(metropolis_hastings(topologies.fully_connected(4)), {"a": jnp.arange(4.0)})
    {'a': Array([1.5, 1.5, 1.5, 1.5], dtype=float32)}
    """
    for leaf in jax.tree.leaves(tree):
        if jnp.ndim(leaf) == 0 or len(leaf) != weights.num_nodes or not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise ValueError(
                f"mix takes floating-point arrays with the {weights.num_nodes} nodes on their first axis, "
                f"not {jnp.result_type(leaf)} of shape {jnp.shape(leaf)}"
            )
    return jax.tree.map(weights.apply, tree)


def metropolis_hastings(topology: Topology) -> Weights:
    """Makes the gossip matrix of the paper (eq. 2), which is symmetric and doubly stochastic for any graph.

        W_ij = 1 / (max(degree(i), degree(j)) + 1)  on edges,   W_ii = 1 - sum_{j != i} W_ij

    >>> from dcliques_jax import topologies
    >>> metropolis_hastings(topologies.from_edges(3, [[0, 1], [1, 2]])).to_dense().round(3)
    array([[0.667, 0.333, 0.   ],
           [0.333, 0.333, 0.333],
           [0.   , 0.333, 0.667]])
    """
    if topology.arcs is not None:
        raise ValueError(f"{topology!r} is directed, but Metropolis-Hastings weights are symmetric: use of_topology")
    if _is_complete(topology):
        return _group_average(np.zeros(topology.num_nodes, np.int64))
    return _from_sparse(matrices.metropolis_hastings(topology))


def of_topology(topology: Topology) -> Weights:
    """Makes the gossip matrix of a topology, which `topology.weights()` returns, too.

    It is the topology's own matrix or sequence of matrices, `metropolis_hastings` for an undirected graph, and equal
    weights 1 / (degree + 1) for a digraph in which every node sends to and hears from equally many others.

    >>> from dcliques_jax import topologies
    >>> of_topology(topologies.ring(3)).to_dense().round(3)
    array([[0.333, 0.333, 0.333],
           [0.333, 0.333, 0.333],
           [0.333, 0.333, 0.333]])
    """
    if topology.matrices is None and topology.arcs is None:
        return metropolis_hastings(topology)
    found = [_from_sparse(matrix) for matrix in matrices.gossip_matrices(topology)]
    if any(isinstance(each, Dense) for each in found) and len(found) * topology.num_nodes**2 > _MOST_DENSE**2:
        raise ValueError(
            f"{topology!r} needs {len(found)} dense matrices, since a node has more than {MOST_UNROLLED} neighbours: "
            "use fewer neighbours, nodes or matrices"
        )
    if topology.drawn:
        return Drawn(Sequence.of(found))
    return found[0] if len(found) == 1 else Sequence.of(found)


def clique_average(topology: Topology) -> Weights:
    """Averages gradients over the clique of each node (Algorithm 3).

        g_i = 1 / |Clique(i)| sum_{j in Clique(i)} grad_j

    In general the average is over a node and its neighbours by `topology.gradient_edges`. If edges inside a clique were
    removed, these are the remaining ones. On a `topologies.diverse_random` graph they lead to one node of each other
    class.
    """
    n, ids, edges = topology.num_nodes, topology.clique_ids, topology.gradient_edges
    if edges is None:
        raise ValueError(
            f"{topology!r} has neither cliques nor gradient edges to average gradients over: use a D-Cliques topology, "
            "or mixing.neighbourhood_average with your own edges"
        )
    if ids is not None:
        sizes = np.bincount(ids)
        if len(edges) == (sizes * (sizes - 1) // 2).sum():
            return _group_average(ids)
    return neighbourhood_average(n, edges)


def neighbourhood_average(num_nodes: int, edges: Edges) -> Weights:
    """Averages uniformly over each node and its neighbours.

    Rows sum to 1, columns in general do not. Use it for gradients, not for gossip.

    Args:
      num_nodes: number of nodes.
      edges: undirected edges, in any order.

    >>> neighbourhood_average(3, [[0, 1], [1, 2]]).to_dense().round(3)
    array([[0.5  , 0.5  , 0.   ],
           [0.333, 0.333, 0.333],
           [0.   , 0.5  , 0.5  ]])
    """
    num_nodes = _checks.integer("num_nodes", num_nodes, 1)
    pairs = _edges.checked(num_nodes, edges)
    ends = np.concatenate([pairs, pairs[:, ::-1]])
    degrees = np.bincount(ends[:, 0], minlength=num_nodes)
    rows = scipy.sparse.csr_array((1 / (degrees[ends[:, 0]] + 1), (ends[:, 0], ends[:, 1])), (num_nodes, num_nodes))
    return _from_sparse(rows)


def from_matrix(matrix: Any) -> Weights:
    """Makes weights from any square matrix, dense or SciPy sparse, whose rows sum to 1.

    Rounding errors of up to 1e-6 per row go to the diagonal. What else gossip needs depends on the algorithm;
    `check_gossip` checks it.
    """
    given = matrix if scipy.sparse.issparse(matrix) else np.asarray(matrix)
    check_square(given)
    sparse = scipy.sparse.csr_array(given).astype(np.float64)
    check_rows(sparse)
    return _from_sparse(sparse)


def lazy(weights: Weights) -> Weights:
    """Makes the matrix (I + W) / 2, or a sequence of these. Its eigenvalues are not negative if W is symmetric.

    >>> from dcliques_jax import topologies
    >>> lazy(topologies.fully_connected(4).weights()).to_dense()[0]
    array([0.625, 0.125, 0.125, 0.125])
    """
    if isinstance(weights, Paced):
        if weights.omegas is not None:
            raise ValueError("Chebyshev gossip knows the eigenvalues of its matrix: make the matrix lazy before")
        return dataclasses.replace(weights, base=lazy(weights.base))
    halved = [
        _from_sparse(((matrix + scipy.sparse.eye_array(weights.num_nodes)) / 2).tocsr())
        for matrix in weights.matrices()
    ]
    if isinstance(weights, Drawn):
        return Drawn(Sequence.of(halved))
    return Sequence.of(halved) if isinstance(weights, Sequence) else halved[0]


def push(topology: Topology) -> Weights:
    """Makes the matrix of a topology whose columns sum to 1, for `algorithms.push_sum`.

        P_ij = 1 / (1 + outdegree(j))  if j sends to i or i = j

    It is the topology's own matrix, or sequence of matrices, if their columns sum to 1.

    >>> import networkx as nx
    >>> from dcliques_jax import topologies
    >>> push(topologies.from_networkx(nx.DiGraph([(0, 1), (1, 0), (1, 2), (2, 0)]))).to_dense().round(3)
    array([[0.5  , 0.333, 0.5  ],
           [0.5  , 0.333, 0.   ],
           [0.   , 0.333, 0.5  ]])
    """
    if topology.drawn:
        raise ValueError(f"{topology!r} draws its graph in every round: push-sum needs graphs that are known before")
    if topology.matrices is not None:
        shares = [Shares.from_sparse(_split(matrix)) for matrix in topology.matrices]
        return shares[0] if len(shares) == 1 else Sequence.of(shares)
    return Shares.from_sparse(_split(topology.heard().astype(np.float64)))


def _split(matrix: scipy.sparse.csr_array) -> scipy.sparse.csr_array:
    """Returns the matrix if its columns sum to 1, else equal shares for all receivers."""
    if np.abs(np.asarray(matrix.sum(axis=0)) - 1).max() <= TOLERANCE:
        return matrix
    heard = scipy.sparse.csr_array(without_diagonal(matrix) + scipy.sparse.eye_array(matrix.shape[0])) != 0
    return (heard @ scipy.sparse.diags_array(1 / np.asarray(heard.sum(axis=0)))).tocsr()


def check_gossip(weights: Weights, topology: Topology, requires: str = "symmetric") -> None:
    """Raises a `ValueError` unless the matrix may be used for gossip over the topology.

    Args:
      weights: the gossip matrix W. Its weights must be non-negative, and zero between nodes that are not neighbours.
      topology: who may talk to whom.
      requires: what else must hold. `"rows"`: rows sum to 1. `"columns"`: columns do too, which preserves the mean of
        all models. `"symmetric"`: the matrix is also symmetric. `"mass"`: columns sum to 1, rows need not.
    """
    _checks.choice("requires", requires, ("rows", "columns", "symmetric", "mass"))
    weights = base_of(weights)
    if weights.num_nodes != topology.num_nodes:
        raise ValueError(f"weights are for {weights.num_nodes} nodes, the topology has {topology.num_nodes}")
    if isinstance(weights, GroupMean) and _is_complete(topology):
        return  # symmetric by construction, and too large to expand
    if isinstance(weights, Drawn) and not (topology.drawn or _is_complete(topology)):
        raise ValueError(f"weights are drawn in every round between any nodes, but {topology!r} has its own edges")
    edges = topology.heard() + scipy.sparse.eye_array(topology.num_nodes)
    for matrix in weights.matrices():
        _check_matrix(matrix, requires)
        i, j, foreign = largest_entry(matrix - matrix * edges)
        if abs(foreign) > TOLERANCE:
            raise ValueError(f"weights link nodes {i} and {j}, but {topology!r} has no edge between them")


def meets(weights: Weights) -> str:
    """Returns the strictest of the requirements of `check_gossip` that all matrices meet.

    `"rows"`: rows sum to 1. `"columns"`: columns do too. `"symmetric"`: matrices are also symmetric.

    >>> meets(neighbourhood_average(3, [[0, 1], [1, 2]]))
    'rows'
    """
    weights = base_of(weights)
    if isinstance(weights, GroupMean | Identity):
        return "symmetric"
    matrices = weights.matrices()
    if all(map(is_symmetric, matrices)):
        return "symmetric"
    sums = [np.abs(matrix.sum(axis=0) - 1).max() for matrix in matrices]
    return "columns" if max(sums) <= TOLERANCE else "rows"


class Messages(NamedTuple):
    """Numbers of messages, one row for each matrix of a sequence."""

    sent: np.ndarray  # [turns, nodes] by each node
    received: np.ndarray  # [turns, nodes] to each node
    phases: np.ndarray  # [turns] number of gossips, one after the other


def messages(weights: Weights) -> Messages:
    """Counts the messages of each round: an entry outside the diagonal is a message.

    There is one row, and one for each matrix of a sequence. If nodes swap their places at random, node i sends what
    place i does before the swap.

    >>> messages(neighbourhood_average(3, [[0, 1], [1, 2]])).sent
    array([[1, 2, 1]])
    """
    if isinstance(weights, Paced):
        parts = (weights.over_rounds(part) for part in messages(weights.base))
        return Messages(*(_zero_if_none(part) for part in parts))
    if isinstance(weights, Identity):
        nothing = np.zeros((1, weights.num_nodes), np.int64)
        return Messages(nothing, nothing, np.zeros(1, np.int64))
    if isinstance(weights, GroupMean):
        group = np.asarray(weights.group)
        others = (np.bincount(group)[group] - 1)[None]
        return Messages(others, others, others.any(axis=1).astype(np.int64))
    outside = [without_diagonal(matrix) != 0 for matrix in weights.matrices()]
    sent, received = (np.stack([np.asarray(matrix.sum(axis=axis)) for matrix in outside]) for axis in (0, 1))
    return Messages(sent.astype(np.int64), received.astype(np.int64), np.asarray(sent.any(axis=1), np.int64))


def _zero_if_none(rows: list[Any]) -> np.ndarray:
    gossip = next(row for row in rows if row is not None)
    return np.stack([np.zeros_like(gossip) if row is None else row for row in rows])


def _check_matrix(matrix: scipy.sparse.csr_array, requires: str) -> None:
    i, j, difference = largest_entry(matrix - matrix.T)
    if requires == "symmetric" and abs(difference) > TOLERANCE:
        raise ValueError(
            f"weights are asymmetric: W[{i}, {j}] = {matrix[i, j]:.6g} but W[{j}, {i}] = {matrix[j, i]:.6g}; this "
            "algorithm needs a symmetric, doubly stochastic matrix such as mixing.metropolis_hastings(topology)"
        )
    if matrix.data.min(initial=0) < -TOLERANCE:
        raise ValueError(f"weights must not be negative, but the smallest is {matrix.data.min():.6g}")
    if requires != "mass":
        check_rows(matrix)
    if requires in ("columns", "mass"):
        check_rows(matrix.T.tocsr(), "column")


def _is_complete(topology: Topology) -> bool:
    return len(topology.edges) == topology.num_nodes * (topology.num_nodes - 1) // 2


def _from_sparse(matrix: scipy.sparse.csr_array) -> Weights:
    """Chooses the fastest form. The diagonal is set so that rows sum to 1."""
    n, width = matrix.shape[0], np.diff(without_diagonal(matrix).indptr).max(initial=0)
    if width <= MOST_UNROLLED:
        return Neighbours.from_sparse(matrix)
    if n > _MOST_DENSE:
        raise ValueError(
            f"a node has {width} neighbours: above {MOST_UNROLLED} weights are a dense matrix, and that of {n:,} nodes "
            f"takes {8e-9 * n * n:,.0f} GB; choose a topology with fewer neighbours, or at most {_MOST_DENSE:,} nodes"
        )
    return Dense.from_sparse(matrix)


def _group_average(ids: np.ndarray) -> GroupMean:
    sizes = np.bincount(ids)
    column = np.arange(sizes.max())
    used = column < sizes[:, None]  # [groups, width]
    starts = np.cumsum(sizes) - sizes
    members = np.argsort(ids, kind="stable")[starts[:, None] + np.where(used, column, 0)]
    arrays = (members.astype(np.int32), used / sizes[:, None], ids.astype(np.int32))
    return GroupMean(*map(_arrays.frozen, arrays))
