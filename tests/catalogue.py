"""Every public topology, partition, data set, model and algorithm, in a small version: the contract tests run on all.

A name is that of the public function, with a variant in brackets. `test_catalogue.py` fails when a function is missing.
"""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import networkx as nx
import numpy as np
import optax
import pytest

import reference
from dcliques_jax import algorithms, cliques, compressors, datasets, mixing, models, partitions, topologies

NODES, CLASSES = 20, 5
CORNERS = 16  # nodes of the hypercube, whose number is a power of two
ONE_CLASS = np.eye(CLASSES)[np.arange(NODES) % CLASSES]  # label distribution of nodes that hold one class each


@functools.cache
def dataset():
    return datasets.synthetic(num_train=400, num_test=60, num_classes=CLASSES, input_shape=(6,), seed=3)


def nodes_of(topology_name):
    return CORNERS if topology_name == "hypercube" else NODES


def _removed(label_distribution):
    return topologies.remove_intra_clique_edges(topologies.d_cliques(label_distribution, clique_size=5), 2, seed=1)


def _mocked_tfds():
    tfds = pytest.importorskip("tensorflow_datasets", reason="needs dcliques_jax[tfds]")
    with tfds.testing.mock_data(num_examples=200):
        return datasets.from_tfds("mnist")


def _line_of_cliques(members, rng):
    return [(rng.choice(a), rng.choice(b)) for a, b in itertools.pairwise(members)]


# Undirected graphs with Metropolis-Hastings weights.
GRAPHS = {
    "ring": lambda p: topologies.ring(NODES, seed=1),
    "grid": lambda p: topologies.grid(4, 5, seed=1),
    "torus": lambda p: topologies.torus(4, 5, seed=1),
    "hypercube": lambda p: topologies.hypercube(CORNERS, seed=1),
    "fully_connected": lambda p: topologies.fully_connected(NODES),
    "random_regular": lambda p: topologies.random_regular(NODES, 4, seed=1),
    "diverse_random": lambda p: topologies.diverse_random(ONE_CLASS, 5, seed=1),
    "from_edges": lambda p: topologies.from_edges(
        NODES, [(i, i + 1) for i in range(NODES - 1)] + [(0, 7), (3, 9)], clique_ids=np.arange(NODES) // 4
    ),
    "from_networkx": lambda p: topologies.from_networkx(nx.star_graph(NODES - 1)),
    "d_cliques[ring]": lambda p: topologies.d_cliques(p, clique_size=5, inter="ring", seed=1),
    "d_cliques[fractal]": lambda p: topologies.d_cliques(p, clique_size=3, inter="fractal", seed=1),
    "d_cliques[small_world]": lambda p: topologies.d_cliques(p, clique_size=4, inter="small_world", seed=1),
    "d_cliques[fully_connected]": lambda p: topologies.d_cliques(p, clique_size=5, seed=1),
    "d_cliques[uneven]": lambda p: topologies.d_cliques(p, clique_size=6, max_steps=50, seed=1),
    "d_cliques[ideal]": lambda p: topologies.d_cliques(p, cliques=cliques.ideal_cliques(ONE_CLASS)),
    "d_cliques[one]": lambda p: topologies.d_cliques(p, clique_size=NODES),
    "d_cliques[own wiring]": lambda p: topologies.d_cliques(p, clique_size=5, inter=_line_of_cliques, seed=1),
    "remove_intra_clique_edges": _removed,
}

# Topologies with gossip matrices of their own.
WITH_MATRICES = {
    "exponential": lambda p: topologies.exponential(NODES, seed=1),
    "one_peer_exponential": lambda p: topologies.one_peer_exponential(NODES, seed=1),
    "base_graph": lambda p: topologies.base_graph(NODES, 2, seed=1),
    "random_matchings": lambda p: topologies.random_matchings(NODES, seed=1),
    "epidemic": lambda p: topologies.epidemic(NODES, 3, seed=1),
    "epidemic[local]": lambda p: topologies.epidemic(NODES, 3, local=True, seed=1),
    "stl_fw": lambda p: topologies.stl_fw(p, 4, seed=1),
    "from_matrices": lambda p: topologies.from_matrices(_lazy(topologies.ring(NODES, seed=1))),
    # As many matrices as one_peer_exponential and base_graph have, so that one program holds all three.
    "sequence": lambda p: topologies.sequence(
        [(topologies.exponential if seed % 2 else topologies.ring)(NODES, seed=seed) for seed in range(5)]
    ),
}

TOPOLOGIES = GRAPHS | WITH_MATRICES
STATIC = tuple(GRAPHS)  # those that reports and the reference know

# What the gossip matrices of a topology keep besides rows that sum to 1: "symmetric", "columns" or only "rows".
PROMISES = dict.fromkeys(GRAPHS, "symmetric") | {
    "exponential": "columns",
    "one_peer_exponential": "columns",
    "base_graph": "symmetric",
    "random_matchings": "symmetric",
    "epidemic": "symmetric",
    "epidemic[local]": "rows",
    "stl_fw": "columns",
    "from_matrices": "symmetric",
    "sequence": "columns",
}

PARTITIONS = {
    "iid": lambda data, n, seed=0: partitions.iid(data, n, seed=seed),
    "balanced_iid": lambda data, n, seed=0: partitions.balanced_iid(data, n, seed=seed),
    "shards": lambda data, n, seed=0: partitions.shards(data, n, unequal=True, seed=seed),
    "one_class": lambda data, n, seed=0: partitions.one_class(data, n, seed=seed),
    "dirichlet": lambda data, n, seed=0: partitions.dirichlet(data, n, alpha=0.5, seed=seed),
    "lin_dirichlet": lambda data, n, seed=0: partitions.lin_dirichlet(data, n, alpha=0.5, seed=seed),
    "k_classes": lambda data, n, seed=0: partitions.k_classes(data, n, k=2, seed=seed),
    "by_group": lambda data, n, seed=0: partitions.by_group(data, n, groups=np.arange(400) // 10, seed=seed),
    "feature_shift": lambda data, n, seed=0: partitions.feature_shift(
        data, n, transforms=[lambda x: x, lambda x: -x], seed=seed
    ),
    "from_indices": lambda data, n, seed=0: partitions.from_indices(data, [range(i, 2 * i + 3) for i in range(n)]),
}

DATASETS = {
    "synthetic": lambda data_dir: datasets.synthetic(),
    "mnist_5k": lambda data_dir: datasets.mnist_5k(),
    "mnist": lambda data_dir: datasets.mnist(data_dir),
    "cifar10": lambda data_dir: datasets.cifar10(data_dir),
    "from_tfds": lambda data_dir: _mocked_tfds(),
    "from_arrays": lambda data_dir: datasets.from_arrays(np.eye(3), [0, 1, 2], np.eye(3), [0, 1, 2]),
}

MODELS = {
    "mlp": (models.mlp, (28, 28, 1), 159010),
    "logistic_regression": (models.logistic_regression, (28, 28, 1), 7850),
    "gn_lenet": (models.gn_lenet, (32, 32, 3), 85354),
    "resnet20": (models.resnet20, (8, 8, 3), 272474),
    "resnet18": (models.resnet18, (8, 8, 3), 11173962),
    "vgg11": (models.vgg11, (32, 32, 3), 9750922),
}


def _lazy(topology):
    """Half of Metropolis-Hastings, half of oneself."""
    return (np.eye(topology.num_nodes) + mixing.metropolis_hastings(topology).to_dense()) / 2


def _averaged(topology):
    """W and G of D-SGD with Clique Averaging, if there are cliques."""
    n, w = topology.num_nodes, reference.metropolis_hastings(topology.num_nodes, topology.edges)
    if topology.clique_ids is None:
        return w, np.eye(n)
    inside = [(i, j) for i, j in topology.edges if topology.clique_ids[i] == topology.clique_ids[j]]
    return w, reference.neighbourhood_average(n, inside)


def _plain(topology):
    return reference.metropolis_hastings(topology.num_nodes, topology.edges), np.eye(topology.num_nodes)


def _own(topology):
    n = topology.num_nodes
    w = reference.metropolis_hastings(n, topology.edges)
    return (np.eye(n) + w) / 2, reference.neighbourhood_average(n, topology.edges)


class Method(NamedTuple):
    """An algorithm, and the twin that it must equal."""

    make: Callable[..., algorithms.Algorithm]  # of the topology, since matrices belong to one
    twin: Callable  # in `reference`; those other than `dsgd` are held against it in test_rivals.py
    matrices: Callable | None = None  # topology -> W and G, for `reference.dsgd`
    rate: float = 0.1
    momentum: float = 0.0


SGD = optax.sgd(0.1)
HEAVY = optax.sgd(0.05, momentum=0.9)
ALGORITHMS = {
    "dsgd": Method(lambda topology: algorithms.dsgd(SGD, clique_averaging=False), reference.dsgd, _plain),
    "dsgd[clique averaging]": Method(lambda topology: algorithms.dsgd(SGD), reference.dsgd, _averaged),
    "dsgd[momentum]": Method(
        lambda topology: algorithms.dsgd(HEAVY, clique_averaging=False), reference.dsgd, _plain, 0.05, 0.9
    ),
    "dsgd[momentum, clique averaging]": Method(
        lambda topology: algorithms.dsgd(HEAVY), reference.dsgd, _averaged, 0.05, 0.9
    ),
    "dsgd[own matrices]": Method(
        lambda topology: algorithms.dsgd(
            SGD,
            weights=_lazy(topology),
            gradient_weights=mixing.neighbourhood_average(topology.num_nodes, topology.edges),
        ),
        reference.dsgd,
        _own,
    ),
    "gradient_tracking": Method(lambda topology: algorithms.gradient_tracking(SGD), reference.gradient_tracking),
    "d2": Method(lambda topology: algorithms.d2(SGD), reference.d2),
    "gossip_momentum": Method(lambda topology: algorithms.gossip_momentum(0.05), reference.gossip_momentum),
    "quasi_global_momentum": Method(
        lambda topology: algorithms.quasi_global_momentum(0.05), reference.quasi_global_momentum
    ),
    "push_sum": Method(lambda topology: algorithms.push_sum(SGD), reference.push_sum),
    "choco": Method(lambda topology: algorithms.choco(SGD, compressors.top_k(0.5), 0.3), reference.choco),
    "local_steps": Method(lambda topology: algorithms.local_steps(algorithms.dsgd(SGD), 2), reference.descent),
    "repeated_gossip": Method(lambda topology: algorithms.repeated_gossip(algorithms.dsgd(SGD), 2), reference.descent),
    "repeated_gossip[chebyshev]": Method(
        lambda topology: algorithms.repeated_gossip(algorithms.dsgd(SGD), 3, chebyshev=True),
        reference.chebyshev_descent,
    ),
    "sam": Method(lambda topology: algorithms.sam(algorithms.dsgd(SGD), 0.05), reference.descent),
}
