"""Matrices whose columns sum to 1, as push-sum needs them: a node splits what it has among its receivers."""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import scipy.sparse

from dcliques_jax._engine.xla import unfused
from dcliques_jax._mixing.entries import check_rows, without_diagonal
from dcliques_jax._mixing.forms import MOST_UNROLLED, Lists, Neighbours, Weights, flat, rows_of


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Shares(Weights):
    """A matrix P with weights of its own on the diagonal: x_i <- p_ii x_i + sum_j p_ij x_j.

    Its columns sum to 1, its rows need not: the sum over all nodes stays, equal values do not stay equal.
    """

    lists: Lists  # p_ij of the nodes that each node hears from
    own: npt.ArrayLike  # [nodes, 1] p_ii

    @classmethod
    def from_sparse(cls, matrix: scipy.sparse.csr_array, width: int = 0) -> Self:
        """Converts a matrix to lists of at least `width` senders."""
        check_rows(matrix.T.tocsr(), "column")
        return cls(Neighbours.from_sparse(matrix, width), np.asarray(matrix.diagonal())[:, None])

    @property
    def num_nodes(self) -> int:  # type: ignore[override]
        """Number of rows."""
        return np.shape(self.own)[0]

    def apply(self, x: jax.Array) -> jax.Array:
        """Computes P x."""
        values, own = (jnp.asarray(part, x.dtype) for part in (self.lists.values, self.own))
        table = self.lists.table(flat(x))
        return _shared(jnp.asarray(self.lists.neighbours), values, own, table).reshape(x.shape)

    def reordered(self, order: np.ndarray) -> Self:
        """Reorders lists and own weights; an empty slot keeps what it has."""
        own = np.where(order[:, None] < 0, 1, np.asarray(self.own)[order])
        return dataclasses.replace(self, lists=self.lists.reordered(order), own=own)

    def to_sparse(self) -> scipy.sparse.csr_array:
        """Returns the matrix."""
        outside = without_diagonal(self.lists.to_sparse())
        return (outside + scipy.sparse.diags_array(np.asarray(self.own, np.float64)[:, 0])).tocsr()


def to_one_width(shares: Any) -> Any:
    """Converts the shares of several runs to lists of one width."""
    width = max(np.shape(each.lists.values)[1] for each in shares)
    return [Shares.from_sparse(each.to_sparse(), width) for each in shares]


@unfused
def _shared(neighbours: jax.Array, values: jax.Array, own: jax.Array, table: jax.Array) -> jax.Array:
    def add(k: Any, mixed: jax.Array) -> jax.Array:
        return mixed + values[:, k, None] * rows_of(table, neighbours[:, k])

    mixed, width = own * table[: len(values)], values.shape[1]
    if width > MOST_UNROLLED:
        return jax.lax.fori_loop(0, width, add, mixed)
    for k in range(width):
        mixed = add(k, mixed)
    return mixed
