"""The setting of one curve of a figure: a data set, its partition, a topology and an algorithm."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import optax

from dcliques_jax import _random, algorithms, cliques, datasets, models, partitions, topologies
from dcliques_jax.algorithms import Algorithm
from dcliques_jax.datasets import Dataset
from dcliques_jax.partitions import PartitionedDataset
from dcliques_jax.topologies import Topology

CLIQUE_SIZE = 10


class Task(NamedTuple):
    """A data set and the training settings of the paper."""

    title: str
    load: Callable[[], Dataset]
    model: Callable[[int], Any]  # from the number of classes
    learning_rate: float
    batch_size: int  # per node, for 100 nodes


TASKS = {
    "mnist": Task("MNIST", datasets.mnist, models.logistic_regression, 0.1, 128),
    "cifar10": Task("CIFAR-10", datasets.cifar10, models.gn_lenet, 0.002, 20),
}


class Setting(NamedTuple):
    """One curve. The defaults are those of most of the paper: D-Cliques of 100 nodes with two shards each."""

    task: str  # "mnist" or "cifar10"
    topology: str = "d_cliques"  # or "ring", "grid", "fully_connected", "random_regular", "diverse_random"
    partition: str = "shards"  # or "iid", and with balanced classes "one_class" and "balanced_iid"
    num_nodes: int = 100
    inter: str = "fully_connected"  # wiring between cliques
    greedy_swap: bool = True  # False: random cliques
    removed_edges: int = 0  # per clique
    averaging: bool = False  # of gradients: Clique Averaging, or over diverse neighbours
    momentum: float = 0.0

    @property
    def name(self) -> str:
        """A unique name that is fit for a file."""
        graph = [self.topology]
        if self.topology == "d_cliques":
            graph += [self.inter, *(["random-cliques"] * (not self.greedy_swap))]
        if self.removed_edges:
            graph.append(f"less-{self.removed_edges}-edges")
        method = ["averaging"] * self.averaging + [f"momentum-{self.momentum:g}"] * (self.momentum > 0)
        return "-".join([self.task, self.partition, str(self.num_nodes), *graph, *method]).replace("_", "-")

    @property
    def batch_size(self) -> int:
        """Batch size per node. It shrinks with the number of nodes, so that epochs have the same number of rounds."""
        return max(1, round(TASKS[self.task].batch_size * 100 / self.num_nodes))

    def algorithm(self) -> Algorithm:
        """Builds D-SGD for this setting."""
        optimizer = optax.sgd(TASKS[self.task].learning_rate, momentum=self.momentum or None)
        return algorithms.dsgd(optimizer, clique_averaging=self.averaging)

    def data(self, dataset: Dataset, seed: int) -> PartitionedDataset:
        """Partitions a data set.

        >>> Setting("mnist", partition="one_class", num_nodes=20).data(datasets.synthetic(), 0)
        PartitionedDataset('synthetic', num_nodes=20, 50 examples per node)
        """
        return PARTITIONS[self.partition](dataset, self.num_nodes, seed)

    def graph(self, label_distribution: np.ndarray, seed: int) -> Topology:
        """Builds the topology for a label distribution `[nodes, classes]`.

        >>> p = np.full((100, 10), 0.1)
        >>> Setting("mnist", inter="ring", removed_edges=5).graph(p, seed=0)
        Topology('D-Cliques (ring), edges removed per clique: 5', num_nodes=100, edges=410, cliques=10)
        """
        graph = TOPOLOGIES[self.topology](self, label_distribution, seed)
        if self.removed_edges:
            return topologies.remove_intra_clique_edges(graph, self.removed_edges, seed=seed)
        return graph


def _balanced_iid(dataset: Dataset, num_nodes: int, seed: int) -> PartitionedDataset:
    """Deals the examples of `one_class` out at random."""
    balanced = partitions.one_class(dataset, dataset.num_classes, seed=seed).indices.ravel()
    return partitions.from_indices(dataset, np.array_split(_random.generator(seed).permutation(balanced), num_nodes))


def _grid(num_nodes: int, seed: int) -> Topology:
    """Makes a grid that is as square as the number of nodes allows."""
    rows = max(rows for rows in range(1, int(num_nodes**0.5) + 1) if num_nodes % rows == 0)
    return topologies.grid(rows, num_nodes // rows, seed=seed)


def _d_cliques(setting: Setting, label_distribution: np.ndarray, seed: int) -> Topology:
    """Uses Greedy Swap or random cliques. For nodes of one class, uses ideal cliques as in appendix C."""
    if setting.partition == "one_class" and setting.greedy_swap:
        ids = cliques.ideal_cliques(label_distribution, seed=seed)
        return topologies.d_cliques(label_distribution, inter=setting.inter, cliques=ids, seed=seed)
    steps = {} if setting.greedy_swap else {"max_steps": 0}
    size = min(CLIQUE_SIZE, setting.num_nodes)
    return topologies.d_cliques(label_distribution, clique_size=size, inter=setting.inter, seed=seed, **steps)


PARTITIONS: dict[str, Callable[[Dataset, int, int], PartitionedDataset]] = {
    "iid": lambda dataset, nodes, seed: partitions.iid(dataset, nodes, seed=seed),
    "balanced_iid": _balanced_iid,
    "shards": lambda dataset, nodes, seed: partitions.shards(dataset, nodes, seed=seed),
    "one_class": lambda dataset, nodes, seed: partitions.one_class(dataset, nodes, seed=seed),
}
TOPOLOGIES: dict[str, Callable[[Setting, np.ndarray, int], Topology]] = {
    "ring": lambda setting, p, seed: topologies.ring(setting.num_nodes, seed=seed),
    "grid": lambda setting, p, seed: _grid(setting.num_nodes, seed),
    "fully_connected": lambda setting, p, seed: topologies.fully_connected(setting.num_nodes),
    "random_regular": lambda setting, p, seed: topologies.random_regular(setting.num_nodes, 10, seed=seed),
    "diverse_random": lambda setting, p, seed: topologies.diverse_random(p, 10, seed=seed),
    "d_cliques": _d_cliques,
}
