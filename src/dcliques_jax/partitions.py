"""Which node holds which example.

Every partition is a function `(dataset, num_nodes, *, ..., seed) -> PartitionedDataset`. The same seed gives the same
partition.
"""

import bisect
import dataclasses
import heapq
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dcliques_jax import _arrays, _checks, _random
from dcliques_jax._partitions.partitioned import PartitionedDataset, checked, padded_lists, with_classes
from dcliques_jax.datasets import Dataset

__all__ = [
    "PartitionedDataset",
    "balanced_iid",
    "by_group",
    "dirichlet",
    "feature_shift",
    "from_indices",
    "iid",
    "k_classes",
    "lin_dirichlet",
    "one_class",
    "shards",
]

_BLOCK = 10  # nodes among which `lin_dirichlet` splits classes
_MOST_DRAWS = 20_000  # of a block


def from_indices(dataset: Dataset, indices: Sequence[npt.ArrayLike]) -> PartitionedDataset:
    """Gives node i the training examples `indices[i]`.

    Args:
      dataset: the data set.
      indices: one list of indices into the training examples per node. Lists may overlap and differ in length.

    >>> from dcliques_jax import datasets
    >>> from_indices(datasets.synthetic(), [[0, 1, 2], [3, 4]])
    PartitionedDataset('synthetic', num_nodes=2, 2 to 3 examples per node)
    """
    padded, sizes = padded_lists(indices)
    return PartitionedDataset(dataset, padded, _arrays.frozen(sizes))


def iid(dataset: Dataset, num_nodes: int, *, seed: int = 0) -> PartitionedDataset:
    """Deals the shuffled examples out evenly, so that every node sees the global label distribution.

    Args:
      dataset: the data set.
      num_nodes: number of nodes. Sizes differ by at most one if it does not divide the number of examples.
      seed: seed of the shuffle.

    >>> from dcliques_jax import datasets
    >>> iid(datasets.synthetic(num_train=1000), 100)
    PartitionedDataset('synthetic', num_nodes=100, 10 examples per node)
    """
    num_train = len(checked(dataset).train_labels)
    num_nodes = _checks.integer("num_nodes", num_nodes, 1, num_train, "one example per node")
    return from_indices(dataset, np.array_split(_random.generator(seed).permutation(num_train), num_nodes))


def balanced_iid(dataset: Dataset, num_nodes: int, *, seed: int = 0) -> PartitionedDataset:
    """Deals equally many examples of every class out at random: the IID data of the paper's appendix C.

    The examples are those that `one_class` uses with one node per class.

    Args:
      dataset: the data set.
      num_nodes: number of nodes.
      seed: seed of the choice of examples and of the shuffle.

    >>> from dcliques_jax import datasets
    >>> data = balanced_iid(datasets.synthetic(num_train=1000), 20)
    >>> sorted(set(data.label_counts.sum(axis=0).tolist()))
    [100]
    """
    balanced = one_class(dataset, with_classes(dataset).num_classes, seed=seed).indices.ravel()
    num_nodes = _checks.integer("num_nodes", num_nodes, 1, len(balanced), "one example per node")
    return from_indices(dataset, np.array_split(_random.generator(seed).permutation(balanced), num_nodes))


def shards(
    dataset: Dataset, num_nodes: int, *, shards_per_node: int = 2, unequal: bool = False, seed: int = 0
) -> PartitionedDataset:
    """Sorts examples by class and cuts them into shards, as McMahan et al. (2017) and the paper do.

    The examples, shuffled inside each class, are cut into `num_nodes * shards_per_node` shards of equal size. Every
    node gets `shards_per_node` of them at random. A shard may straddle two classes.

    Args:
      dataset: the data set.
      num_nodes: number of nodes.
      shards_per_node: number of shards per node.
      unequal: whether the sizes of shards may differ by one. Otherwise the number of shards must divide the number of
        examples.
      seed: seed of the shuffle and of the choice of shards.

    >>> from dcliques_jax import datasets
    >>> data = shards(datasets.synthetic(num_train=1000), 100, seed=1)
    >>> int((data.label_distribution > 0).sum(axis=1).max())
    2
    """
    num_train = len(with_classes(dataset).train_labels)
    shards_per_node = _checks.integer("shards_per_node", shards_per_node, 1, num_train)
    num_nodes = _checks.integer("num_nodes", num_nodes, 1, num_train // shards_per_node, "one example per shard")
    num_shards = num_nodes * shards_per_node
    if num_train % num_shards and not unequal:
        raise ValueError(
            f"{num_train} examples do not divide into {num_nodes} x {shards_per_node} = {num_shards} equal shards: "
            "choose another num_nodes, or pass unequal=True for shards whose sizes differ by one"
        )
    rng = _random.generator(seed)
    cut = np.array_split(_sorted_by_class(dataset.train_labels, rng), num_shards)
    assigned = rng.permutation(num_shards).reshape(num_nodes, shards_per_node)
    return from_indices(dataset, [np.concatenate([cut[shard] for shard in node]) for node in assigned])


def one_class(
    dataset: Dataset, num_nodes: int, *, examples_per_class: int | None = None, seed: int = 0
) -> PartitionedDataset:
    """Gives every node one class, and every class to equally many nodes: the skew of the paper's appendix C.

    Args:
      dataset: the data set.
      num_nodes: number of nodes, a multiple of the number of classes.
      examples_per_class: number of examples of each class that are used. Defaults to the size of the smallest class,
        rounded down to two digits (MNIST: 4,529 to 4,500, as in the reference experiments, so that 10, 100 and 1,000
        nodes train on the same examples) and then to a multiple of the nodes of a class.
      seed: seed of the choice of examples and nodes.

    >>> from dcliques_jax import datasets
    >>> data = one_class(datasets.synthetic(num_train=1000), 20)
    >>> data, int((data.label_distribution > 0).sum(axis=1).max())
    (PartitionedDataset('synthetic', num_nodes=20, 50 examples per node), 1)
    """
    num_classes = with_classes(dataset).num_classes
    num_nodes = _checks.integer("num_nodes", num_nodes, 1)
    if num_nodes % num_classes:
        raise ValueError(
            f"num_nodes={num_nodes} must be a multiple of the {num_classes} classes, "
            f"such as {max(1, round(num_nodes / num_classes)) * num_classes}"
        )
    nodes_per_class = num_nodes // num_classes
    counts = np.bincount(dataset.train_labels, minlength=num_classes)
    smallest = int(counts.min())
    if smallest < nodes_per_class:
        raise ValueError(
            f"the smallest class, {counts.argmin()}, has {smallest} training examples, too few for its "
            f"{nodes_per_class} nodes"
        )
    if examples_per_class is None:
        unit = 10 ** max(0, len(str(smallest)) - 2)
        rounded = smallest // unit * unit
        usable = rounded if rounded >= nodes_per_class else smallest
        examples_per_class = usable // nodes_per_class * nodes_per_class
    examples_per_class = _checks.integer("examples_per_class", examples_per_class, 0)
    if not nodes_per_class <= examples_per_class <= smallest or examples_per_class % nodes_per_class:
        raise ValueError(
            f"examples_per_class={examples_per_class} must be a positive multiple of {nodes_per_class}, the nodes per "
            f"class, and at most {smallest}, the size of the smallest class"
        )
    rng = _random.generator(seed)
    ordered = _sorted_by_class(dataset.train_labels, rng)
    starts = np.searchsorted(dataset.train_labels[ordered], np.arange(num_classes))
    kept = ordered[starts[:, None] + np.arange(examples_per_class)]
    return from_indices(dataset, list(rng.permutation(kept.reshape(num_nodes, -1))))


def dirichlet(
    dataset: Dataset, num_nodes: int, *, alpha: float, min_size: int = 1, seed: int = 0
) -> PartitionedDataset:
    """Distributes each class over the nodes in proportions drawn from a Dirichlet distribution.

    Args:
      dataset: the data set.
      num_nodes: number of nodes. Their sizes differ.
      alpha: concentration of the distribution. Small values give strong skew, large values come close to `iid`.
      min_size: smallest number of examples per node. Smaller nodes get random examples of the largest node.
      seed: seed of proportions and examples.

    >>> from dcliques_jax import datasets
    >>> data = dirichlet(datasets.synthetic(num_train=1000), 10, alpha=0.5)
    >>> data.num_nodes, int(data.sizes.sum())
    (10, 1000)
    """
    _check_concentration(alpha)
    num_train = len(with_classes(dataset).train_labels)
    min_size = _checks.integer("min_size", min_size, 1, num_train)
    num_nodes = _checks.integer("num_nodes", num_nodes, 1, num_train // min_size, "min_size examples per node")
    rng = _random.generator(seed)
    owner = np.empty(num_train, np.int64)  # [train] the node that holds an example
    for label in range(dataset.num_classes):
        examples = rng.permutation(np.flatnonzero(dataset.train_labels == label))
        proportions = rng.dirichlet(np.full(num_nodes, alpha))
        bounds = np.round(np.cumsum(proportions) * len(examples)).astype(np.int64)
        owner[examples] = np.minimum(np.searchsorted(bounds, np.arange(len(examples)), side="right"), num_nodes - 1)
    sizes = np.bincount(owner, minlength=num_nodes)
    held = np.split(np.argsort(owner, kind="stable"), np.cumsum(sizes)[:-1])  # examples of each node, in order
    return from_indices(dataset, _topped_up([row.tolist() for row in held], min_size, rng))


def _check_concentration(alpha: Any) -> None:
    if not isinstance(alpha, (int, float, np.floating)) or not 0 < alpha <= 1e6:
        raise ValueError(f"alpha={alpha!r} must be positive and at most 1e6, which is close to IID")


def lin_dirichlet(dataset: Dataset, num_nodes: int, *, alpha: float, seed: int = 0) -> PartitionedDataset:
    """Distributes classes by Dirichlet distributions over nodes of equal sizes (Lin et al., ICML 2021).

    Nodes come in blocks of 10, each with its share of the shuffled examples. In a block, every class is split in
    proportions drawn from a Dirichlet distribution over the nodes that hold less than the average. A block is drawn
    again until its smallest node has at least half of the average. In the end, the examples of all nodes, one after the
    other and class by class, are cut into equal parts.

    Args:
      dataset: the data set.
      num_nodes: number of nodes.
      alpha: concentration of the distribution. Small values give strong skew, large values come close to `iid`.
      seed: seed of proportions and examples.

    >>> from dcliques_jax import datasets
    >>> data = lin_dirichlet(datasets.synthetic(num_train=1000), 16, alpha=0.1)
    >>> int(data.sizes.min()), int(data.sizes.max())
    (62, 63)
    """
    _check_concentration(alpha)
    num_train = len(with_classes(dataset).train_labels)
    num_nodes = _checks.integer("num_nodes", num_nodes, 1, num_train, "the number of training examples")
    rng = _random.generator(seed)
    starts = np.arange(0, num_nodes, _BLOCK)
    blocks = np.split(rng.permutation(num_train), np.round(starts[1:] / num_nodes * num_train).astype(np.int64))
    sizes = np.diff([*starts, num_nodes])
    held = [
        _split_block(rows, dataset.train_labels[rows], n, alpha, rng) for rows, n in zip(blocks, sizes, strict=True)
    ]
    return from_indices(dataset, np.array_split(np.concatenate(held), num_nodes))


def k_classes(dataset: Dataset, num_nodes: int, *, k: int, seed: int = 0) -> PartitionedDataset:
    """Gives every node equally many examples of k random classes.

    All classes go to equally many nodes, up to one. A few examples stay unused if numbers do not divide.

    Args:
      dataset: the data set.
      num_nodes: number of nodes.
      k: number of classes per node.
      seed: seed of classes and examples.

    >>> from dcliques_jax import datasets
    >>> data = k_classes(datasets.synthetic(num_train=1000), 20, k=2)
    >>> set((data.label_counts > 0).sum(axis=1).tolist()), set(data.sizes.tolist())
    ({2}, {50})
    """
    classes = with_classes(dataset).num_classes
    num_nodes = _checks.integer("num_nodes", num_nodes, 1)
    k = _checks.integer("k", k, 1, classes, "the number of classes")
    rng = _random.generator(seed)
    load, chosen = np.zeros(classes), np.zeros((num_nodes, classes), bool)
    for node in range(num_nodes):  # the classes that fewest nodes have so far, in random order
        chosen[node, np.lexsort((rng.random(classes), load))[:k]] = True
        load = chosen.sum(axis=0)
    examples = [rng.permutation(np.flatnonzero(dataset.train_labels == label)) for label in range(classes)]
    share = min(len(rows) // count for rows, count in zip(examples, load, strict=True) if count)
    if share == 0:
        raise ValueError(f"num_nodes={num_nodes} and k={k}: a class has fewer examples than nodes; use fewer nodes")
    turns = np.cumsum(chosen, axis=0) - 1  # [nodes, classes] how many earlier nodes have the class
    held = [
        np.concatenate(
            [examples[c][share * turns[node, c] : share * (turns[node, c] + 1)] for c in np.flatnonzero(own)]
        )
        for node, own in enumerate(chosen)
    ]
    return from_indices(dataset, held)


def by_group(dataset: Dataset, num_nodes: int, *, groups: npt.ArrayLike, seed: int = 0) -> PartitionedDataset:
    """Keeps the examples of a group, such as a writer, a role or a user, on one node.

    Args:
      dataset: the data set.
      num_nodes: number of nodes, at most the number of groups. With fewer nodes, groups are dealt in random order, each
        to the node with the fewest groups.
      groups: the group of each training example, `[train]`, integers or strings.
      seed: seed of the order of groups. With as many nodes as groups, node i has the i-th group in sorted order.

    >>> from dcliques_jax import datasets
    >>> writers = np.repeat(np.arange(25), 40)
    >>> by_group(datasets.synthetic(num_train=1000), 10, groups=writers).sizes
    array([120, 120, 120, 120, 120,  80,  80,  80,  80,  80])
    """
    given = np.asarray(groups)
    if given.shape != (len(checked(dataset).train_labels),):
        raise ValueError(f"groups have shape {given.shape}: pass one for each of {len(dataset.train_labels)} examples")
    names, member = np.unique(given, return_inverse=True)
    num_nodes = _checks.integer("num_nodes", num_nodes, 1, len(names), "the number of groups")
    order = np.arange(len(names))
    if num_nodes < len(names):
        order = _random.generator(seed).permutation(len(names))
    node_of_group = np.empty(len(names), np.int64)
    node_of_group[order] = np.arange(len(names)) % num_nodes
    owner = node_of_group[member]
    return from_indices(dataset, [np.flatnonzero(owner == node) for node in range(num_nodes)])


def feature_shift(
    dataset: Dataset, num_nodes: int, *, transforms: Sequence[Callable[[np.ndarray], np.ndarray]], seed: int = 0
) -> PartitionedDataset:
    """Lets nodes see the same classes in different ways: node i transforms its inputs with `transforms[i % k]`.

    Examples are dealt out evenly, as in `iid`. The test set of the new data set holds every test example in each of the
    k ways, and every node has those in its own way as `test_indices`, on which `history.local_accuracy` is measured.
    Inputs are kept as floats.

    Args:
      dataset: the data set.
      num_nodes: number of nodes.
      transforms: functions of inputs `[examples, ...]` that return as many of the same shape, such as rotations.
      seed: seed of the shuffle.

    >>> from dcliques_jax import datasets
    >>> digits = datasets.synthetic(num_train=100, num_test=20, input_shape=(8, 8, 1))
    >>> turns = [lambda images: images, lambda images: np.rot90(images, 2, axes=(1, 2))]
    >>> data = feature_shift(digits, 10, transforms=turns)
    >>> len(data.dataset.test_labels), data.test_indices.shape
    (40, (10, 20))
    """
    if not transforms or not all(map(callable, transforms)):
        raise ValueError(f"transforms={transforms!r} must be a list of functions of inputs [examples, ...]")
    even = iid(dataset, num_nodes, seed=seed)
    ways, num_test = len(transforms), len(dataset.test_labels)
    train = np.array(dataset.train_inputs, np.result_type(dataset.train_inputs, np.float32))
    for way, transform in enumerate(transforms):
        rows = even.indices[way::ways]
        rows = rows[rows >= 0]
        train[rows] = _transformed(transform, dataset.train_inputs[rows])
    test = np.concatenate([_transformed(transform, dataset.test_inputs) for transform in transforms])
    shifted = dataclasses.replace(
        dataset,
        train_inputs=_arrays.frozen(train),
        test_inputs=_arrays.frozen(test.astype(train.dtype)),
        test_labels=np.concatenate([dataset.test_labels] * ways),
        validation_inputs=None,
        validation_labels=None,
        name=f"{dataset.name}, shifted",
        byte_scale=None,
    )
    own = np.arange(num_test)[None] + num_test * (np.arange(num_nodes) % ways)[:, None]
    return PartitionedDataset(shifted, even.indices, even.sizes, test_indices=own)


def _transformed(transform: Callable[[np.ndarray], np.ndarray], inputs: np.ndarray) -> np.ndarray:
    found = np.asarray(transform(inputs))
    if found.shape != inputs.shape:
        raise ValueError(
            f"a transform returns inputs of shape {found.shape} for {inputs.shape}: it must keep the shape"
        )
    return found


def _split_block(
    examples: np.ndarray, labels: np.ndarray, num_nodes: int, alpha: float, rng: np.random.Generator
) -> np.ndarray:
    """Splits the examples of a block over its nodes; returns those of the first node class by class, and so on."""
    average = len(examples) / num_nodes
    for _ in range(_MOST_DRAWS):
        owner, sizes = np.zeros(len(examples), np.int64), np.zeros(num_nodes, np.int64)
        for label in np.unique(labels):
            rows = np.flatnonzero(labels == label)
            proportions = rng.dirichlet(np.full(num_nodes, alpha)) * (sizes < average)
            if proportions.sum() == 0:  # small values of alpha round to 0
                proportions = np.eye(num_nodes)[sizes.argmin()]
            bounds = np.cumsum(proportions / proportions.sum()) * len(rows)
            owner[rows] = np.searchsorted(np.round(bounds[:-1]), np.arange(len(rows)), side="right")
            sizes += np.bincount(owner[rows], minlength=num_nodes)
        if sizes.min() >= average / 2:
            return np.asarray(examples[np.lexsort((labels, owner))])
    raise ValueError(f"alpha={alpha}: no draw of {_MOST_DRAWS:,} gave every node half of the average; use a larger one")


def _topped_up(held: list[list[int]], min_size: int, rng: np.random.Generator) -> list[list[int]]:
    """Moves random examples of the largest node to nodes with fewer than `min_size`. Rows stay in order."""
    richest = [(-len(row), node) for node, row in enumerate(held)]
    heapq.heapify(richest)
    for poor in [node for node, row in enumerate(held) if len(row) < min_size]:
        while len(held[poor]) < min_size:
            while -richest[0][0] != len(held[richest[0][1]]):  # the heap holds an outdated size
                heapq.heapreplace(richest, (-len(held[richest[0][1]]), richest[0][1]))
            rich = richest[0][1]
            bisect.insort(held[poor], held[rich].pop(rng.integers(len(held[rich]))))
    return held


def _sorted_by_class(labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Lists all examples class by class, in random order inside a class."""
    shuffled = rng.permutation(len(labels))
    return shuffled[np.argsort(labels[shuffled], kind="stable")]
