"""Matrices that change from round to round, without compiling anything again.

`at(round)` returns the matrix of a round as one of the static forms. What may change is an argument of the program.
"""

import dataclasses
from collections.abc import Sequence as Matrices
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse

from dcliques_jax import _arrays
from dcliques_jax._mixing.forms import Dense, Neighbours, Weights, register, rows_of, to_common_form, without_diagonal
from dcliques_jax._random import random_bits

_PLACES = 2**32 - 3  # folded into the key of a round for the places of nodes
_TIMES = 3  # dimensions of an array `[nodes, times, ...]` that changes from round to round


class Moving(Weights):
    """Matrices that change from round to round. They multiply nothing themselves: take one with `at(round)`."""

    def apply(self, x: jax.Array) -> jax.Array:
        """Raises a `ValueError`: which matrix it is depends on the round."""
        raise ValueError(f"{type(self).__name__} weights have one matrix per round: mix with weights.at(round)")

    def to_sparse(self) -> scipy.sparse.csr_array:
        """Returns the mean of the matrices."""
        matrices = self.matrices()
        return (sum(matrices[1:], start=matrices[0]) / len(matrices)).tocsr()


@register
@dataclasses.dataclass(frozen=True, eq=False)
class Sequence(Moving):
    """Matrices in turn: round t uses matrix t mod T. In its form, arrays that change are `[nodes, T, ...]`."""

    form: Any  # Neighbours or Dense, or a form for several devices

    @classmethod
    def of(cls, matrices: Matrices[Weights]) -> Self:
        """Stacks matrices of one form and shape. Each round then costs what the widest matrix costs."""
        return cls(jax.tree.map(lambda *leaves: _arrays.frozen(np.stack(leaves, axis=1)), *to_common_form(matrices)))

    @classmethod
    def of_union(cls, matrices: Matrices[scipy.sparse.csr_array]) -> Self:
        """Lists the neighbours of all matrices together; only their weights change. So links keep their places."""
        outside = [without_diagonal(matrix) for matrix in matrices]
        union = Neighbours.from_sparse(sum(outside[1:], start=outside[0]))
        neighbours, n = np.asarray(union.neighbours), union.num_nodes
        codes = np.arange(n)[:, None] * n + neighbours  # of row and column
        used = np.asarray(union.values) != 0
        values = np.zeros((n, len(outside), neighbours.shape[1]))
        for turn, matrix in enumerate(outside):
            entries = scipy.sparse.coo_array(matrix)
            row, column = entries.coords
            found = np.zeros(np.count_nonzero(used))
            found[np.searchsorted(codes[used], row.astype(np.int64) * n + column)] = entries.data
            values[:, turn][used] = found
        return cls(union.with_arrays(neighbours, _arrays.frozen(values)))

    @property
    def num_nodes(self) -> int:  # type: ignore[override]
        """Number of rows."""
        return self.form.num_nodes

    @property
    def period(self) -> int:
        """Number T of matrices."""
        return next(np.shape(leaf)[1] for leaf in jax.tree.leaves(self.form) if np.ndim(leaf) == _TIMES)

    def at(self, round: Any) -> Weights:
        """Returns the matrix of a round."""
        return self._turn(round.number % self.period)

    def _turn(self, turn: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf[:, turn] if np.ndim(leaf) == _TIMES else leaf, self.form)

    def turns(self) -> list[Weights]:
        """Returns the matrices, in their turns."""
        return [self._turn(turn) for turn in range(self.period)]

    def reordered(self, order: np.ndarray) -> Self:
        """Reorders every matrix."""
        moved = [matrix.reordered(order) for matrix in self.turns()]
        return type(self)(
            jax.tree.map(
                lambda leaf, *leaves: np.stack(leaves, axis=1) if np.ndim(leaf) == _TIMES else leaves[0],
                self.form,
                *moved,
            )
        )

    def matrices(self) -> list[scipy.sparse.csr_array]:
        """Returns the matrices in float64, in their turns."""
        return [matrix.to_sparse() for matrix in self.turns()]


@register
@dataclasses.dataclass(frozen=True, eq=False)
class Drawn(Moving):
    """Matrices in turn, in which nodes swap their places at random in every round: W_t = P_t^T W_(t mod T) P_t.

    A random permutation P_t of a matching is a random matching, and of a regular graph a random regular graph of the
    same contraction, which a program could not draw otherwise.
    """

    pool: Sequence

    @property
    def num_nodes(self) -> int:  # type: ignore[override]
        """Number of rows."""
        return self.pool.num_nodes

    def at(self, round: Any) -> Weights:
        """Returns the matrix of a round. The permutation depends on the numbers of nodes, not on their slots."""
        n = self.num_nodes
        everyone = jnp.arange(n, dtype=jnp.int32)
        bits = random_bits(jax.random.fold_in(round.key, _PLACES), everyone, jnp.zeros_like(everyone))
        place = jnp.argsort(bits)  # [nodes] the place of each node in the matrix
        mine = place[round.nodes]  # [slots]
        matrix: Any = self.pool.at(round)
        if isinstance(matrix, Dense):
            return matrix.with_arrays(jnp.asarray(matrix.matrix)[mine[:, None], mine[None]])
        slot_at = jnp.zeros(n, jnp.int32).at[mine].set(everyone)  # the slot whose node has each place
        neighbours = rows_of(slot_at, rows_of(jnp.asarray(matrix.neighbours), mine))
        return matrix.with_arrays(neighbours, rows_of(jnp.asarray(matrix.values), mine))

    def reordered(self, order: np.ndarray) -> Self:
        """Returns the same matrices: slots find their places by their nodes."""
        if len(order) != self.num_nodes:
            raise ValueError(
                "graphs that are drawn in every round need all nodes on one device: omit mesh, or use a topology with "
                "fixed matrices"
            )
        return self

    def matrices(self) -> list[scipy.sparse.csr_array]:
        """Returns the matrices in float64, in their turns, before nodes swap their places."""
        return self.pool.matrices()
