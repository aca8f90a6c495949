"""Weights between nodes on several devices. They move only the rows that other devices read."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import scipy.sparse

from dcliques_jax import mixing
from dcliques_jax._mesh.placement import Placement, occurrences
from dcliques_jax._mesh.transfer import AXIS
from dcliques_jax._mixing.forms import Lists, flat, rows_of


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ShardedNeighbours(Lists):
    """Lists of neighbours, some of which are on other devices. The halo of a device holds the rows that it receives.

    Every device d sends the rows `sent[i]` to device d + shifts[i]. Halos follow a device's own rows, shift by shift.
    Unused shifts are omitted; for the others, all devices send as many rows as the one that sends most.
    """

    neighbours: npt.ArrayLike  # [slots, width] indices of rows of the device and its halo
    values: npt.ArrayLike  # [slots, width] weight of each neighbour, 0 in the padding
    sent: tuple[npt.ArrayLike, ...]  # per shift [devices * rows], the slots that each device sends
    shifts: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    num_devices: int = dataclasses.field(metadata={"static": True})

    def table(self, rows: jax.Array) -> jax.Array:
        """Returns the rows of the device and its halo. Sums are in the same order as on one device."""
        halos = [
            jax.lax.ppermute(
                rows_of(rows, jnp.asarray(sent)),
                AXIS,
                [(device, (device + shift) % self.num_devices) for device in range(self.num_devices)],
            )
            for sent, shift in zip(self.sent, self.shifts, strict=True)
        ]
        return jnp.concatenate([rows, *halos])

    def to_sparse(self) -> scipy.sparse.csr_array:
        """The matrix between all slots."""
        per_device = self.num_nodes // self.num_devices
        rows = np.arange(self.num_nodes).reshape(self.num_devices, per_device)
        tables = [rows]
        for sent, shift in zip(self.sent, self.shifts, strict=True):
            of_sender = np.take_along_axis(rows, np.asarray(sent).reshape(self.num_devices, -1), axis=1)
            tables.append(np.roll(of_sender, shift, axis=0))
        table = np.concatenate(tables, axis=1)
        neighbours = np.asarray(self.neighbours).reshape(self.num_devices, -1)
        found = np.take_along_axis(table, neighbours, axis=1).reshape(self.num_nodes, -1)
        return mixing.Neighbours(found, self.values).to_sparse()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class GlobalMean(mixing.Weights):
    """The average over all nodes on all devices."""

    shares: npt.ArrayLike  # [slots] one over the number of nodes, 0 in empty slots

    @property
    def num_nodes(self) -> int:  # type: ignore[override]
        """Number of rows."""
        return np.shape(self.shares)[0]

    def apply(self, x: jax.Array) -> jax.Array:
        """Computes the mean as a sum over devices of one row per device."""
        rows = flat(x)
        shares = jnp.asarray(self.shares, x.dtype)[:, None]
        mean = jax.lax.psum((shares * rows).sum(axis=0, keepdims=True), AXIS)
        return jnp.broadcast_to(mean, rows.shape).reshape(x.shape)

    def change(self, x: jax.Array) -> jax.Array:
        """Computes W y - y with y = x - x_0, where x_0 is in the first slot of all."""
        first = jax.lax.psum(jnp.where(jax.lax.axis_index(AXIS) == 0, x[:1], 0), AXIS)
        return super().change(x - first)

    def senders(self, nodes: jax.Array) -> jax.Array:
        """Returns the nodes of the device, `[slots]`: all nodes read the same ones."""
        return nodes

    def masked(self, alive: jax.Array) -> "PartialGlobalMean":
        """Leaves the weight of lost nodes with each reader."""
        return PartialGlobalMean(jnp.where(alive, jnp.asarray(self.shares), 0))

    def renormalised(self, alive: jax.Array) -> "GlobalMean":
        """Averages over the nodes that are alive."""
        arrived = jnp.where(alive, jnp.asarray(self.shares), 0)
        total = jax.lax.psum(arrived.sum(), AXIS)
        return GlobalMean(jnp.where(total > 0, arrived / total, 0))

    def count(self, chosen: jax.Array) -> jax.Array:
        """Counts the chosen nodes on all devices, without the node."""
        chosen = chosen & (jnp.asarray(self.shares) != 0)
        return jax.lax.psum(chosen.sum(dtype=jnp.int32), AXIS) - chosen

    def to_sparse(self) -> scipy.sparse.csr_array:
        """The matrix between all slots."""
        return scipy.sparse.csr_array(np.tile(np.asarray(self.shares), (self.num_nodes, 1)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class PartialGlobalMean(GlobalMean):
    """The mean over all nodes, from which some are missing: their weight stays with each reader."""

    def apply(self, x: jax.Array) -> jax.Array:
        """Computes sum_j s_j x_j + (1 - sum_j s_j) x_i over the nodes j that are there."""
        kept = 1 - jax.lax.psum(jnp.asarray(self.shares, x.dtype).sum(), AXIS)
        return super().apply(x) + kept * x


def moved_rows(weights: mixing.Weights, num_devices: int) -> int:
    """Returns the number of rows that all devices together send in one multiplication."""
    if isinstance(weights, mixing.Paced):
        return moved_rows(weights.base, num_devices)
    if isinstance(weights, mixing.Sequence):
        return moved_rows(weights.form, num_devices)
    if isinstance(weights, mixing.Shares):
        return moved_rows(weights.lists, num_devices)
    if isinstance(weights, ShardedNeighbours):
        return sum(np.size(rows) for rows in weights.sent)
    return num_devices if isinstance(weights, GlobalMean) and num_devices > 1 else 0


_SHARED = (mixing.Identity, mixing.Neighbours, mixing.GroupMean, mixing.Dense)


def distributed(weights: Sequence[Any], placements: Sequence[Placement]) -> Sequence[mixing.Weights]:
    """Converts weights between slots, one per run and all of one form, to a form for several devices."""
    form = type(weights[0])
    if isinstance(weights[0], mixing.Sequence):
        return [mixing.Sequence(rows) for rows in _halos([each.form for each in weights], placements[0].num_devices)]
    if isinstance(weights[0], mixing.Shares):
        lists = _halos([each.lists for each in weights], placements[0].num_devices)
        return [mixing.Shares(part, each.own) for part, each in zip(lists, weights, strict=True)]
    if isinstance(weights[0], mixing.Drawn):
        raise ValueError("graphs that are drawn in every round need all nodes on one device: omit mesh")
    if form not in _SHARED:  # the forms below would drop its own `at` and `apply`
        raise ValueError(f"{form.__name__} weights are known on one device only: pass a form of mixing, or omit mesh")
    if isinstance(weights[0], mixing.Identity):
        return [mixing.Identity(placements[0].per_device)] * len(weights)
    if isinstance(weights[0], mixing.Neighbours):
        return _halos(weights, placements[0].num_devices)
    if isinstance(weights[0], mixing.GroupMean) and len(np.asarray(weights[0].members)) == 1:
        sizes = [np.count_nonzero(placement.order >= 0) for placement in placements]
        return [GlobalMean((p.order >= 0) / size) for p, size in zip(placements, sizes, strict=True)]
    if isinstance(weights[0], mixing.GroupMean):
        return _local_groups(weights, placements[0])
    raise ValueError(
        f"{form.__name__} weights multiply all models, which lie on different devices: pass a sparser "
        "matrix or topology, or use one device"
    )


def _halos(weights: Sequence[mixing.Neighbours], num_devices: int) -> list[ShardedNeighbours]:
    per_device = weights[0].num_nodes // num_devices
    read = [_reads(np.asarray(matrix.neighbours), per_device, num_devices) for matrix in weights]
    # [runs, shifts, devices] number of rows that a device sends; the maximum sets the length
    counts = np.stack([np.bincount(r.codes // per_device, minlength=num_devices**2) for r in read])
    longest = counts.reshape(len(weights), num_devices, num_devices).max(axis=(0, 2))
    shifts = tuple(int(shift) for shift in np.flatnonzero(longest))
    starts = per_device + np.cumsum(longest) - longest  # [shifts] start of each halo
    return [_halo(matrix, r, longest, starts, shifts, num_devices) for matrix, r in zip(weights, read, strict=True)]


class _Reads(NamedTuple):
    """Rows that other devices read, each once per shift."""

    remote: np.ndarray  # [slots, width] which neighbours are on other devices
    codes: np.ndarray  # [reads] (shift * devices + sender) * per_device + row, in order
    which: np.ndarray  # [remote neighbours] index of the read of each


def _reads(neighbours: np.ndarray, per_device: int, num_devices: int) -> _Reads:
    sender, row = np.divmod(neighbours, per_device)
    shift = (np.arange(len(neighbours))[:, None] // per_device - sender) % num_devices
    remote = shift > 0
    codes, which = np.unique(((shift * num_devices + sender) * per_device + row)[remote], return_inverse=True)
    return _Reads(remote, codes, which)


def _halo(
    matrix: mixing.Neighbours,
    reads: _Reads,
    longest: np.ndarray,
    starts: np.ndarray,
    shifts: tuple[int, ...],
    num_devices: int,
) -> ShardedNeighbours:
    per_device = matrix.num_nodes // num_devices
    pair, row = np.divmod(reads.codes, per_device)
    turn = np.arange(len(pair)) - np.searchsorted(pair, pair)  # index in the list of its shift and sender
    neighbours = np.asarray(matrix.neighbours) % per_device
    neighbours[reads.remote] = (starts[pair // num_devices] + turn)[reads.which]
    sent = {shift: np.zeros((num_devices, longest[shift]), np.int32) for shift in shifts}
    for shift in shifts:
        of_shift = pair // num_devices == shift
        sent[shift][pair[of_shift] % num_devices, turn[of_shift]] = row[of_shift]
    rows = tuple(sent[shift].ravel() for shift in shifts)
    return ShardedNeighbours(neighbours.astype(np.int32), matrix.values, rows, shifts, num_devices)


def _local_groups(weights: Sequence[mixing.GroupMean], placement: Placement) -> list[mixing.GroupMean]:
    """Splits groups by device, padded to the same number on each."""
    num_devices, per_device = placement.num_devices, placement.per_device
    owners = [np.asarray(matrix.members) // per_device for matrix in weights]
    for owner in owners:
        if (spread := owner.min(axis=1) != owner.max(axis=1)).any():
            raise ValueError(
                f"group {spread.argmax()} of averaged nodes is spread over several devices: use fewer devices, or "
                "average over cliques"
            )
    width = max(np.bincount(owner[:, 0], minlength=num_devices).max() for owner in owners)
    return [_local(matrix, owner[:, 0], width, num_devices) for matrix, owner in zip(weights, owners, strict=True)]


def _local(matrix: mixing.GroupMean, owner: np.ndarray, width: int, num_devices: int) -> mixing.GroupMean:
    members, shares, group = (np.asarray(part) for part in (matrix.members, matrix.shares, matrix.group))
    per_device = len(group) // num_devices
    turn = occurrences(owner)  # index of a group on its device
    local = [np.zeros((num_devices, width, *part.shape[1:]), part.dtype) for part in (members, shares)]
    local[0][owner, turn], local[1][owner, turn] = members % per_device, shares
    members, shares = (part.reshape(num_devices * width, -1) for part in local)
    # An empty slot may belong to any group of its device: its values do not count.
    at_home = owner[group] == np.arange(len(group)) // per_device
    grouped = np.where(at_home, turn[group], 0).astype(np.int32)
    return matrix.with_arrays(members, shares, grouped)  # indices on a device, not of all nodes
