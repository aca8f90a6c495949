"""A data set and who holds which part of it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dcliques_jax import _arrays, _checks, _html, _random
from dcliques_jax.datasets import Dataset

SAMPLINGS = ("epochs", "full_batches", "with_replacement")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PartitionedDataset:
    """A data set and the training examples that each node holds. Use `partitions.from_indices` to make one.

    Its arrays are read-only.
    """

    dataset: Dataset
    indices: np.ndarray  # [nodes, width] int32 into the training examples, padded with -1
    sizes: np.ndarray  # [nodes] number of examples
    sampling: str = "epochs"  # how nodes take batches, see `sampled`
    test_indices: np.ndarray | None = None  # [nodes, width] int32 into the test examples, padded with -1

    def __post_init__(self) -> None:
        num_train = len(checked(self.dataset).train_labels)
        _check_held(np.asarray(self.indices), np.asarray(self.sizes), num_train)
        _checks.choice("sampling", self.sampling, SAMPLINGS)
        if self.test_indices is not None:
            _check_tests(np.asarray(self.test_indices), len(self.sizes), len(self.dataset.test_labels))
            object.__setattr__(self, "test_indices", _arrays.read_only(self.test_indices, np.int32))
        object.__setattr__(self, "indices", _arrays.read_only(self.indices, np.int32))
        object.__setattr__(self, "sizes", _arrays.read_only(self.sizes, np.int64))

    __reduce__ = _arrays.rebuilt

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.sizes)

    def sampled(self, how: str) -> "PartitionedDataset":
        """Chooses how nodes take batches.

        Args:
          how: `"epochs"`: every example once per epoch, with a short last batch, and smaller batches at smaller nodes.
            `"full_batches"`: full batches only, as batch normalisation needs; an epoch has as many as the smallest node
            can fill, and the rest of the order, which is drawn for every epoch, is dropped. `"with_replacement"`: full
            batches of independent, uniform draws from the node's examples.

        >>> from dcliques_jax import datasets, partitions
        >>> partitions.iid(datasets.synthetic(), 4).sampled("with_replacement").sampling
        'with_replacement'
        """
        return dataclasses.replace(self, sampling=how)

    def with_tests(self, indices: Sequence[npt.ArrayLike]) -> "PartitionedDataset":
        """Gives every node test examples of its own, on which `history.local_accuracy` is measured.

        Args:
          indices: one list of indices into the test examples per node. Lists may overlap and differ in length.
        """
        return dataclasses.replace(self, test_indices=padded_lists(indices)[0])

    def with_local_tests(self, *, seed: int = 0) -> "PartitionedDataset":
        """Gives every node test examples with the label distribution of its training examples.

        Of every class, a node gets its share of that class in its training examples times the number of test examples
        per node, rounded up, without repetition (as DisPFL does). Nodes may have the same examples.

        Args:
          seed: seed of the choice.

        >>> from dcliques_jax import datasets, partitions
        >>> data = partitions.shards(datasets.synthetic(num_test=200), 10).with_local_tests()
        >>> data.test_indices.shape
        (10, 20)
        """
        labels, rng = with_classes(self.dataset).test_labels, _random.generator(seed)
        of_class = [np.flatnonzero(labels == label) for label in range(self.dataset.num_classes)]
        wanted = -(-self.label_counts * len(labels) // (self.sizes[:, None] * self.num_nodes))  # rounded up, exactly
        held = [
            np.concatenate([rng.permutation(rows)[:count] for rows, count in zip(of_class, counts, strict=True)])
            for counts in wanted
        ]
        return self.with_tests(held)

    @property
    def label_counts(self) -> np.ndarray:
        """Number of examples of each class at each node, `[nodes, classes]`."""
        with_classes(self.dataset)
        nodes, _ = held = np.nonzero(self.indices >= 0)
        counts = np.zeros((self.num_nodes, self.dataset.num_classes), np.int64)
        np.add.at(counts, (nodes, self.dataset.train_labels[self.indices[held]]), 1)
        return counts

    @property
    def label_distribution(self) -> np.ndarray:
        """The local label distributions p_i(y), `[nodes, classes]`. Each row sums to 1."""
        return self.label_counts / self.sizes[:, None]

    def plot(self, ax: Any = None) -> Any:
        """Draws how many examples of each label every node holds."""
        from dcliques_jax import plotting

        return plotting.plot_partition(self, ax=ax)

    def __repr__(self) -> str:
        smallest, largest = self.sizes.min(), self.sizes.max()
        each = f"{smallest}" if smallest == largest else f"{smallest} to {largest}"
        return f"PartitionedDataset({self.dataset.name!r}, num_nodes={self.num_nodes}, {each} examples per node)"

    def _repr_html_(self) -> str:
        rows = [
            ("nodes", f"{self.num_nodes:,}"),
            ("examples per node", _html.span(self.sizes.min(), self.sizes.max())),
        ]
        if self.dataset.target_kind == "classes":
            labels = (self.label_counts > 0).sum(axis=1)
            rows.append(("labels per node", f"{_html.span(labels.min(), labels.max())} of {self.dataset.num_classes}"))
        return _html.table(self.dataset.name, rows)


def padded_lists(indices: Sequence[npt.ArrayLike]) -> tuple[np.ndarray, np.ndarray]:
    """Returns lists of integers as one array, padded with -1, and their lengths."""
    if len(indices) == 0:
        raise ValueError("a partition needs at least one node")
    rows = [np.asarray(row).reshape(-1) for row in indices]
    for node, row in enumerate(rows):
        if row.dtype.kind not in "iu" and row.size:
            raise ValueError(f"indices[{node}] must be integers, not {row.dtype}")
    sizes = np.array([len(row) for row in rows])
    held = np.concatenate([row for row in rows if len(row)] or rows)  # empty lists have type float
    padded = np.full((len(rows), sizes.max()), -1, np.int64)
    padded[np.arange(sizes.max()) < sizes[:, None]] = held
    return padded, sizes


def checked(dataset: Dataset) -> Dataset:
    if not isinstance(dataset, Dataset):
        raise ValueError(f"dataset={dataset!r} is not a Dataset: build one with dcliques_jax.datasets")
    return dataset


def with_classes(dataset: Dataset) -> Dataset:
    """Returns the data set if every example has one class."""
    if checked(dataset).target_kind != "classes":
        raise ValueError(
            f"{dataset.name} has {dataset.target_kind} instead of one class per example, and this needs classes: use "
            "partitions.iid, by_group or from_indices"
        )
    return dataset


def _check_tests(indices: np.ndarray, num_nodes: int, num_test: int) -> None:
    if indices.dtype.kind not in "iu" or indices.ndim != 2 or len(indices) != num_nodes:
        raise ValueError(f"test_indices of shape {indices.shape} must be integers [nodes, width] for {num_nodes} nodes")
    if (without := (indices < 0).all(axis=1)).any():
        raise ValueError(f"node {without.argmax()} has no test example: every node needs at least one")
    if indices.min() < -1 or indices.max() >= num_test:
        raise ValueError(
            f"test_indices range from {indices.min()} to {indices.max()}, but there are {num_test} test examples"
        )


def _check_held(indices: np.ndarray, sizes: np.ndarray, num_train: int) -> None:
    """Checks that row i of the indices holds `sizes[i]` examples and then -1."""
    if indices.dtype.kind not in "iu" or sizes.dtype.kind not in "iu":
        wrong = indices if indices.dtype.kind not in "iu" else sizes
        raise ValueError(f"indices and sizes must be integers, not {wrong.dtype}")
    if indices.ndim != 2 or len(indices) == 0 or sizes.shape != indices.shape[:1]:
        raise ValueError(
            f"indices of shape {indices.shape} and sizes of shape {sizes.shape} must be [nodes, width] and "
            "[nodes], with at least one node: partitions.from_indices makes both from one list per node"
        )
    if sizes.min() <= 0:
        raise ValueError(f"node {sizes.argmin()} holds no example: every node needs at least one")
    if sizes.max() > indices.shape[1]:
        raise ValueError(
            f"sizes[{sizes.argmax()}]={sizes.max()} is more than the {indices.shape[1]} columns of indices: sizes "
            "count the examples of each node"
        )
    used = np.arange(indices.shape[1]) < sizes[:, None]
    held, padding = indices[used], indices[~used]
    if held.min() < 0 or held.max() >= num_train:
        raise ValueError(f"indices range from {held.min()} to {held.max()}, but there are {num_train} examples")
    if (padding != -1).any():
        node = np.flatnonzero(((indices != -1) & ~used).any(axis=1))[0]
        raise ValueError(
            f"indices[{node}] must be -1 past the {sizes[node]} examples of the node, not "
            f"{indices[node, sizes[node] :].tolist()}"
        )
