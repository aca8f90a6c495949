"""What a node's examples look like, as a few numbers: cliques for nodes whose inputs differ, not their labels.

Each function returns the means of some features over every node's training examples, `[nodes, features]`, for
`cliques.greedy_swap` in the place of label distributions. The paper names this as future work.
"""

import warnings

import numpy as np
import numpy.typing as npt
import scipy.cluster.vq

from dcliques_jax import _checks, _random
from dcliques_jax.partitions import PartitionedDataset

_SAMPLE = 1000  # examples that distances and prototypes are computed from
_ROUNDING = 1e-9  # of a mean deviation, in units of the means


def mean_image(data: PartitionedDataset, size: int = 7) -> np.ndarray:
    """Returns the mean image of every node, averaged over blocks to `size` x `size` pixels.

    Args:
      data: a partition of images `[height, width, channels]`.
      size: height and width of the mean images.

    >>> from dcliques_jax import datasets, partitions
    >>> images = datasets.synthetic(num_train=100, input_shape=(28, 28, 1))
    >>> mean_image(partitions.iid(images, 10)).shape
    (10, 49)
    """
    images = _inputs(data)
    size = _checks.integer("size", size, 1)
    if images.ndim != 4 or min(images.shape[1:3]) < size:
        raise ValueError(f"mean_image takes images of at least {size} x {size} pixels, not {images.shape[1:]}")
    rows, columns = ((np.arange(length) * size) // length for length in images.shape[1:3])

    def pooled(examples: np.ndarray) -> np.ndarray:
        mean = examples.mean(axis=0, dtype=np.float64)
        sums, counts = np.zeros((size, size, mean.shape[2])), np.zeros((size, size, 1))
        np.add.at(sums, (rows[:, None], columns[None]), mean)
        np.add.at(counts, (rows[:, None], columns[None]), 1)
        return (sums / counts).ravel()

    return np.stack([pooled(images[_held(data, node)]) for node in range(data.num_nodes)])


def random_fourier(
    data: PartitionedDataset, num_features: int = 64, *, scale: float | None = None, seed: int = 0
) -> np.ndarray:
    """Returns the mean of random Fourier features, whose distances tell distributions apart (Rahimi and Recht, 2007).

        psi(x) = sqrt(2 / D) cos(Omega x + b),   Omega ~ N(0, 1 / s^2),   b ~ U(0, 2 pi)

    Args:
      data: a partition.
      num_features: number D of features.
      scale: the length s. Default: the median distance between examples.
      seed: seed of Omega, b and the examples for the median. All nodes share it.

    >>> from dcliques_jax import datasets, partitions
    >>> random_fourier(partitions.iid(datasets.synthetic(), 10)).shape
    (10, 64)
    """
    num_features = _checks.integer("num_features", num_features, 1)
    inputs = _flat_inputs(data)
    rng = _random.generator(seed)
    if scale is None:
        first, second = (inputs[rng.integers(len(inputs), size=_SAMPLE)].astype(np.float64) for _ in range(2))
        apart = np.sqrt(np.square(first - second).sum(axis=1))
        scale = float(np.median(apart[apart > 0])) if (apart > 0).any() else 1.0
    scale = _checks.real("scale", scale, 1e-30)
    omega = rng.standard_normal((inputs.shape[1], num_features)) / scale
    shift = rng.uniform(0, 2 * np.pi, num_features)

    def mean(examples: np.ndarray) -> np.ndarray:
        return np.sqrt(2 / num_features) * np.cos(examples @ omega + shift).mean(axis=0)

    return np.stack([mean(inputs[_held(data, node)]) for node in range(data.num_nodes)])


def prototypes(data: PartitionedDataset, count: int = 20, *, seed: int = 0) -> np.ndarray:
    """Returns the share of every node's examples that are nearest to each of some prototypes, found by k-means.

    Args:
      data: a partition.
      count: number of prototypes.
      seed: seed of the prototypes and of the examples that they are found on.

    >>> from dcliques_jax import datasets, partitions
    >>> shares = prototypes(partitions.iid(datasets.synthetic(), 10), 5)
    >>> shares.shape, bool(np.allclose(shares.sum(axis=1), 1))
    ((10, 5), True)
    """
    inputs = _flat_inputs(data)
    count = _checks.integer("count", count, 1, len(inputs), "the number of training examples")
    rng = _random.generator(seed)
    sample = inputs[rng.choice(len(inputs), min(len(inputs), max(_SAMPLE, count)), replace=False)].astype(np.float64)
    with warnings.catch_warnings(action="ignore"):  # a prototype without examples stays where it is
        centres, _ = scipy.cluster.vq.kmeans2(sample, sample[:count], iter=30, minit="matrix")

    def shares(examples: np.ndarray) -> np.ndarray:
        nearest, _ = scipy.cluster.vq.vq(examples.astype(np.float64), centres)
        return np.bincount(nearest, minlength=count) / len(examples)

    return np.stack([shares(inputs[_held(data, node)]) for node in range(data.num_nodes)])


def together(*means: npt.ArrayLike) -> np.ndarray:
    """Joins several means of nodes, such as label distributions and features, so that each counts the same.

    Each is scaled to the same mean deviation from its global mean, in the 1-norm. Means that are equal at all nodes are
    left as they are.

    Args:
      *means: arrays `[nodes, features]`.

    >>> together(np.eye(2), [[1.0], [3.0]])
    array([[0.5, 0. , 0.5],
           [0. , 0.5, 1.5]])
    """
    blocks = [np.asarray(block, np.float64) for block in means]
    if not blocks:
        raise ValueError("together() joins nothing: pass means of nodes, [nodes, features]")
    for number, block in enumerate(blocks):
        if block.ndim != 2 or len(block) != len(blocks[0]):
            raise ValueError(f"means of shape {block.shape} must be [nodes, features], for as many nodes each")
        if not np.isfinite(block).all():
            raise ValueError(f"means {number} hold {block[~np.isfinite(block)][0]}: all must be finite")
    return np.concatenate([_scaled(block) for block in blocks], axis=1) / len(blocks)


def _scaled(block: np.ndarray) -> np.ndarray:
    deviation = np.abs(block - block.mean(axis=0)).sum(axis=1).mean()
    return block / deviation if deviation > _ROUNDING * np.abs(block).sum(axis=1).mean() else block


def _inputs(data: PartitionedDataset) -> np.ndarray:
    if not isinstance(data, PartitionedDataset):
        raise ValueError(f"{data!r} is not a partition: divide a data set among nodes with dcliques_jax.partitions")
    return data.dataset.train_inputs


def _flat_inputs(data: PartitionedDataset) -> np.ndarray:
    inputs = _inputs(data)
    return inputs.reshape(len(inputs), -1)


def _held(data: PartitionedDataset, node: int) -> np.ndarray:
    return data.indices[node, : data.sizes[node]]
