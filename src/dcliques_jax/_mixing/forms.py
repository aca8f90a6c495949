"""The forms in which a matrix multiplies along the node axis.

All forms are pytrees, so programs are compiled for their shapes and not their values. Weights are stored in float64 and
rounded to the type of what they multiply. Constructors check concrete arrays and keep them read-only. JAX rebuilds
pytrees without calling constructors.
"""

import abc
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import scipy.sparse

from dcliques_jax import _arrays
from dcliques_jax._engine.xla import unfused
from dcliques_jax._mixing.entries import (
    check_kind,
    check_range,
    check_rows,
    check_square,
    slots_of,
    with_unit_rows,
    without_diagonal,
)

# Above this many neighbours per node the matrix is dense, because unrolling more compiles slowly.
MOST_UNROLLED = 64

_Form = TypeVar("_Form", bound="Weights")


class Weights(abc.ABC):
    """A matrix that multiplies along the node axis. Each of its rows sums to 1."""

    num_nodes: int

    @abc.abstractmethod
    def apply(self, x: jax.Array) -> jax.Array:
        """Multiplies one array `[nodes, ...]`."""

    def change(self, x: jax.Array) -> jax.Array:
        """Computes W x - x. Forms override this to round in proportion to differences between nodes, not to x."""
        return self.apply(x) - x

    def at(self, round: Any) -> "Weights":
        """Returns the matrix of one round; by default this one. The engine calls it once per round.

        Args:
          round: the `algorithms.Round`.
        """
        del round
        return self

    def reordered(self, order: np.ndarray) -> Self:
        """Returns the matrix for another storage order, with node `order[k]` in slot k.

        The default keeps nodes in their order.

        Args:
          order: the node of each slot, -1 for empty slots. Other slots do not read an empty slot.
        """
        if np.array_equal(order, np.arange(self.num_nodes)):
            return self
        raise ValueError(
            f"{type(self).__name__} does not define reordered(order), which nodes in cliques or on a mesh need: define "
            "it, or pass a form of mixing"
        )

    @abc.abstractmethod
    def to_sparse(self) -> scipy.sparse.csr_array:
        """Returns the matrix in float64 as a SciPy sparse array."""

    def to_dense(self) -> np.ndarray:
        """Returns the matrix in float64, `[nodes, nodes]`."""
        dense: np.ndarray = self.to_sparse().toarray()
        return dense

    def matrices(self) -> list[scipy.sparse.csr_array]:
        """Returns the matrices of all rounds in float64, in their turns; by default this one."""
        return [self.to_sparse()]

    def senders(self, nodes: jax.Array) -> jax.Array:
        """Returns the node that each entry of the matrix reads. Faults need it, and the three methods below.

        Args:
          nodes: the node in each slot, `[slots]`.
        """
        raise self._fault_free()

    def masked(self, alive: jax.Array) -> "Weights":
        """Returns the matrix with lost weights on the diagonal: x_i + sum_j alive_ij w_ij (x_j - x_i).

        Args:
          alive: which entries arrive, in the shape of `senders`.
        """
        raise self._fault_free()

    def renormalised(self, alive: jax.Array) -> "Weights":
        """Returns the matrix of the averages over what arrives and the node's own value."""
        raise self._fault_free()

    def count(self, chosen: jax.Array) -> jax.Array:
        """Counts the chosen entries of each row that read other nodes, `[slots]`."""
        raise self._fault_free()

    def _fault_free(self) -> ValueError:
        return ValueError(
            f"{type(self).__name__} weights cannot lose messages: define senders, masked, renormalised and count, pass "
            "a form of mixing, or omit faults"
        )

    def with_arrays(self, *arrays: npt.ArrayLike) -> Self:
        """Returns the same form with other arrays in its fields, without checking them."""
        return jax.tree.unflatten(jax.tree.structure(self), arrays)


def register(form: type[_Form]) -> type[_Form]:
    """Registers a form as a pytree of its fields.

    Unlike with `jax.tree_util.register_dataclass`, unflattening skips the constructor and its checks. It is free, and
    fields may be arrays of several runs or devices, shapes or tracers.
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


def owned(weights: Weights, **fields: npt.ArrayLike) -> list[np.ndarray] | None:
    """Makes the fields of weights read-only and returns them. Returns None while tracing, when they have no values."""
    if any(isinstance(field, jax.core.Tracer) for field in fields.values()):
        return None
    arrays = {name: _arrays.read_only(field) for name, field in fields.items()}
    for name, field in fields.items():
        if not isinstance(field, jax.Array):  # JAX arrays stay on their device
            object.__setattr__(weights, name, arrays[name])
    return list(arrays.values())


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Identity(Weights):
    """The identity matrix: every node keeps its own values."""

    num_nodes: int = dataclasses.field(metadata={"static": True})

    def apply(self, x: jax.Array) -> jax.Array:
        """Returns x."""
        return x

    def senders(self, nodes: jax.Array) -> jax.Array:
        """Returns an array without entries: nobody reads anybody."""
        return nodes[:, None][:, :0]

    def masked(self, alive: jax.Array) -> Self:
        """Returns the identity."""
        del alive
        return self

    renormalised = masked

    def count(self, chosen: jax.Array) -> jax.Array:
        """Returns zeros."""
        return chosen.sum(axis=1, dtype=jnp.int32)

    def reordered(self, order: np.ndarray) -> Self:
        """Returns the identity of all slots."""
        return type(self)(len(order))

    def to_sparse(self) -> scipy.sparse.csr_array:
        """Returns the identity matrix."""
        return scipy.sparse.eye_array(self.num_nodes, format="csr")


class Lists(Weights):
    """A sparse matrix as lists of neighbours. The weight of a node for itself makes its row sum to 1."""

    neighbours: npt.ArrayLike  # [nodes, width] rows of the table
    values: npt.ArrayLike  # [nodes, width] weight of each neighbour, 0 in the padding

    @property
    def num_nodes(self) -> int:  # type: ignore[override]
        """Number of rows."""
        return np.shape(self.values)[0]

    def table(self, rows: jax.Array) -> jax.Array:
        """Returns the rows that lists refer to, `[.., p]`, from one row per slot; the first are these."""
        return rows

    def apply(self, x: jax.Array) -> jax.Array:
        """Computes x_i + sum_j w_ij (x_j - x_i). Equal models stay equal to the last bit."""
        values = jnp.asarray(self.values, x.dtype)
        return gossip(jnp.asarray(self.neighbours), values, self.table(flat(x))).reshape(x.shape)

    def senders(self, nodes: jax.Array) -> jax.Array:
        """Returns the node of each neighbour, `[slots, width]`."""
        return rows_of(self.table(nodes[:, None]), jnp.asarray(self.neighbours))[..., 0]

    def masked(self, alive: jax.Array) -> Self:
        """Sets lost weights to 0; the row still sums to 1."""
        return dataclasses.replace(self, values=jnp.where(alive, jnp.asarray(self.values), 0))  # type: ignore[type-var]

    def renormalised(self, alive: jax.Array) -> Self:
        """Divides by the weight that arrives, the node's own included."""
        values = jnp.asarray(self.values)
        arrived = jnp.where(alive, values, 0)
        total = (1 - values.sum(axis=1, keepdims=True)) + arrived.sum(axis=1, keepdims=True)
        # A node that gives itself no weight and hears nothing keeps its own value.
        return dataclasses.replace(self, values=jnp.where(total > 0, arrived / total, 0))  # type: ignore[type-var]

    def count(self, chosen: jax.Array) -> jax.Array:
        """Counts the chosen neighbours, without padding."""
        return ((jnp.asarray(self.values) != 0) & chosen).sum(axis=1, dtype=jnp.int32)


@register
@dataclasses.dataclass(frozen=True, eq=False)
class Neighbours(Lists):
    """A sparse matrix as lists of neighbours. The weight of a node for itself makes its row sum to 1."""

    neighbours: npt.ArrayLike  # [nodes, width] padded with the node
    values: npt.ArrayLike  # [nodes, width] weight of each neighbour, 0 in the padding

    def __post_init__(self) -> None:
        if (arrays := owned(self, neighbours=self.neighbours, values=self.values)) is None:
            return
        neighbours, values = arrays
        check_kind("neighbours", neighbours, "iu", 2)
        check_kind("values", values, "iuf", 2)
        if neighbours.shape != values.shape or len(values) == 0:
            raise ValueError(
                f"neighbours of shape {neighbours.shape} and values of shape {values.shape} must both be "
                "[nodes, width], with at least one node"
            )
        check_range("neighbours", neighbours, len(values), "nodes")

    @classmethod
    def from_sparse(cls, matrix: scipy.sparse.csr_array, width: int = 0) -> Self:
        """Converts a matrix to lists of at least `width` neighbours. The diagonal is set so that rows sum to 1."""
        matrix = without_diagonal(matrix)
        n, counts = matrix.shape[0], np.diff(matrix.indptr)
        width = int(counts.max(initial=width))
        used = np.arange(width) < counts[:, None]  # [nodes, width]
        neighbours = np.tile(np.arange(n, dtype=np.int32)[:, None], width)
        values = np.zeros((n, width))
        neighbours[used], values[used] = matrix.indices, matrix.data
        return cls(_arrays.frozen(neighbours), _arrays.frozen(values))

    def reordered(self, order: np.ndarray) -> Self:
        """Reorders and renumbers the lists. The order inside a list stays, so sums round the same way."""
        neighbours, values = np.asarray(self.neighbours)[order], np.asarray(self.values)[order]
        empty, here = order[:, None] < 0, np.arange(len(order), dtype=np.int32)[:, None]
        slots = slots_of(order, self.num_nodes)[neighbours]
        return self.with_arrays(np.where(empty, here, slots), np.where(empty, 0, values))

    def to_sparse(self) -> scipy.sparse.csr_array:
        """Returns the matrix, with its diagonal."""
        values, neighbours = np.asarray(self.values, np.float64), np.asarray(self.neighbours)
        n, width = values.shape
        rows = np.repeat(np.arange(n), width)
        matrix = scipy.sparse.csr_array((values.ravel(), (rows, neighbours.ravel())), shape=(n, n))
        return with_unit_rows(matrix)


@register
@dataclasses.dataclass(frozen=True, eq=False)
class Dense(Weights):
    """A dense matrix, for rows with many entries."""

    matrix: npt.ArrayLike  # [nodes, nodes] every row sums to 1

    def __post_init__(self) -> None:
        if (arrays := owned(self, matrix=self.matrix)) is not None:
            check_square(arrays[0])
            check_rows(arrays[0])

    @classmethod
    def from_sparse(cls, matrix: scipy.sparse.csr_array) -> Self:
        """Converts a matrix. The diagonal is set so that rows sum to 1."""
        return cls(_arrays.frozen(with_unit_rows(matrix).toarray()))

    @property
    def num_nodes(self) -> int:  # type: ignore[override]
        """Number of rows."""
        return np.shape(self.matrix)[0]

    def apply(self, x: jax.Array) -> jax.Array:
        """Computes x + (W - I) (x - x_0). Rounding errors vanish as models agree."""
        return x + self.change(x)

    def change(self, x: jax.Array) -> jax.Array:
        """Computes (W - I) (x - x_0)."""
        change = jnp.asarray(self.matrix, x.dtype) - jnp.eye(self.num_nodes, dtype=x.dtype)
        return jnp.tensordot(change, x - x[:1], 1, precision="highest")

    def senders(self, nodes: jax.Array) -> jax.Array:
        """Returns the node of each column, `[slots, slots]`."""
        return jnp.broadcast_to(nodes[None], np.shape(self.matrix))

    def masked(self, alive: jax.Array) -> Self:
        """Moves lost weights to the diagonal."""
        arrived = jnp.where(alive & self._outside(), jnp.asarray(self.matrix), 0)
        return self.with_arrays(arrived + jnp.diag(1 - arrived.sum(axis=1)))

    def renormalised(self, alive: jax.Array) -> Self:
        """Divides by the weight that arrives, the node's own included."""
        arrived = jnp.where(alive | ~self._outside(), jnp.asarray(self.matrix), 0)
        total = arrived.sum(axis=1, keepdims=True)
        return self.with_arrays(jnp.where(total > 0, arrived / total, ~self._outside()))

    def count(self, chosen: jax.Array) -> jax.Array:
        """Counts the chosen entries outside the diagonal."""
        return ((jnp.asarray(self.matrix) != 0) & chosen & self._outside()).sum(axis=1, dtype=jnp.int32)

    def _outside(self) -> jax.Array:
        """Returns which entries are not on the diagonal."""
        return ~jnp.eye(self.num_nodes, dtype=bool)

    def reordered(self, order: np.ndarray) -> Self:
        """Reorders rows and columns."""
        matrix = np.asarray(self.matrix)[np.ix_(order, order)]
        empty = order < 0
        matrix[empty], matrix[:, empty] = 0, 0
        matrix[empty, empty] = 1
        return self.with_arrays(matrix)

    def to_sparse(self) -> scipy.sparse.csr_array:
        """Returns the matrix."""
        return scipy.sparse.csr_array(np.asarray(self.matrix, np.float64))


@unfused
def gossip(neighbours: jax.Array, values: jax.Array, table: jax.Array) -> jax.Array:
    """Computes x_i + sum_j w_ij (t_j - x_i), where x are the first rows, or all rows, of the table t `[.., p]`.

    x is not a second argument: XLA (jax 0.12) assumes that two arguments of a call do not share memory, and would
    overwrite rows of the table before all of them are read.
    """
    x = mixed = table[: len(values)]
    # XLA fuses unrolled gathers into one pass. It would write out a single gather of all neighbours.
    for k in range(values.shape[1]):
        mixed = mixed + values[:, k, None] * (rows_of(table, neighbours[:, k]) - x)
    return mixed


def flat(x: jax.Array) -> jax.Array:
    """Flattens to one row per node. XLA does not vectorise loops over short last axes, such as ten classes."""
    return x.reshape(len(x), math.prod(x.shape[1:]))


def rows_of(x: jax.Array, nodes: jax.Array) -> jax.Array:
    """Gathers rows of an array without a check of bounds."""
    return x.at[nodes].get(mode="promise_in_bounds")


def is_weights(value: Any) -> bool:
    """Whether a value is `Weights`; pytrees treat these as leaves."""
    return isinstance(value, Weights)


def have_one_form(weights: Sequence[Weights]) -> bool:
    """Whether matrices have the same form and shapes, so that they can be stacked."""
    kinds = [(jax.tree.structure(matrix), [np.shape(leaf) for leaf in jax.tree.leaves(matrix)]) for matrix in weights]
    return all(kind == kinds[0] for kind in kinds)


def to_lists_or_dense(weights: Sequence[Weights]) -> Sequence[Weights]:
    """Converts matrices to lists of one width, or to dense matrices if a list would be too long."""
    matrices = [matrix.to_sparse() for matrix in weights]
    width = max(int(np.diff(without_diagonal(matrix).indptr).max(initial=0)) for matrix in matrices)
    if width > MOST_UNROLLED:
        return [Dense.from_sparse(matrix) for matrix in matrices]
    return [Neighbours.from_sparse(matrix, width) for matrix in matrices]
