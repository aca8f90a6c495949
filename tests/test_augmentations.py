"""Augmentation: what it draws, that it is the same however nodes are stored, and that evaluation has none."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats

from dcliques_jax import algorithms, augmentations, datasets, partitions, prepare, simulate, topologies

IMAGE = jnp.arange(1.0, 1 + 32 * 32 * 3).reshape(32, 32, 3)


def found_variants(count, **more):
    """Offset and flip of each of many augmented images, found by comparison."""
    out = np.asarray(jax.jit(augmentations.crop_and_flip(**more))(jax.random.key(1), jnp.tile(IMAGE, (count, 1, 1, 1))))
    known = {}
    for row in range(9):
        for column in range(9):
            shifted = np.zeros((40, 40, 3))
            shifted[4:36, 4:36] = IMAGE
            cut = shifted[row : row + 32, column : column + 32]
            known[cut.tobytes()] = (row, column, False)
            known[np.ascontiguousarray(cut[:, ::-1]).tobytes()] = (row, column, True)
    return [known[np.ascontiguousarray(image, np.float64).tobytes()] for image in out]


def test_all_162_variants_are_equally_likely():
    count = 162 * 40
    variants = collections.Counter(found_variants(count))
    assert len(variants) == 162
    assert scipy.stats.chisquare(list(variants.values())).pvalue > 1e-3
    assert (4, 4, False) in variants  # the identity


def test_without_flip_there_are_81():
    assert all(not flipped for _, _, flipped in found_variants(500, flip=False))


def test_borders_have_the_fill_of_each_channel():
    fill = np.array([-1.0, -2.0, -3.0])
    out = augmentations.crop_and_flip(4, fill)(jax.random.key(3), jnp.zeros((200, 8, 8, 3)))
    values = np.unique(np.asarray(out).reshape(-1, 3), axis=0)
    np.testing.assert_array_equal(values, [[-1, -2, -3], [0, 0, 0]])


def test_erasing_has_the_known_rate_and_area():
    out = np.asarray(augmentations.random_erasing()(jax.random.key(0), jnp.ones((4000, 32, 32, 1))))
    share = 1 - out.mean(axis=(1, 2, 3))
    assert (share > 0).mean() == pytest.approx(0.5, abs=0.03)
    assert share.max() < 0.36
    assert share[share > 0].min() > 0.01
    for image in out[share > 0][:20, :, :, 0]:  # one rectangle
        rows, columns = np.flatnonzero((image == 0).any(axis=1)), np.flatnonzero((image == 0).any(axis=0))
        assert (image == 0).sum() == len(rows) * len(columns)
        assert np.ptp(rows) + 1 == len(rows)
        assert np.ptp(columns) + 1 == len(columns)


IMAGES = np.random.default_rng(0).random((160, 6, 6, 1)).astype(np.float32)
DATA = partitions.shards(datasets.from_arrays(IMAGES, np.arange(160) % 4, IMAGES[:20], np.arange(20) % 4), 16, seed=0)
AUGMENT = augmentations.compose(augmentations.crop_and_flip(1, 0.5), augmentations.random_erasing())


def run(topology=None, **more):
    arguments = {"epochs": 2, "batch_size": 4, "augment": AUGMENT, "progress": False} | more
    return simulate(topology or topologies.ring(16), DATA, **arguments)


def test_evaluation_sees_inputs_as_they_are():
    simulation = prepare(topologies.ring(16), DATA, augment=lambda key, inputs: inputs * 0, batch_size=4)
    plain = prepare(topologies.ring(16), DATA, batch_size=4)
    np.testing.assert_array_equal(simulation.evaluate().loss, plain.evaluate().loss)
    simulation.run(2)
    kernel = np.asarray(simulation.params["Dense_0"]["kernel"])
    np.testing.assert_array_equal(kernel[0], np.asarray(plain.params["Dense_0"]["kernel"])[0])  # black has no gradient


def test_draws_follow_nodes_and_not_slots():
    """Nodes in cliques are stored clique by clique, those of the same graph without cliques in their order."""
    cliques = topologies.d_cliques(DATA.label_distribution, clique_size=4, seed=2)
    plain = algorithms.dsgd(optax.sgd(0.1), clique_averaging=False)
    stored, in_order = (run(graph, algorithm=plain) for graph in (cliques, topologies.from_edges(16, cliques.edges)))
    np.testing.assert_allclose(stored.history.train_loss, in_order.history.train_loss, rtol=1e-5)
    assert (run(cliques, algorithm=plain, augment=None).history.train_loss[-1] != stored.history.train_loss[-1]).all()


def test_seeds_draw_their_own_and_each_as_alone():
    both = run(seeds=[0, 5])
    np.testing.assert_allclose(both.history.loss[1], run(seed=5).history.loss, rtol=1e-5)


def test_a_run_resumes_to_the_same_bits(tmp_path):
    whole = run()
    run(checkpoint_dir=tmp_path, on_evaluation=lambda record: record.epoch == 1)
    np.testing.assert_array_equal(run(checkpoint_dir=tmp_path).history.train_loss, whole.history.train_loss)
    assert "crop_and_flip" in whole.provenance["augment"]


def test_further_gradients_see_the_same_batch():
    """With a radius of 0, SAM's second gradient equals the first."""
    sgd = algorithms.dsgd(optax.sgd(0.1))
    first, second = (run(algorithm=each).history.loss for each in (sgd, algorithms.sam(sgd, 0.0)))
    np.testing.assert_allclose(first, second, rtol=1e-5)


def test_channels_of_cifar10_are_normalised_by_name(cifar10, data_dir):
    exact = datasets.cifar10(data_dir, normalise="exact")
    pixels = exact.train_inputs.reshape(-1, 3)[::50].astype(np.float64)
    np.testing.assert_allclose(pixels.mean(axis=0), 0, atol=0.01)
    np.testing.assert_allclose(pixels.std(axis=0), 1, atol=0.01)
    np.testing.assert_array_equal(exact.train_bytes[:100], cifar10.train_bytes[:100])
    np.testing.assert_allclose(exact.black, -np.array([0.4914, 0.4822, 0.4465]) / [0.2470, 0.2435, 0.2616])
    with pytest.raises(ValueError, match="normalise='all' is unknown: choose one of common, exact, half, imagenet"):
        datasets.cifar10(data_dir, normalise="all")


def test_inputs_in_double_precision_are_augmented_in_single_precision():
    dataset = datasets.synthetic(num_train=64, num_test=4, input_shape=(4, 4, 1))
    double = datasets.from_arrays(
        np.float64(dataset.train_inputs), dataset.train_labels, np.float64(dataset.test_inputs), dataset.test_labels
    )
    result = simulate(topologies.ring(4), double, augment=augmentations.crop_and_flip(1), epochs=1, progress=False)
    assert np.isfinite(result.history.loss).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: augmentations.crop_and_flip(-1), "padding=-1"),
        (lambda: augmentations.crop_and_flip(flip=2), "flip=2"),
        (lambda: augmentations.random_erasing(2), "probability=2"),
        (lambda: augmentations.random_erasing(area=(0.5, 0.1)), r"area=\(0.5, 0.1\)"),
        (lambda: augmentations.random_erasing(aspect=3), "aspect=3"),
        (lambda: augmentations.compose(3), "3 is not an augmentation"),
        (lambda: run(augment=3), "augment=3 is not a function"),
        (lambda: run(augment=lambda key, inputs: inputs[:, :3]), "augment returns"),
        (lambda: DATA.dataset.black, "does not tell how inputs come from bytes"),
    ],
)
def test_impossible_augmentations_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
