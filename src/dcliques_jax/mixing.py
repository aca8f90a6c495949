"""How much each neighbour counts.

Gossip and Clique Averaging are one operation, a sparse matrix along the node axis of a stacked pytree: `mix`. A matrix
comes in the form that multiplies fastest: a mean over groups where it is one, else lists of neighbours up to 64 a node,
else a dense matrix. These choices were measured on CPUs (`benchmarks/mixing.py`); other devices get the same. To force
another, pass it to the algorithm:

    matrix = mixing.metropolis_hastings(topology).to_sparse()
    algorithms.dsgd(weights=mixing.Dense.from_sparse(matrix))

All forms are pytrees, so that programs are compiled for their shapes, not their values. Weights are built and kept in
float64 and rounded to the type of what they multiply. Constructors check what they are given, as far as it has values,
and keep read-only arrays; JAX builds pytrees without them.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import scipy.sparse

from dcliques_jax import _checks
from dcliques_jax._apart import apart
from dcliques_jax.topologies import Edges, Topology, check_edges

# Above this many neighbours a row is multiplied as part of a dense matrix: unrolling more compiles slowly.
_MOST_UNROLLED = 64
_TOLERANCE = 1e-6  # for matrices from outside, which may have been rounded to float32
_DENSE_SPECTRUM = 2000  # nodes up to which all eigenvalues are computed rather than the extreme ones
_MOST_DENSE = 20_000  # nodes for which a dense matrix is built, of 3.2 GB


_Form = TypeVar("_Form", bound="Weights")


class Weights(abc.ABC):
    """A matrix that multiplies along the node axis; each of its rows sums to 1."""

    num_nodes: int

    @abc.abstractmethod
    def apply(self, x: jax.Array) -> jax.Array:
        """The product with one array `[nodes, ...]`."""

    @abc.abstractmethod
    def reordered(self, order: np.ndarray) -> Self:
        """The matrix between nodes that are stored in another order, node `order[k]` at place k.

        Where `order[k]` is -1 the place is empty: no other place reads it, and what it holds is of no account.
        """

    @abc.abstractmethod
    def to_sparse(self) -> scipy.sparse.csr_array:
        """The matrix in float64, as a SciPy sparse array."""

    def to_dense(self) -> np.ndarray:
        """The matrix in float64, `[nodes, nodes]`."""
        dense: np.ndarray = self.to_sparse().toarray()
        return dense

    def with_arrays(self, *arrays: npt.ArrayLike) -> Self:
        """The same form with other arrays in its fields, which are not checked."""
        return jax.tree.unflatten(jax.tree.structure(self), arrays)


def _register(form: type[_Form]) -> type[_Form]:
    """Makes a form a pytree of its fields.

    Unlike that of `jax.tree_util.register_dataclass`, unflattening does not call the constructor: it costs nothing, and
    arrays of runs or devices, shapes and tracers need not pass its checks.
    """
    names = [field.name for field in dataclasses.fields(form)]  # type: ignore[arg-type]

    def flatten(weights: _Form) -> tuple[tuple[Any, ...], None]:
        return tuple(getattr(weights, name) for name in names), None

    def flatten_with_keys(weights: _Form) -> tuple[tuple[Any, ...], None]:
        return tuple((jax.tree_util.GetAttrKey(name), getattr(weights, name)) for name in names), None

    def unflatten(_: None, arrays: Iterable[Any]) -> _Form:
        weights = object.__new__(form)
        vars(weights).update(zip(names, arrays, strict=True))
        return weights

    jax.tree_util.register_pytree_with_keys(form, flatten_with_keys, unflatten, flatten)
    return form


def _owned(weights: Weights, **fields: npt.ArrayLike) -> list[np.ndarray] | None:
    """Makes the fields of weights read-only and returns them; None inside a traced function, where they lack values."""
    if any(isinstance(field, jax.core.Tracer) for field in fields.values()):
        return None
    arrays = {name: _checks.read_only(field) for name, field in fields.items()}
    for name, field in fields.items():
        if not isinstance(field, jax.Array):  # which stays on its device
            object.__setattr__(weights, name, arrays[name])
    return list(arrays.values())


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Identity(Weights):
    """Every node keeps what it has."""

    num_nodes: int = dataclasses.field(metadata={"static": True})

    def apply(self, x: jax.Array) -> jax.Array:
        """Returns x."""
        return x

    def reordered(self, order: np.ndarray) -> Self:
        """The same for all places."""
        return type(self)(len(order))

    def to_sparse(self) -> scipy.sparse.csr_array:
        """The identity matrix."""
        return scipy.sparse.eye_array(self.num_nodes, format="csr")


@_register
@dataclasses.dataclass(frozen=True, eq=False)
class Neighbours(Weights):
    """A sparse matrix as lists of neighbours. What a row leaves to 1 is the node's weight for itself."""

    neighbours: npt.ArrayLike  # [nodes, most] padded with the node itself
    values: npt.ArrayLike  # [nodes, most] weight of each neighbour, 0 in the padding

    def __post_init__(self) -> None:
        if (owned := _owned(self, neighbours=self.neighbours, values=self.values)) is None:
            return
        neighbours, values = owned
        _check_kind("neighbours", neighbours, "iu", 2)
        _check_kind("values", values, "iuf", 2)
        if neighbours.shape != values.shape or len(values) == 0:
            raise ValueError(
                f"neighbours of shape {neighbours.shape} and values of shape {values.shape} must both be "
                "[nodes, most], with at least one node"
            )
        _check_range("neighbours", neighbours, len(values), "nodes")

    @classmethod
    def from_sparse(cls, matrix: scipy.sparse.csr_array, most: int = 0) -> Self:
        """The matrix in lists of `most` neighbours at least; its diagonal is what the rest of a row leaves to 1."""
        matrix = _without_diagonal(matrix)
        n, counts = matrix.shape[0], np.diff(matrix.indptr)
        most = int(counts.max(initial=most))
        used = np.arange(most) < counts[:, None]  # [nodes, most]
        neighbours = np.tile(np.arange(n, dtype=np.int32)[:, None], most)
        values = np.zeros((n, most))
        neighbours[used], values[used] = matrix.indices, matrix.data
        return cls(_checks.frozen(neighbours), _checks.frozen(values))

    @property
    def num_nodes(self) -> int:  # type: ignore[override]
        """Number of rows."""
        return np.shape(self.values)[0]

    def apply(self, x: jax.Array) -> jax.Array:
        """Computes x_i + sum_j w_ij (x_j - x_i): equal models stay equal to the last bit."""
        return gossip(jnp.asarray(self.neighbours), jnp.asarray(self.values, x.dtype), flat(x)).reshape(x.shape)

    def reordered(self, order: np.ndarray) -> Self:
        """The lists in another order and of other numbers, each as it was: sums are rounded alike."""
        neighbours, values = np.asarray(self.neighbours)[order], np.asarray(self.values)[order]
        empty, here = order[:, None] < 0, np.arange(len(order), dtype=np.int32)[:, None]
        places = _places(order, self.num_nodes)[neighbours]
        return self.with_arrays(np.where(empty, here, places), np.where(empty, 0, values))

    def to_sparse(self) -> scipy.sparse.csr_array:
        """The matrix with its diagonal."""
        values, neighbours = np.asarray(self.values, np.float64), np.asarray(self.neighbours)
        n, most = values.shape
        rows = np.repeat(np.arange(n), most)
        matrix = scipy.sparse.csr_array((values.ravel(), (rows, neighbours.ravel())), shape=(n, n))
        return _with_unit_rows(matrix)


@_register
@dataclasses.dataclass(frozen=True, eq=False)
class Groups(Weights):
    """The average over groups of nodes, each node in one group: a whole clique, or all nodes."""

    members: npt.ArrayLike  # [groups, most] padded with members of the same group
    shares: npt.ArrayLike  # [groups, most] one over the size of the group, 0 in the padding
    group: npt.ArrayLike  # [nodes] the group of each node

    def __post_init__(self) -> None:
        if (owned := _owned(self, members=self.members, shares=self.shares, group=self.group)) is None:
            return
        members, shares, group = owned
        _check_kind("members", members, "iu", 2)
        _check_kind("shares", shares, "iuf", 2)
        _check_kind("group", group, "iu", 1)
        if members.shape != shares.shape or len(group) == 0:
            raise ValueError(
                f"members of shape {members.shape} and shares of shape {shares.shape} must both be [groups, most], and "
                f"group of shape {group.shape} [nodes], with at least one node"
            )
        _check_range("members", members, len(group), "nodes")
        _check_range("group", group, len(members), "groups")
        rows, places = used = np.nonzero(shares)
        counted = np.bincount(members[used], minlength=len(group))
        wrong = np.flatnonzero(counted != 1)
        if len(wrong):
            raise ValueError(f"node {wrong[0]} has a share {counted[wrong[0]]} times: every node must have one")
        strangers = np.flatnonzero(group[members[used]] != rows)
        if len(strangers):
            node = members[used][strangers[0]]
            raise ValueError(f"node {node} has a share of group {rows[strangers[0]]}, but group[{node}]={group[node]}")
        sizes = np.bincount(group, minlength=len(members))
        uneven = np.flatnonzero(np.abs(shares[used] - 1 / sizes[rows]) > _TOLERANCE)
        if len(uneven):
            row, place = rows[uneven[0]], places[uneven[0]]
            raise ValueError(
                f"shares[{row}, {place}]={shares[row, place]} must be one over the size of the group, 1/{sizes[row]}"
            )

    @property
    def num_nodes(self) -> int:  # type: ignore[override]
        """Number of rows."""
        return np.shape(self.group)[0]

    def apply(self, x: jax.Array) -> jax.Array:
        """Averages every group once and hands the average to its members."""
        means = _group_means(jnp.asarray(self.members), jnp.asarray(self.shares, x.dtype), flat(x))
        return rows_of(means, jnp.asarray(self.group)).reshape(x.shape)

    def reordered(self, order: np.ndarray) -> Self:
        """The groups, each as it was: sums are rounded alike."""
        members = _places(order, self.num_nodes)[np.asarray(self.members)]
        return self.with_arrays(members, self.shares, np.asarray(self.group)[order])

    def to_sparse(self) -> scipy.sparse.csr_array:
        """The matrix of groups as diagonal blocks, up to the order of nodes."""
        group = np.asarray(self.group)
        membership = scipy.sparse.csr_array((np.ones(len(group)), (np.arange(len(group)), group)))
        sizes = np.bincount(group)
        return _with_unit_rows(membership @ scipy.sparse.diags_array(1 / sizes) @ membership.T)


@_register
@dataclasses.dataclass(frozen=True, eq=False)
class Dense(Weights):
    """A matrix with many entries in a row."""

    matrix: npt.ArrayLike  # [nodes, nodes] every row sums to 1

    def __post_init__(self) -> None:
        if (owned := _owned(self, matrix=self.matrix)) is not None:
            _check_square(owned[0])
            check_rows(owned[0])

    @classmethod
    def from_sparse(cls, matrix: scipy.sparse.csr_array) -> Self:
        """The matrix in this form; its diagonal is what the rest of a row leaves to 1."""
        return cls(_checks.frozen(_with_unit_rows(matrix).toarray()))

    @property
    def num_nodes(self) -> int:  # type: ignore[override]
        """Number of rows."""
        return np.shape(self.matrix)[0]

    def apply(self, x: jax.Array) -> jax.Array:
        """Computes x + (W - I) (x - x_0): rounding errors vanish as models agree, and the mean does not drift."""
        change = jnp.asarray(self.matrix, x.dtype) - jnp.eye(self.num_nodes, dtype=x.dtype)
        return x + jnp.tensordot(change, x - x[:1], 1, precision="highest")

    def reordered(self, order: np.ndarray) -> Self:
        """Rows and columns in another order."""
        matrix = np.asarray(self.matrix)[np.ix_(order, order)]
        empty = order < 0
        matrix[empty], matrix[:, empty] = 0, 0
        matrix[empty, empty] = 1
        return self.with_arrays(matrix)

    def to_sparse(self) -> scipy.sparse.csr_array:
        """The matrix."""
        return scipy.sparse.csr_array(np.asarray(self.matrix, np.float64))


@apart
def gossip(neighbours: jax.Array, values: jax.Array, table: jax.Array) -> jax.Array:
    """Computes x_i + sum_j w_ij (t_j - x_i); x are the first rows of the table `[.., p]`, or all.

    They are not handed over by themselves: XLA (jax 0.12) takes two arguments of a call for different memory, and would
    write over rows of x, which are those of the table, before all have been read.
    """
    x = mixed = table[: len(values)]
    # Unrolled, XLA fuses the gathers into one pass; a single gather of all neighbours would be written out.
    for k in range(values.shape[1]):
        mixed = mixed + values[:, k, None] * (rows_of(table, neighbours[:, k]) - x)
    return mixed


@apart
def _group_means(members: jax.Array, shares: jax.Array, x: jax.Array) -> jax.Array:
    if members.shape[1] > _MOST_UNROLLED:
        return jnp.einsum("gm,gmp->gp", shares, rows_of(x, members), precision="highest")
    return sum(
        (shares[:, k, None] * rows_of(x, members[:, k]) for k in range(members.shape[1])),
        start=jnp.zeros((len(members), x.shape[1]), x.dtype),
    )


def flat(x: jax.Array) -> jax.Array:
    """One row a node: loops over short last axes, such as that of ten classes, would not be vectorised."""
    return x.reshape(len(x), math.prod(x.shape[1:]))


def rows_of(x: jax.Array, nodes: jax.Array) -> jax.Array:
    """Some rows of an array; all are known to be there."""
    return x.at[nodes].get(mode="promise_in_bounds")


def alike(trees: Sequence[Any]) -> list[Any]:
    """Pytrees of equal structure with the weights in them brought to equal forms and shapes, so that they stack."""
    flattened = [jax.tree.flatten(tree, is_leaf=lambda node: isinstance(node, Weights)) for tree in trees]
    columns = [
        _alike(column) if isinstance(column[0], Weights) else column
        for column in zip(*(leaves for leaves, _ in flattened), strict=True)
    ]
    return [jax.tree.unflatten(flattened[0][1], leaves) for leaves in zip(*columns, strict=True)]


def _alike(weights: Sequence[Weights]) -> Sequence[Weights]:
    if len({str(jax.tree.map(np.shape, matrix)) for matrix in weights}) == 1:
        return weights
    matrices = [matrix.to_sparse() for matrix in weights]
    most = max(int(np.diff(_without_diagonal(matrix).indptr).max(initial=0)) for matrix in matrices)
    if most > _MOST_UNROLLED:
        return [Dense.from_sparse(matrix) for matrix in matrices]
    return [Neighbours.from_sparse(matrix, most) for matrix in matrices]


def _places(order: np.ndarray, num_nodes: int) -> np.ndarray:
    """Where each node is stored, `[nodes]`, if node `order[k]` is at place k."""
    places, used = np.zeros(num_nodes, np.int32), np.flatnonzero(order >= 0)
    places[order[used]] = used
    return places


def mix(weights: Weights, tree: Any) -> Any:
    """Multiplies every leaf `[nodes, ...]` of a stacked pytree with the matrix: x_i <- sum_j w_ij x_j.

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
    """The gossip matrix of the paper (eq. 2), symmetric and doubly stochastic for any graph.

        W_ij = 1 / (max(degree(i), degree(j)) + 1)  on edges,   W_ii = 1 - sum_{j != i} W_ij

    >>> from dcliques_jax import topologies
    >>> metropolis_hastings(topologies.from_edges(3, [[0, 1], [1, 2]])).to_dense().round(3)
    array([[0.667, 0.333, 0.   ],
           [0.333, 0.333, 0.333],
           [0.   , 0.333, 0.667]])
    """
    n = topology.num_nodes
    if len(topology.edges) == n * (n - 1) // 2:
        return _group_average(np.zeros(n, np.int64))
    return _from_edges(n, topology.edges, 1 / (topology.degrees[topology.edges].max(axis=1) + 1))


def clique_average(topology: Topology) -> Weights:
    """Averages gradients over the clique of each node (Algorithm 3).

        g_i = 1 / |Clique(i)| sum_{j in Clique(i)} grad_j

    Where edges inside the clique were removed it is the average over the node and the clique-mates it still touches,
    and on a `topologies.diverse_random` graph that over the node and one neighbour of each other class.
    """
    n, ids, edges = topology.num_nodes, topology.clique_ids, topology.gradient_edges
    if edges is None:
        raise ValueError(
            f"{topology!r} has neither cliques nor gradient edges to average gradients over: use a D-Cliques topology, "
            "or mixing.neighbourhood_average for a neighbourhood of your own"
        )
    if ids is not None:
        sizes = np.bincount(ids)
        if len(edges) == (sizes * (sizes - 1) // 2).sum():
            return _group_average(ids)
    return neighbourhood_average(n, edges)


def neighbourhood_average(num_nodes: int, edges: Edges) -> Weights:
    """Averages uniformly over a node and its neighbours by the given undirected edges.

    Rows sum to 1, columns need not: meant for gradients, not for gossip.

    >>> neighbourhood_average(3, [[0, 1], [1, 2]]).to_dense().round(3)
    array([[0.5  , 0.5  , 0.   ],
           [0.333, 0.333, 0.333],
           [0.   , 0.5  , 0.5  ]])
    """
    num_nodes = _checks.integer("num_nodes", num_nodes, 1)
    pairs = check_edges(num_nodes, edges)
    ends = np.concatenate([pairs, pairs[:, ::-1]])
    degrees = np.bincount(ends[:, 0], minlength=num_nodes)
    rows = scipy.sparse.csr_array((1 / (degrees[ends[:, 0]] + 1), (ends[:, 0], ends[:, 1])), (num_nodes, num_nodes))
    return _from_sparse(rows)


def from_matrix(matrix: Any) -> Weights:
    """Weights of any square matrix, dense or SciPy sparse, whose rows sum to 1.

    A residue of rounding (up to 1e-6) goes to the diagonal. Gossip needs a symmetric, doubly stochastic matrix; that
    is checked where the matrix is used for gossip.
    """
    given = matrix if scipy.sparse.issparse(matrix) else np.asarray(matrix)
    _check_square(given)
    sparse = scipy.sparse.csr_array(given).astype(np.float64)
    check_rows(sparse)
    return _from_sparse(sparse)


def check_gossip(weights: Weights, topology: Topology) -> None:
    """Raises a `ValueError` unless the matrix may be used for gossip over the topology.

    It must be symmetric and doubly stochastic, so that the mean of all models is preserved, and link neighbours only.
    """
    if weights.num_nodes != topology.num_nodes:
        raise ValueError(f"weights are for {weights.num_nodes} nodes, the topology has {topology.num_nodes}")
    matrix = weights.to_sparse()
    i, j, difference = _largest_entry(matrix - matrix.T)
    if abs(difference) > _TOLERANCE:
        raise ValueError(
            f"weights are asymmetric: W[{i}, {j}] = {matrix[i, j]:.6g} but W[{j}, {i}] = {matrix[j, i]:.6g}; gossip "
            "needs a symmetric, doubly stochastic matrix such as mixing.metropolis_hastings(topology)"
        )
    if matrix.data.min(initial=0) < -_TOLERANCE:
        raise ValueError(f"weights must not be negative, but the smallest is {matrix.data.min():.6g}")
    check_rows(matrix)
    edges = topology.adjacency() + scipy.sparse.eye_array(topology.num_nodes)
    i, j, foreign = _largest_entry(matrix - matrix * edges)
    if abs(foreign) > _TOLERANCE:
        raise ValueError(f"weights link nodes {i} and {j}, but {topology!r} has no edge between them")


def second_eigenvalue(weights: Weights) -> float:
    """The second largest absolute eigenvalue of a symmetric matrix: the factor by which gossip shrinks differences.

    For more than 2000 nodes it comes from Lanczos iterations, up to a thousandth of the spectral gap.

    >>> from dcliques_jax import topologies
    >>> round(second_eigenvalue(metropolis_hastings(topologies.ring(100))), 5)
    0.99868
    """
    if isinstance(weights, Groups):  # a projection: an eigenvalue of 1 for every group, else 0
        return float(len(np.asarray(weights.members)) > 1)
    n, matrix = weights.num_nodes, weights.to_sparse()
    if n == 1:
        return 0.0
    if abs(_largest_entry(matrix - matrix.T)[2]) > _TOLERANCE:
        raise ValueError("the second eigenvalue is that of a symmetric matrix, and these weights are not symmetric")
    if n <= _DENSE_SPECTRUM:
        return float(np.sort(np.abs(np.linalg.eigvalsh(matrix.toarray())))[-2])
    if scipy.sparse.csgraph.connected_components(matrix, directed=False)[0] > 1:
        return 1.0  # every part keeps a mean of its own
    # How far eigenvalues stay from 1, which is that of the constant vector, and from -1. The latter only counts where
    # it is less: in most graphs a rough value says that it is not.
    from_one, from_minus_one = (scipy.sparse.eye_array(n) + sign * matrix for sign in (-1, 1))
    gap = _least_eigenvalue(from_one, 1e-3, constant=1)
    if 0.8 * _least_eigenvalue(from_minus_one, 0.1) < gap:
        gap = min(gap, _least_eigenvalue(from_minus_one, 1e-3))
    return 1 - gap


def _least_eigenvalue(matrix: scipy.sparse.csr_array, tolerance: float, constant: int = 0) -> float:
    """The smallest eigenvalue of a symmetric matrix, by Lanczos, up to a relative error.

    With `constant=1` that of the constant vector, which is 0, is left out.
    """
    n = matrix.shape[0]
    start = np.random.default_rng(0).standard_normal(n)  # the same answer at every call
    lanczos = functools.partial(
        scipy.sparse.linalg.eigsh, v0=start, tol=tolerance, maxiter=10_000, return_eigenvectors=False
    )
    steps = scipy.sparse.csgraph.shortest_path(abs(matrix), unweighted=True, indices=0).astype(np.int64)
    if np.bincount(steps).max() ** 2 > 10 * n:
        product = scipy.sparse.linalg.LinearOperator(
            (n, n), matvec=lambda x: matrix @ x + 2 * constant * x.mean(axis=0), dtype=np.float64
        )
        return float(lanczos(product, k=1, which="SA")[0])
    # A graph no wider than a grid mixes so slowly that Lanczos would not get there: it needs the inverse, whose factors
    # stay sparse. The shift makes the matrix regular.
    shift = 1e-9
    factors = scipy.sparse.linalg.splu(
        scipy.sparse.csc_array(matrix + shift * scipy.sparse.eye_array(n)),
        permc_spec="MMD_AT_PLUS_A",
        diag_pivot_thresh=0.0,
        options={"SymmetricMode": True},
    )
    inverse = scipy.sparse.linalg.LinearOperator((n, n), matvec=factors.solve, dtype=np.float64)
    return float(lanczos(matrix, k=1 + constant, sigma=-shift, OPinv=inverse).max())


def spectral_gap(weights: Weights) -> float:
    """One minus the second largest absolute eigenvalue: 1 mixes in one round, 0 never.

    >>> from dcliques_jax import topologies
    >>> round(spectral_gap(metropolis_hastings(topologies.fully_connected(100))), 6)
    1.0
    """
    return 1.0 - second_eigenvalue(weights)


def _from_edges(num_nodes: int, edges: np.ndarray, values: np.ndarray) -> Weights:
    half = scipy.sparse.csr_array((values, tuple(edges.T)), shape=(num_nodes, num_nodes))
    return _from_sparse(half + half.T)


def _from_sparse(matrix: scipy.sparse.csr_array) -> Weights:
    """The matrix in its best form; its diagonal is what the rest of a row leaves to 1."""
    n, most = matrix.shape[0], np.diff(_without_diagonal(matrix).indptr).max(initial=0)
    if most <= _MOST_UNROLLED:
        return Neighbours.from_sparse(matrix)
    if n > _MOST_DENSE:
        raise ValueError(
            f"a node has {most} neighbours: above {_MOST_UNROLLED} weights are a dense matrix, and that of {n:,} nodes "
            f"takes {8e-9 * n * n:,.0f} GB; choose a topology with fewer neighbours, or up to {_MOST_DENSE:,} nodes"
        )
    return Dense.from_sparse(matrix)


def _group_average(ids: np.ndarray) -> Groups:
    sizes = np.bincount(ids)
    place = np.arange(sizes.max())
    used = place < sizes[:, None]  # [groups, most]
    starts = np.cumsum(sizes) - sizes
    members = np.argsort(ids, kind="stable")[starts[:, None] + np.where(used, place, 0)]
    arrays = (members.astype(np.int32), used / sizes[:, None], ids.astype(np.int32))
    return Groups(*map(_checks.frozen, arrays))


def _check_kind(name: str, array: np.ndarray, kinds: str, ndim: int) -> None:
    if array.dtype.kind not in kinds or array.ndim != ndim:
        what = "real numbers" if "f" in kinds else "integers"
        raise ValueError(f"{name} must be {what} in {ndim} dimensions, not {array.dtype} of shape {array.shape}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError(f"{name} hold NaN or infinite values")


def _check_range(name: str, array: np.ndarray, size: int, what: str) -> None:
    wrong = array[(array < 0) | (array >= size)]
    if len(wrong):
        raise ValueError(f"{name} hold {wrong[0]}, which leaves the {what} 0..{size - 1}")


def _check_square(matrix: Any) -> None:
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or matrix.size == 0 or matrix.dtype.kind not in "iuf":
        raise ValueError(f"a matrix of weights must be real and square, not {matrix.dtype} of shape {matrix.shape}")


def check_rows(matrix: scipy.sparse.csr_array | np.ndarray) -> None:
    """Raises a `ValueError` unless every row sums to 1."""
    with np.errstate(invalid="ignore"):
        sums = matrix.sum(axis=1, dtype=np.float64)
    if not np.isfinite(sums).all():
        raise ValueError("the matrix of weights holds NaN or infinite values")
    worst = int(np.abs(sums - 1).argmax())
    if abs(sums[worst] - 1) > _TOLERANCE:
        raise ValueError(f"row {worst} of the weights sums to {sums[worst]:.6g}; every row must sum to 1")


def _largest_entry(matrix: scipy.sparse.csr_array) -> tuple[int, int, float]:
    """Row, column and value of the entry that is largest in absolute value."""
    entries = scipy.sparse.coo_array(matrix)
    if entries.nnz == 0:
        return 0, 0, 0.0
    where = int(np.abs(entries.data).argmax())
    row, column = entries.coords
    return int(row[where]), int(column[where]), float(entries.data[where])


def _without_diagonal(matrix: scipy.sparse.csr_array) -> scipy.sparse.csr_array:
    matrix = matrix.tocsr(copy=True)
    matrix.setdiag(0)
    matrix.eliminate_zeros()
    matrix.sort_indices()
    return matrix


def _with_unit_rows(matrix: scipy.sparse.csr_array) -> scipy.sparse.csr_array:
    """Sets the diagonal to what the rest of each row leaves to 1, so that no residue of rounding remains."""
    matrix = _without_diagonal(matrix)
    return (matrix + scipy.sparse.diags_array(1 - matrix.sum(axis=1))).tocsr()
