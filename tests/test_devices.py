"""Placements, and weights in their forms for several devices; what needs devices is in `eight_devices.py`."""

import os
import pathlib
import subprocess
import sys

import hypothesis
import hypothesis.strategies as st
import networkx as nx
import numpy as np
import pytest

from dcliques_jax import datasets, mixing, partitions, topologies
from dcliques_jax._mesh import halos
from dcliques_jax._mesh.placement import place

ROOT = pathlib.Path(__file__).parent.parent
SHARDS = partitions.shards(datasets.synthetic(num_train=2000), 100, seed=1)


@pytest.mark.slow
def test_on_eight_devices():
    told = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "tests/eight_devices.py"],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    print(told.stdout)
    assert told.returncode == 0, told.stdout + told.stderr


@st.composite
def graphs(draw):
    n = draw(st.integers(2, 40))
    tree = [(draw(st.integers(0, i - 1)), i) for i in range(1, n)]
    more = draw(st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=40))
    ids = None
    if draw(st.booleans()):
        ids = np.unique(draw(st.lists(st.integers(0, 5), min_size=n, max_size=n)), return_inverse=True)[1]
    return topologies.from_edges(n, [(i, j) for i, j in tree + more if i != j], clique_ids=ids)


@hypothesis.given(graphs(), st.integers(1, 9))
def test_every_node_has_a_place_and_cliques_share_a_device(topology, num_devices):
    placement = place(topology, num_devices)
    order, device = placement.order, np.arange(len(placement.order)) // placement.per_device
    assert sorted(order[order >= 0]) == list(range(topology.num_nodes))
    assert order[0] >= 0
    np.testing.assert_array_equal(order[placement.slots], np.arange(topology.num_nodes))
    if topology.clique_ids is not None:
        ids = topology.clique_ids[order[order >= 0]]
        for clique in range(ids.max() + 1):
            assert len(set(device[order >= 0][ids == clique])) == 1
    of_node = placement.slots // placement.per_device
    assert placement.cut(topology) == sum(of_node[i] != of_node[j] for i, j in topology.edges)


@hypothesis.given(graphs(), st.integers(1, 9))
def test_forms_for_several_devices_are_the_same_matrix(topology, num_devices):
    placement = place(topology, num_devices).widened(place(topology, num_devices).per_device + 1)
    neighbours = mixing.Neighbours.from_sparse(mixing.metropolis_hastings(topology).to_sparse())
    (halo,) = halos.distributed([neighbours.reordered(placement.order)], [placement])
    places = placement.slots
    dense = halo.to_dense()
    np.testing.assert_allclose(dense[np.ix_(places, places)], neighbours.to_dense(), atol=1e-15)
    np.testing.assert_allclose(dense.sum(axis=1), 1)
    # An empty place reads nobody, and is read by nobody.
    empty = placement.order < 0
    np.testing.assert_array_equal(dense[empty], np.eye(len(dense))[empty])
    # Nothing is sent to a device that does not read it.
    read = (dense != 0) & (places[0] >= 0)
    device = np.arange(len(dense)) // placement.per_device
    needed = sum(
        len(np.unique(np.argwhere(read[device == d])[:, 1][device[np.argwhere(read[device == d])[:, 1]] != d]))
        for d in range(num_devices)
    )
    assert needed <= halos.moved_rows(halo, num_devices) <= needed * num_devices


def test_groups_stay_on_their_devices():
    topology = topologies.d_cliques(SHARDS.label_distribution)
    placement = place(topology, 4)
    weights = mixing.clique_average(topology).reordered(placement.order)
    (local,) = halos.distributed([weights], [placement])
    assert isinstance(local, mixing.GroupMean)
    per_device = placement.per_device
    for device in range(4):
        rows = slice(device * len(local.members) // 4, (device + 1) * len(local.members) // 4)
        groups, shares = local.members[rows], local.shares[rows]
        assert groups.max() < per_device
        ours = placement.order[device * per_device : (device + 1) * per_device]
        for slot in np.flatnonzero(ours >= 0):
            group = local.group[device * per_device + slot]
            members = ours[groups[group][shares[group] > 0]]
            np.testing.assert_array_equal(
                np.sort(members), np.flatnonzero(topology.clique_ids == topology.clique_ids[ours[slot]])
            )


def test_few_edges_are_cut():
    """A grid of 64 x 64 nodes at random places is cut into strips, a ring into arcs."""
    assert place(topologies.ring(4096, seed=3), 8).cut(topologies.ring(4096, seed=3)) <= 8 * 2
    grid = topologies.grid(64, 64, seed=3)
    assert place(grid, 8).cut(grid) < 0.2 * len(grid.edges)
    data = partitions.shards(datasets.synthetic(num_train=4000), 1000)
    small_world = topologies.d_cliques(data.label_distribution, inter="small_world", max_steps=0)
    between = len(small_world.edges) - len(small_world.gradient_edges)
    assert place(small_world, 8).cut(small_world) < 0.7 * between  # 7 of 8 at random
    shuffled = topologies.from_networkx(
        nx.relabel_nodes(nx.cycle_graph(50), dict(enumerate(np.random.default_rng(0).permutation(50))))
    )
    assert place(shuffled, 5).cut(shuffled) <= 10
