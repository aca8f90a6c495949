"""Every public topology, partition, data set, model and algorithm, in a small version: the contract tests run on all.

A name is that of the public function, with a variant in brackets. `test_catalogue.py` fails when a function is missing.
"""

import functools
import itertools

import networkx as nx
import numpy as np
import optax
import pytest

from dcliques_jax import algorithms, cliques, datasets, mixing, models, partitions, topologies

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
    "sequence": lambda p: topologies.sequence([topologies.ring(NODES, seed=1), topologies.exponential(NODES, seed=2)]),
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
    "shards": lambda data, n, seed=0: partitions.shards(data, n, unequal=True, seed=seed),
    "one_class": lambda data, n, seed=0: partitions.one_class(data, n, seed=seed),
    "dirichlet": lambda data, n, seed=0: partitions.dirichlet(data, n, alpha=0.5, seed=seed),
    "lin dirichlet": lambda data, n, seed=0: partitions.lin_dirichlet(data, n, alpha=0.5, seed=seed),
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
}


def _lazy(topology):
    """Half of Metropolis-Hastings, half of oneself."""
    return (np.eye(topology.num_nodes) + mixing.metropolis_hastings(topology).to_dense()) / 2


# Functions of the topology, since matrices belong to one.
ALGORITHMS = {
    "dsgd": lambda topology: algorithms.dsgd(optax.sgd(0.1), clique_averaging=False),
    "dsgd[clique averaging]": lambda topology: algorithms.dsgd(optax.sgd(0.1)),
    "dsgd[momentum]": lambda topology: algorithms.dsgd(optax.sgd(0.05, momentum=0.9), clique_averaging=False),
    "dsgd[momentum, clique averaging]": lambda topology: algorithms.dsgd(optax.sgd(0.05, momentum=0.9)),
    "dsgd[own matrices]": lambda topology: algorithms.dsgd(
        optax.sgd(0.1),
        weights=_lazy(topology),
        gradient_weights=mixing.neighbourhood_average(topology.num_nodes, topology.edges),
    ),
    "dsgd[adam]": lambda topology: algorithms.dsgd(optax.adam(0.01)),
}
