"""Means over groups of nodes."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import scipy.sparse

from dcliques_jax._engine.xla import unfused
from dcliques_jax._mixing.entries import TOLERANCE, check_kind, check_range, slots_of, with_unit_rows
from dcliques_jax._mixing.forms import MOST_UNROLLED, Weights, flat, owned, register, rows_of


@register
@dataclasses.dataclass(frozen=True, eq=False)
class GroupMean(Weights):
    """The mean over groups of nodes, such as whole cliques or all nodes. Each node is in one group."""

    members: npt.ArrayLike  # [groups, width] padded with members of the same group
    shares: npt.ArrayLike  # [groups, width] one over the size of the group, 0 in the padding
    group: npt.ArrayLike  # [nodes] the group of each node

    def __post_init__(self) -> None:
        if (arrays := owned(self, members=self.members, shares=self.shares, group=self.group)) is None:
            return
        members, shares, group = arrays
        check_kind("members", members, "iu", 2)
        check_kind("shares", shares, "iuf", 2)
        check_kind("group", group, "iu", 1)
        if members.shape != shares.shape or len(group) == 0:
            raise ValueError(
                f"members of shape {members.shape} and shares of shape {shares.shape} must both be [groups, width], "
                f"and group of shape {group.shape} [nodes], with at least one node"
            )
        check_range("members", members, len(group), "nodes")
        check_range("group", group, len(members), "groups")
        rows, columns = used = np.nonzero(shares)
        counted = np.bincount(members[used], minlength=len(group))
        wrong = np.flatnonzero(counted != 1)
        if len(wrong):
            raise ValueError(f"node {wrong[0]} has a share {counted[wrong[0]]} times: every node must have one")
        strangers = np.flatnonzero(group[members[used]] != rows)
        if len(strangers):
            node = members[used][strangers[0]]
            raise ValueError(f"node {node} has a share of group {rows[strangers[0]]}, but group[{node}]={group[node]}")
        sizes = np.bincount(group, minlength=len(members))
        uneven = np.flatnonzero(np.abs(shares[used] - 1 / sizes[rows]) > TOLERANCE)
        if len(uneven):
            row, column = rows[uneven[0]], columns[uneven[0]]
            raise ValueError(
                f"shares[{row}, {column}]={shares[row, column]} must be one over the size of the group, 1/{sizes[row]}"
            )

    @property
    def num_nodes(self) -> int:  # type: ignore[override]
        """Number of rows."""
        return np.shape(self.group)[0]

    def apply(self, x: jax.Array) -> jax.Array:
        """Computes the mean of each group once and copies it to the members."""
        means = _group_means(jnp.asarray(self.members), jnp.asarray(self.shares, x.dtype), flat(x))
        return rows_of(means, jnp.asarray(self.group)).reshape(x.shape)

    def change(self, x: jax.Array) -> jax.Array:
        """Computes W y - y with y = x - x_1, where x_1 is the first member of each group."""
        first = rows_of(x, jnp.asarray(self.members)[jnp.asarray(self.group), 0])
        return super().change(x - first)

    def senders(self, nodes: jax.Array) -> jax.Array:
        """Returns the nodes, `[slots]`: all members of a group read the same ones."""
        return nodes

    def masked(self, alive: jax.Array) -> "PartialMean":
        """Leaves the weight of lost members with each reader."""
        return PartialMean(self.members, self._arrived(alive), self.group)

    def renormalised(self, alive: jax.Array) -> Self:
        """Averages over the members that are alive. A group without any has a mean of 0, which nobody reads."""
        arrived = self._arrived(alive)
        total = arrived.sum(axis=1, keepdims=True)
        return self.with_arrays(self.members, jnp.where(total > 0, arrived / total, 0), self.group)

    def count(self, chosen: jax.Array) -> jax.Array:
        """Counts the chosen members of each node's group, without the node."""
        used = (jnp.asarray(self.shares) != 0) & chosen[jnp.asarray(self.members)]
        return used.sum(axis=1, dtype=jnp.int32)[jnp.asarray(self.group)] - chosen

    def _arrived(self, alive: jax.Array) -> jax.Array:
        return jnp.where(alive[jnp.asarray(self.members)], jnp.asarray(self.shares), 0)

    def reordered(self, order: np.ndarray) -> Self:
        """Renumbers the members. The order inside a group stays, so sums round the same way."""
        members = slots_of(order, self.num_nodes)[np.asarray(self.members)]
        return self.with_arrays(members, self.shares, np.asarray(self.group)[order])

    def to_sparse(self) -> scipy.sparse.csr_array:
        """Returns the matrix; up to the order of nodes, groups are diagonal blocks."""
        group = np.asarray(self.group)
        membership = scipy.sparse.csr_array((np.ones(len(group)), (np.arange(len(group)), group)))
        sizes = np.bincount(group)
        return with_unit_rows(membership @ scipy.sparse.diags_array(1 / sizes) @ membership.T)


@register
@dataclasses.dataclass(frozen=True, eq=False)
class PartialMean(GroupMean):
    """The mean over groups from which members are missing: their weight stays with each reader."""

    def __post_init__(self) -> None:
        """Checks nothing: shares do not sum to 1."""

    def apply(self, x: jax.Array) -> jax.Array:
        """Computes sum_j s_j x_j + (1 - sum_j s_j) x_i over the members j that are there."""
        kept = 1 - jnp.asarray(self.shares, x.dtype).sum(axis=1)[jnp.asarray(self.group)]
        return super().apply(x) + kept.reshape(-1, *[1] * (x.ndim - 1)) * x


@unfused
def _group_means(members: jax.Array, shares: jax.Array, x: jax.Array) -> jax.Array:
    if members.shape[1] > MOST_UNROLLED:
        return jnp.einsum("gm,gmp->gp", shares, rows_of(x, members), precision="highest")
    return sum(
        (shares[:, k, None] * rows_of(x, members[:, k]) for k in range(members.shape[1])),
        start=jnp.zeros((len(members), x.shape[1]), x.dtype),
    )
