"""Features of nodes: cliques mix domains as known, and the figures of gradients follow."""

import numpy as np
import pytest
import scipy.ndimage

from dcliques_jax import cliques, datasets, features, mixing, partitions, topologies

NODES, SIZE = 100, 10
TURNS = np.arange(NODES) % 4


def rotated(seed):
    """Real digits, four of each class at every node; node i sees them turned by 90 degrees x (i % 4)."""
    dataset = datasets.mnist_5k()
    rng = np.random.default_rng(seed)
    of_class = [rng.permutation(np.flatnonzero(dataset.train_labels == label)).reshape(NODES, 4) for label in range(10)]
    held = np.concatenate(of_class, axis=1)
    images = dataset.train_inputs.copy()
    for node, rows in enumerate(held):
        images[rows] = np.rot90(images[rows], TURNS[node], axes=(1, 2))
    turned = datasets.from_arrays(images, dataset.train_labels, dataset.test_inputs, dataset.test_labels)
    return partitions.from_indices(turned, held)


def rotation_skew(ids):
    return cliques.skew(ids, np.eye(4)[TURNS]).mean()


def gradients(data):
    """Of logistic regression at 0, for all examples of each node."""
    dataset = data.dataset
    error = 0.1 - np.eye(10)[dataset.train_labels]
    flat = dataset.train_inputs.reshape(len(error), -1)
    with_bias = np.concatenate([flat, np.ones((len(flat), 1))], axis=1)
    return np.stack([(with_bias[rows].T @ error[rows] / len(rows)).ravel() for rows in data.indices])


KINDS = {
    "mean image": (features.mean_image, 0.200, 0.967),
    "random Fourier": (features.random_fourier, 0.200, 0.961),
    "prototypes": (features.prototypes, 0.200, 0.955),
}


@pytest.mark.parametrize("kind", KINDS)
def test_cliques_by_features_mix_rotations(kind):
    """The best possible skew of four rotations in cliques of ten is 0.2; cliques by labels stay at random."""
    make, expected, bias = KINDS[kind]
    skews, biases = [], []
    for seed in range(3):
        data = rotated(seed)
        ids = cliques.greedy_swap(make(data), SIZE, max_steps=2000, seed=seed)
        skews.append(rotation_skew(ids))
        all_gradients = gradients(data)
        means = np.stack([all_gradients[ids == clique].mean(axis=0) for clique in range(NODES // SIZE)])
        biases.append(np.square(means - all_gradients.mean(axis=0)).sum(axis=1).mean())
    assert np.mean(skews) == pytest.approx(expected, abs=0.03)
    assert np.mean(biases) == pytest.approx(bias, rel=0.1)


def in_ten_ways(seed):
    """Real digits, four of each class at every node: turned, turned and inverted, or blurred."""
    data = rotated(seed)
    images, plain = data.dataset.train_inputs.copy(), datasets.mnist_5k().train_inputs
    for node, rows in enumerate(data.indices):
        way = node % 10
        seen = np.rot90(plain[rows], way % 4, axes=(1, 2))
        if 4 <= way < 8:
            seen = 1 - seen
        elif way >= 8:
            seen = scipy.ndimage.gaussian_filter(plain[rows], (0, way - 7, way - 7, 0))
        images[rows] = seen
    seen = datasets.from_arrays(images, data.dataset.train_labels, data.dataset.test_inputs, data.dataset.test_labels)
    return partitions.from_indices(seen, data.indices)


def test_cliques_by_features_mix_ten_domains():
    """Skew of the ten domains in cliques, and heterogeneity H(W) = mean_i |sum_j W_ij g_j - mean g|^2, on average."""
    domains = np.eye(10)[np.arange(NODES) % 10]
    found = {"random": [], "random Fourier": [], "known": []}
    for seed in range(3):
        data = in_ten_ways(seed)
        given = {"random Fourier": features.random_fourier(data), "known": domains}
        ids = {name: cliques.greedy_swap(rows, SIZE, max_steps=3000, seed=seed) for name, rows in given.items()}
        ids["random"] = cliques.random_cliques(NODES, SIZE, seed=seed)
        all_gradients = gradients(data)
        for name, of_nodes in ids.items():
            topology = topologies.d_cliques(data.label_distribution, cliques=of_nodes, seed=seed)
            mixed = mixing.metropolis_hastings(topology).to_dense() @ all_gradients
            heterogeneity = np.square(mixed - all_gradients.mean(axis=0)).sum(axis=1).mean()
            found[name].append((cliques.skew(of_nodes, domains).mean(), heterogeneity))
    means = {name: np.mean(values, axis=0) for name, values in found.items()}
    assert means["known"] == pytest.approx([0, 0.79], abs=0.03)
    assert means["random Fourier"] == pytest.approx([0.18, 0.81], abs=0.05)
    assert (means["random"] > [0.6, 1.3]).all()


def test_random_cliques_do_not_mix_rotations():
    skews = [rotation_skew(cliques.random_cliques(NODES, SIZE, seed=seed)) for seed in range(20)]
    assert np.mean(skews) == pytest.approx(0.426, abs=0.04)


def test_random_fourier_features_follow_their_formula():
    data = partitions.iid(datasets.synthetic(num_train=40, input_shape=(3,)), 4)
    found = features.random_fourier(data, 5, scale=2.0, seed=7)
    rng = np.random.default_rng([7])
    omega, shift = rng.standard_normal((3, 5)) / 2, rng.uniform(0, 2 * np.pi, 5)
    for node in range(4):
        values = [np.sqrt(2 / 5) * np.cos(data.dataset.train_inputs[i] @ omega + shift) for i in data.indices[node]]
        np.testing.assert_allclose(found[node], np.mean(values, axis=0), rtol=1e-6)


def test_mean_images_are_means_over_blocks():
    data = partitions.iid(datasets.synthetic(num_train=40, input_shape=(8, 6, 2)), 4)
    found = features.mean_image(data, 2).reshape(4, 2, 2, 2)
    for node in range(4):
        mean = data.dataset.train_inputs[data.indices[node]].mean(axis=0)
        np.testing.assert_allclose(found[node, 1, 0], mean[4:, :3].mean(axis=(0, 1)), rtol=1e-5)


def test_labels_and_features_count_the_same_together():
    data = partitions.shards(datasets.synthetic(num_train=400), 20, seed=1)
    parts = (data.label_distribution, features.random_fourier(data))
    joined = features.together(*parts)
    of_blocks = np.split(joined, [10], axis=1)
    deviations = [np.abs(block - block.mean(axis=0)).sum(axis=1).mean() for block in of_blocks]
    np.testing.assert_allclose(deviations, 0.5)
    assert (
        cliques.skew(cliques.greedy_swap(joined, 5), joined).mean()
        < cliques.skew(cliques.random_cliques(20, 5), joined).mean()
    )


def test_labels_that_are_equal_everywhere_do_not_count():
    equal, domains = np.full((1000, 10), 0.1), np.eye(4)[np.arange(1000) % 4]
    np.testing.assert_array_equal(features.together(equal, domains)[:, :10], equal / 2)


@pytest.mark.parametrize("make", [features.mean_image, features.random_fourier, features.prototypes])
def test_features_of_bytes_are_those_of_their_values(make):
    images = np.random.default_rng(0).integers(256, size=(120, 8, 8, 1)).astype(np.uint8)
    labels = np.arange(120) % 4
    found = [
        make(partitions.iid(datasets.from_arrays(values, labels, values, labels), 4))
        for values in (images, images.astype(np.float32))
    ]
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda data: features.mean_image(data), "takes images of at least 7 x 7"),
        (lambda data: features.random_fourier(data, 0), "num_features=0"),
        (lambda data: features.random_fourier(data, scale=0), "scale=0"),
        (lambda data: features.prototypes(data, 0), "count=0"),
        (lambda data: features.together(np.eye(3), np.eye(2)), "for as many nodes each"),
        (lambda data: features.together(np.eye(3), np.full((3, 1), np.nan)), "means 1 hold nan"),
        (lambda data: features.together(), "joins nothing"),
        (lambda data: features.random_fourier(data.dataset), "is not a partition"),
        (lambda data: cliques.greedy_swap(data.label_counts, 2), "divide counts by the number of examples"),
        (lambda data: cliques.greedy_swap(np.full((4, 2), np.inf), 2), "is not a distribution"),
    ],
)
def test_impossible_features_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make(partitions.iid(datasets.synthetic(num_train=100), 4))
