"""Whole runs on real MNIST, held against the reference experiments: 100 nodes, two shards each, five epochs."""

import numpy as np
import pytest

from dcliques_jax import algorithms, partitions, simulate, topologies

pytestmark = [pytest.mark.slow, pytest.mark.optimised]  # they compute for longer than they compile
SEED = 0


@pytest.fixture(scope="module")
def accuracies(mnist):
    """Mean test accuracy in percent, and its smallest and largest over nodes, by topology."""
    data = partitions.shards(mnist, 100, seed=SEED)
    p = data.label_distribution
    clique_averaging, plain = algorithms.dsgd(), algorithms.dsgd(clique_averaging=False)
    runs = {
        "ring": (topologies.ring(100, seed=SEED), data, plain),
        "grid": (topologies.grid(10, 10, seed=SEED), data, plain),
        "random": (topologies.random_regular(100, 10, seed=SEED), data, plain),
        "random cliques": (topologies.d_cliques(p, max_steps=0, seed=SEED), data, clique_averaging),
        "D-Cliques": (topologies.d_cliques(p, seed=SEED), data, plain),
        "D-Cliques, Clique Averaging": (topologies.d_cliques(p, seed=SEED), data, clique_averaging),
        "fully connected": (topologies.fully_connected(100), data, plain),
        "ring, IID": (topologies.ring(100, seed=SEED), partitions.iid(mnist, 100, seed=SEED), plain),
    }
    found = {}
    for name, (topology, split, algorithm) in runs.items():
        result = simulate(
            topology, split, algorithm=algorithm, batch_size=128, epochs=5, eval_every=5, seed=SEED, progress=False
        )
        assert result.history.round[-1] == 20  # four rounds an epoch
        last = 100 * result.history.accuracy[-1].astype(np.float64)
        found[name] = last.mean(), last.min(), last.max()
    print({name: [round(value, 1) for value in values] for name, values in found.items()})
    return found


def test_topologies_come_in_the_paper_s_order(accuracies):
    order = ["ring", "grid", "random", "D-Cliques", "D-Cliques, Clique Averaging", "fully connected"]
    means = [accuracies[name][0] for name in order]
    assert means == sorted(means)
    assert accuracies["random cliques"][0] < accuracies["D-Cliques"][0]


@pytest.mark.parametrize(
    ("name", "expected", "points"),
    [
        ("ring", 52.8, 4),
        ("grid", 69.2, 4),
        ("random", 83.1, 1),
        ("D-Cliques", 87.4, 1),
        ("D-Cliques, Clique Averaging", 87.8, 1),
        ("fully connected", 88.1, 1),
        ("ring, IID", 87.2, 1),
    ],
)
def test_accuracies_are_those_of_the_reference_experiments(accuracies, name, expected, points):
    assert accuracies[name][0] == pytest.approx(expected, abs=points)


def test_clique_averaging_narrows_the_band(accuracies):
    plain, averaged = (np.ptp(accuracies[name][1:]) for name in ("D-Cliques", "D-Cliques, Clique Averaging"))
    assert averaged < plain < np.ptp(accuracies["random"][1:])
    assert averaged < 3
    assert np.ptp(accuracies["fully connected"][1:]) < 0.1


def test_without_skew_topology_hardly_matters(accuracies):
    assert abs(accuracies["ring, IID"][0] - accuracies["fully connected"][0]) < 2
