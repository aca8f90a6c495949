"""Networks beyond the paper train as known: mnist_5k, two shards, 100 nodes, batches of 10, 20 epochs, zero models."""

import numpy as np
import optax
import pytest

from dcliques_jax import algorithms, datasets, faults, partitions, simulate, topologies

SEEDS = (1, 2, 3)
LOSS = {"faults": faults.message_loss(0.2)}

# A topology, the mean accuracy of all nodes in per cent that one other implementation found with one seed, and what
# else `simulate` gets. Differences of a point mean nothing.
KNOWN = {
    "D-Cliques": (lambda p, seed: topologies.d_cliques(p, seed=seed), 88.2, {}),
    "D-Cliques, 20 % loss": (lambda p, seed: topologies.d_cliques(p, seed=seed), 87.8, LOSS),
    "D-Cliques without Clique Averaging, 20 % loss": (
        lambda p, seed: topologies.d_cliques(p, seed=seed),
        87.1,
        LOSS | {"clique_averaging": False},
    ),
    "one-peer exponential": (lambda p, seed: topologies.one_peer_exponential(100, seed=seed), 80.3, {}),
    "Base-2": (lambda p, seed: topologies.base_graph(100, 1, seed=seed), 81.1, {}),
    "Base-5": (lambda p, seed: topologies.base_graph(100, 4, seed=seed), 86.8, {}),
    "random matchings": (lambda p, seed: topologies.random_matchings(100, seed=seed), 81.2, {}),
    "exponential": (lambda p, seed: topologies.exponential(100, seed=seed), 87.7, {}),
    "EL-Oracle": (lambda p, seed: topologies.epidemic(100, 10, seed=seed), 88.2, {}),
    "EL-Local": (lambda p, seed: topologies.epidemic(100, 10, local=True, seed=seed), 88.2, {}),
    "STL-FW, degree 5": (lambda p, seed: topologies.stl_fw(p, 5, seed=seed), 88.3, {}),
    "STL-FW, degree 10": (lambda p, seed: topologies.stl_fw(p, 10, seed=seed), 88.6, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KNOWN)
def test_accuracy_after_20_epochs(name):
    build, known, more = KNOWN[name]
    averaging = {"clique_averaging": more["clique_averaging"]} if "clique_averaging" in more else {}
    dataset = datasets.mnist_5k()
    data = [partitions.shards(dataset, 100, seed=seed) for seed in SEEDS]
    result = simulate(
        [build(each.label_distribution, seed) for each, seed in zip(data, SEEDS, strict=True)],
        data,
        algorithm=algorithms.dsgd(optax.sgd(0.05), **averaging),
        init={"Dense_0": {"kernel": np.zeros((784, 10), np.float32), "bias": np.zeros(10, np.float32)}},
        batch_size=10,
        epochs=20,
        eval_every=20,
        seeds=SEEDS,
        faults=more.get("faults"),
        progress=False,
    )
    accuracy = 100 * result.history.accuracy[:, -1]
    print(name, accuracy.mean(axis=1), accuracy.min(), accuracy.max())
    assert accuracy.mean() == pytest.approx(known, abs=2.5)
