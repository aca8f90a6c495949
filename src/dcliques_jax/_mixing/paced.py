"""Gossip that does not happen once per round: every k-th round only, or several times in a round.

`Paced` is part of a network; in a round, `at` makes `Sometimes`, `Product` or `Chebyshev` of it. Matrices that change
advance once per gossip.
"""

import dataclasses
import math
from collections.abc import Callable
from collections.abc import Sequence as Several
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import scipy.sparse

from dcliques_jax._mixing.forms import Weights
from dcliques_jax._mixing.sequences import Moving


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Paced(Moving):
    """Gossips `times` times after every `every`-th round and not at all after the others."""

    base: Weights
    omegas: npt.ArrayLike | None = None  # [nodes, times - 1] factors of Chebyshev gossip; None: plain gossip
    every: int = dataclasses.field(default=1, metadata={"static": True})
    times: int = dataclasses.field(default=1, metadata={"static": True})

    @property
    def num_nodes(self) -> int:  # type: ignore[override]
        """Number of rows."""
        return self.base.num_nodes

    def at(self, round: Any) -> Weights:
        """Returns the matrix of one round."""
        first = round.number // self.every * self.times
        keys = [round.key, *(jax.random.fold_in(round.key, index) for index in range(1, self.times))]
        factors = [self.base.at(round._replace(number=first + index, key=key)) for index, key in enumerate(keys)]
        return self.together(factors, (round.number + 1) % self.every == 0)

    def together(self, factors: list[Weights], gossips: Any) -> Weights:
        """Returns the matrix of a round with these matrices, in which nodes gossip or not."""
        matrix = factors[0]
        if self.omegas is not None:
            matrix = Chebyshev(matrix, self.omegas)
        elif self.times > 1:
            matrix = Product(tuple(factors))
        return matrix if self.every == 1 else Sometimes(matrix, gossips)

    def reordered(self, order: np.ndarray) -> Self:
        """Reorders the matrices inside."""
        omegas = None if self.omegas is None else np.asarray(self.omegas)[order]  # all rows are equal
        return dataclasses.replace(self, base=self.base.reordered(order), omegas=omegas)

    def matrices(self) -> list[scipy.sparse.csr_array]:
        """Returns the matrices inside, each as often as it is."""
        return self.base.matrices()

    def over_rounds(self, of_turns: Any, add: Callable[[list[Any]], Any] = sum) -> list[Any]:
        """Returns values of each round, in turn, from those of each matrix; None in rounds without gossip.

        >>> Paced(Weights, every=2, times=2).over_rounds([1, 10, 100])
        [None, 11, None, 101, None, 110]
        """
        period = len(of_turns)
        gossips = period // math.gcd(period, self.times)
        added = [
            add([of_turns[(gossip * self.times + index) % period] for index in range(self.times)])
            for gossip in range(gossips)
        ]
        return [value for one in added for value in [None] * (self.every - 1) + [one]]


def paced(weights: Weights, *, every: int = 1, times: int = 1) -> Weights:
    """Makes weights gossip less often, or several times in a round."""
    if isinstance(weights, Paced):
        if times > 1 and weights.omegas is not None:
            raise ValueError("Chebyshev gossip is repeated already: pass all its times to one repeated_gossip")
        return dataclasses.replace(weights, every=weights.every * every, times=weights.times * times)
    return Paced(weights, every=every, times=times)


def base_of(weights: Weights) -> Weights:
    """Returns the weights without their pace."""
    return weights.base if isinstance(weights, Paced) else weights


def over_bases(convert: Callable[[Any], Several[Any]], weights: Several[Any]) -> Several[Any]:
    """Converts the weights of several runs, without their pace, which they keep."""
    pace = next((each for each in weights if isinstance(each, Paced)), None)
    if pace is None:
        return convert(weights)
    bases = convert([base_of(each) for each in weights])
    paces = [each if isinstance(each, Paced) else pace for each in weights]  # an identity has the pace of the others
    return [dataclasses.replace(each, base=base) for each, base in zip(paces, bases, strict=True)]


class _InRound(Weights):
    """A matrix that exists in a round only."""

    def to_sparse(self) -> scipy.sparse.csr_array:
        """Raises a `ValueError`: values are traced."""
        raise ValueError(f"{type(self).__name__} weights are those of one round: ask the network for its matrices")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Sometimes(_InRound):
    """A matrix, or the identity."""

    matrix: Weights
    gossips: jax.Array  # [] whether nodes gossip in this round

    @property
    def num_nodes(self) -> int:  # type: ignore[override]
        """Number of rows."""
        return self.matrix.num_nodes

    def apply(self, x: jax.Array) -> jax.Array:
        """Multiplies by the matrix, or returns x."""
        return jax.lax.cond(self.gossips, self.matrix.apply, lambda x: x, x)

    def senders(self, nodes: jax.Array) -> jax.Array:
        """Returns the nodes that entries of the matrix read."""
        return self.matrix.senders(nodes)

    def masked(self, alive: jax.Array) -> Self:
        """Masks the matrix."""
        return dataclasses.replace(self, matrix=self.matrix.masked(alive))

    def renormalised(self, alive: jax.Array) -> Self:
        """Renormalises the matrix."""
        return dataclasses.replace(self, matrix=self.matrix.renormalised(alive))

    def count(self, chosen: jax.Array) -> jax.Array:
        """Counts entries of the matrix; none if nodes do not gossip."""
        return jnp.where(self.gossips, self.matrix.count(chosen), 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Product(_InRound):
    """A product of matrices of one form; the first multiplies first."""

    factors: tuple[Weights, ...]

    @property
    def num_nodes(self) -> int:  # type: ignore[override]
        """Number of rows."""
        return self.factors[0].num_nodes

    def apply(self, x: jax.Array) -> jax.Array:
        """Multiplies by one matrix after the other."""
        for factor in self.factors:
            x = factor.apply(x)
        return x

    def senders(self, nodes: jax.Array) -> jax.Array:
        """Returns the nodes that entries read, `[slots, width]` of one factor beside the other."""
        senders = [factor.senders(nodes) for factor in self.factors]
        return senders[0] if senders[0].ndim == 1 else jnp.concatenate(senders, axis=1)

    def masked(self, alive: jax.Array) -> Self:
        """Masks every factor."""
        return type(self)(tuple(factor.masked(part) for factor, part in self._parts(alive)))

    def renormalised(self, alive: jax.Array) -> Self:
        """Renormalises every factor."""
        return type(self)(tuple(factor.renormalised(part) for factor, part in self._parts(alive)))

    def count(self, chosen: jax.Array) -> jax.Array:
        """Counts the chosen entries of all factors."""
        return jnp.stack([factor.count(part) for factor, part in self._parts(chosen)]).sum(axis=0, dtype=jnp.int32)

    def _parts(self, entries: jax.Array) -> list[tuple[Weights, jax.Array]]:
        """Returns each factor with its entries; means over groups have one entry per slot in all factors."""
        times = len(self.factors)
        parts = [entries] * times if entries.ndim == 1 else jnp.split(entries, times, axis=1)
        return list(zip(self.factors, parts, strict=True))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Chebyshev(_InRound):
    """The Chebyshev polynomial of a symmetric matrix W that shrinks differences most: T_m(W / l) / T_m(1 / l)."""

    matrix: Weights
    omegas: npt.ArrayLike  # [slots, m - 1]

    @property
    def num_nodes(self) -> int:  # type: ignore[override]
        """Number of rows."""
        return self.matrix.num_nodes

    def apply(self, x: jax.Array) -> jax.Array:
        """Computes y_1 = W x, y_(j + 1) = omega_(j + 1) (W y_j - y_(j - 1)) + y_(j - 1)."""
        omegas = jnp.asarray(self.omegas, x.dtype).reshape(len(x), -1, *[1] * (x.ndim - 1))
        before, y = x, self.matrix.apply(x)
        for index in range(omegas.shape[1]):
            before, y = y, omegas[:, index] * (self.matrix.apply(y) - before) + before
        return y


def chebyshev_omegas(eigenvalue: float, times: int) -> list[float]:
    """Returns omega_2 .. omega_m: omega_1 = 2, omega_(j + 1) = 1 / (1 - l^2 omega_j / 4), with l = |lambda2|.

    >>> chebyshev_omegas(0.5, 3) == [2 / (2 - 0.5**2), 1 / (1 - 0.5**2 * 2 / (2 - 0.5**2) / 4)]
    True
    """
    omegas = [2.0]
    for _ in range(times - 1):
        omegas.append(1 / (1 - eigenvalue**2 * omegas[-1] / 4))
    return omegas[1:]
