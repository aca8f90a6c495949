"""Assigns nodes to devices."""

from typing import NamedTuple

import numpy as np
import scipy.sparse

from dcliques_jax.topologies import Topology


class Placement(NamedTuple):
    """The slot and device of each node."""

    order: np.ndarray  # [slots] the node in each slot, -1 in an empty slot; devices hold equal parts
    num_devices: int

    @property
    def per_device(self) -> int:
        """Number of slots per device."""
        return len(self.order) // self.num_devices

    @property
    def slots(self) -> np.ndarray:
        """The slot of each node, `[nodes]`."""
        used = np.flatnonzero(self.order >= 0)
        return used[np.argsort(self.order[used])]

    def widened(self, per_device: int) -> "Placement":
        """Adds empty slots, up to `per_device` on each device."""
        parts = self.order.reshape(self.num_devices, -1)
        wider = np.pad(parts, ((0, 0), (0, per_device - self.per_device)), constant_values=-1)
        return Placement(wider.ravel(), self.num_devices)

    def cut(self, topology: Topology) -> int:
        """Returns the number of edges between nodes on different devices."""
        device = self.slots // self.per_device
        return int(np.count_nonzero(device[topology.edges[:, 0]] != device[topology.edges[:, 1]]))


def place(topology: Topology, num_devices: int) -> Placement:
    """Orders nodes clique by clique and splits them between cliques into about equal parts, so that few edges cross.

    Cliques are in the order of their numbers, which is how wirings link them, or with linked cliques near each other
    (reverse Cuthill-McKee), whichever cuts fewer edges. Without cliques the same holds for nodes.
    """
    ids = np.arange(topology.num_nodes) if topology.clique_ids is None else topology.clique_ids
    as_numbered = _placement(ids, np.arange(ids.max() + 1), num_devices)
    if num_devices == 1 or len(topology.edges) == topology.num_nodes * (topology.num_nodes - 1) // 2:
        return as_numbered
    first, second = ids[topology.edges].T
    links = scipy.sparse.csr_array((np.ones(len(first)), (first, second)), shape=(ids.max() + 1, ids.max() + 1))
    near = scipy.sparse.csgraph.reverse_cuthill_mckee((links + links.T).tocsr(), symmetric_mode=True)
    return min(as_numbered, _placement(ids, near, num_devices), key=lambda placement: placement.cut(topology))


def _placement(ids: np.ndarray, line: np.ndarray, num_devices: int) -> Placement:
    """Places cliques in the order `line`, each on the device that its first node has if nodes are split evenly."""
    rank = np.argsort(line)  # position of each clique
    by_clique = np.argsort(rank[ids], kind="stable")
    sizes = np.bincount(ids)[line]
    firsts = np.cumsum(sizes) - sizes
    device = np.repeat(firsts * num_devices // len(ids), sizes)
    held = np.bincount(device, minlength=num_devices)
    order = np.full((num_devices, held.max()), -1)
    order[np.arange(held.max()) < held[:, None]] = by_clique
    return Placement(order.ravel(), num_devices)


def occurrences(values: np.ndarray) -> np.ndarray:
    """Counts the equal values before each value.

    >>> occurrences(np.array([3, 1, 3, 3]))
    array([0, 0, 1, 2])
    """
    order = np.argsort(values, kind="stable")
    found = np.empty(len(values), np.int64)
    found[order] = np.arange(len(values)) - np.searchsorted(values[order], values[order])
    return found
