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
from dcliques_jax._mixing.entries import without_diagonal
from dcliques_jax._mixing.forms import (
    MOST_UNROLLED,
    Dense,
    Neighbours,
    Weights,
    have_one_form,
    register,
    rows_of,
    to_lists_or_dense,
)
from dcliques_jax._mixing.push import Shares, to_one_width
from dcliques_jax._random import random_bits

_PLACES = 2**32 - 3  # folded into the key of a round for the places of nodes


def _changes(leaf: Any) -> bool:
    """Whether an array of a form is `[nodes, turns, ...]`, with other values in other rounds."""
    return np.ndim(leaf) == 3


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

    form: Any  # Neighbours, Dense or Shares, or a form for several devices

    @classmethod
    def of(cls, matrices: Matrices[Weights]) -> Self:
        """Stacks matrices of one form and shape. Each round then costs what the widest matrix costs."""
        if not matrices or any(matrix.num_nodes != matrices[0].num_nodes for matrix in matrices):
            told = [matrix.num_nodes for matrix in matrices]
            raise ValueError(f"a sequence needs at least one matrix, and matrices for the same nodes, not for {told}")
        plain = all(isinstance(matrix, Neighbours | Dense | Shares) for matrix in matrices)
        common = _static_to_common_form(matrices) if plain else to_lists_or_dense(matrices)
        return cls(jax.tree.map(lambda *leaves: _arrays.frozen(np.stack(leaves, axis=1)), *common))

    @classmethod
    def of_union(cls, matrices: Matrices[scipy.sparse.csr_array], width: int = 0) -> Self:
        """Makes lists of at least `width` neighbours of all matrices together. Only their weights change."""
        outside = [without_diagonal(matrix) for matrix in matrices]
        union = Neighbours.from_sparse(sum(outside[1:], start=outside[0]), width)
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
        return next(np.shape(leaf)[1] for leaf in jax.tree.leaves(self.form) if _changes(leaf))

    def at(self, round: Any) -> Weights:
        """Returns the matrix of a round."""
        turn = round.number % self.period
        matrix: Weights = jax.tree.map(lambda leaf: jnp.asarray(leaf)[:, turn] if _changes(leaf) else leaf, self.form)
        return matrix

    def turns(self) -> list[Weights]:
        """Returns the matrices, in their turns, on the host."""
        return [
            jax.tree.map(lambda leaf, turn=turn: np.asarray(leaf)[:, turn] if _changes(leaf) else leaf, self.form)
            for turn in range(self.period)
        ]

    def reordered(self, order: np.ndarray) -> Self:
        """Reorders every matrix."""
        moved = [matrix.reordered(order) for matrix in self.turns()]
        return type(self)(
            jax.tree.map(
                lambda leaf, *leaves: np.stack(leaves, axis=1) if _changes(leaf) else leaves[0],
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
        del order
        return self

    def matrices(self) -> list[scipy.sparse.csr_array]:
        """Returns the matrices in float64, in their turns, before nodes swap their places."""
        return self.pool.matrices()


def as_unions(sequences: Matrices[Sequence]) -> list[Sequence]:
    """Converts the sequences of several runs to lists of the neighbours of all matrices, which keep their places."""
    if isinstance(sequences[0].form, Shares):
        raise ValueError("push-sum over matrices that change from round to round needs one device: omit mesh")
    unions = [Sequence.of_union(sequence.matrices()) for sequence in sequences]
    width = max(union.form.neighbours.shape[1] for union in unions)
    if width > MOST_UNROLLED:
        raise ValueError(
            f"a node has {width} neighbours in all matrices of a sequence together: several devices, and faults with a "
            f"memory such as bursts, need at most {MOST_UNROLLED}"
        )
    return [Sequence.of_union(union.matrices(), width) for union in unions]


def _static_to_common_form(weights: Matrices[Weights]) -> Matrices[Weights]:
    """Converts static matrices to one form and shape."""
    if have_one_form(weights):
        return weights
    return to_one_width(weights) if isinstance(weights[0], Shares) else to_lists_or_dense(weights)


def to_common_form(weights: Matrices[Weights]) -> Matrices[Weights]:
    """Converts the weights of several runs to one form and shape, so that they can be stacked."""
    if have_one_form(weights):
        return weights
    pools = [each.pool if isinstance(each, Drawn) else each for each in weights]
    if not any(type(each).at is not Weights.at for each in pools):
        return _static_to_common_form(weights)
    sequences = [each for each in pools if isinstance(each, Sequence)]
    if len({type(each) for each in weights}) > 1 or len({each.period for each in sequences}) != 1:
        told = ", ".join(sorted({type(each).__name__ for each in weights}))
        raise ValueError(
            f"{told} weights, which change from round to round, have other shapes for other seeds: use as many "
            "matrices for every seed, or pad their arrays to the same shapes"
        )
    matrices = _static_to_common_form([matrix for each in sequences for matrix in each.turns()])
    period = sequences[0].period
    common = [Sequence.of(matrices[start : start + period]) for start in range(0, len(matrices), period)]
    return [Drawn(each) for each in common] if isinstance(weights[0], Drawn) else common
